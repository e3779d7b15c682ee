"""`F.scaled_dot_product_attention` as torch chooses its kernel on a card, on a torch that has no card to ask.

Which kernel runs decides what is kept: flash, memory-efficient and cuDNN attention keep the output and a row of
numbers per head; the composed one keeps every score. The rules, in torch's order of preference
(pytorch:aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `_fused_sdp_choice_cuda`, read for 2.11 to 2.13):

| kernel | needs |
|---|---|
| cuDNN (first on 9.0 and 10.0) | fp16 or bf16, head size ≤ 128 and a multiple of 8 |
| flash | 8.0 or later, fp16 or bf16, no mask, head size ≤ 256 |
| memory-efficient | 5.0 or later, as many key heads as query heads; bf16 from 8.0 |
| composed | nothing |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["install_cuda_attention"]

Attention = Callable[..., torch.Tensor]


def install_cuda_attention(capability: tuple[int, int]) -> None:
    """Replaces torch's function for tensors on a fake card of this compute capability."""
    original = F.scaled_dot_product_attention

    def attention(
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
        query, key, value = _autocast(query, key, value)
        if attn_mask is not None and attn_mask.dtype.is_floating_point:
            attn_mask = attn_mask.to(query.dtype)
        fewer_keys = enable_gqa and query.shape[-3] != key.shape[-3]
        chosen = kernel_on_card(
            capability, query.dtype, query.shape[-1], masked=attn_mask is not None, grouped=fewer_keys
        )
        return _KERNELS[chosen](query, key, value, attn_mask, dropout_p, is_causal, scale, fewer_keys)

    F.scaled_dot_product_attention = attention


def kernel_on_card(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, *, masked: bool, grouped: bool
) -> str:
    """`"cudnn"`, `"flash"`, `"efficient"` or `"composed"`, by the table above.

    Args:
        capability: the card's compute capability.
        dtype: of the queries, after autocast.
        head_size: elements of a query.
        masked: whether there is a mask other than the causal one.
        grouped: whether there are fewer key heads than query heads.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if half and capability in ((9, 0), (10, 0)) and head_size <= 128 and head_size % 8 == 0:
        return "cudnn"
    if half and capability >= (8, 0) and not masked and head_size <= 256:
        return "flash"
    if not grouped and (dtype is not torch.bfloat16 or capability >= (8, 0)):
        return "efficient"
    return "composed"


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As the dispatcher does before: attention is among the operations that autocast computes in 16 bits."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in tensors)


def _flash(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool) -> Any:
    size = q.shape[-1]
    scale = 1 / math.sqrt(size) if scale is None else scale
    if size % 8:  # the kernel takes multiples of 8
        q, k, v = (F.pad(each, (0, 8 - size % 8)) for each in (q, k, v))
    output = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return output[..., :size]


def _efficient(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Any:
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)
        if mask.shape[-1] % 16:  # rows of the mask begin at multiples of 16 bytes
            padded = F.pad(mask, (0, 16 - mask.shape[-1] % 16))
            mask = padded[..., : mask.shape[-1]]
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    for_backward = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, mask, for_backward, dropout, causal, scale=scale)[0]


def _cudnn(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool) -> Any:
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)
    for_backward = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(q, k, v, mask, for_backward, dropout, causal, False, scale=scale)[0]


def _composed(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Any:
    attend = torch.ops.aten._scaled_dot_product_attention_math
    return attend(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)[0]


_KERNELS: dict[str, Attention] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "composed": _composed,
}
