"""Parts of a DeepSpeed prediction from the trace and from the ledger, on any number of GPUs; every preset."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.presets import preset_index
from hf_memkit.deepspeed.sizing import size_preset
from hf_memkit.prediction import Prediction, predict
from hf_memkit.prediction.split_states import one_rank, split_notes
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.setup.job import Job
from hf_memkit.setup.ledger import Ledger, Row
from hf_memkit.setup.setup import Setup
from tests.prediction.cases import facts

COUNTS = ((1, 1), (2, 1), (8, 8))
"""(GPUs of a machine, machines): 1, 2 and 64 ranks."""

SMALL: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 50257, "n_positions": 128,
}  # fmt: skip
"""GPT-2 XL's kind, its vocabulary and its imbalance, small."""

MACHINE = Machine(gpu_of_size("80GB"), ram_bytes=2048 * GIB, disk_free_bytes=9999 * GIB, disk_path="/d", cpu_count=8)


def setup_of(preset: str, config: dict[str, Any], model: ModelFacts, gpus: int, nodes: int) -> Setup:
    sized = size_preset(preset, model, MACHINE, nvme_path="/d", gpus=gpus, nodes=nodes, accumulation=False)
    setup = Setup(preset).put("model.name", "m", "a test's").put("model.origin", "architecture", "a test's")
    setup = setup.put("model.architecture", config, "a test's").put("arguments.bf16", True, "a test's")
    return setup.put("deepspeed.config", sized.config, "a test's")


def predicted(setup: Setup, model: ModelFacts, gpus: int, nodes: int) -> Prediction:
    return predict(replace(setup, job=Job(model, MACHINE, 1, 64, gpus=gpus, nodes=nodes)))


TRACED = {
    "zero1": [pytest.mark.slow],
    "zero2-offload": [pytest.mark.slow],
    "zero3-infinity": [],
    "zero3": [pytest.mark.slow],
}
"""One of each stage and of each place that states go to; the others are set otherwise, and split as these are."""


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=TRACED.get(name, [pytest.mark.exhaustive])) for name in preset_index()]
)
def test_every_preset_is_predicted_to_the_end(preset: str) -> None:
    """Traced, on 1 to 64 ranks: a number comes out, more GPUs never need more of each, and RAM, pinned RAM and disk
    are the ledger's."""
    model = facts(SMALL)
    peaks = []
    for gpus, nodes in COUNTS:
        setup = setup_of(preset, SMALL, model, gpus, nodes)
        found = predicted(setup, model, gpus, nodes)
        assert found.confidence.level == "trace", found.notes
        assert found.categories["activations"] > 0 and found.categories["weights"] > 0
        assert found.peak_allocated_bytes <= found.smallest_cap_bytes
        held = zero_ledger(setup["deepspeed.config"], model, gpus=gpus, nodes=nodes, accumulation=False)
        process = found.host_rss_bytes - held.total_bytes("host") if found.host_rss_bytes is not None else -1
        assert process >= 0 and found.pinned_bytes == held.total_bytes("pinned")
        assert found.disk_bytes == held.total_bytes("disk")
        peaks.append((found.peak_allocated_bytes, held))
    gathers = max(_constant(held) for _, held in peaks)
    for (fewer, _), (more, _) in itertools.pairwise(peaks[1:]):
        assert more <= fewer + 2**20, "padding of partitions at most"
    assert peaks[1][0] <= peaks[0][0] + gathers, "one GPU gathers nothing"


def _constant(ledger: Ledger) -> int:
    return sum(row.size_bytes for row in ledger.rows if row.place == "device" and row.category == "buffers") + sum(
        row.size_bytes for row in ledger.rows if row.term == "small parameters, never split"
    )


def small_trace() -> Trace:
    """Two steps: an activation, then gradients of 4 and 6 KiB, which the step's end frees."""
    trace = Trace(operations=["op"], modules=[""])
    names = {name: CATEGORIES.index(name) for name in ("activations", "gradients", "weights")}

    def make(size: int, category: str) -> int:
        trace.sizes_bytes.append(size)
        trace.category_of.append(names[category])
        trace.operation_of.append(0)
        trace.module_of.append(0)
        trace.events.append(len(trace.sizes_bytes))
        return len(trace.sizes_bytes)

    def mark(phase: Any) -> None:
        trace.marks.append((len(trace.events), phase))

    make(10240, "weights")
    mark("load")
    for _ in range(2):
        kept = make(2048, "activations")
        mark("forward")
        gradients = [make(4096, "gradients"), make(6144, "gradients")]
        trace.events.append(-kept)
        mark("backward")
        trace.events.append(-make(512, "activations"))
        mark("optimizer")
        trace.events.extend(-number for number in gradients)
        mark("data")
    return trace


def accumulated_trace() -> Trace:
    """A step of two micro-batches: gradients of 4 KiB, the second of which is added to the first."""
    trace = Trace(operations=["op"], modules=[""])
    gradients = CATEGORIES.index("gradients")
    kept = trace.add(4096, gradients)
    trace.events.append(kept)
    trace.marks.append((1, "backward"))
    added = trace.add(4096, gradients)
    trace.events += [added, -added]
    trace.marks.append((3, "backward"))
    step = trace.add(512, CATEGORIES.index("activations"))
    trace.events += [step, -step, -kept]
    trace.marks.append((6, "optimizer"))
    return trace


def row(term: str, size_bytes: int, category: Any, phase: Any = None) -> Row:
    return Row("device", category, term, size_bytes, "a test's", phase)


def test_whole_gradients_come_as_they_are_traced() -> None:
    """Stages 0 and 1: no gradients in forward, all of them at the end of backward."""
    ledger = Ledger((row("gradients", 10240, "gradients"), row("weights, flat", 10240, "weights")))
    found = one_rank(small_trace(), ledger).peaks_by_phase()
    assert found["load"] == 10240 and found["forward"] == 10240 + 2048
    assert found["backward"] == 10240 + 2048 + 4096 + 6144


def test_what_a_process_owns_of_the_gradients_is_made_at_the_first_of_them() -> None:
    """Stage 2 of four ranks, whose last one owns the first gradient: its whole quarter is allocated from then on."""
    terms = (row("largest gradient", 6144, "gradients", "backward"), row("gradient partition", 2560, "gradients"))
    found = one_rank(small_trace(), Ledger(terms)).peaks_by_phase()
    assert found["forward"] == 2048
    assert found["backward"] == 2048 + 2560 + 6144
    assert found["optimizer"] == 2560 + 512


def test_a_bucket_is_reduced_when_it_is_full() -> None:
    """Two buckets of 8 KiB: the second gradient has no room, so that the first is reduced before it comes. What of it
    belongs to several processes is flattened, and dropped before the partition is made."""
    terms = (
        row("largest gradient", 6144, "gradients", "backward"), row("gradient partition", 512, "gradients"),
        row("gradient buckets", 16384, "buffers", "backward"),
        row("gradient bucket, flattened to be reduced", 8192, "gradients", "backward"),
    )  # fmt: skip
    found = one_rank(small_trace(), Ledger(terms), 8192).peaks_by_phase()
    assert found["backward"] == 16384 + 2048 + 512 + 6144 + 6144 - 2048, "the activation is gone when the second is"
    found = one_rank(small_trace(), Ledger(terms), 16384).peaks_by_phase()
    assert found["backward"] == 16384 + 8192 + 6144, "both at once, at the end, and at most a bucket"


def test_the_norm_of_an_offloaded_gradient_is_taken_in_fp64() -> None:
    """Four times a 16-bit gradient's bytes, at most what one process owns of a parameter."""
    largest = row("largest gradient", 6144, "gradients", "backward")
    for owned, copy in ((20480, 20480), (32768, 4 * 6144)):
        norm = row("gradient in fp64, for its norm", owned, "gradients")
        found = one_rank(small_trace(), Ledger((largest, norm))).peaks_by_phase()
        assert found["backward"] == 6144 + copy and found["optimizer"] == 512
    whole = (row("gradients", 10240, "gradients"), row("gradient in fp64, for its norm", 20480, "gradients"))
    assert one_rank(small_trace(), Ledger(whole)).peaks_by_phase()["backward"] == 10240 + 20480, "stage 1: at the end"


def test_later_micro_batches_have_a_partition_of_their_own() -> None:
    trace = accumulated_trace()
    rows = (
        row("largest gradient", 6144, "gradients", "backward"), row("gradient partition", 2560, "gradients"),
        row("gradient partition of a later micro-batch", 2560, "gradients", "backward"),
    )  # fmt: skip
    found = one_rank(trace, Ledger(rows)).peaks_by_phase()
    assert found["backward"] == 2 * 2560 + 4096 and found["optimizer"] == 2560 + 512


def test_moments_come_with_the_first_step() -> None:
    """What activations have left free holds them."""
    joined = one_rank(small_trace(), Ledger((row("moments", 8192, "optimizer"), row("weights, flat", 512, "weights"))))
    held = []
    live = 0
    for start, end, phase in joined.spans():
        for event in joined.events[start:end]:
            live += joined.sizes_bytes[abs(event) - 1] * (1 if event > 0 else -1)
        held += [live] * (phase == "forward")
    assert held == [512 + 2048, 512 + 8192 + 2048]


def test_gathered_parameters_are_gone_before_the_step() -> None:
    rows = (row("largest gradient", 6144, "gradients", "backward"), row("live parameters", 8192, "buffers"))
    found = one_rank(small_trace(), Ledger(rows)).peaks_by_phase()
    assert found["forward"] == 2048 + 8192 and found["optimizer"] == 512
    assert any("upper bound" in note for note in split_notes(Ledger(rows)))
    assert not any("upper bound" in note for note in split_notes(Ledger(rows[:1])))
