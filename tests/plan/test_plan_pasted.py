"""What a user pastes is what was judged: read by the libraries' own readers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_memkit.catalog import library_versions
from hf_memkit.cli import main
from hf_memkit.cli.predict_next import NextSetup
from hf_memkit.deepspeed import presets
from hf_memkit.plan import choices
from hf_memkit.plan.candidate import Alternative, SetupCandidate
from hf_memkit.plan.pasted import Pasted, pasted
from tests.plan.made_plans import ALLOCATOR, EIGHT_BITS, PATCH, SDPA, setup
from tests.plan.made_trainings import MADE, changed

CHOICES = [choices._NO_CHECKPOINTING, *map(choices.alternative, choices._rows("checkpointing")), EIGHT_BITS]


def read(found: Pasted) -> TrainingArguments:
    words = shlex.split(" ".join(["--output_dir", "out", "--gradient_accumulation_steps", "64", *found.flags]))
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)  # type: ignore[arg-type]
    return arguments


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: each.name)
def test_flags_yaml_and_python_say_the_same(choice: Alternative) -> None:
    """Would notice: a mapping that is no JSON, a quote that a shell eats, a name that this transformers does not know,
    a switch without its value, a flag that loses against the script's own before it."""
    candidate = SetupCandidate(4, 2, (choice,))
    found, wanted = pasted(candidate), library_versions.to_installed_arguments(candidate.arguments)
    from_flags = read(found)
    assert {name: getattr(from_flags, name) for name in wanted} == wanted
    assert yaml.safe_load(found.yaml) == wanted
    call = found.python.replace("    ...,\n", "")
    assert eval(call, {"TrainingArguments": dict}) == wanted


def test_variables_stand_in_every_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a setup that fits only with the allocator's setting, pasted as YAML or Python without it; a
    comment that the YAML's reader takes for an argument."""
    variable = "PYTORCH_ALLOC_CONF"
    monkeypatch.setenv(variable, "")
    found = pasted(SetupCandidate(4, 2, (ALLOCATOR,)))
    exported = f"export {variable}=expandable_segments:True"
    assert found.typed_first == (exported,) and exported in found.yaml
    assert set(yaml.safe_load(found.yaml)) == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    exec(found.python.replace("    ...,\n", ""), {"TrainingArguments": dict, "os": os})
    assert os.environ[variable] == "expandable_segments:True"


def test_what_predict_proposes_has_them_too() -> None:
    """Would notice: a variable or a command that is lost where a script parses no arguments."""
    engine = Alternative("engine", "zero2", {"arguments.deepspeed": presets.load("zero2")}, engine="zero2")
    first = "export PYTORCH_ALLOC_CONF=expandable_segments:True; then memkit ds copy zero2; then "
    for parses, begin in ((True, "--per_device_train_batch_size 4 "), (False, "TrainingArguments( ..., per_device_")):
        judged = setup(4, 2, 12, 1.0, ALLOCATOR, engine, training=changed(MADE, plan__parses_arguments=parses))
        assert NextSetup(judged).flags.startswith(first + begin)


FULL = Alternative("checkpointing", "no checkpointing", {"arguments.activation_checkpointing": False})
LIGER = Alternative("loss", "Liger kernels", {"arguments.use_liger_kernel": True})


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("llamafactory-cli", {
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": False,
            "optim": "adamw_bnb_8bit", "enable_liger_kernel": True, "flash_attn": "sdpa",
        }),
        ("axolotl", {
            "micro_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": False,
            "optimizer": "adamw_bnb_8bit", "plugins": ["axolotl.integrations.liger.LigerPlugin"],
            "liger_fused_linear_cross_entropy": True, "liger_rms_norm": True, "liger_glu_activation": True,
            "liger_rope": True, "attn_implementation": "sdpa",
        }),
    ],
)  # fmt: skip
def test_a_front_end_gets_its_own_keys(command: str, written: dict[str, Any]) -> None:
    found = pasted(SetupCandidate(4, 2, (FULL, EIGHT_BITS, LIGER, SDPA)), command=command)
    assert yaml.safe_load("\n".join(found.front_end)) == written and found.to_json()["front_end"] == list(
        found.front_end
    )


def test_options_of_ms_swift_are_added_to_its_command() -> None:
    found = pasted(SetupCandidate(4, 2, (LIGER, SDPA)), command="swift")
    assert found.front_end == (
        "--per_device_train_batch_size 4", "--gradient_accumulation_steps 2", "--use_liger_kernel true",
        "--attn_impl sdpa",
    )  # fmt: skip
    assert pasted(SetupCandidate(4, 2, (LIGER, SDPA)), command="trl").front_end == ()


def test_what_no_flag_sets_is_said_apart() -> None:
    """Would notice: an option of from_pretrained among the flags, where a parser stops at it; code that is dropped."""
    found = pasted(SetupCandidate(4, 2, (SDPA, PATCH)))
    assert "attn" not in " ".join(found.flags) and "attn_implementation='sdpa'" in found.model
    assert found.code == PATCH.code and not found.environment


@pytest.mark.parametrize(
    ("engine", "largest"), [("zero2", 0), ("zero3-offload", 0), ("zero3-infinity", 10), ("zero3-infinity", 2 * 10**8)]
)
def test_the_command_writes_the_json_that_was_judged(
    engine: str, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: a JSON that differs from the one whose memory was predicted, or a flag with another name; a buffer
    that is too small for the largest weight, a placeholder for the disk's folder."""
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = presets.load(engine)
    if engine == choices.ON_DISK:
        config = choices._on_disk(changed(MADE, plan__weights__trained=(5, largest)), 1, "fast disk")
        assert config["zero_optimization"]["offload_param"]["buffer_size"] >= largest
    found = pasted(
        SetupCandidate(8, 1, (Alternative("engine", engine, {"arguments.deepspeed": config}, engine=engine),))
    )
    command, *more = found.before
    memkit, *words = shlex.split(command)
    assert memkit == "memkit" and main(words) == 0
    assert len(more) == (largest > 10**8)
    for each in more:
        subprocess.run(each, shell=True, check=True)
    file = yaml.safe_load(found.yaml)["deepspeed"]
    assert f"--deepspeed {file}" in found.flags and json.loads(Path(file).read_text()) == config
    assert (f"--nvme-path '{tmp_path}/fast disk'" in command) == ("infinity" in engine)
