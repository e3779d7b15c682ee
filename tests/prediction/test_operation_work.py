"""FLOPs and bytes of real small operations: against torch's own counter, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_memkit.prediction.child.tracer.operation_work import held_bytes
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.trace.work import Operation

aten = torch.ops.aten
F = torch.nn.functional


def rows(function: Callable[[], Any], device: str = "cpu") -> list[Operation]:
    """What `function` computes, call by call, as the tracer sees it."""
    tracer = StorageTracer(device, work=True)
    with tracer:
        function()
    assert tracer.recorder is not None
    work = tracer.recorder.work
    return [work.operations[each] for each in work.calls]


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=device, requires_grad=grad)


def heads(device: str = "meta") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values: two rows, three heads, 16 and 24 tokens, 8 numbers a head."""
    shapes = (2, 3, 16, 8), (2, 3, 24, 8), (2, 3, 24, 8)
    return tuple(ones(*each, dtype=torch.bfloat16, device=device, grad=True) for each in shapes)  # type: ignore[return-value]


PRODUCTS: dict[str, Callable[[], Any]] = {
    "mm": lambda: ones(3, 5, grad=True) @ ones(5, 7, grad=True),
    "linear": lambda: F.linear(ones(2, 3, 5, grad=True), ones(7, 5, grad=True), ones(7, grad=True)),
    "bmm": lambda: torch.bmm(ones(2, 3, 5, grad=True), ones(2, 5, 7, grad=True)),
    "baddbmm": lambda: torch.baddbmm(ones(2, 3, 7), ones(2, 3, 5, grad=True), ones(2, 5, 7, grad=True)),
    "convolution": lambda: F.conv2d(ones(2, 4, 9, 9, grad=True), ones(6, 2, 3, 3, grad=True), stride=2, groups=2),
    "transposed": lambda: F.conv_transpose1d(ones(2, 4, 9, grad=True), ones(4, 6, 3, grad=True), stride=2),
    "flash": lambda: aten._scaled_dot_product_flash_attention(*heads())[0],
    "efficient": lambda: aten._scaled_dot_product_efficient_attention(*heads(), None, True)[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """Defect: a formula that leaves out a dimension, or a gradient."""
    device = "meta" if name in ("flash", "efficient") else "cpu"

    def both() -> None:
        PRODUCTS[name]().sum().backward()

    with FlopCounterMode(display=False) as counter:
        both()
    found = rows(both, device)
    assert sum(each.flops for each in found) == counter.get_total_flops() > 0
    assert {each.kind for each in found if each.flops} == {"attention" if device == "meta" else "matmul"}


def test_a_causal_mask_halves_attention_and_nothing_else() -> None:
    """Defect: causal attention priced as if every query saw every key."""
    q = ones(2, 3, 16, 8, dtype=torch.bfloat16, device="meta")
    whole, causal = (
        rows(lambda mask=mask: aten._scaled_dot_product_flash_attention(q, q, q, 0.0, mask), "meta")[0]  # type: ignore[misc]
        for mask in (False, True)
    )
    assert causal.flops * 2 == whole.flops == 2 * 2 * (2 * 3) * 16 * 16 * 8
    assert causal.moved_bytes == whole.moved_bytes
    assert causal.shape == (6, 16, 16, 8)


def test_sequences_behind_one_another_attend_to_themselves_alone() -> None:
    """Defect: packed rows priced as one long sequence."""
    tokens, count = 64, 4
    q = ones(tokens, 3, 8, dtype=torch.bfloat16, device="meta")
    starts = torch.zeros(count + 1, dtype=torch.int32, device="meta")

    def packed() -> Any:
        return aten._flash_attention_forward(q, q, q, starts, starts, 16, 16, 0.0, False, False)

    assert rows(packed, "meta")[0].flops == count * 2 * 2 * 3 * 16 * 16 * 8


def test_grouped_products_count_every_row_once() -> None:
    """Defect: rows × groups, as if each expert saw every token; or the gradient of the weights left out."""
    a, b = ones(8, 16, dtype=torch.bfloat16), ones(2, 16, 24, dtype=torch.bfloat16)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    forward = rows(lambda: aten._grouped_mm(a, b, ends))[-1]
    weights = rows(lambda: aten._grouped_mm(a.t(), ones(8, 24, dtype=torch.bfloat16), ends))[-1]
    assert forward.flops == weights.flops == 2 * 8 * 16 * 24
    assert forward.shape == (2, 4, 24, 16) and weights.shape == (2, 16, 24, 4)


def moved(function: Callable[[], Any]) -> int:
    return sum(each.moved_bytes for each in rows(function))


x, y, ids = ones(4, 6), ones(4, 6), torch.zeros(3, dtype=torch.int64)
row, table = ones(6), ones(100, 6)

MOVED: dict[str, tuple[Callable[[], Any], int]] = {
    "sum of two": (lambda: x + y, 3 * 96),
    "broadcast": (lambda: x + row, 2 * 96 + 24),
    "expanded": (lambda: x + row.expand(4, 6), 2 * 96 + 24),
    "in place": (lambda: x.add_(y), 3 * 96),
    "copy": (lambda: x.copy_(y), 2 * 96),
    "cast": (lambda: x.to(torch.bfloat16), 96 + 48),
    "filled": (lambda: x.zero_(), 96),
    "zeros like": (lambda: torch.zeros_like(x), 96),
    "looked up": (lambda: F.embedding(ids, table), 3 * 8 + 2 * 72),
    "picked": (lambda: table[ids], 3 * 8 + 2 * 72),
    "views": (lambda: x.t()[1:].unsqueeze(0).detach(), 0),
    "allocations": (lambda: (torch.empty(5), torch.empty_like(x)), 0),
    "product": (lambda: x @ y.t(), 2 * 96 + 64),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_are_those_of_a_reader_with_a_pencil(name: str) -> None:
    """Defect: a view that costs, a broadcast input at the result's size, a table that is read whole."""
    function, expected = MOVED[name]
    assert moved(function) == expected


def test_an_optimizer_for_lists_reads_and_writes_each_tensor_and_launches_chunks() -> None:
    """Defect: only the first tensor of a list counted, or one launch for billions of elements."""
    weights, gradients = ([ones(70_000), ones(8)] for _ in range(2))
    size = 4 * 70_008
    (found,) = rows(lambda: torch._foreach_add_(weights, gradients))
    assert (found.moved_bytes, found.launches) == (3 * size, 1)
    many = [ones(1) for _ in range(200)]
    (scaled,) = rows(lambda: torch._foreach_mul_(many, 2.0))
    assert scaled.launches == 2  # of 110 tensors each
    large = torch.empty(1, 400 * 65536, device="meta")
    (large_row,) = rows(lambda: torch._foreach_mul_([large], 2.0), "meta")
    assert large_row.launches == 2  # of 320 chunks each


def test_the_fused_optimizer_moves_weights_gradients_and_both_moments() -> None:
    """Defect: states left out: seven passes of a fused AdamW (four read, three written)."""
    parameter = torch.nn.Parameter(ones(1000))
    parameter.grad = ones(1000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    found = [each for each in rows(optimizer.step) if "_fused_adamw_" in each.name]
    gradients_too = 4000  # the schema lets the kernel write them: it unscales them in place
    assert sum(each.moved_bytes for each in found) in range(7 * 4000, 7 * 4000 + gradients_too + 100)


def test_what_lies_elsewhere_is_no_work_and_what_crosses_is_a_transfer() -> None:
    """Defect: the host's operations priced at the GPU's rates; a copy priced at the GPU's bandwidth."""
    on_gpu, on_host = torch.empty(8, device="meta"), torch.empty(8)
    assert rows(lambda: on_host + on_host, "meta") == []
    (copied,) = rows(lambda: on_host.to("meta"), "meta")
    assert (copied.kind, copied.moved_bytes, copied.waits) == ("transfer", 32, True)
    (later,) = rows(lambda: on_gpu.copy_(on_host, non_blocking=True), "meta")
    assert (later.kind, later.waits) == ("transfer", False)


def test_a_value_that_is_read_makes_the_host_wait() -> None:
    """Defect: a step with `.item()` priced as if Python ran ahead."""
    assert [each.waits for each in rows(lambda: ones(1).item())] == [False, True]


def test_an_operation_that_nobody_looked_at_is_unknown() -> None:
    """Defect: a library's own kernel passed off as a copy of its tensors."""

    @torch.library.custom_op("memkit_tests::sorts", mutates_args=())
    def sorts(values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    (found,) = [each for each in rows(lambda: sorts(ones(4))) if "memkit_tests" in each.name]
    assert (found.kind, found.moved_bytes) == ("unknown", 32)


def test_a_decomposition_is_unknown_and_a_norm_is_not() -> None:
    """Defect: GaLore's decompositions, which take seconds, priced as one reading of the matrix."""
    assert {each.kind for each in rows(lambda: torch.linalg.svd(ones(4, 4))) if "svd" in each.name} == {"unknown"}
    assert {each.kind for each in rows(lambda: torch.linalg.vector_norm(ones(4, 4)))} == {"memory"}


def test_fp32_products_are_tf32_where_torch_may_round_them() -> None:
    """Defect: TF32 priced as fp32, eight times too slow on an A100."""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert rows(lambda: x @ y.t())[0].dtype == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = False
        assert rows(lambda: x @ y.t())[0].dtype == "float32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_autograd_calls_are_told_from_pythons() -> None:
    """Defect: a recomputed layer, which Python queues, priced like the rest of backward."""
    weight = ones(4, 4, grad=True)

    def checkpointed() -> None:
        made = torch.utils.checkpoint.checkpoint(lambda each: each @ weight, ones(2, 4, grad=True), use_reentrant=True)
        made.sum().backward()

    found = [each.called_by for each in rows(checkpointed) if each.kind == "matmul"]
    assert found == ["python", "python", "autograd", "autograd"]  # forward, recomputed, two gradients


def test_held_bytes_leave_out_what_is_only_expanded() -> None:
    assert held_bytes(ones(1, 6).expand(5, 6)) == 24
    assert held_bytes(torch.empty(0, 4)) == 0


def test_rows_that_are_no_multiple_of_8_are_seen_whatever_way_they_lie() -> None:
    """Defect: an odd number of tokens, which no kernel minds, taken for an odd number of words."""
    half = torch.bfloat16
    found = {
        "words": rows(lambda: ones(16, 8, dtype=half) @ ones(7, 8, dtype=half).t()),
        "tokens": rows(lambda: ones(7, 8, dtype=half) @ ones(16, 8, dtype=half).t()),
        "half": rows(lambda: ones(16, 12, dtype=half) @ ones(12, 16, dtype=half)),
    }
    assert {name: calls[-1].alignment for name, calls in found.items()} == {"words": 1, "tokens": 8, "half": 4}


def test_attention_with_dropout_says_so() -> None:
    attend = aten._scaled_dot_product_flash_attention
    with_and_without = rows(lambda: (attend(*heads(), 0.1), attend(*heads())), "meta")
    assert [each.name.endswith("(dropout)") for each in with_and_without if each.kind == "attention"] == [True, False]


def test_a_cpu_s_attention_has_its_flops() -> None:
    """Defect: a CPU's kernel that costs its bytes alone."""
    q = ones(2, 4, 32, 16, grad=True)
    found = rows(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    forward = 2 * 2 * (2 * 4) * 32 * 32 * 16 // 2  # two products, half of the scores: it is causal
    assert [each.flops for each in found if each.kind == "attention"] == [forward, 5 * forward // 2]


def test_chunked_loss_computes_as_many_products() -> None:
    """`linear_cross_entropy` is one operation to the dispatcher, and its products were not seen: a third of a step."""
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch 2.13")
    hidden, weight, labels = ones(128, 64, grad=True), ones(400, 64, grad=True), torch.zeros(128, dtype=torch.int64)
    whole = rows(lambda: F.cross_entropy(F.linear(hidden, weight), labels).backward())
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=24)
    chunked = rows(lambda: F.linear_cross_entropy(hidden, weight, labels, options=chunks).backward())
    assert not [each for each in chunked if each.kind == "unknown"]
    assert sum(each.flops for each in chunked) == sum(each.flops for each in whole)
    sizes = [each.shape[1] for each in chunked if each.name.endswith("(product)") and each.shape[2] == 400]
    assert sorted(sizes) == [8, *[24] * 5]
