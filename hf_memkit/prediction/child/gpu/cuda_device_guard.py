"""Lets autograd accept fake CUDA tensors on a torch that is built without CUDA or sees no GPU.

A CPU build has no device guard for CUDA and reports no accelerator, so the first autograd node aborts the process.
Both answers come from C++ objects that torch looks up at run time, and that are replaced here through ctypes:

* `device_guard_impl_registry[CUDA]` gets an object whose methods all return 0; torch then replaces it with its guard
  for fake devices (`_ensureCUDADeviceGuardSet`, which needs an existing guard that sees no device).
* the CUDA hooks, whose methods raise without CUDA, get a method table in which `hasCUDA` returns true and the methods
  of the accelerator interface return 0. Trying the entries shows which one is `hasCUDA`.

This depends on the layout of private symbols (Linux x86-64, checked with torch 2.8 and 2.13 built for the CPU, and
2.15 built for CUDA 13.2). So `self_test` runs one backward pass, in a process that may crash.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import torch

_CUDA: Final = 1  # c10/core/DeviceType.h
_DEVICE_TYPES: Final = 22
_GUARD_METHODS: Final = 64
_HOOK_METHODS: Final = 96
_ACCELERATOR_METHODS: Final = 24
"""AcceleratorHooksInterface's methods come first in the table (ATen/detail/AcceleratorHooksInterface.h)."""

_Answer = ctypes.CFUNCTYPE(ctypes.c_int64)
_kept: list[Any] = []
"""Objects that C++ points to, kept alive."""


def install() -> None:
    """Replaces both objects; does nothing if torch sees a GPU.

    Raises:
        OSError, AttributeError: this torch lacks the symbols.
        RuntimeError: no entry of the hooks' table is `hasCUDA`.
    """
    if torch.cuda.is_available():
        return
    _install_guard()
    _install_hooks()


def self_test() -> None:
    """Runs a forward and a backward pass on fake CUDA tensors.

    Raises:
        Exception: any error of torch; it may also abort the process.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        layer = torch.nn.Linear(4, 4, device="cuda:0")
        output = layer(torch.empty(2, 4, device="cuda:0"))
        (output * output).sum().backward()
        if layer.weight.grad is None or layer.weight.grad.device.type != "cuda":
            raise RuntimeError("no gradient arrived on the fake GPU")


def _install_guard() -> None:
    registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(
        _library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    replaces = hasattr(torch._C, "_ensureCUDADeviceGuardSet")
    if not replaces or not registry[_CUDA]:
        # torch 2.8 keeps this guard. 1 is a valid answer to all its methods: the type CUDA, its device 0, one device
        # (c10/core/impl/DeviceGuardImplInterface.h).
        answer = _Answer(lambda: 0 if replaces else _CUDA)
        table = (ctypes.c_void_p * _GUARD_METHODS)(*[ctypes.cast(answer, ctypes.c_void_p).value] * _GUARD_METHODS)
        guard = (ctypes.c_void_p * 4)(ctypes.addressof(table), 0, 0, 0)
        _kept.extend([answer, table, guard])
        registry[_CUDA] = ctypes.addressof(guard)
    if replaces:
        torch._C._ensureCUDADeviceGuardSet()


def _install_hooks() -> None:
    get_hooks = _library("libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = (ctypes.c_void_p * 1).from_address(get_hooks())
    original = hooks[0]
    assert original is not None
    zero, one = _Answer(lambda: 0), _Answer(lambda: 1)
    no, yes = (ctypes.cast(answer, ctypes.c_void_p).value for answer in (zero, one))
    # The two words before a method table belong to it: the offset to the top of the object, and its type.
    methods = (ctypes.c_void_p * (_HOOK_METHODS + 2)).from_address(original - 16)
    table = (ctypes.c_void_p * (_HOOK_METHODS + 2))(*[method or 0 for method in methods])
    _kept.extend([zero, one, table])
    hooks[0] = ctypes.addressof(table) + 16
    for index in range(4, _HOOK_METHODS + 2):  # the first two methods destroy the object
        before = table[index]
        if not before:
            break
        table[index] = yes
        if _has_cuda():
            for other in range(4, _ACCELERATOR_METHODS + 2):
                if other != index:
                    table[other] = no
            return
        table[index] = before
    hooks[0] = original
    raise RuntimeError("no entry of the method table of CUDA's hooks is hasCUDA")


def _has_cuda() -> bool:
    try:
        accelerator = torch._C._accelerator_getAccelerator()
    except Exception:  # every other entry raises
        return False
    return accelerator is not None


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
