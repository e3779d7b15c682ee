"""torch.compile through Trainer: the same losses, less kept, and a guard that really stops a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.common.errors import SettingError
from hf_memkit.components import recompilation_guard
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.compiling import RETIRED
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.techniques.cpu_allocations import saved_bytes
from tests.techniques.jobs import MACHINE, gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import batch, causal_model


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before or after; the counters are of the process, and the guard takes differences."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Mean(nn.Module):
    """Compiles in no time, and again for each number of tokens where shapes are static."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).square().mean()}


Train = Callable[..., Trainer]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(model: nn.Module, data: Any, *, guarded: bool = False, **arguments: Any) -> Trainer:
        values: dict[str, Any] = {
            "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "per_device_train_batch_size": 1, "logging_steps": 1, "save_strategy": "no", "max_steps": 2,
            "train_sampling_strategy": "sequential",
        }  # fmt: skip
        options = {}
        args = TrainingArguments(**{**values, **arguments})
        if guarded:
            options = recompilation_guard.trainer_options(model=model, processing_class=None, arguments=args)
        trainer = Trainer(model=model, args=args, train_dataset=data, **options)
        trainer.train()
        return trainer

    return run


def numbers(count: int) -> list[dict[str, torch.Tensor]]:
    """One sample of each length."""
    return [{"x": torch.ones(2 + number), "labels": torch.ones(1)} for number in range(count)]


@proves("same-result", "compile")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_losses_are_those_of_the_uncompiled_model(train: Train, backend: str) -> None:
    """eager: exactly. aot_eager: rounding of what is recomputed. inductor fuses: tried in benchmarks."""
    rows = [{name: value[0] for name, value in batch(1, 16, ignored=False).items()}] * 4

    def losses(**arguments: Any) -> list[float]:
        model = causal_model(n_layer=1, loss_type="ForCausalLM")
        done = train(model, rows, guarded=bool(arguments), learning_rate=1e-2, **arguments)
        return [entry["loss"] for entry in done.state.log_history if "loss" in entry]

    plain = losses()
    assert plain[0] != plain[1]
    assert losses(torch_compile_backend=backend) == pytest.approx(plain, rel=0 if backend == "eager" else 1e-6)


@pytest.mark.slow
@proves("memory", "compile")
def test_less_is_kept_for_backward() -> None:
    """GPT-2's composed GELU keeps five tensors of four times the width; compiled, it is made again from one."""
    model = causal_model(n_layer=1, loss_type="ForCausalLM", attn_pdrop=0.1, resid_pdrop=0.1)
    model.config.use_cache = False
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    inputs = batch(4, 32, ignored=False)

    def kept(called: Any) -> int:
        called(**inputs).loss.backward()
        return saved_bytes(
            lambda: called(**inputs).loss, lambda tensor: tensor.untyped_storage().data_ptr() not in weights
        )

    plain = kept(model)
    assert kept(torch.compile(model, backend="aot_eager")) < 0.85 * plain


def test_a_run_in_which_nothing_is_compiled_is_stopped(train: Train) -> None:
    with pytest.raises(RuntimeError, match="torch_compile=True"):
        train(Mean(), numbers(2), guarded=True, torch_compile=True, torch_compile_backend="no")
    assert train(Mean(), numbers(2), guarded=True, torch_compile_backend="eager").state.global_step == 2
    torch._dynamo.utils.counters.clear()
    assert train(Mean(), numbers(2), guarded=True).state.global_step == 2, "a plan has turned torch.compile off"


def test_a_run_in_which_torch_gives_up_compiling_is_stopped(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard it goes on uncompiled, as the first half shows."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "false")  # a graph for each length
    with torch._dynamo.config.patch(recompile_limit=2):
        assert train(Mean(), numbers(6), torch_compile_backend="eager", max_steps=6).state.global_step == 6
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with pytest.raises(RuntimeError, match=r"2 times .*recompile_limit"):
            train(Mean(), numbers(6), guarded=True, torch_compile_backend="eager", max_steps=6)


def test_dynamic_lengths_are_compiled_twice_and_no_more(train: Train) -> None:
    """The first length as it is, the second as any length: dynamic padding needs no fixed length."""
    train(Mean(), numbers(6), guarded=True, torch_compile_backend="eager", max_steps=6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_graphs_that_come_late_are_warned_of(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "false")
    monkeypatch.setattr(recompilation_guard, "SETTLED_AFTER", 2)
    monkeypatch.setattr(recompilation_guard, "MOST_LATE", 1)
    output: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            output.append(record.getMessage())

    keep = Keep()
    logger = transformers_logging.get_logger("transformers.memkit")
    logger.addHandler(keep)
    try:
        train(Mean(), numbers(6), guarded=True, torch_compile_backend="eager", max_steps=6)
    finally:
        logger.removeHandler(keep)
    assert len(output) == 1 and "2 more graphs after step 2" in output[0]


def applied(card: str | None = None, **values: Any) -> Setup:
    machine = MACHINE.with_gpu(named_gpu(card)) if card else MACHINE
    return TECHNIQUES["compile"](Setup("x", job=gpt2_job(None, machine=machine, values=values)))


def test_settings() -> None:
    assert applied().arguments == {"torch_compile": True, "torch_compile_backend": "inductor"}
    tuned = applied(compile_mode="max-autotune")
    assert tuned["arguments.torch_compile_mode"] == "max-autotune" and "one shape" in tuned.notes[0]
    assert "trainer_parts.recompilation_guard" in tuned
    assert not applied("T4").problems and "P100 has 6.0" in applied("P100").problems[0]
    assert not applied("P100", compile_backend="aot_eager").problems


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compile_backend": "nvprims_nvfuser"}, "backend 'inductor'"),
        ({"compile_backend": "inductr"}, "did you mean 'inductor'"),
        ({"compile_mode": "cudagraphs"}, "for a backend: compile_backend"),
        ({"compile_backend": "aot_eager", "compile_mode": "max-autotune"}, "ignores modes. Remove it"),
    ],
)
def test_what_cannot_train_is_answered_with_what_can(values: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        applied(**values)
    assert all("inductor" in text or "openxla" in text for text in RETIRED.values())
