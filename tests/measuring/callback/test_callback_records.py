from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.measuring.memory.records import read_records, steps

pytestmark = pytest.mark.compat
ON_CUDA_ONLY = {
    "allocated_gib", "peak_allocated_gib", "reserved_gib", "peak_reserved_gib", "capacity_gib", "fragmentation_gib",
    "alloc_retries", "device_used_gib", "outside_allocator_gib", "phases", "categories",
}  # fmt: skip


def kinds(records: list[dict[str, Any]]) -> list[str]:
    return [record["kind"] for record in records]


def test_record_contract(make_trainer: Any, tmp_path: Path) -> None:
    predicted = {"peak_allocated_gib": 0.5, "categories": {"weights_gib": 0.25}}
    callback = MemoryReportCallback(run_facts={"recipe": "tiny"}, prediction=predicted)
    trainer = make_trainer([callback], save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    trainer.train()
    path = tmp_path / "run" / "memory-rank0.jsonl"
    assert callback.path == path
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    records = [json.loads(line) for line in lines]
    assert all(r["schema"] == 1 and r["time"] > 1e9 for r in records)
    assert records.pop(1)["kind"] == "modules"
    assert kinds(records) == ["run", "step", "step", "evaluate", "save", "step", "save", "end"] or kinds(records) == [
        "run", "step", "step", "evaluate", "save", "step", "evaluate", "save", "end",
    ]  # fmt: skip

    run, end = records[0], records[-1]
    assert run["facts"] == {"recipe": "tiny"} and run["prediction"] == predicted
    assert {"hf_memkit", "torch", "transformers", "accelerate", "python"} <= run["versions"].keys()
    assert {"device_name", "cpu_count", "ram_gib"} <= run["hardware"].keys()
    arguments = run["arguments"]
    assert arguments["per_device_train_batch_size"] == 2 and arguments["activation_checkpointing"] is False
    assert isinstance(arguments["optim"], str) and "deepspeed_stage" not in arguments
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert run["parameters"] == run["trainable_parameters"] == parameters
    assert run["model_class"] == "GPT2LMHeadModel" and run["start_step"] == 0
    assert run["optimizer_classes"] == ["AcceleratedOptimizer", "AdamW"]
    assert "engine" not in run  # a plain callback cannot know it

    for number, step in enumerate(steps(records), 1):
        assert step["step"] == number and step["step_time_ms"] > 0 and step["host_rss_gib"] > 0
        assert (step["samples"], step["tokens"], step["longest_sequence"]) == (2, 16, 8)
        assert step["recomputed_layers"] == 0
        if not torch.cuda.is_available():
            assert not ON_CUDA_ONLY & step.keys()
        assert None not in step.values()
    evaluate = records[3]
    assert evaluate["metrics"]["eval_loss"] > 0 and evaluate["host_rss_gib"] > 0
    assert records[4]["checkpoint"] == "checkpoint-2" and (tmp_path / "run" / "checkpoint-2").is_dir()

    assert end["status"] == "finished" and end["steps"] == 3
    assert end["reader_errors"] == {} and end["callback_errors"] == 0
    assert end["optimizer_states"]["exp_avg"] == {"float32": len(list(trainer.model.parameters()))}
    assert end["peak_host_rss_gib"] >= max(s["host_rss_gib"] for s in steps(records))


def test_accumulation_sums_over_the_window(make_trainer: Any) -> None:
    callback = MemoryReportCallback()
    make_trainer([callback], gradient_accumulation_steps=3, max_steps=2).train()
    assert [(s["samples"], s["tokens"]) for s in steps(read_records(callback.path))] == [(6, 48), (6, 48)]


def test_evaluation_adds_no_samples(make_trainer: Any) -> None:
    callback = MemoryReportCallback()
    make_trainer([callback], eval_strategy="steps", eval_steps=1, eval_on_start=True).train()
    assert [s["samples"] for s in steps(read_records(callback.path))] == [2, 2, 2]


def test_embeddings_and_pictures() -> None:
    from hf_memkit.measuring.memory.inputs import InputCounter

    counter = InputCounter()
    counter.add((), {"attention_mask": torch.ones(2, 9), "inputs_embeds": torch.zeros(2, 5, 16)})
    counter.add((torch.zeros(1, 7, dtype=torch.long),), {})
    assert counter.fields() == {"samples": 3, "tokens": 17, "longest_sequence": 7}
    pictures = InputCounter()
    pictures.add((), {"pixel_values": torch.zeros(4, 3, 8, 8)})
    assert pictures.fields() == {"samples": 4}  # three channels are no tokens


def test_log_keys_reach_the_log_history_and_other_callbacks(make_trainer: Any, allocator: Any) -> None:
    class Dashboard(TrainerCallback):
        seen: list[dict[str, float]] = []  # noqa: RUF012

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.seen.append(dict(logs))

    from hf_memkit.measuring.memory.readers.host import HostReader

    trainer = make_trainer([Dashboard()], eval_strategy="steps", eval_steps=2)
    callback = attach(trainer, readers=[allocator, HostReader()])
    assert trainer.callback_handler.callbacks[0] is callback
    trainer.train()
    keys = {
        "memory/peak_allocated_gib", "memory/peak_reserved_gib", "memory/peak_reserved_percent", "memory/headroom_gib",
    }  # fmt: skip
    for log in (*Dashboard.seen, *trainer.state.log_history):
        assert {key for key in log if key.startswith("memory/")} == (keys if "loss" in log else set())
        assert all(type(log[key]) is float for key in keys & log.keys())
    assert len(Dashboard.seen) >= 4
    json.dumps(trainer.state.log_history)
    assert read_records(callback.path)[0]["engine"] == "GPT2LMHeadModel"


def test_attach_leaves_one_callback_and_puts_it_first(make_trainer: Any, tmp_path: Path) -> None:
    there = MemoryReportCallback(tmp_path / "mine", summary=False)
    trainer = make_trainer([there])
    assert trainer.callback_handler.callbacks[0] is not there
    assert attach(trainer) is there  # with the options that it has
    other = attach(trainer, html=False)
    ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, MemoryReportCallback)]
    assert ours == [other] == trainer.callback_handler.callbacks[:1] and other is not there


def test_two_callbacks_leave_one_set_of_hooks_and_full_records(make_trainer: Any, tmp_path: Path) -> None:
    first, second = MemoryReportCallback(tmp_path / "a"), MemoryReportCallback(tmp_path / "b")
    make_trainer([first, second]).train()
    left_out = read_records(tmp_path / "a" / "memory-rank0.jsonl")
    assert kinds(left_out) == ["run", "modules", "end"]
    assert left_out[-1]["status"] == "interrupted" and "another one" in left_out[-1]["error"]
    assert [s["samples"] for s in steps(read_records(tmp_path / "b" / "memory-rank0.jsonl"))] == [2, 2, 2]


def test_interrupted(make_trainer: Any) -> None:
    callback = MemoryReportCallback()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            callback.mark_interrupted()
            control.should_training_stop = True

    make_trainer([callback, Stop()]).train()
    end = read_records(callback.path)[-1]
    assert (end["kind"], end["status"], end["steps"]) == ("end", "interrupted", 1)


def test_resume_repeats_steps_and_the_last_counts(make_trainer: Any, tmp_path: Path) -> None:
    def run(**arguments: Any) -> Any:
        return make_trainer([MemoryReportCallback()], save_strategy="steps", save_steps=2, **arguments)

    run(max_steps=3).train()
    run(max_steps=4).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    records = read_records(tmp_path / "run" / "memory-rank0.jsonl")
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 3, 4]
    assert [r["start_step"] for r in records if r["kind"] == "run"] == [0, 2]
    second_run = [r["kind"] for r in records].index("run", 1)
    assert [r["step"] for r in steps(records)] == [1, 2, 3, 4]
    assert steps(records)[2] == next(r for r in records[second_run:] if r["kind"] == "step")


def test_a_model_that_is_no_transformers_model(make_trainer: Any) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 64)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
            return (nn.functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten()),)

    callback = MemoryReportCallback()
    make_trainer([callback], model=Plain()).train()
    step = steps(read_records(callback.path))[0]
    assert step["samples"] == 2 and "recomputed_layers" not in step


def test_the_time_of_a_step_is_without_evaluations(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now_s[0] += 1

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now_s[0] += 100

    monkeypatch.setattr("hf_memkit.measuring.memory.recorder.time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    callback = MemoryReportCallback(summary=False, html=False)
    make_trainer([Clock(), callback], eval_strategy="steps", eval_steps=1).train()
    assert [step["step_time_ms"] for step in steps(read_records(callback.path))] == [1000] * 3
