"""`preset()` in Python: composition, conflicts, own arguments, and real training of a tiny model on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_memkit import PresetSetup, preset
from hf_memkit.common.errors import InputError, MissingPackageError, RunError, SettingError
from hf_memkit.common.units import format_gib
from hf_memkit.prediction import Prediction
from hf_memkit.presets import PRESETS
from hf_memkit.presets.not_in_file import outside_lines
from hf_memkit.setup.job import process_row
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES, wrong_value
from tests.presets.test_sizes import made_of
from tests.tiny_trainer import samples

CPU: dict[str, Any] = {
    "use_cpu": True, "max_steps": 3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
    "save_strategy": "no", "learning_rate": 1e-2, "per_device_train_batch_size": 2,
}  # fmt: skip
GPU: dict[str, Any] = {"gpu_memory": "16GB", "ram": "64GB", "use_hub": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model: two layers, 64 words, no dropout so that presets can be compared."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def baseline(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    arguments = TrainingArguments(output_dir=str(tmp_path_factory.mktemp("baseline")), **CPU)
    return losses(Trainer(GPT2LMHeadModel.from_pretrained(folder), arguments, train_dataset=samples()))


def test_a_replaced_setting_needs_no_package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    setup = preset("8bit", model=str(folder), arguments=CPU, **GPU)
    with pytest.raises(MissingPackageError, match=r"'8bit' needs bitsandbytes \(for adamw-8bit\)"):
        setup.trainer(str(tmp_path / "out"), train_dataset=samples())
    mine = {"optim": "adamw_torch"}
    late = setup.trainer(str(tmp_path / "out"), arguments=mine, train_dataset=samples())
    early = preset("8bit", model=str(folder), arguments={**CPU, **mine}, **GPU)
    early_trainer = early.trainer(str(tmp_path / "out"), train_dataset=samples())
    assert late.args.optim == early_trainer.args.optim == "adamw_torch"


class SeesTwoGpus(TrainingArguments):
    """As on a machine with two GPUs, in a process that no launcher has started."""

    @property
    def n_gpu(self) -> int:
        return 2


def test_several_gpus_in_one_process_are_refused(folder: Path, tmp_path: Path) -> None:
    """Trainer would multiply the batch by the number of GPUs: nothing of that is in the setup."""
    assert SeesTwoGpus(str(tmp_path), use_cpu=True, per_device_train_batch_size=3).train_batch_size == 6
    setup = preset("checkpointed", model=str(folder), arguments=CPU, **GPU)
    with pytest.raises(RunError, match=r"this process sees 2 GPUs.*torchrun --nproc-per-node 2"):
        setup.trainer(str(tmp_path / "out"), train_dataset=samples(), arguments_class=SeesTwoGpus)
    spread = GPT2LMHeadModel.from_pretrained(folder)
    spread.hf_device_map = {"transformer": 0, "lm_head": 1}  # Trainer leaves a model that is spread as it is
    arguments = setup.training_arguments(str(tmp_path / "out"), arguments_class=SeesTwoGpus)
    assert "callbacks" in setup.trainer_options(spread, arguments)


@pytest.mark.parametrize("name", ["lean", pytest.param("8bit", marks=pytest.mark.slow), "lora"])
def test_trainer_model_and_arguments_in_one_call(
    folder: Path, tmp_path: Path, baseline: list[float], name: str
) -> None:
    setup = preset(name, model=str(folder), arguments=CPU, **GPU)
    trainer = setup.trainer(str(tmp_path / "out"), train_dataset=samples())
    assert trainer.args.use_cpu and trainer.args.max_steps == 3
    measured = losses(trainer)
    assert len(measured) == 3 and len(set(measured)) == 3
    model = trainer.model
    if name == "lean":
        plain = GPT2LMHeadModel.from_pretrained(folder)
        assert type(model.transformer.h[0].mlp.act) is not type(plain.transformer.h[0].mlp.act)
        assert any("chunked-loss is left out" in note for note in setup.notes)  # so few tokens are one chunk
    elif name == "8bit":
        assert type(trainer.optimizer.optimizer).__module__.startswith("bitsandbytes")
    if name == "lora":
        trained = [key for key, value in model.named_parameters() if value.requires_grad]
        assert trained and all("lora_" in key for key in trained)
    else:
        # bf16 autocast rounds to 8 bits of fraction, and the 8-bit states round the update.
        assert measured == pytest.approx(baseline, rel=1e-5 if name != "8bit" else 0.01)


@pytest.mark.slow
def test_with_a_model_and_a_trainer_of_one_s_own(folder: Path, tmp_path: Path, baseline: list[float]) -> None:
    """Each smaller door leads to the same training; a part can be taken off again."""
    setup = preset("lean+activation-checkpointing", model=str(folder), arguments=CPU, **GPU)
    model = setup.load_model()
    arguments = setup.training_arguments(str(tmp_path / "a"))
    trainer = Trainer(model, arguments, train_dataset=samples(), **setup.trainer_options(model, arguments))
    assert losses(trainer) == pytest.approx(baseline, rel=1e-5)

    plain = TrainingArguments(output_dir=str(tmp_path / "b"), **setup.plain_arguments)
    mine = GPT2LMHeadModel.from_pretrained(folder)
    before = type(mine.transformer.h[0].mlp.act)
    undo = setup.install(mine)
    assert losses(Trainer(mine, plain, train_dataset=samples())) == pytest.approx(baseline, rel=1e-5)
    undo()
    assert type(mine.transformer.h[0].mlp.act) is before


def test_the_printed_lines_do_what_the_setup_does(folder: Path) -> None:
    """The Python code for settings that a file cannot contain works."""
    setup = preset("lean+lora", model=str(folder), arguments=CPU, **GPU)
    namespace: dict[str, Any] = {}
    exec("from transformers import AutoModelForCausalLM", namespace)
    lines = [each.line for each in outside_lines(setup) if not each.line.startswith("export ")]
    assert sum("Trainer(…" not in line for line in lines) >= 3
    for line in lines:
        if "Trainer(…" not in line:
            exec(line, namespace)
    reported, made = namespace["model"], setup.load_model()
    assert [(key, value.dtype, value.requires_grad) for key, value in reported.named_parameters()] == [
        (key, value.dtype, value.requires_grad) for key, value in made.named_parameters()
    ]
    inputs = torch.arange(8)[None]
    assert torch.equal(reported.eval()(inputs).logits, made.eval()(inputs).logits)


def test_own_arguments_win_at_every_door(folder: Path, tmp_path: Path) -> None:
    setup = preset(
        "checkpointed", model=str(folder), arguments={**CPU, "gradient_checkpointing": False, "max_steps": "2"}, **GPU
    )
    assert setup.arguments["activation_checkpointing"] is False and setup.arguments["max_steps"] == 2
    assert {each.setting.key for each in setup.replaced} >= {"arguments.activation_checkpointing"}
    assert "the preset has True" in next(
        s.reason for s in setup.settings if s.key == "arguments.activation_checkpointing"
    )
    with_it = preset("checkpointed", model=str(folder), arguments=CPU, **GPU)
    for made in (
        with_it.training_arguments(str(tmp_path), gradient_checkpointing=False, max_steps=2),
        with_it.trainer(
            str(tmp_path), arguments={"gradient_checkpointing": False, "max_steps": 2}, train_dataset=samples()
        ).args,
        setup.training_arguments(str(tmp_path)),
    ):
        assert made.gradient_checkpointing is False and made.max_steps == 2


def test_own_learning_rate_reaches_an_optimizer_of_the_preset_s(folder: Path, tmp_path: Path) -> None:
    setup = preset("resident", model=str(folder), arguments=CPU, **GPU)
    assert setup.section("optimizer")
    trainer = setup.trainer(str(tmp_path), arguments={"learning_rate": 3e-3}, train_dataset=samples())
    trainer.create_optimizer()
    assert [float(group["lr"]) for group in trainer.optimizer.param_groups] == pytest.approx([3e-3] * 2)
    setup = preset("lean+adamw-loop", model=str(folder), arguments=CPU, **GPU)
    assert setup.section("optimizer")
    replaced = setup.trainer(str(tmp_path), arguments={"optim": "rmsprop"}, train_dataset=samples())
    replaced.create_optimizer()
    assert type(replaced.optimizer) is torch.optim.RMSprop


def test_the_ledger_follows_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is computed with the user's values, not with those that they replaced; the traces are made up."""

    def traced(setup: Setup) -> Prediction:
        return made_of(6, 0.3 if setup.arguments["activation_checkpointing"] else 1.0, 3)(setup.micro_batch_size)

    monkeypatch.setattr("hf_memkit.presets.for_model.predict", traced)
    options = {**GPU, "model": "gpt2-xl", "global_batch_size": 64}
    with_it = preset("resident", **options)
    without = preset("resident", arguments={"activation_checkpointing": False}, **options)
    sizes = [s.arguments["per_device_train_batch_size"] for s in (without, with_it)]
    assert sizes[0] < sizes[1]
    for setup in (with_it, without):
        arguments = setup.arguments
        assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 64
        assert arguments["per_device_eval_batch_size"] == arguments["per_device_train_batch_size"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_setup_with_and_without_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memkit.presets.for_model.predict", lambda setup: made_of(6, 0.1, 3)(1))
    plain = preset(name)
    assert isinstance(plain, PresetSetup) and not plain.ledger.rows
    assert all(setting.reason for setting in plain.settings) and plain.techniques
    model = "Llama-3.2-1B" if name == "in-backward" else "gpt2-xl"  # APOLLO projects nn.Linear, and GPT-2 has none
    made = preset(name, model=model, **GPU)
    assert made.ledger.total_bytes("device") > 0 and made["model.name"] == model
    assert PresetSetup.from_json(made.to_json()).arguments == made.arguments


def test_the_plain_dictionary_brings_deepspeed() -> None:
    made = preset("offload", model="gpt2", sequence_length=512, **GPU)
    assert made.plain_arguments["deepspeed"] == made["deepspeed.config"]
    assert "deepspeed" not in preset("resident").plain_arguments


def test_presets_compose_and_contradictions_name_both() -> None:
    both = preset("lean+lora")
    assert set(both.techniques) == {*PRESETS["lean"].techniques, *PRESETS["lora"].techniques}
    assert preset("lora+lean").settings == both.settings
    with pytest.raises(SettingError, match=r"'8bit' .*'resident'"):
        preset("8bit+resident")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "lora", "values": {"rnak": 4}}, "did you mean 'rank'"),
        ({"name": "lora", "values": {"rank": 0}}, "rank=0 must be at least 1"),
        ({"name": "lora", "values": {"dropout": 1}}, "dropout=1 must be at least 0 and below 1"),
        ({"name": "lora", "values": {"dropout": float("nan")}}, "dropout=nan must be at least 0 and below 1"),
        ({"name": "lora", "global_batch_size": 0}, "global_batch_size=0"),
        ({"name": "lora", "global_batch_size": 30, "gpus": 4}, "30"),
    ],
)
def test_wrong_input_is_one_clear_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        preset(**given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_number_that_a_technique_takes_has_its_bounds() -> None:
    """What the bounds allow is set, their lower end included; what is just outside of them is refused."""
    bounded: set[str] = set()
    for one in TECHNIQUES.values():
        assert set(one.bounds) == {name for name, kind in one.values.items() if kind in (int, float)}, one.name
        for name, (low, high) in one.bounds.items():
            assert low is not None and wrong_value([one], name, one.values[name](low)) == ""
            below = low - 1 if one.values[name] is int else -1e-9
            assert f"at least {low:g}" in wrong_value([one], name, below), name
            if high is not None:
                assert f"below {high:g}" in wrong_value([one], name, float(high)), name
            bounded.add(name)
    assert bounded
    assert preset("lora", values={"rank": 1, "dropout": 0})["adapter.r"] == 1


def test_a_hint_refuses_nothing_and_is_noted() -> None:
    own = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"preserve_rng_state": True}}
    setup = preset("resident", model="gpt2", gpu_memory="16GB", arguments=own)
    assert [note for note in setup.notes if note.startswith("Hint: activation_checkpointing_kwargs")]
    with pytest.raises(SettingError, match="use_cache"):  # a warning
        preset("resident", model="gpt2", gpu_memory="16GB", arguments=own | {"use_cache": True})


def test_notes_are_printed_where_they_help() -> None:
    """Advice about a technique stands in a setup whose user chose it, and on the machine that it is for."""

    def message(name: str, part: str, **given: Any) -> bool:
        return any(part in note for note in preset(name, model="gpt2-xl", **{**GPU, **given}).notes)

    assert message("length-grouped", "nothing pads the batches")
    assert not message("length-grouped+pad-to-multiple", "nothing pads the batches")
    assert message("8bit+sdpa-attention", "flash kernel") and not message("lean", "flash kernel")
    assert not message("lean+adalomo", "adalomo needs a CUDA GPU")
    if not torch.cuda.is_available():
        assert message("lean+adalomo", "adalomo needs a CUDA GPU", gpu_memory=None)
        assert not message("8bit+sdpa-attention", "flash kernel", gpu_memory=None)


def test_offloaded_bytes_do_not_include_the_process() -> None:
    made = preset("offload", model="gpt2-xl", gpus=2, **GPU)
    (note,) = [note for note in made.notes if note.startswith("ZeRO-Offload keeps")]
    rows = [row for row in made.ledger.rows if row.place in ("host", "pinned")]
    held = [row for row in rows if row != process_row(2)]
    assert len(held) == len(rows) - 1, "the processes are a row of the ledger"
    assert f": {format_gib(sum(row.size_bytes for row in held))} by formula" in note


def test_a_setup_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    setup = preset("checkpointed", arguments=CPU)
    with pytest.raises(InputError, match="this preset has no model"):
        setup.trainer(str(tmp_path))
