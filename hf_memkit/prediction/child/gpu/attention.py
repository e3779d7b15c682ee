"""Chooses the kernel of `F.scaled_dot_product_attention` as torch does on a GPU, on a torch without a GPU.

The kernel decides what is kept for backward: flash, memory-efficient and cuDNN attention keep the output and a row of
numbers per head; the composed one keeps every score. The rules, in torch's order of preference
(pytorch:aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend` and the functions that it calls, as
of 2026; an H200 with torch 2.11 chose accordingly for GPT-2, BERT, T5, Llama, ViT and Whisper):

| kernel | needs | source |
|---|---|---|
| cuDNN, preferred on 9.x and 10.x, with cuDNN 9.15.2 or later (torch's wheels for CUDA 13) | fp16 or bf16, head sizes ≤ 128 that are multiples of 8; from torch 2.12 dropout in sixteenths (pytorch#174245) | `check_prefer_cudnn_attention`, `check_cudnn_tensor_shapes`, `check_cudnn_dropout` |
| flash | 8.0 or later, fp16 or bf16, no mask, one head size ≤ 256; causal only with as many queries as keys; on 8.6, 8.9 and 12.x no training with head sizes from 193 to 224, nor to 256 with dropout | `can_use_flash_attention` |
| memory-efficient | 5.0 or later; fp32 or fp16, from 8.0 bf16 too; head sizes that are multiples of 8 (16 bits on tensor cores) or 4 (from 8.0); as many key heads as query heads (later versions of torch take fewer) | `can_use_mem_efficient_attention`, `minimum_gemm_alignment` |
| composed | nothing | |

A script can switch each of them off: `torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_cudnn_sdp`, ….
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

Attention = Callable[..., torch.Tensor]

_HALF: Final = (torch.float16, torch.bfloat16)


def install_cuda_attention(capability: tuple[int, int]) -> None:
    """Replaces torch's function for tensors on a fake GPU of this compute capability."""
    original = F.scaled_dot_product_attention

    # Context parallelism replaces the function by its name (torch 2.13: distributed/tensor/experimental/
    # _context_parallel/_attention.py, `_distribute_function`).
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type != "cuda":
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):  # as the dispatcher casts for attention
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (part.to(dtype) if part.is_floating_point() else part for part in (query, key, value))
        if attn_mask is not None and attn_mask.dtype.is_floating_point:
            attn_mask = attn_mask.to(query.dtype)
        fewer_keys = enable_gqa and query.shape[-3] != key.shape[-3]
        call = AttentionCall(
            dtype=query.dtype,
            head_sizes=(query.shape[-1], value.shape[-1]),
            masked=attn_mask is not None,
            grouped=fewer_keys,
            dropout=dropout_p,
            trained=_trained(query, key, value),
            causal_across=is_causal and query.shape[-2] != key.shape[-2],
        )
        chosen = kernel_on_gpu(capability, call)
        return _KERNELS[chosen](query, key, value, attn_mask, dropout_p, is_causal, scale, fewer_keys)

    F.scaled_dot_product_attention = scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Properties of a call that decide the kernel."""

    dtype: torch.dtype  # after autocast
    head_sizes: tuple[int, int]  # of a query and of a value
    masked: bool = False  # there is a mask other than the causal one
    grouped: bool = False  # there are fewer key heads than query heads
    dropout: float = 0.0  # probability
    trained: bool = True  # a backward pass can follow
    causal_across: bool = False  # the mask is causal, and the numbers of queries and keys differ


def kernel_on_gpu(capability: tuple[int, int], call: AttentionCall) -> str:
    """`"cudnn"`, `"flash"`, `"efficient"` or `"composed"`, by the table above, for a GPU of this capability. Raises
    torch's RuntimeError if the script has switched off every kernel that could run."""
    enabled = _enabled_kernels()
    half, size = call.dtype in _HALF, call.head_sizes[0]
    if (
        "cudnn" in enabled
        and capability[0] in (9, 10)
        and half
        and max(call.head_sizes) <= 128
        and all(size % 8 == 0 for size in call.head_sizes)
        and ((call.dropout * 16).is_integer() or torch.__version__ < "2.12")
    ):
        return "cudnn"
    wide = capability[0] == 12 or (8, 6) <= capability <= (8, 9)
    if (
        "flash" in enabled
        and capability >= (8, 0)
        and half
        and not call.masked
        and call.head_sizes == (size, size)
        and size <= 256
        and not call.causal_across
        and not (wide and call.trained and size > 192 and (size <= 224 or call.dropout > 0))
    ):
        return "flash"
    multiple = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (half and capability >= (7, 0)):  # tensor cores read 16 bytes at once
        multiple = max(multiple, 8 if half else 4)
    known = call.dtype in (torch.float16, torch.float32) or (call.dtype is torch.bfloat16 and capability >= (8, 0))
    aligned = all(size % multiple == 0 for size in call.head_sizes)
    if "efficient" in enabled and known and aligned and not call.grouped:
        return "efficient"
    if "composed" not in enabled:
        raise RuntimeError("No available kernel. Aborting execution.")
    return "composed"


def _enabled_kernels() -> tuple[str, ...]:
    """The kernels that the script has not switched off."""
    switches: dict[str, Callable[[], bool]] = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "composed": torch.backends.cuda.math_sdp_enabled,
    }
    return tuple(name for name, is_on in switches.items() if is_on())


# dynamo calls the function while it compiles, as with `torch.compiler.assume_constant_result`, which imports dynamo.
vars(_enabled_kernels)["_dynamo_marked_constant"] = True


def _trained(*tensors: torch.Tensor) -> bool:
    """Whether a backward pass can follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _additive_mask(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask as numbers that are added to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _flash(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool) -> Any:
    size = q.shape[-1]
    scale = 1 / math.sqrt(size) if scale is None else scale
    if size % 8:  # the kernel takes multiples of 8
        q, k, v = (F.pad(tensor, (0, 8 - size % 8)) for tensor in (q, k, v))
    output = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return output[..., :size]


def _efficient(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Any:
    if mask is not None:
        mask = _additive_mask(mask, q.dtype)
        if mask.shape[-1] % 16:  # rows of the mask start at multiples of 16 bytes
            padded = F.pad(mask, (0, 16 - mask.shape[-1] % 16))
            mask = padded[..., : mask.shape[-1]]
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, mask, _trained(q, k, v), dropout, causal, scale=scale)[0]


def _cudnn(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool) -> Any:
    mask = None if mask is None else _additive_mask(mask, q.dtype)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(q, k, v, mask, _trained(q, k, v), dropout, causal, False, scale=scale)[0]


def _composed(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Any:
    attend = torch.ops.aten._scaled_dot_product_attention_math
    return attend(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)[0]


_KERNELS: dict[str, Attention] = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "composed": _composed}
