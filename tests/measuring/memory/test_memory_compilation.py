"""Records and reports of real trainings that torch compiles: graphs, graph breaks, recompilations, and when."""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_memkit import MemoryReportCallback, oom_advice
from hf_memkit.measuring.memory.records import read_records
from hf_memkit.measuring.report.answer import report_json
from hf_memkit.measuring.report.load import load_run
from tests.measuring.recorded import QUIET
from tests.record_shape import misfits_in

LENGTHS = (4, 4, 6, 7, 8, 9)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before or after. The counters stay: a training's figures are differences."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Broken(nn.Module):
    """Compiles in a fraction of a second, in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.weight * x
        torch._dynamo.graph_break()
        return {"loss": y.square().mean()}


Train = Callable[..., dict[str, list[dict[str, Any]]]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains a model on one sample of each of `LENGTHS`; returns the records by kind."""

    def run(model: nn.Module | None = None, collator: Any = None, **arguments: Any) -> dict[str, list[dict[str, Any]]]:
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=len(LENGTHS),
            per_device_train_batch_size=1, save_strategy="no", train_sampling_strategy="sequential", **arguments,
        )  # fmt: skip
        rows = [{"x": torch.ones(length), "labels": torch.ones(1)} for length in LENGTHS]
        callback = MemoryReportCallback(**QUIET)
        trainer = Trainer(
            model=model or Broken(), args=args, train_dataset=rows, eval_dataset=rows[:1], callbacks=[callback],
            data_collator=collator,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(torch.OutOfMemoryError), oom_advice():
            trainer.train()
        assert callback.path is not None and callback.callback_errors == 0 and misfits_in(tmp_path) == []
        records: dict[str, list[dict[str, Any]]] = {}
        for record in read_records(callback.path):
            records.setdefault(record["kind"], []).append(record)
        return records

    return run


def compiled(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The records with figures, by step."""
    return {record["step"]: record for record in records if "compilation" in record}


def test_a_compiled_training_records_what_was_compiled_and_when(train: Train, tmp_path: Path) -> None:
    """The first length as it is, the second as any length: two graphs each, because the model breaks its graph."""
    records = train(torch_compile_backend="aot_eager", eval_strategy="steps", eval_steps=4)
    steps = compiled(records["step"])
    assert {step: record["compiled_graphs"] for step, record in steps.items()} == {1: 2, 3: 2}
    assert compiled(records["evaluate"]) == {}
    first = steps[1]["compilation"]
    assert (first["graphs"], first["graph_breaks"], first["recompilations"]) == (2, 1, 0)
    assert first["compile_time_ms"] > 0 and "recompile_reasons" not in first

    (end,) = records["end"]
    last = end["compilation"]
    assert last == steps[3]["compilation"] and "compiled_graphs" not in end
    assert (last["graphs"], last["graph_breaks"], last["recompilations"], last["given_up"]) == (4, 2, 2, 0)
    line = Broken.forward.__code__.co_firstlineno
    (reason,) = last["graph_break_reasons"]
    assert reason.startswith(f"test_memory_compilation.py:{line + 2}: ") and "graph_break" in reason
    assert last["recompile_reasons"][0].startswith(f"test_memory_compilation.py:{line}: ")
    assert "expected 4, actual 6" in last["recompile_reasons"][0]

    summary = report_json(load_run(tmp_path))["summary"]
    assert summary["compilation"] == last and summary["compiled_steps"] == (1, 3)
    others = [record["step_time_ms"] for record in records["step"] if record["step"] not in steps]
    assert summary["step_time_ms"] == statistics.median(others)


def test_graphs_of_an_evaluation_are_not_those_of_the_next_step(train: Train) -> None:
    """Without gradients torch compiles anew. (Trainer evaluates without what its own `torch_compile` compiled.)"""
    model = Broken()
    model.compile(backend="eager")
    records = train(model, eval_strategy="steps", eval_steps=5)
    assert 6 not in compiled(records["step"])
    assert compiled(records["evaluate"])[5]["compiled_graphs"] > 0


def test_an_out_of_memory_error_has_the_figures_until_then(train: Train) -> None:
    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if len(rows[0]["x"]) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return default_data_collator(rows)

    records = train(collator=collate, torch_compile_backend="eager")
    (error,) = records["oom"]
    assert error["compilation"] == compiled(records["step"])[3]["compilation"] and "compiled_graphs" not in error


def test_a_training_in_which_torch_gives_up(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "false")  # a graph for each length
    with torch._dynamo.config.patch(recompile_limit=2):
        records = train(torch_compile_backend="eager")
    steps = compiled(records["step"])
    # The function and its second half get two graphs each; the fourth step has the third length.
    assert {step: record["compiled_graphs"] for step, record in steps.items()} == {1: 2, 3: 2, 4: 0}
    assert [record["compilation"]["given_up"] for record in steps.values()] == [0, 0, 1]
    report = report_json(load_run(tmp_path))
    (finding,) = report["findings"]
    assert (finding["kind"], finding["first_step"]) == ("recompilations", 4)
    assert finding["figures"] == {"graphs": 4, "recompilations": 2, "given_up": 1, "late_graphs": 0}
    assert report["summary"]["compiled_steps"] == (1, 3)


def test_a_training_that_is_not_compiled_has_no_figures(train: Train, tmp_path: Path) -> None:
    """Although the process compiled another model before."""
    torch.compile(Broken(), backend="eager")(torch.ones(3))
    assert not any(compiled(of_kind) for of_kind in train().values() if of_kind[0]["kind"] != "modules")
    assert report_json(load_run(tmp_path))["summary"]["compilation"] is None
