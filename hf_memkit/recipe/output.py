"""A run of a recipe and its folder: which one to use, what state it is in, and the file that says so.

`memkit-run.json` holds the run's setup and status. A folder is free (it has no such file), finished, or unfinished
(running, interrupted, or killed).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import InputError, RunError
from hf_memkit.setup import Setting, Setup

RUN_FILE: Final = "memkit-run.json"
_HOME: Final = Path("memkit-runs")


@dataclass(frozen=True)
class RecipeRun:
    """One run of a recipe.

    Attributes:
        recipe, variant: names.
        setup: what runs here.
        target: the setup that this is the rehearsal of; None if this is the real thing.
        not_rehearsed: what of the target does not run here, each with its reason.
        gpus: processes on each machine, one GPU each.
        nodes: machines.
        prediction: of what runs here, in its JSON form, where there is one; it stands in the records beside what is
            measured.
        target_prediction: that of `target` in its JSON form, with `gpu` (its name), `gpu_verdict` (of the GPU alone)
            and `ram_gib` (of this machine), where there is one.
    """

    recipe: str
    variant: str
    setup: Setup
    target: Setup | None = None
    not_rehearsed: tuple[Setting, ...] = ()
    gpus: int = 1
    nodes: int = 1
    prediction: Mapping[str, Any] | None = None
    target_prediction: Mapping[str, Any] | None = None

    @property
    def processes(self) -> int:
        return self.gpus * self.nodes

    @property
    def output(self) -> str:
        return str(self.setup["arguments.output_dir"])

    @property
    def is_rehearsal(self) -> bool:
        return self.target is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "variant": self.variant,
            "rehearsal": self.is_rehearsal,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "setup": self.setup.to_json(),
            "target": self.target.to_json() if self.target else None,
            "not_rehearsed": [setting.to_json() for setting in self.not_rehearsed],
            "prediction": self.prediction,
            "target_prediction": self.target_prediction,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RecipeRun:
        return cls(
            recipe=content["recipe"],
            variant=content["variant"],
            setup=Setup.from_json(content["setup"]),
            target=Setup.from_json(content["target"]) if content["target"] else None,
            not_rehearsed=tuple(Setting(**setting) for setting in content["not_rehearsed"]),
            gpus=content.get("gpus", 1),
            nodes=content.get("nodes", 1),
            prediction=content.get("prediction"),
            target_prediction=content.get("target_prediction"),
        )


def default_output(recipe: str, variant: str) -> str:
    """A folder in `memkit-runs/` that no run has used: `gpt2-on-16gb-resident`, then `gpt2-on-16gb-resident-2` …"""
    number = 1
    while True:
        path = _HOME / (f"{recipe}-{variant}" if number == 1 else f"{recipe}-{variant}-{number}")
        if not (path / RUN_FILE).exists():
            return str(path)
        number += 1


def read_run(folder: str | Path) -> dict[str, Any] | None:
    """The content of the folder's run file, or None if it has none.

    Raises:
        RunError: the file is damaged, or cannot be read.
    """
    path = Path(folder) / RUN_FILE
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}. Choose another folder: --output FOLDER") from None
    except (ValueError, RecursionError):
        raise RunError(
            f"{path} is damaged. Choose another folder: --output FOLDER, or {start_again(folder)}"
        ) from None
    return content


def start_again(folder: str | Path) -> str:
    """What to type where a run cannot go on; --resume and --overwrite exclude each other."""
    return f"start again without --resume: --overwrite --output {folder} (this deletes its checkpoints)"


def write_run(folder: str | Path, content: dict[str, Any]) -> None:
    """Writes the run file whole: a kill leaves the old one or the new one, never half of one."""
    path = Path(folder) / RUN_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def refuse_used(folder: str) -> None:
    """Makes sure that a new run may write to `folder`; creates nothing.

    Raises:
        InputError: the folder holds a run already, is a file, or cannot be written to.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InputError(f"--output {folder}: is a file; give a folder")
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"--output {folder}: {nearest} is not writable. Choose another folder")
    run = read_run(folder)
    if run is not None:
        state = "a finished run" if run["status"] == "finished" else "an unfinished run"
        go_on = "" if run["status"] == "finished" else "--resume to continue it, "
        raise InputError(
            f"--output {folder}: already holds {state}. Add {go_on}--overwrite to replace it, or choose another folder"
        )


def clear(folder: str) -> None:
    """Removes the run in `folder`, and nothing that a run did not write there."""
    path = Path(folder)
    if not (path / RUN_FILE).exists():
        return  # whatever lies here, no run of memkit wrote it
    for old in (*path.glob("checkpoint-*"), path / "model", path / "nvme", path / "runs", path / "__pycache__"):
        if old.is_dir():
            shutil.rmtree(old)
    with suppress(RunError):  # a damaged run file names nothing
        for name in (read_run(folder) or {}).get("files", ()):
            (path / Path(name).name).unlink(missing_ok=True)
    for old in (*path.glob("memory-rank*.jsonl"), path / "memory-report.html", path / RUN_FILE):
        old.unlink(missing_ok=True)


def unfinished_run(recipe: str, variant: str, folder: str) -> tuple[str, dict[str, Any]]:
    """(folder, content of the run file) of the run that `--resume` means: the one in `folder` or, if that is empty,
    the newest unfinished one of this recipe (and variant, unless that is `"auto"`) in `memkit-runs/`.

    Raises:
        InputError: there is none.
    """
    if folder:
        run = read_run(folder)
        if run is None:
            raise InputError(f"--resume: {folder} holds no run. Remove --resume to start one")
        if run["status"] == "finished":
            raise InputError(f"--resume: the run in {folder} is finished. To train anew, {start_again(folder)}")
        if run["recipe"] != recipe:
            raise InputError(
                f"--resume: the run in {folder} belongs to recipe {run['recipe']!r}, not {recipe!r}. Type: memkit "
                f"recipe {run['recipe']} --resume --output {folder}"
            )
        return folder, run
    pattern = f"{recipe}-*" if variant == "auto" else f"{recipe}-{variant}*"
    files = sorted(_HOME.glob(f"{pattern}/{RUN_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        run = read_run(file.parent)
        if run is not None and run["status"] != "finished" and variant in ("auto", run["variant"]):
            return str(file.parent), run
    raise InputError(f"--resume: no unfinished run of {recipe} in {_HOME}/; give its folder with --output")


def last_checkpoint(folder: str) -> str | None:
    """The newest whole checkpoint in `folder`, or None. One that a kill cut short lacks Trainer's state file, which is
    written last, and is passed over."""
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if number.isdigit():
            found.append((int(number), str(path)))
    return max(found)[1] if found else None
