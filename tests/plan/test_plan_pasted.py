"""The text to paste has the settings of the candidate, as the libraries' own parsers read it."""

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
from hf_memkit.plan.candidate import Candidate, Choice
from hf_memkit.plan.pasted import Pasted, pasted
from tests.plan.made_plans import ALLOCATOR, EIGHT_BITS, PATCH, SDPA, setup
from tests.plan.made_trainings import MADE, changed

CHOICES = [choices._NO_CHECKPOINTING, *map(choices.choice_of, choices._rows("checkpointing")), EIGHT_BITS]


def read(paste: Pasted) -> TrainingArguments:
    words = shlex.split(" ".join(["--output_dir", "out", "--gradient_accumulation_steps", "64", *paste.flags]))
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)  # type: ignore[arg-type]
    return arguments


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: each.name)
def test_flags_yaml_and_python_have_the_same_settings(choice: Choice) -> None:
    """Would notice: a mapping that is not JSON, a quote that the shell removes, an argument name of another
    transformers version, a flag without its value, a flag that the script's own before it overrides."""
    candidate = Candidate(4, 2, (choice,))
    paste, wanted = pasted(candidate), library_versions.to_installed_arguments(candidate.arguments)
    from_flags = read(paste)
    assert {name: getattr(from_flags, name) for name in wanted} == wanted
    assert yaml.safe_load(paste.yaml) == wanted
    call = paste.python.replace("    ...,\n", "")
    assert eval(call, {"TrainingArguments": dict}) == wanted


def test_variables_are_in_all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: YAML or Python without the allocator's setting, without which the setup does not fit; a comment
    that YAML reads as an argument."""
    variable = "PYTORCH_ALLOC_CONF"
    monkeypatch.setenv(variable, "")
    paste = pasted(Candidate(4, 2, (ALLOCATOR,)))
    exported = f"export {variable}=expandable_segments:True"
    assert paste.typed_first == (exported,) and exported in paste.yaml
    assert set(yaml.safe_load(paste.yaml)) == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    exec(paste.python.replace("    ...,\n", ""), {"TrainingArguments": dict, "os": os})
    assert os.environ[variable] == "expandable_segments:True"


def test_the_proposal_of_predict_has_variables_and_commands() -> None:
    """Would notice: a variable or command that is missing for a script that parses no arguments."""
    engine = Choice("engine", "zero2", {"arguments.deepspeed": presets.load("zero2")}, engine="zero2")
    first = "export PYTORCH_ALLOC_CONF=expandable_segments:True; then memkit ds copy zero2; then "
    for parses, begin in ((True, "--per_device_train_batch_size 4 "), (False, "TrainingArguments( ..., per_device_")):
        judgement = setup(4, 2, 12, 1.0, ALLOCATOR, engine, training=changed(MADE, plan__parses_arguments=parses))
        assert NextSetup(judgement).flags.startswith(first + begin)


FULL = Choice("checkpointing", "no checkpointing", {"arguments.activation_checkpointing": False})
LIGER = Choice("loss", "Liger kernels", {"arguments.use_liger_kernel": True})


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
    paste = pasted(Candidate(4, 2, (FULL, EIGHT_BITS, LIGER, SDPA)), command=command)
    assert yaml.safe_load("\n".join(paste.front_end)) == written
    assert paste.to_json()["front_end"] == paste.front_end


def test_options_of_ms_swift_are_added_to_its_command() -> None:
    paste = pasted(Candidate(4, 2, (LIGER, SDPA)), command="swift")
    assert paste.front_end == (
        "--per_device_train_batch_size 4", "--gradient_accumulation_steps 2", "--use_liger_kernel true",
        "--attn_impl sdpa",
    )  # fmt: skip
    assert pasted(Candidate(4, 2, (LIGER, SDPA)), command="trl").front_end == ()


def test_settings_without_a_flag_are_separate() -> None:
    """Would notice: an option of from_pretrained among the flags, which the parser refuses; missing code."""
    paste = pasted(Candidate(4, 2, (SDPA, PATCH)))
    assert "attn" not in " ".join(paste.flags) and "attn_implementation='sdpa'" in paste.model
    assert paste.code == PATCH.code and not paste.environment


@pytest.mark.parametrize(
    ("engine", "largest"), [("zero2", 0), ("zero3-offload", 0), ("zero3-infinity", 10), ("zero3-infinity", 2 * 10**8)]
)
def test_the_command_writes_the_deepspeed_config_of_the_candidate(
    engine: str, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: another config than the one whose memory was predicted, or a flag with another file name; a buffer
    that is too small for the largest weight; a placeholder instead of the folder."""
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = presets.load(engine)
    if engine == choices.ON_DISK:
        config = choices._on_disk(changed(MADE, plan__weights__trained=(5, largest)), 1, "fast disk")
        assert config["zero_optimization"]["offload_param"]["buffer_size"] >= largest
    paste = pasted(Candidate(8, 1, (Choice("engine", engine, {"arguments.deepspeed": config}, engine=engine),)))
    command, *more = paste.before
    memkit, *words = shlex.split(command)
    assert memkit == "memkit" and main(words) == 0
    assert len(more) == (largest > 10**8)
    for each in more:
        subprocess.run(each, shell=True, check=True)
    file = yaml.safe_load(paste.yaml)["deepspeed"]
    assert f"--deepspeed {file}" in paste.flags and json.loads(Path(file).read_text()) == config
    assert (f"--nvme-path '{tmp_path}/fast disk'" in command) == ("infinity" in engine)
