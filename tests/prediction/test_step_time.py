"""The time of a step: units, monotony, the two clocks, unknown operations."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.catalog.gpu_rates import RATES
from hf_memkit.prediction.time.operation_time import OperationSeconds
from hf_memkit.prediction.time.step_time import StepTime, step_time
from hf_memkit.prediction.trace.work import Operation, Work

ROOT = Path(__file__).resolve().parents[2]
A100 = RATES["A100 80GB"]
REACHED = 0.98
"""Of its rates in a step (benchmarks/plan_speed.py)."""
PRODUCT = Operation("aten.mm.default", "matmul", "bfloat16", 2 * 8192**3, 3 * 2 * 8192**2, (1, 8192, 8192, 8192))
COPY = Operation("aten.neg.default", "memory", "bfloat16", 0, 2 * 10**9)
SMALL = Operation("aten.add.Tensor", "memory", "float32", 0, 3000)
STEP = replace(COPY, name="aten._fused_adamw_.default")
CLIP = replace(COPY, name="aten._foreach_norm.Scalar")
READ = replace(SMALL, name="aten._local_scalar_dense.default", waits=True)


def work_of(*micro_batches: list[Operation], clip: bool = False) -> Work:
    """A step: of each micro-batch the same operations forward and, called by autograd, backward."""
    work = Work()

    def add(operations: list[Operation], phase: Any) -> None:
        for each in operations:
            if each not in work.operations:
                work.operations.append(each)
            work.calls.append(work.operations.index(each))
        work.marks.append((len(work.calls), phase))

    add([SMALL], "load")
    for number, forward in enumerate(micro_batches):
        add([], "data")
        add(forward, "forward")
        backward = [replace(each, called_by="autograd") for each in forward]
        add([*backward, *([CLIP] if clip and number == len(micro_batches) - 1 else [])], "backward")
    add([STEP], "optimizer")
    add([], "data")
    return work


def priced(work: Work, name: str = "A100 80GB", capability: float = 8.0, **options: Any) -> StepTime:
    return step_time(work, RATES[name], capability=capability, **options)


def test_a_large_product_takes_its_flops_at_the_rate_and_a_copy_its_bytes_at_the_bandwidth() -> None:
    """Defect: TFLOPS for FLOPS, GB for bytes: seconds are off by a thousand."""
    found = priced(work_of([PRODUCT] * 10))
    rate = min(A100.achievable_tflops[name].value for name in ("bfloat16", "float16"))
    assert found.by_kind["matmul"] == pytest.approx(20 * PRODUCT.flops / (1e12 * rate * REACHED), rel=0.03)
    copies = priced(work_of([COPY] * 10)).by_kind["memory"]
    bandwidth = 1e9 * A100.achievable_memory_gb_per_s.value * REACHED
    assert copies == pytest.approx(21 * COPY.moved_bytes / bandwidth, rel=0.01)


def test_phases_add_up_to_the_middle_which_lies_in_the_range() -> None:
    """Defect: a part of the step in no phase, or a range that excludes its middle."""
    found = priced(work_of([PRODUCT, SMALL], [PRODUCT, READ], clip=True), micro_batches=3)
    low, middle, high = found.seconds
    assert sum(found.by_phase.values()) == pytest.approx(middle)
    parts = 3 * (found.forward_s + found.backward_s) + found.optimizer_s
    assert parts == pytest.approx(middle)
    assert found.optimizer_s > found.by_phase["optimizer"]  # and clipping
    assert 0 < low < middle < high
    assert set(found.by_phase) == {"forward", "backward", "optimizer"}


def test_micro_batches_that_were_not_traced_cost_as_much_as_the_second() -> None:
    """Defect: a trace of two micro-batches priced as the whole step; the optimizer, or clipping, with each of them."""
    work = work_of([PRODUCT], [PRODUCT, PRODUCT], clip=True)
    one, two, three, ten = (priced(work, micro_batches=count).seconds[1] for count in (1, 2, 3, 10))
    second = two - one
    assert three - two == pytest.approx(second)
    assert ten - two == pytest.approx(8 * second)
    assert second > one - priced(work_of([PRODUCT], clip=True)).seconds[1]
    assert priced(work_of([PRODUCT], clip=True), micro_batches=4).seconds[1] > 3 * second / 2


def test_a_single_micro_batch_of_two_that_were_traced_is_the_first() -> None:
    work = work_of([PRODUCT], [PRODUCT] * 9, clip=True)
    assert priced(work).seconds == pytest.approx(priced(work_of([PRODUCT], clip=True)).seconds)


def test_many_small_operations_are_bound_by_the_host_and_widen_the_range() -> None:
    """Defect: a LoRA of a small model at 200 tokens, priced by its FLOPs alone."""
    small, large = priced(work_of([SMALL] * 2000)), priced(work_of([PRODUCT] * 20))
    assert small.bound_by_launches > 0.7 > 0.1 > large.bound_by_launches
    assert small.seconds[2] / small.seconds[0] > 1.5 * large.seconds[2] / large.seconds[0]
    assert small.seconds[1] > 2000 * 10e-6  # 10 µs of Python for each, at the least
    assert any("waits for Python" in each for each in small.rests_on)


def test_compiled_code_queues_its_kernels_faster_than_python() -> None:
    """Defect: a wrapper that calls kernels directly, priced as modules and autograd."""
    eager = priced(work_of([SMALL] * 2000))
    generated = priced(work_of([replace(SMALL, called_by="compiled")] * 2000))
    assert generated.seconds[1] < eager.seconds[1]
    assert any("torch.compile" in each for each in generated.rests_on)
    assert not any("torch.compile" in each for each in eager.rests_on)


def test_compiled_products_are_padded() -> None:
    """Defect: logits of 50257 words that take as long as in eager code: inductor pads their rows."""
    seconds = OperationSeconds(RATES["H200"], 9.0)
    odd = replace(PRODUCT, alignment=1)
    assert seconds.of(odd) > 3 * seconds.of(PRODUCT)
    assert seconds.of(replace(odd, called_by="compiled")) == pytest.approx(seconds.of(PRODUCT))


def test_the_host_runs_ahead_unless_a_value_is_read() -> None:
    """Defect: launches added to the GPU's work that hides them; or hidden where the host must wait."""
    hidden = priced(work_of([PRODUCT] * 5 + [SMALL] * 200)).seconds[1]
    waiting = priced(work_of([PRODUCT] * 5 + [READ] + [SMALL] * 200)).seconds[1]
    assert waiting - hidden > 100 * 5e-6


def test_hooks_of_an_engine_hide_behind_a_busy_gpu_and_count_where_it_waits() -> None:
    """Defect: 290 hooks of ZeRO-3 added to a step that the GPU bounds, a third of a small model's."""
    hooks, busy, idle = (0.05, 0.1, 0.2), work_of([PRODUCT] * 50), work_of([SMALL] * 200)
    assert priced(busy, hooks_s=hooks).seconds[1] < priced(busy).seconds[1] + 0.02
    one = priced(idle, hooks_s=hooks).seconds[1] - priced(idle).seconds[1]
    assert one == pytest.approx(0.1, rel=0.1)
    more = priced(idle, hooks_s=hooks, micro_batches=3).seconds[1] - priced(idle, micro_batches=3).seconds[1]
    assert more == pytest.approx(3 * one, rel=0.05)


def test_a_batch_of_tokens_is_put_together_while_the_gpu_waits() -> None:
    """Defect: the loader forgotten, which takes longer than all else between steps of a long batch."""
    tokens = Operation("aten._to_copy.default", "transfer", "int64", 0, 8 * 100_000, waits=True)
    loaded, bare = priced(work_of([PRODUCT, tokens])), priced(work_of([PRODUCT]))
    assert 10e-3 < loaded.seconds[1] - bare.seconds[1] < 60e-3  # twice here, of 100 to 230 ns each
    beside = priced(work_of([PRODUCT, tokens]), loader_workers=2)
    assert beside.seconds[1] - bare.seconds[1] < 1e-3
    images = replace(tokens, dtype="float32")
    assert priced(work_of([PRODUCT, images])).seconds[1] - bare.seconds[1] < 1e-3


def test_more_work_is_never_faster() -> None:
    """Defect: a rule for shapes that makes a longer sum, or another row, cheaper."""
    before = 0.0
    for rows in (16, 64, 128, 256, 840, 1024, 4096, 16384):
        product = replace(
            PRODUCT, flops=2 * rows * 4096 * 4096, shape=(1, rows, 4096, 4096), moved_bytes=2 * rows * 8192
        )
        found = priced(work_of([product] * 50)).seconds[1]
        assert found >= before
        before = found


def test_small_products_stay_below_the_rate() -> None:
    """Defect: the gradient of an adapter of rank 16, which fills an eighth of a tile, at full speed."""
    thin = replace(PRODUCT, flops=2 * 16 * 4096 * 16384, shape=(1, 16, 4096, 16384), moved_bytes=1)
    seconds = priced(work_of([thin] * 100)).by_kind["matmul"] / 200
    assert thin.flops / seconds < 0.25e12 * A100.achievable_tflops["bfloat16"].value


def test_what_is_unknown_is_named_and_widens_the_range() -> None:
    """Defect: an operation without a formula that is not reported."""
    odd = replace(COPY, name="theirs.kernel", kind="unknown")
    found, known = priced(work_of([PRODUCT, odd])), priced(work_of([PRODUCT, COPY]))
    assert found.unknown == ("theirs.kernel",)
    assert found.seconds[1] == pytest.approx(known.seconds[1])
    assert found.seconds[0] < known.seconds[0] and found.seconds[2] > known.seconds[2] + 5e-3
    assert any("theirs.kernel" in each for each in found.rests_on) and not known.unknown


def test_a_gpu_without_bf16_computes_in_fp32_and_says_so() -> None:
    """Defect: a T4 priced at its fp16 rate for bf16, eight times too fast; or a KeyError."""
    work = work_of([PRODUCT] * 10)
    found = priced(work, "T4", 7.5)
    fp16 = Work(
        [replace(each, dtype="float16") if each.kind == "matmul" else each for each in work.operations],
        work.calls, work.marks,
    )  # fmt: skip
    rates = RATES["T4"].achievable_tflops
    slower = rates["float16"].value / rates["float32"].value
    assert found.by_kind["matmul"] == pytest.approx(slower * priced(fp16, "T4", 7.5).by_kind["matmul"], rel=0.01)
    assert any("bfloat16" in each and "float32" in each for each in found.rests_on)


@pytest.mark.parametrize("name", RATES)
def test_every_gpu_prices_every_type(name: str) -> None:
    """Defect: a type that the table of a GPU lacks ends the plan."""
    types = ("float32", "tf32", "bfloat16", "float16", "int8", "float64", "float8_e4m3fn", "complex64")
    attention = Operation(
        "aten._scaled_dot_product_flash_attention.default", "attention", "bfloat16", 10**12, 10**8, (8, 9, 9, 64)
    )
    work = work_of([*(replace(PRODUCT, dtype=each) for each in types), attention])
    assert priced(work, name, 8.0).seconds[1] > 0


def test_a_slower_host_queues_longer() -> None:
    """Defect: a factor of the host without effect."""
    small = work_of([SMALL] * 1000)
    assert priced(small, host=2.0).seconds[1] > 1.8 * priced(small).seconds[1]


def test_the_last_step_is_priced_unless_another_is_asked_for() -> None:
    """Defect: a typical step's time for the worst one."""
    typical, worst = work_of([PRODUCT]), work_of([PRODUCT] * 4)
    both = Work(
        [*typical.operations, *worst.operations],
        [*typical.calls, *(each + len(typical.operations) for each in worst.calls)],
        [*typical.marks, *((end + len(typical.calls), phase) for end, phase in worst.marks)],
    )
    first, last = both.steps()
    assert priced(both).seconds[1] == pytest.approx(priced(worst).seconds[1], rel=0.01)
    assert priced(both, span=first).seconds[1] == pytest.approx(priced(typical).seconds[1], rel=0.01)
    assert first[1] <= last[0]


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        priced(work_of([PRODUCT]), micro_batches=0)
    with pytest.raises(ValueError, match="no optimizer step"):
        priced(Work())


def test_a_price_needs_no_torch() -> None:
    """Defect: a plan that loads torch in the process that asks."""
    code = "import sys, hf_memkit.prediction.time.step_time; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def kernel_ms(operation: Operation, name: str = "H200", capability: float = 9.0) -> float:
    """One call's share of a step, without the rest of it."""
    return 1e3 * OperationSeconds(RATES[name], capability).of(operation)


def measured_on_an_h200() -> dict[str, dict[str, list[int]]]:
    """`{case: {operation: [calls, µs]}}` of the recorded kernels."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "predict-h200.json").read_text())["cases"]
    return {row["model"]: row["kernels"] for row in rows if row["kind"] == "kernels"}


def test_products_with_odd_rows_take_what_an_h200_took() -> None:
    """Defect: the logits of 50257 words at full speed, seven times too fast: kernels of Turing compute them there."""
    logits = replace(PRODUCT, flops=2 * 8192 * 768 * 50257, shape=(1, 8192, 50257, 768), moved_bytes=1, alignment=1)
    kernels = measured_on_an_h200()["gpt2"]
    odd = [time for name, (_, time) in kernels.items() if "align1" in name]
    assert len(odd) == 3
    assert kernel_ms(logits) == pytest.approx(sum(odd) / 3 / 1e3, rel=0.2)
    assert kernel_ms(replace(logits, alignment=8)) < 0.2 * kernel_ms(logits)
    assert kernel_ms(logits, "A100 80GB", 8.0) < 1.6 * kernel_ms(replace(logits, alignment=8), "A100 80GB", 8.0)


def test_norms_sums_and_8_bit_updates_take_what_an_h200_took() -> None:
    """Defect: each tensor read once at full speed, two to eight times too fast."""
    bert, large = measured_on_an_h200()["bert-large"], measured_on_an_h200()["gpt2-xl"]
    rows = 32 * 512 * 1024
    backward = Operation("aten.native_layer_norm_backward.default", "memory", "float32", 0, 3 * 4 * rows)
    calls, time = bert["aten::native_layer_norm_backward"]
    assert kernel_ms(backward) == pytest.approx(time / calls / 1e3, rel=0.25)
    updated = 1_557_611_200
    eight = Operation(
        "bitsandbytes.optimizer_update_8bit_blockwise.default", "memory", "float32", updated, 20 * updated
    )
    assert kernel_ms(eight) == pytest.approx(large["bitsandbytes::optimizer_update_8bit_blockwise"][1] / 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("model", "heads", "length", "causal", "dropout"),
    [("llama-1b", 128, 2048, True, False), ("gpt2", 96, 1024, True, True), ("vit-large", 1024, 197, False, False)],
)
def test_cudnn_s_attention_takes_what_an_h200_took(
    model: str, heads: int, length: int, causal: bool, dropout: bool
) -> None:
    """Defect: the rate of heads of 128 for heads of 64, or rows that fill no tile at full speed."""
    flops = 4 * heads * length * length * 64 // (2 if causal else 1)
    name = "aten._scaled_dot_product_cudnn_attention.default" + " (dropout)" * dropout
    forward = Operation(name, "attention", "bfloat16", flops, 1, (heads, length, length, 64))
    calls, time = measured_on_an_h200()[model]["aten::_cudnn_attention_forward"]
    assert kernel_ms(forward) == pytest.approx(time / calls / 1e3, rel=0.35)
