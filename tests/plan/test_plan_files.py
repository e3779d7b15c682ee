"""Plan files: `memkit run --plan` reads what `memkit plan --write` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_memkit.common.errors import InputError
from hf_memkit.common.user_script import UserScript
from hf_memkit.deepspeed import presets
from hf_memkit.plan.candidate import Choice
from hf_memkit.plan.plan_file import plan_text, write_plan
from hf_memkit.setup.script_overrides import read_plan
from tests.plan.made_plans import ALLOCATOR, CHECKPOINTING, SDPA, plan, setup

ENGINE = Choice(
    "engine", "zero3-offload", {"arguments.deepspeed": presets.load("zero3-offload")}, engine="zero3-offload"
)


def test_a_written_plan_is_read(tmp_path: Path) -> None:
    """Would notice: a value that YAML reads as another type, a lost section, figures in `about` that are read as
    settings."""
    setups = setup(8, 1, 42, 1.0), setup(4, 2, 12, 2.0, CHECKPOINTING, SDPA, ALLOCATOR, ENGINE)
    made = plan(*setups, script=UserScript("src/train.py"))
    path = write_plan(made, str(tmp_path / "plan.yaml"))
    overrides, about = read_plan(path)
    best = made.proposed
    assert best is not None and overrides == best.candidate.overrides
    assert overrides.environment and overrides.model and about["setup"] == best.candidate.name
    assert about["step_time_s"] == pytest.approx([1.8, 2.0, 2.6]) and about["gpu"] == "RTX 3090"
    head = path.read_text().splitlines()[:6]
    assert all(line.startswith("#") for line in head[:5]) and f"memkit run src/train.py --plan {path}" in "".join(head)


def test_a_plan_that_was_cut_is_refused(tmp_path: Path) -> None:
    """Would notice: a run with a part of the settings."""
    path = write_plan(plan(setup(8, 1, 42, 1.0), setup(4, 2, 12, 2.0, CHECKPOINTING)), str(tmp_path / "plan.yaml"))
    whole = path.read_text()
    for end in range(0, len(whole) - 2, 7):
        path.write_text(whole[:end])
        with pytest.raises(InputError, match=str(path)):
            read_plan(path)
    path.write_text(whole.replace("arguments:", "arguments:  # edited") + "# a note\n")
    assert read_plan(path)[0].arguments


def test_only_a_plan_of_memkits_is_replaced(tmp_path: Path) -> None:
    """Would notice: an overwritten file of the user; a traceback for a folder or a link."""
    made = plan(setup(8, 1, 12, 1.0))
    path = tmp_path / "plan.yaml"
    write_plan(made, str(path))
    write_plan(made, str(path))
    path.write_text("learning_rate: 1.0e-4\n")
    (tmp_path / "link").symlink_to("nowhere")
    for wrong in (path, tmp_path, tmp_path / "link", tmp_path / "none" / "plan.yaml"):
        with pytest.raises(InputError, match=r"^--write ") as error:
            write_plan(made, str(wrong))
        assert "\n" not in str(error.value)
    assert path.read_text() == "learning_rate: 1.0e-4\n" and {each.name for each in tmp_path.iterdir()} == {
        "link",
        "plan.yaml",
    }


def test_no_plan_is_written_if_nothing_fits() -> None:
    """Would notice: the settings of a setup that does not fit."""
    with pytest.raises(LookupError):
        plan_text(plan(setup(8, 1, 42, 1.0)), "plan.yaml")


@pytest.mark.parametrize(
    ("gpus", "script", "command"),
    [
        (1, UserScript("my train.py"), "memkit run 'my train.py' --plan p.yaml -- ARGUMENTS, with the script's"),
        (1, None, "memkit run SCRIPT --plan p.yaml -- ARGUMENTS, with your own training script for SCRIPT"),
        (
            2, UserScript("trl.scripts.sft", is_module=True),
            "torchrun --nproc_per_node 2 -m hf_memkit run -m trl.scripts.sft --plan p.yaml -- ARGUMENTS, with the",
        ),
    ],
)  # fmt: skip
def test_the_file_names_the_command_that_uses_it(gpus: int, script: UserScript | None, command: str) -> None:
    """Would notice: a script named although a model was planned; one process for two GPUs; an unquoted path."""
    head = plan_text(plan(setup(8, 1, 12, 1.0), gpus=gpus, script=script), "p.yaml")
    assert f"\n# Use it: {command}" in head
