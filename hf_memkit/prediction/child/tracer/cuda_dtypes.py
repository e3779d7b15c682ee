"""Refuses operations in dtypes that CUDA's kernels lack, but fake tensors accept, with `NoKernel`.

The real kernel raises NotImplementedError. Only certain refusals are listed: `scripts/cuda_dtypes.py` generates the
JSON table from torch's own tests, and operations that those lack are in this file with their source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hf_memkit.common.errors import NoKernel
from hf_memkit.prediction.child.tracer.plain_tensors import device_type
from hf_memkit.setup.bf16_on_gpus import unscaled_bf16

TABLE: Final = Path(__file__).with_name("cuda_dtypes_2_13.json")

_HALF: Final = ("float16", "bfloat16")
_UNSCALE: Final = "aten._amp_foreach_non_finite_check_and_unscale_.default"

_NOT_IN_OPINFOS: Final[Mapping[str, tuple[str, ...]]] = {
    # "_amp_foreach_non_finite_check_and_unscale_cuda": AT_DISPATCH_FLOATING_TYPES_AND_HALF of the gradients' type
    # (pytorch 2.13: aten/src/ATen/native/cuda/AmpKernels.cu; pytorch issue 127176).
    _UNSCALE: ("bfloat16",),
    # "cdist_cuda", "cdist_cuda_backward": AT_DISPATCH_FLOATING_TYPES (native/cuda/DistanceKernel.cu). With p=2 and
    # rows a product computes it, so that OpInfos list both dtypes.
    "aten._cdist_forward.default": _HALF,
    "aten._cdist_backward.default": _HALF,
    # "ctc_loss_cuda", "ctc_loss_backward_cuda": AT_DISPATCH_FLOATING_TYPES (native/cuda/LossCTC.cu).
    "aten._ctc_loss.default": _HALF,
    "aten._ctc_loss.Tensor": _HALF,
}
"""By the dtype of the first tensor."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Dtypes without a kernel. `by_first`: the dtype of the first tensor counts; else those of all except indices."""

    dtypes: frozenset[torch.dtype]
    by_first: bool = False


def refuse_types(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], refusal: Refusal, module: str) -> None:
    """Checks a call of an operation in `REFUSED`; `module` is the dotted name of the running module. Raises
    NoKernel if CUDA has no kernel for the dtype of these arguments."""
    first = next(_tensors(args, kwargs), None)
    if first is None or device_type(first) != "cuda" or not first.numel():  # no kernel runs without elements
        return
    dtype = first.dtype if refusal.by_first else type_of_call(args, kwargs)
    if dtype not in refusal.dtypes:
        return
    name = str(dtype).removeprefix("torch.")
    if str(func) == _UNSCALE:
        raise NoKernel(unscaled_bf16(has_bf16=torch.cuda.get_device_capability() >= (8, 0)))
    where = f" in {module}" if module else ""
    instead = "in float32: tensor.float()" if name in _HALF else "in another type, such as tensor.float()"
    raise NoKernel(f"{str(func).rpartition('.')[0]}{where}: CUDA has no kernel for {name}; compute it {instead}")


def type_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The common dtype of all tensors, ignoring integer tensors next to floating ones; None if there are several."""
    dtype = None
    for tensor in _tensors(args, kwargs):
        if dtype is None:
            dtype = tensor.dtype
        elif tensor.dtype is not dtype and (tensor.dtype.is_floating_point or not dtype.is_floating_point):
            return None
    return dtype


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def _read() -> dict[int, Refusal]:
    """Id of an operation → its refusal. Empty for versions of torch newer than the table, because they add dtypes."""
    table = json.loads(TABLE.read_text())
    if _version(torch.__version__) > _version(table["torch"]):
        return {}
    refusals: dict[int, Refusal] = {}
    for refused, by_first in ((table["refused"], False), (_NOT_IN_OPINFOS, True)):
        for name, dtypes in refused.items():
            _, packet, overload = name.split(".")
            operation = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if operation is not None:  # this version of torch has it
                refusals[id(operation)] = Refusal(frozenset(getattr(torch, dtype) for dtype in dtypes), by_first)
    return refusals


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


REFUSED: Final = _read() if TABLE.is_file() else {}
"""By the id of an operation."""
