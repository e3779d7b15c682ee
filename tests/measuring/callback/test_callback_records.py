from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_memkit import MemoryReportCallback, attach
from hf_memkit.measuring.memory.inputs import InputCounter
from hf_memkit.measuring.memory.records import read_records, steps
from tests.conftest import read_json_lines
from tests.measuring.recorded import PREDICTED, QUIET, Recorded

pytestmark = pytest.mark.compat
ON_CUDA_ONLY = {
    "allocated_gib", "peak_allocated_gib", "reserved_gib", "peak_reserved_gib", "capacity_gib", "fragmentation_gib",
    "alloc_retries", "device_used_gib", "outside_allocator_gib", "phases", "categories",
}  # fmt: skip


def kinds(records: list[dict[str, Any]]) -> list[str]:
    return [record["kind"] for record in records]


def test_record_contract(recorded: Recorded) -> None:
    path, trainer = recorded.callback.path, recorded.trainer
    assert path == Path(trainer.args.output_dir) / "memory-rank0.jsonl"
    records = read_json_lines(path)
    assert path.read_bytes().endswith(b"\n") and all(r["schema"] == 1 and r["time"] > 1e9 for r in records)
    expected = ["run", "modules", "evaluate", "step", "step", "evaluate", "save", "step", "save", "end"]
    assert kinds(records) in (expected, [*expected[:-2], "evaluate", *expected[-2:]])

    (run,), (modules,), (end,) = (recorded.of(kind) for kind in ("run", "modules", "end"))
    assert run["facts"] == {"recipe": "tiny"} and run["prediction"] == PREDICTED
    assert {"hf_memkit", "torch", "transformers", "accelerate", "python"} <= run["versions"].keys()
    assert {"device_name", "cpu_count", "ram_gib"} <= run["hardware"].keys()
    assert (run["rank"], run["world_size"], run["host"]["pid"]) == (0, 1, os.getpid())
    assert run["host"]["process_started"] < run["time"] and run["host"]["hostname"]
    arguments = run["arguments"]
    assert arguments["per_device_train_batch_size"] == 2 and arguments["activation_checkpointing"] is False
    assert arguments["per_device_eval_batch_size"] == 8 and arguments["max_grad_norm"] == 1.0
    assert isinstance(arguments["optim"], str) and "deepspeed_stage" not in arguments
    assert arguments["optim_args"] == "foreach=False" and arguments["dataloader_num_workers"] == 0
    assert arguments["auto_find_batch_size"] is False and isinstance(arguments["train_sampling_strategy"], str)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert run["parameters"] == run["trainable_parameters"] == parameters
    assert run["weights_dtypes"] == {"float32": parameters}
    assert sum(row["parameters"] * row.get("repeats", 1) for row in modules["rows"]) == parameters
    assert (run["model_class"], run["model_type"], run["vocabulary"]) == ("GPT2LMHeadModel", "gpt2", 64)
    assert run["attention"] == "sdpa" and run["start_step"] == 0
    assert run["optimizer_classes"] == ["AcceleratedOptimizer", "AdamW"]
    assert "engine" not in run  # a plain callback cannot know it

    for number, step in enumerate(recorded.of("step"), 1):
        assert step["step"] == number and step["step_time_ms"] > 0 and step["host_rss_gib"] > 0
        # Of two micro-batches; evaluations add none.
        assert (step["samples"], step["tokens"], step["longest_sequence"]) == (4, 32, 8)
        assert step["recomputed_layers"] == 0 and None not in step.values()
        if not torch.cuda.is_available():
            assert not ON_CUDA_ONLY & step.keys()
    host = recorded.of("step")[0]["held"]["host"]  # on a CPU, all of it
    assert {name: round(gib * 2**30) for name, gib in host.items()} == {
        "weights_gib": 4 * parameters, "gradients_gib": 4 * parameters, "optimizer_gib": 8 * parameters + 28 * 4,
    }  # fmt: skip
    evaluate, save = recorded.of("evaluate")[1], recorded.of("save")[0]
    assert evaluate["metrics"]["eval_loss"] > 0 and evaluate["host_rss_gib"] > 0
    assert save["checkpoint"] == "checkpoint-2" and (path.parent / "checkpoint-2").is_dir()

    assert end["status"] == "finished" and end["steps"] == 3 and end["recomputed_layers"] == 0
    assert end["reader_errors"] == {} and end["callback_errors"] == 0
    assert end["optimizer_states"]["exp_avg"] == {"float32": len(list(trainer.model.parameters()))}
    assert end["peak_host_rss_gib"] >= max(step["host_rss_gib"] for step in recorded.of("step"))


def test_embeddings_and_pictures() -> None:
    counter = InputCounter()
    counter.add((), {"attention_mask": torch.ones(2, 9), "inputs_embeds": torch.zeros(2, 5, 16)})
    counter.add((torch.zeros(1, 7, dtype=torch.long),), {})
    assert counter.fields() == {"samples": 3, "tokens": 17, "longest_sequence": 7}
    pictures = InputCounter()
    pictures.add((), {"pixel_values": torch.zeros(4, 3, 8, 8)})
    assert pictures.fields() == {"samples": 4}  # three channels are no tokens


def test_attach_leaves_one_callback_and_puts_it_first(make_trainer: Any, tmp_path: Path, measured: Recorded) -> None:
    first = MemoryReportCallback(tmp_path / "mine", summary=False)
    trainer = make_trainer([first])
    assert trainer.callback_handler.callbacks[0] is not first
    assert attach(trainer) is first  # with the options that it has
    other = attach(trainer, html=False)
    ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, MemoryReportCallback)]
    assert ours == [other] == trainer.callback_handler.callbacks[:1] and other is not first
    assert measured.of("run")[0]["engine"] == "GPT2LMHeadModel"


def test_two_callbacks_leave_one_set_of_hooks_and_full_records(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer([MemoryReportCallback(tmp_path / name, **QUIET) for name in "ab"]).train()
    left_out, full = (read_records(tmp_path / name / "memory-rank0.jsonl") for name in "ab")
    assert kinds(left_out) == ["run", "modules", "end"]
    assert left_out[-1]["status"] == "interrupted" and "another one" in left_out[-1]["error"]
    assert [s["samples"] for s in steps(full)] == [2, 2, 2]


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
        return make_trainer([MemoryReportCallback(**QUIET)], save_strategy="steps", save_steps=2, **arguments)

    run(max_steps=3).train()
    run(max_steps=4).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    records = read_records(tmp_path / "run" / "memory-rank0.jsonl")
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 3, 4]
    assert [r["start_step"] for r in records if r["kind"] == "run"] == [0, 2]
    assert [r["step"] for r in steps(records)] == [1, 2, 3, 4]
    assert steps(records)[2:] == [r for r in records if r["kind"] == "step"][-2:]


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
    callback = MemoryReportCallback(**QUIET)
    make_trainer([Clock(), callback], eval_strategy="steps", eval_steps=1).train()
    assert [step["step_time_ms"] for step in steps(read_records(callback.path))] == [1000] * 3
