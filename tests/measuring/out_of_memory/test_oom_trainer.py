"""With the real Trainer: where its tracebacks pass through, and that every argument that is named is its own."""

from __future__ import annotations

import dataclasses
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames
from trl import GRPOConfig

from hf_memkit.measuring.out_of_memory import explain_oom, suggest
from hf_memkit.measuring.out_of_memory.advice import _OFFERED, _applied
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.message import OomMessage
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.traceback import Traced
from tests.measuring.out_of_memory.oom_messages import EXAMPLES
from tests.measuring.out_of_memory.test_oom_changes import oom, run
from tests.tiny_trainer import samples, tiny_gpt2

SIZE = next(example.text for example in EXAMPLES if example.name == "torch 2.2-2.9: size")


def fails(*arguments: Any, **more: Any) -> Any:
    raise torch.OutOfMemoryError(SIZE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "evaluate", "save", "load"])
def test_a_real_traceback_tells_the_phase(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised where it would be; everything above it in the traceback is the libraries' own."""
    model = tiny_gpt2()
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=1, per_device_train_batch_size=2, disable_tqdm=True,
        eval_strategy="steps" if phase == "evaluate" else "no", eval_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples(), eval_dataset=samples(4))
    block = model.transformer.h[1]
    if phase == "forward":
        monkeypatch.setattr(block.mlp, "forward", fails)
    elif phase == "backward":
        block.mlp.c_fc.weight.register_hook(fails)
    elif phase == "optimizer":
        monkeypatch.setattr(torch.optim.AdamW, "_init_group", fails)  # where the states are made
    elif phase == "evaluate":
        monkeypatch.setattr("transformers.trainer.nested_detach", fails)
    elif phase == "save":
        monkeypatch.setattr("safetensors.torch.save_file", fails)
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fails)
    with pytest.raises(torch.OutOfMemoryError) as error:
        if phase == "load":
            tiny_gpt2().save_pretrained(tmp_path / "model")
            monkeypatch.setattr("torch.nn.Module.to", fails)
            monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel._load_pretrained_model", fails)
            type(model).from_pretrained(tmp_path / "model")
        else:
            trainer.train()
    text = "".join(traceback.format_exception(error.value))
    explanation = explain_oom(text)
    assert explanation.found is not None and explanation.found.phase == phase, text


_OF_OTHERS = ("arguments.vllm_gpu_memory_utilization", "arguments.generation_max_length")  # TRL's, Seq2Seq's


def test_every_argument_that_is_named_exists_in_transformers() -> None:
    records = [
        run(), run(arguments={"optim": "adamw_torch", "bf16": False}, model_type="llama"),
        run(engine="FullyShardedDataParallel"),
        run(arguments={"optim": "adamw_bnb_8bit"}),
        run(arguments={"dataloader_num_workers": 4, "dataloader_pin_memory": True}),
        run(hardware={"allocator_settings": "expandable_segments:True"}), run(hardware={"device_name": "Tesla T4"},
                                                                               arguments={"bf16": False}),
    ]  # fmt: skip
    moments = [oom(phase, cause=cause) for phase in ("forward", "backward", "optimizer", "evaluate", "save", "load")
               for cause in ("size", "fragmentation", "host memory")]  # fmt: skip
    changes = [change for record in records for moment in moments for change in suggest(record, moment, limit=99)]
    small = run(trainable_parameters=10_000_000, arguments={"optim": "adamw_torch"})
    changes += suggest(small, {**oom("optimizer"), "categories": {"weights_gib": 20.0}})
    table = [(memory, technique) for memory, rows in _OFFERED.items() for row in rows.values() for technique in row]
    used = frozenset({"FSDP"}), frozenset({"ZeRO-3", "DeepSpeed"}), frozenset({"unsloth"}), frozenset()
    for memory, technique in table:
        for in_use in used:  # type: ignore[assignment]
            failed = FailedJob(OomMessage("x", "PyTorch", memory), Traced(in_use=in_use), RunView({}, {}))
            changes += _applied((technique,), failed)
    changes = [change for change in changes if change.key not in _OF_OTHERS]
    named = {change.key.removeprefix("arguments.") for change in changes if change.key.startswith("arguments.")}
    classes = (TrainingArguments, GRPOConfig)  # vLLM's arguments are TRL's
    assert named and named <= {field.name for each in classes for field in dataclasses.fields(each) if field.init}
    optimizers = {change.value for change in changes if change.key == "arguments.optim"}
    assert optimizers <= {name.value for name in OptimizerNames} and optimizers
    assert not any(re.search(r"\bsaves?\b.*\d+ ?%", f"{change.reason} {change.cost}") for change in changes)
