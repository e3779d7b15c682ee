"""From a setup to its prediction: devices, joined ledgers and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.common.errors import InputError, NoKernel, TraceFailed
from hf_memkit.common.units import GIB
from hf_memkit.prediction import Prediction, predict
from hf_memkit.prediction.from_setup import MEASURED_ON
from hf_memkit.setup.bf16_on_gpus import unscaled_by_setup
from hf_memkit.setup.job import Job
from hf_memkit.setup.setup import Setup
from tests.prediction.cases import GPT2, LENGTH, facts, small_setup

MACHINE = Machine(gpu_of_size("16GB"), ram_bytes=64 * GIB, disk_free_bytes=200 * GIB, disk_path="/data", cpu_count=8)


def predicted(setup: Setup | None = None, **options: Any) -> Prediction:
    given = {"model": facts(GPT2), "machine": MACHINE, "micro_batch_size": 2, "sequence_length": LENGTH, **options}
    return predict(replace(setup or small_setup(), job=Job(**given)))


def test_gradients_that_fp16_cannot_scale_are_refused() -> None:
    """Would notice: "fits" for a checkpoint in bf16 under fp16."""
    setup = small_setup({**GPT2, "dtype": "bfloat16"}, fp16=True)
    with pytest.raises(NoKernel, match='dtype="float32"'):
        predicted(setup)
    for other in (
        setup.put("model.dtype", "float32", "a test's"),
        setup.put("adapter.r", 8, "a test's"),  # which PEFT keeps in fp32
        setup.put("deepspeed.config", {}, "a test's"),  # which scales by itself
        small_setup({**GPT2, "dtype": "bfloat16"}, bf16=True),
    ):
        assert not unscaled_by_setup(replace(other, job=Job(facts(GPT2), MACHINE, 2, LENGTH)))


def test_a_trace_is_the_first_choice() -> None:
    found = predicted()
    assert found.confidence.level == "trace" and found.confidence.measured_on == MEASURED_ON
    assert found.verdict == "fits" and found.peak_phase == "backward" and found.peak_operation
    low, high = found.peak_reserved_bytes
    assert found.peak_allocated_bytes <= found.smallest_cap_bytes and low <= high
    assert found.capacity_bytes == gpu_of_size("16GB").capacity_bytes and found.outside_allocator_bytes
    assert list(found.phases) == ["load", "data", "forward", "backward", "optimizer", "save"]


def test_what_cannot_be_traced_is_not_predicted() -> None:
    """Would notice: numbers of something else in its place."""
    broken = small_setup().put("model.class", "NoSuchModel", "a test's")
    with pytest.raises(InputError, match="NoSuchModel"):
        predicted(broken)
    once = r"^this training cannot be traced: torch_compile_mode=reduce-overhead: CUDA graphs hold memory[^;]*$"
    with pytest.raises(InputError, match=once):
        predicted(small_setup(torch_compile=True, torch_compile_mode="reduce-overhead"))
    with pytest.raises(InputError, match="torch_compile_backend=cudagraphs: not traced"):
        predicted(small_setup(torch_compile=True, torch_compile_backend="cudagraphs"))


@pytest.mark.slow
def test_modes_that_time_nothing_here_need_the_same() -> None:
    default, tuned = (
        predicted(small_setup(torch_compile=True, bf16=True, torch_compile_mode=mode))
        for mode in ("default", "max-autotune-no-cudagraphs")
    )
    assert default.confidence.level == tuned.confidence.level == "trace"
    assert default.compilation is not None and default.compilation == tuned.compilation
    assert default.phases == tuned.phases


def test_code_compiled_for_a_cpu_does_not_replace_code_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = TraceFailed("InductorError: no such kernel", kind="InductorError")
    monkeypatch.setattr("hf_memkit.prediction.from_setup.trace_setup", Mock(side_effect=failure))
    with pytest.raises(InputError, match=r"cannot be traced: InductorError: no such kernel\. Omit torch_compile"):
        predicted(small_setup(torch_compile=True))


def test_8_bits_say_what_is_assumed_of_outliers() -> None:
    """Would notice: outliers that are counted silently, and a setup in 8 bits that cannot be traced."""
    setup = small_setup().put("model.quantization", {"load_in_8bit": True}, "a test's").put("adapter.r", 8, "a test's")
    found = predicted(setup)
    assert found.confidence.level == "trace", found.notes
    assert found.categories["weights"] < 0.6 * predicted().categories["weights"]  # embeddings stay in fp32
    assert any("7 columns of each input" in note for note in found.notes)


@pytest.mark.slow
def test_replicas_add_their_buckets() -> None:
    gradients = 4 * sum(facts(GPT2).sizes)
    one, two = predicted(), predicted(gpus=2)
    assert two.categories["buffers"] - one.categories["buffers"] == pytest.approx(gradients, rel=0.001)
    assert any("NCCL" in note for note in two.notes)
