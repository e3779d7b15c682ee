"""Which attention kernel a GPU would run, and what its libraries take: the rules of torch's sources, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memkit.common.units import MIB
from hf_memkit.prediction.child.gpu.attention import _KERNELS, AttentionCall, kernel_on_gpu
from hf_memkit.prediction.child.tracer import gpu_events
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.gpu_memory import (
    cublas_workspace_bytes,
    efficient_backward_bytes,
    flash_backward_bytes,
    foreach_norm_bytes,
    four_bit_product_bytes,
)

BF16 = AttentionCall(torch.bfloat16, (64, 64))
FP16 = replace(BF16, dtype=torch.float16)
FP32 = replace(BF16, dtype=torch.float32)

T4, A100, RTX_3090, RTX_4090, H100, B200, RTX_5090 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("card", "call", "kernel"),
    [
        (A100, BF16, "flash"),
        (A100, FP32, "efficient"),
        (A100, replace(BF16, masked=True), "efficient"),
        (A100, replace(BF16, grouped=True), "flash"),
        (A100, replace(FP32, grouped=True), "composed"),
        (A100, replace(BF16, causal_across=True), "efficient"),
        # Values of another size, as in multi-head latent attention.
        (A100, replace(BF16, head_sizes=(192, 128)), "efficient"),
        (A100, replace(BF16, head_sizes=(288, 288)), "efficient"),
        (A100, replace(BF16, head_sizes=(20, 20)), "flash"),  # padded to 24 before
        (A100, replace(BF16, head_sizes=(20, 20), masked=True), "composed"),
        (A100, replace(FP32, head_sizes=(20, 20)), "efficient"),
        (A100, replace(FP32, head_sizes=(22, 22)), "composed"),
        (T4, FP16, "efficient"),
        (T4, replace(FP16, head_sizes=(20, 20)), "composed"),
        (T4, replace(FP32, head_sizes=(22, 22)), "efficient"),
        (T4, BF16, "composed"),
        (H100, BF16, "cudnn"),
        (H100, replace(BF16, masked=True), "cudnn"),
        (H100, replace(BF16, dropout=0.125), "cudnn"),
        (H100, replace(BF16, dropout=0.1), "flash"),  # GPT-2's
        (H100, replace(BF16, head_sizes=(256, 256)), "flash"),
        (B200, BF16, "cudnn"),
        (RTX_5090, BF16, "flash"),
        (RTX_3090, replace(BF16, head_sizes=(224, 224)), "efficient"),
        (RTX_3090, replace(BF16, head_sizes=(224, 224), trained=False), "flash"),
        (RTX_4090, replace(BF16, head_sizes=(256, 256)), "flash"),
        (RTX_4090, replace(BF16, head_sizes=(256, 256), dropout=0.1), "efficient"),
        (A100, replace(BF16, head_sizes=(224, 224)), "flash"),
    ],
)
def test_the_kernel_that_a_gpu_runs(card: tuple[int, int], call: AttentionCall, kernel: str) -> None:
    assert kernel_on_gpu(card, call) == kernel


def test_a_script_can_switch_kernels_off() -> None:
    """Defect: an H100's trace has cuDNN's attention although the script chose flash attention."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert kernel_on_gpu(H100, BF16) == "flash"
        with pytest.raises(RuntimeError, match="No available kernel"):
            kernel_on_gpu(H100, FP32)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert kernel_on_gpu(H100, BF16) == "efficient"
        assert kernel_on_gpu(H100, replace(BF16, grouped=True)) == "composed"


def test_a_mask_of_flags_becomes_numbers_of_the_queries_type() -> None:
    tracer = StorageTracer("cpu")
    with FakeTensorMode(), tracer:
        query, mask = torch.empty(2, 4, 32, 64, dtype=torch.bfloat16), torch.empty(2, 1, 32, 32, dtype=torch.bool)
        _KERNELS["efficient"](query, query, query, mask, 0.0, False, None, False)
    flags = 2 * 32 * 32
    assert 2 * flags in tracer.trace.sizes_bytes and 4 * flags not in tracer.trace.sizes_bytes


def test_cublas_workspaces() -> None:
    assert cublas_workspace_bytes(A100) == 8 * MIB + 128 * 1024
    assert {cublas_workspace_bytes(card) for card in (H100, B200, RTX_5090)} == {32 * MIB}


def test_flash_backward_rounds_lengths_and_head_sizes() -> None:
    query = (2, 4, 100, 80)
    alone = flash_backward_bytes(query, query, 2)
    assert alone == 4 * 2 * 4 * 128 * (96 + 1)
    key = (2, 1, 100, 80)
    assert flash_backward_bytes(query, key, 2) == alone + 2 * 2 * 100 * 4 * 80 * 2
    wide = (1, 1, 128, 160)
    assert flash_backward_bytes(wide, wide, 2) == 4 * 128 * (192 + 1)


@pytest.mark.parametrize(
    ("shape", "key_heads", "measured_mib"), [((4, 16, 2048, 64), 16, 64.5), ((2, 32, 4096, 128), 8, 385.0)]
)
def test_flash_backward_copies_what_lies_in_another_order(
    shape: tuple[int, int, int, int], key_heads: int, measured_mib: float
) -> None:
    """Measured on an H100, `calibrate` in benchmarks/results/predict.json. Models give queries in the order batch,
    length, head: then nothing is copied."""
    scratch = gpu_events._SCRATCH["aten::_scaled_dot_product_flash_attention_backward"]
    batch, heads, length, size = shape
    with FakeTensorMode():
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        query = torch.empty(shape, **like)
        key = torch.empty(batch, key_heads, length, size, **like)
        ordered = torch.empty(batch, length, heads, size, **like).transpose(1, 2)
        copied = scratch((query, query, key, key, query), {})
        assert copied == pytest.approx(measured_mib * MIB, rel=1e-4)
        assert scratch((ordered, ordered, key, key, ordered), {}) == copied - 2 * 2 * query.numel()


def test_norms_of_a_list_take_a_number_for_each_chunk_of_the_largest() -> None:
    assert foreach_norm_bytes([3, 65536]) == 4 * (2 * 1 + 320)
    assert foreach_norm_bytes([3, 65537, 5]) == 4 * (3 * 2 + 320)


def test_efficient_backward() -> None:
    shape = (2, 4, 100, 64)
    delta, sums = 4 * 2 * 4 * 100, 4 * 2 * 4 * 128 * 64
    assert efficient_backward_bytes(shape, shape, shape, 2) == delta + sums
    # In fp32 torch makes `delta` from a product of the output's size, which is gone before the sums are made.
    assert efficient_backward_bytes(shape, shape, shape, 4) == delta + sums
    thin = (2, 4, 128, 64)
    value = (2, 4, 128, 128)
    assert efficient_backward_bytes(thin, thin, value, 4) == 4 * 2 * 4 * 128 + 4 * 2 * 4 * 128 * 128
    wide = (1, 1, 128, 192)
    assert efficient_backward_bytes(wide, wide, wide, 2) == 4 * 128 + 4 * 128 * 192 + 4 * 128 * (256 + 256)


def test_a_product_in_four_bits_makes_the_weight_whole() -> None:
    weight = (1024, 512)
    assert four_bit_product_bytes(4096, weight, 2, nested=False) == 2 * 1024 * 512
    assert four_bit_product_bytes(4096, weight, 2, nested=True) == 2 * 1024 * 512 + 8 * 1024 * 512 // 64
    assert four_bit_product_bytes(1, weight, 2, nested=True) == 0
