#!/usr/bin/env python3
"""Writes the types that CUDA's kernels refuse into hf_memkit/prediction/child; with --check only compares.

pip install --target FOLDER expecttest hypothesis
PYTHONPATH=FOLDER .venv/bin/python scripts/cuda_dtypes.py [--check]

Source: the OpInfos in torch's wheel (torch/testing/_internal), of which PyTorch's own tests on GPUs prove
`dtypesIfCUDA` and `backward_dtypesIfCUDA` (pytorch: test/test_ops.py, `test_dtypes`). An OpInfo is about a function of
Python, which may call several kernels. So each runs here on fake CUDA tensors, in each type, and what it calls is
recorded:

* an operation that some OpInfo calls in a type that it supports is supported in it;
* where an OpInfo does not support a type, and all its samples call one same operation that nothing shows to be
  supported, and no other such operation, that one is refused; unless a CPU runs a sample though the OpInfo says that
  it cannot.

All else is unknown, and is not written. What OpInfos lack is in hf_memkit/prediction/child/tracer/cuda_dtypes.py.
It takes about ten minutes.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from docs_blocks import write
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import common_cuda
from torch.testing._internal.common_device_type import onlyCPU
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_memkit.prediction.child.gpu import cuda_device_guard
from hf_memkit.prediction.child.gpu.fake_gpu import patch_cuda_device
from hf_memkit.prediction.child.tracer.cuda_dtypes import TABLE, type_of_call

DTYPES: Final = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
"""Those that `test_dtypes` tries, without complex ones, which no model of transformers trains in."""

SAMPLES: Final = 40
"""Of each OpInfo at most."""

Call = tuple[Any, torch.dtype]


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


def calls_of(op: OpInfo, dtype: torch.dtype) -> Iterator[tuple[set[Call], set[Call] | None]]:
    """Of each sample that fake tensors do not refuse themselves: what its forward calls, and what its backward does,
    None where there is none."""
    gradients = op.supports_autograd and dtype.is_floating_point

    def on_gpu(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("cuda").requires_grad_(gradients and leaf.requires_grad)

    for sample in samples_of(op, dtype, gradients=gradients):
        forward, backward = Recorder(), Recorder()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                given = tree_map(on_gpu, (sample.input, sample.args, sample.kwargs))
                with forward:
                    outputs = [
                        each for each in trained(op.op(given[0], *given[1], **given[2])) if each.is_floating_point()
                    ]
        except Exception:
            continue
        try:
            with backward:
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
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
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
            return True
    return False


def content() -> dict[str, Any]:
    """What the file holds."""
    supported: set[Call] = set()
    doubtful: list[tuple[torch.dtype, list[set[Call]]]] = []
    for op in all_ops():
        for dtype in DTYPES:
            found = list(calls_of(op, dtype))
            backwards = [backward for _, backward in found if backward is not None]
            if dtype in op.dtypesIf["cuda"]:
                supported.update(*(forward for forward, _ in found))
                if dtype in op.backward_dtypesIfCUDA:
                    supported.update(*backwards)
                elif is_proven(op) and (dtype in op.backward_dtypes or not runs_on_cpu(op, dtype, backward=True)):
                    doubtful.append((dtype, backwards))
            elif is_proven(op) and (dtype in op.dtypes or not runs_on_cpu(op, dtype, backward=False)):
                doubtful.append((dtype, [forward for forward, _ in found]))
    refused: dict[str, set[str]] = defaultdict(set)
    for dtype, samples in doubtful:
        unproven = [
            {func for func, each in calls if each is dtype and (func, each) not in supported} for calls in samples
        ]
        if unproven and len(set().union(*unproven)) == 1 and all(unproven):
            (func,) = unproven[0]
            for each in (func, *in_place(func)):
                refused[str(each)].add(str(dtype).removeprefix("torch."))
    order = [str(each).removeprefix("torch.") for each in DTYPES]
    return {
        "torch": torch.__version__.split("+")[0],
        "refused": {name: sorted(dtypes, key=order.index) for name, dtypes in sorted(refused.items())},
    }


def in_place(func: Any) -> Iterable[Any]:
    """The same kernel, written into its first argument."""
    packet = getattr(torch.ops.aten, f"{func._schema.name.partition('::')[2]}_", None)
    overload = func._overloadname
    return [getattr(packet, overload)] if packet is not None and overload in packet.overloads() else []


def written(found: Mapping[str, Any]) -> str:
    """As JSON, an operation a line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(dtypes)}" for name, dtypes in found["refused"].items())
    return f'{{\n "torch": {json.dumps(found["torch"])},\n "refused": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    cuda_device_guard.install()
    patch_cuda_device((12, 0), 80 * 2**30)
    current = write(TABLE, written(content()), check="--check" in sys.argv)
    sys.stdout.flush()
    os._exit(not current)  # destructors look for a GPU that does not exist
