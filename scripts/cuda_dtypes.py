#!/usr/bin/env python3
"""Writes the types that CUDA's kernels refuse into hf_memkit/prediction/child; takes about ten minutes.

pip install --target FOLDER expecttest hypothesis
PYTHONPATH=FOLDER .venv/bin/python scripts/cuda_dtypes.py

Source: the OpInfos in torch's wheel (torch/testing/_internal). PyTorch's own tests on GPUs prove their `dtypesIfCUDA`
and `backward_dtypesIfCUDA` (pytorch: test/test_ops.py, `test_dtypes`). An OpInfo is about a Python function, which may
call several kernels. Each runs here on fake CUDA tensors, in each type. The kernels that it calls are supported in a
type that it supports. A kernel is refused in a type if an OpInfo does not support it, all samples call this kernel and
no other that may be at fault, and a CPU runs no sample either. All else is unknown and not written; what OpInfos lack
is in hf_memkit/prediction/child/tracer/cuda_dtypes.py.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from docs_blocks import compact_json
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import common_cuda
from torch.testing._internal.common_device_type import onlyCPU
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_memkit.prediction.child.gpu import cuda_device_guard
from hf_memkit.prediction.child.gpu.fake_gpu import patch_cuda_device
from hf_memkit.prediction.child.tracer.cuda_dtypes import TABLE, type_of_call

NAMES: Final = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
"""Types that `test_dtypes` tries, without complex ones, which no model of transformers trains in."""

SAMPLES: Final = 40
"""Of each OpInfo at most."""

Call = tuple[Any, torch.dtype]
"""An operation, and the type of its tensors."""


class Recorder(TorchDispatchMode):
    """What is called while it is active, as the tracer of a training sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Call] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = type_of_call(args, kwargs)
        if dtype is not None and func.namespace == "aten":
            self.calls.add((func, dtype))
        return func(*args, **kwargs)


def all_ops() -> list[OpInfo]:
    """Torch's, as of the newest GPU: what that supports, nothing may refuse. They look for the machine's own."""
    for name in [each for each in vars(common_cuda) if each.startswith(("SM", "PLATFORM_SUPPORTS_"))]:
        setattr(common_cuda, name, True)
    return importlib.import_module("torch.testing._internal.common_methods_invocations").op_db


def is_proven(op: OpInfo) -> bool:
    """Whether PyTorch's tests on GPUs compare what it says with what the kernels do."""
    for each in op.decorators:
        if not isinstance(each, DecorateInfo):
            if each is onlyCPU or "skip.<locals>" in getattr(each, "__qualname__", ""):
                return False
            continue
        named = each.cls_name in (None, "TestCommon") and each.test_name in (None, "test_dtypes")
        if each.active_if and named and each.device_type in (None, "cuda"):
            return False
    return not op.dynamic_dtypes


def samples_of(op: OpInfo, dtype: torch.dtype, *, gradients: bool) -> list[Any]:
    try:
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), SAMPLES))
    except Exception:
        return []


def trained(result: Any) -> list[torch.Tensor]:
    """The tensors of a result that have gradients."""
    return [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]


def run_backward(outputs: list[torch.Tensor]) -> None:
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])


def calls_of(op: OpInfo, dtype: torch.dtype) -> Iterator[tuple[set[Call], set[Call] | None]]:
    """(calls of forward, calls of backward or None) of each sample that fake tensors do not refuse themselves."""
    gradients = op.supports_autograd and dtype.is_floating_point

    def on_gpu(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("cuda").requires_grad_(gradients and leaf.requires_grad)

    for sample in samples_of(op, dtype, gradients=gradients):
        forward, backward = Recorder(), Recorder()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                given, args, kwargs = tree_map(on_gpu, (sample.input, sample.args, sample.kwargs))
                with forward:
                    result = op.op(given, *args, **kwargs)
            outputs = [each for each in trained(result) if each.is_floating_point()]
        except Exception:
            continue
        try:
            with backward:
                run_backward(outputs)
        except Exception:
            outputs = []
        yield forward.calls, backward.calls if outputs else None


def runs_on_cpu(op: OpInfo, dtype: torch.dtype, *, backward: bool) -> bool:
    """Whether a sample runs there, though the OpInfo says that the type is not supported. PyTorch's tests let a type
    pass that some samples support, such as bool of `cumsum`, which fails only with `dtype=bool`: then the OpInfo says
    nothing of the kernel."""
    for sample in samples_of(op, dtype, gradients=backward):
        tensors = [each for each in tree_leaves((sample.input, sample.args)) if isinstance(each, torch.Tensor)]
        if not all(each.numel() for each in tensors):
            continue  # nothing is computed
        with contextlib.suppress(Exception):
            outputs = trained(op.op(sample.input, *sample.args, **sample.kwargs))
            if backward:
                run_backward(outputs)
            return True
    return False


def content() -> dict[str, Any]:
    """What the file holds."""
    supported: set[Call] = set()
    doubtful: list[tuple[str, list[set[Call]]]] = []
    for op, name in itertools.product(all_ops(), NAMES):
        dtype = getattr(torch, name)
        samples = list(calls_of(op, dtype))
        forwards = [forward for forward, _ in samples]
        backwards = [backward for _, backward in samples if backward is not None]
        if dtype not in op.dtypesIf["cuda"]:
            if is_proven(op) and (dtype in op.dtypes or not runs_on_cpu(op, dtype, backward=False)):
                doubtful.append((name, forwards))
            continue
        supported.update(*forwards)
        if dtype in op.backward_dtypesIfCUDA:
            supported.update(*backwards)
        elif is_proven(op) and (dtype in op.backward_dtypes or not runs_on_cpu(op, dtype, backward=True)):
            doubtful.append((name, backwards))

    refused: dict[str, set[str]] = defaultdict(set)
    for name, samples_calls in doubtful:
        dtype = getattr(torch, name)
        unproven = [{call[0] for call in calls - supported if call[1] is dtype} for calls in samples_calls]
        if unproven and all(unproven) and len(set().union(*unproven)) == 1:
            (func,) = unproven[0]
            for each in (func, *in_place(func)):
                refused[str(each)].add(name)
    return {
        "torch": torch.__version__.split("+")[0],
        "refused": {func: sorted(names, key=NAMES.index) for func, names in sorted(refused.items())},
    }


def in_place(func: Any) -> Iterable[Any]:
    """The same kernel, written into its first argument."""
    packet = getattr(torch.ops.aten, f"{func._schema.name.partition('::')[2]}_", None)
    overload = func._overloadname
    return [getattr(packet, overload)] if packet is not None and overload in packet.overloads() else []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    cuda_device_guard.install()
    patch_cuda_device((12, 0), 80 * 2**30)
    TABLE.write_text(compact_json(content()))
    os._exit(0)  # destructors look for a GPU that does not exist
