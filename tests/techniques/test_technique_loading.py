"""Loading: the dtype that is asked for and the RAM that it takes, and data loader workers, with the real Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_memkit.common.errors import RunError
from hf_memkit.common.units import MIB
from hf_memkit.setup.build.model import build_model, model_options
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.loading import PREFETCH, prefetched_bytes
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.techniques.jobs import MACHINE, gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import VOCABULARY, causal_model


def applied(*names: str, **changes: Any) -> Setup:
    setup = Setup(preset="test", job=gpt2_job(None, **changes))
    for name in names:
        setup = TECHNIQUES[name](setup)
    return setup


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in fp16."""
    folder = tmp_path_factory.mktemp("fp16")
    causal_model("llama").half().save_pretrained(folder)
    return folder


def named(folder: Path, setup: Setup) -> Setup:
    return setup.put("model.name", str(folder), "test").put("model.origin", "local", "test")


@proves("same-result", "load-in-training-dtype")
def test_the_weights_are_those_of_the_file_in_the_dtype_asked_for(checkpoint: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(checkpoint).dtype is torch.float16  # what nobody asked for
    for before, dtype in (((), torch.float32), (("pure-bf16",), torch.bfloat16)):
        setup = applied(*before, "load-in-training-dtype")
        model = build_model(named(checkpoint, setup), lambda line: None)
        afterwards = AutoModelForCausalLM.from_pretrained(checkpoint).to(dtype)
        assert model.dtype is dtype
        for one, other in zip(model.parameters(), afterwards.parameters(), strict=True):
            assert torch.equal(one, other)


def own_bytes(model: Any) -> int:
    """Bytes of the weights that are the process's own memory, rather than pages of the checkpoint's file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [line[0].split("-") for line in lines if line[-1].endswith(".safetensors")]
    spans = [(int(first, 16), int(last, 16)) for first, last in files]
    return sum(
        parameter.nbytes
        for parameter in model.parameters()
        if not any(first <= parameter.data_ptr() < last for first, last in spans)
    )


@proves("memory", "load-in-training-dtype")
def test_a_conversion_takes_what_the_weights_take_and_the_file_s_type_nothing(checkpoint: Path) -> None:
    """By where Linux says the weights lie; benchmarks/loading_ram.py has the figures of whole processes."""
    for name, bytes_each in (("float16", 0), ("bfloat16", 2), ("float32", 4)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, name))
        assert own_bytes(model) == bytes_each * model.num_parameters(), name
        del model
    setup = named(checkpoint, applied("pure-bf16", "load-in-training-dtype"))
    model = build_model(setup, lambda line: None)
    assert own_bytes(model) == 2 * model.num_parameters()


def test_weights_straight_to_the_gpu_is_one_setting_that_a_cpu_refuses(checkpoint: Path) -> None:
    setup = named(checkpoint, applied("pure-bf16", "low-host-ram"))
    assert model_options(setup) == {"dtype": "bfloat16", "device_map": "cuda", "use_safetensors": True}
    with pytest.raises(RunError, match=r"low-host-ram loads the weights onto a GPU"):
        build_model(setup, lambda line: None)


class Children(TrainerCallback):  # type: ignore[misc]
    """How many processes work for this one at the end of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_end(self, *args: Any, **others: Any) -> None:
        self.counts.append(len([p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]))


def run(folder: Path, **arguments: Any) -> tuple[list[float], list[int]]:
    """(losses, processes at each step) of four steps with an evaluation after each."""
    tokens = torch.randint(3, VOCABULARY, (32, 12), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    values = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
              "save_strategy": "no", "logging_steps": 1, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1,
              "per_device_train_batch_size": 4, **arguments}  # fmt: skip
    seen = Children()
    trainer = Trainer(model=causal_model(), args=TrainingArguments(**values), train_dataset=rows,
                      eval_dataset=rows[:4], callbacks=[seen])  # fmt: skip
    before = len(psutil.Process().children())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [count - before for count in seen.counts]


@proves("same-result", "pinned-workers")
def test_workers_bring_the_same_batches(tmp_path: Path) -> None:
    """Exactly the same losses; two processes, and from the first evaluation on four: those of it stay as well."""
    setup = applied("pinned-workers")
    arguments = {key: value for key, value in setup.arguments.items() if key != "dataloader_pin_memory"}
    plain, nobody = run(tmp_path / "plain")
    actual, processes = run(tmp_path / "workers", **arguments)
    assert actual == plain and nobody == [0, 0, 0, 0]
    assert processes == [2, 4, 4, 4]


def test_workers_are_at_most_the_cores_and_their_ram_is_said() -> None:
    few = applied("pinned-workers", values={"data_workers": 32}, gpus=2)
    cores = MACHINE.cpu_count // 2
    assert few.arguments["dataloader_num_workers"] == cores
    reason = next(s.reason for s in few.settings if s.key.endswith("num_workers"))
    assert f"32 would be more than the {cores} cores" in reason
    setup = applied("pinned-workers")
    assert setup.arguments["dataloader_prefetch_factor"] == PREFETCH
    # What a batch of the job's shape takes, from real tensors.
    batch = {name: torch.zeros(4, 512, dtype=torch.int64) for name in ("input_ids", "labels", "attention_mask")}
    held = 2 * PREFETCH * sum(tensor.nbytes for tensor in batch.values())
    assert prefetched_bytes(2, 4, 512) == held
    assert any(f"{held / MIB:.1f} MiB" in setting.reason for setting in setup.settings)
    assert "data_workers=0" in applied("pinned-workers", values={"data_workers": 0}).problems[0]
