"""Replaces the flash-attn package by torch's flash operations on fake tensors, with the package's layouts.

Both keep the same tensors (queries, keys, values, output, a row of fp32 per head). The package is replaced in
`sys.modules` even if it is installed, because its kernels need real memory.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.names import Names
from hf_memkit.prediction.child.older_libraries import FLASH_CHECKS, flash_attention_table, hub_kernel_loader

_VERSION: Final = "2.8.3"
_HUB: Final = ("flash-attn2", "flash-attn3", "vllm-flash-attn3")
"""The same functions, as built by `kernels-community` on the hub."""


def install_flash_attn(capability: tuple[int, int]) -> None:
    """Makes `flash_attn` and `flash_attn_interface` (version 3) importable and visible to transformers. On GPUs
    without kernels they raise the package's error (flash-attn 2.8.3: csrc/flash_attn/flash_api.cpp, `mha_fwd`)."""
    from transformers import modeling_utils

    if capability < (8, 0):

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

        for name in FLASH_CHECKS:
            setattr(modeling_utils.PreTrainedModel, name, refuse)
        return
    from transformers import modeling_flash_attention_utils as utils

    padding = {
        "pad_input": utils._pad_input, "unpad_input": utils._unpad_input, "index_first_axis": utils._index_first_axis,
    }  # fmt: skip
    functions: dict[str, Any] = {
        function.__name__: function for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    }
    package = _module("flash_attn", {**functions, "__version__": _VERSION})
    package.bert_padding = _module("flash_attn.bert_padding", padding)  # type: ignore[attr-defined]
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", functions)  # type: ignore[attr-defined]
    _module("flash_attn_interface", functions)
    _patch_availability()
    _patch_hub_kernels(package)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention on (batch, length, heads, head size), with at most as many key heads."""
    _check(q)
    padded, scale = _padded(q, k, v), _scale(q, softmax_scale)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    output, rows, *_ = attend(*(tensor.transpose(1, 2) for tensor in padded), dropout_p, causal, False, scale=scale)
    output = output.transpose(1, 2)[..., : q.shape[-1]]
    return (output, rows, None) if return_attn_probs else output


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Attention on (tokens, heads, head size): concatenated sequences that start at `cu_seqlens`."""
    _check(q)
    longest = int(max_seqlen_q), int(max_seqlen_k)
    attend = torch.ops.aten._flash_attention_forward
    output, rows, *_ = attend(
        *_padded(q, k, v), cu_seqlens_q, cu_seqlens_k, *longest, dropout_p, causal, False,
        scale=_scale(q, softmax_scale),
    )  # fmt: skip
    output = output[..., : q.shape[-1]]
    return (output, rows, None) if return_attn_probs else output


def flash_attn_with_kvcache(*args: Any, block_table: Any = None, cache_seqlens: Any = None, **kwargs: Any) -> NoReturn:
    raise Unmodelled(
        "flash_attn_with_kvcache: a paged cache of keys and values is not modelled; measure with memkit run"
    )


def _check(q: torch.Tensor) -> None:
    """Raises the package's errors (flash-attn 2.8.3: csrc/flash_attn/flash_api.cpp, `mha_fwd`)."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


def _padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pads head sizes to multiples of 8, as the kernels need."""
    return [F.pad(tensor, (0, -tensor.shape[-1] % 8)) if tensor.shape[-1] % 8 else tensor for tensor in tensors]


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    """Adds a module to `sys.modules`; its submodules are those of the installed package, if any."""
    parent = name.partition(".")[0]
    installed = importlib.util.find_spec(name) if name == parent else None
    module = ModuleType(name)
    module.__spec__ = spec = ModuleSpec(name, None, origin=__file__, is_package=name == parent)
    module.__file__ = __file__
    if name == parent:
        module.__path__ = spec.submodule_search_locations = (
            list(installed.submodule_search_locations or ()) if installed else []
        )
    vars(module).update(content)
    sys.modules[name] = module
    return module


_CHECKS: Final = ("is_flash_attn_2_available", "is_flash_attn_3_available", "is_flash_attn_greater_or_equal")


@functools.cache
def availability() -> Names:
    """transformers' checks of the package."""
    from transformers.utils import import_utils

    return Names((getattr(import_utils, name) for name in _CHECKS), "transformers")


def _patch_availability() -> None:
    """Replaces transformers' availability checks of the package in all modules, and in the table of version needs
    (transformers 5.23.0: utils/import_utils.py; modeling_flash_attention_utils.py,
    `FLASH_ATTENTION_COMPATIBILITY_MATRIX`)."""
    from packaging.version import parse
    from transformers.utils import import_utils

    def yes(kernels_fallback_ok: bool = False) -> bool:
        return True

    def at_least(library_version: str) -> bool:
        return parse(library_version) <= parse(_VERSION)

    answers: dict[str, Callable[..., bool]] = dict(zip(_CHECKS, (yes, yes, at_least), strict=True))
    replaced = {id(getattr(import_utils, name)): answer for name, answer in answers.items()}
    for row in flash_attention_table().values():
        row.update({key: replaced[id(value)] for key, value in row.items() if id(value) in replaced})
    for names, key in availability().places():
        names[key] = replaced.get(id(names[key]), names[key])


def _patch_hub_kernels(package: ModuleType) -> None:
    """Uses `package` for `attn_implementation="kernels-community/flash-attn2"`, without a download (transformers
    5.23.0: integrations/hub_kernels.py, `load_and_register_attn_kernel`)."""
    from transformers.integrations import hub_kernels
    from transformers.integrations.flash_attention import flash_attention_forward

    name = hub_kernel_loader()
    original = getattr(hub_kernels, name)

    def load(attn_implementation: str, attention_wrapper: Any = None, *args: Any, **kwargs: Any) -> Any:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        repository = attn_implementation.rpartition("|")[2].partition("@")[0].partition(":")[0]
        if repository.strip() not in [f"kernels-community/{name}" for name in _HUB]:
            return original(attn_implementation, attention_wrapper, *args, **kwargs)
        ALL_ATTENTION_FUNCTIONS.register(attn_implementation, attention_wrapper or flash_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(attn_implementation, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
        return package

    setattr(hub_kernels, name, load)
