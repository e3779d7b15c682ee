"""A recipe's folder: its script with `args.yaml`, and the run file `memkit-run.json`.

The run file has the setup with its reasons, its prediction, the target of a rehearsal, and the status: `written`
(nothing has run), `running`, `interrupted` or `finished`. A killed run stays `running`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import yaml

from hf_memkit._version import __version__
from hf_memkit.catalog import library_versions
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError, RunError
from hf_memkit.common.user_files import replace_text
from hf_memkit.components.resuming import last_checkpoint
from hf_memkit.setup.process_group import LAUNCHER_VARIABLES
from hf_memkit.setup.setup import Setting, Setup

RUN_FILE: Final = "memkit-run.json"
ARGUMENTS_FILE: Final = "args.yaml"
WRITTEN: Final = "written"
"""Status of a folder that nothing has run in."""
_STATUSES: Final = (WRITTEN, "running", "interrupted", "finished")

_HOME: Final = Path("memkit-runs")


@dataclass(frozen=True)
class RecipeRun:
    """One run of a recipe.

    Attributes:
        target: the setup that this run rehearses; None for the real run.
        not_rehearsed: settings of the target that do not run here, each with its reason.
        gpus: processes on each machine, one GPU each.
        nodes: machines.
        prediction: prediction of this run as JSON, if any; the records show it with the measurements.
        target_prediction: prediction of `target` as JSON, if any, with `gpu` (its name), `gpu_verdict` (for the GPU
            only) and `ram_gib` (of this machine).
        asked: the recipe as given, by name or by its file.
        needs_less: options of `memkit recipe` with which it needs less memory.
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
    asked: str = ""
    needs_less: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        return self.gpus * self.nodes

    @property
    def target_processes(self) -> int:
        """Processes of `target`; a rehearsal may have fewer."""
        of_target = (int(each.value) for each in self.not_rehearsed if each.key == "environment.WORLD_SIZE")
        return next(of_target, self.processes)

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
            "asked": self.asked,
            "needs_less": list(self.needs_less),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RecipeRun:
        names = ("gpus", "nodes", "prediction", "target_prediction")
        return cls(
            recipe=content["recipe"],
            variant=content["variant"],
            setup=Setup.from_json(content["setup"]),
            target=Setup.from_json(content["target"]) if content["target"] else None,
            not_rehearsed=tuple(Setting(**setting) for setting in content["not_rehearsed"]),
            asked=content.get("asked", content["recipe"]),
            needs_less=tuple(content.get("needs_less", ())),
            **{name: content[name] for name in names if name in content},
        )

    def new_file(self, names: list[str]) -> dict[str, Any]:
        """Content of the run file for files of these names, the script first."""
        written = {"schema": 1, "memkit": __version__, "status": WRITTEN}
        return {**written, **self.to_json(), "blocks_sha256": None, "files": names, "result": None, "stopped_by": None}


def default_output(recipe: str, variant: str) -> str:
    """A folder in `memkit-runs/` that no run has used: `gpt2-on-16gb-resident`, then `gpt2-on-16gb-resident-2` …"""
    first = f"{recipe}-{variant}"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(str(_HOME / name) for name in names if not (_HOME / name / RUN_FILE).exists())


def read_run(folder: str | Path) -> dict[str, Any] | None:
    """Content of the folder's run file, or None if it has none. Raises InputError if it is damaged, RunError if it is
    unreadable."""
    path = Path(folder) / RUN_FILE
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}. Choose another folder: --output FOLDER") from None
    except (ValueError, RecursionError):
        raise _damaged(folder) from None
    if not isinstance(content, dict) or not all(_is_valid(content, name) for name in _FIELDS):
        raise _damaged(folder)
    return content


_FIELDS: Final[Mapping[str, type]] = {"recipe": str, "variant": str, "status": str, "setup": dict, "files": list}
"""Fields of every run file."""


def _is_valid(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name)
    if name == "files":
        return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)
    return isinstance(value, _FIELDS[name]) and (name != "status" or value in _STATUSES)


def _damaged(folder: str | Path) -> InputError:
    path = Path(folder)
    fix = "To train from the first step, give another folder"
    if (newest := last_checkpoint(path)) is not None and (script := next(path.glob("train_*.py"), None)) is not None:
        fix = f"To continue from {Path(newest).name}, type: {command('python', script)}. {fix}"
    return InputError(f"{path / RUN_FILE} is damaged. {fix}")


def folder_of(path: str | Path) -> Path | None:
    """The recipe's folder if `path` is such a folder, or its script; else None."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not (folder / ARGUMENTS_FILE).exists():
        return None
    content = read_run(folder)
    if content is None:
        return None
    is_script = path.name in content.get("files", ())[:1]
    return folder if path == folder or is_script else None


def written_run(folder: Path) -> tuple[RecipeRun, dict[str, Any]]:
    """(the run in the folder with the user's changes of its files, the content of its run file). Raises InputError if
    there is no run, or a file is missing or cannot be read."""
    content = read_run(folder)
    if content is None:
        raise InputError(
            f"{folder}: no {RUN_FILE} in it. Write a run: {command('memkit', 'recipe', 'NAME', '--export', folder)}"
        )
    try:
        job = RecipeRun.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(folder) from None
    try:
        setup = _with_changes(job.setup, folder)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}. Restore it, or {start_again(folder)}") from None
    except (ValueError, AttributeError, yaml.YAMLError) as error:
        first = str(error).partition("\n")[0]
        raise InputError(f"{folder / ARGUMENTS_FILE}: cannot be read ({first}). Correct it") from None
    # Problems on the machine that wrote the folder do not apply here.
    return replace(job, setup=replace(setup, problems=())), content


def _with_changes(setup: Setup, folder: Path) -> Setup:
    """`setup` with the values of `args.yaml` and of the DeepSpeed JSON."""
    sections = yaml.safe_load((folder / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    arguments = sections["arguments"]
    config_file = arguments.pop("deepspeed", None)
    if config_file is not None:
        config = json.loads((folder / config_file).read_text(encoding="utf-8"))
        if config != setup.get("deepspeed.config"):
            setup = setup.put("deepspeed.config", config, _CHANGED)
    arguments["output_dir"] = str(folder)
    if setup["model.origin"] == "architecture" and "architecture" not in sections["model"]:
        setup = setup.put("model.origin", "hub", "the script loads it")
    for section in ("environment", "adapter", "model_parts", "arguments", "trainer_parts"):
        before = setup.section(section)
        values = sections.get(section) or {}
        current = {library_versions.current_name(name): value for name, value in values.items()}
        for name in before.keys() - current.keys():
            setup = setup.drop(f"{section}.{name}")
        for name, value in current.items():
            is_same = name in before and before[name] == value
            if not is_same and name not in LAUNCHER_VARIABLES:  # those are for running the script without a launcher
                setup = setup.put(f"{section}.{name}", value, _CHANGED)
    return setup


_CHANGED: Final = "changed in the folder"


def start_again(folder: str | Path) -> str:
    """End of an error message of a run that cannot continue."""
    return f"start again: {command('memkit', 'run', folder, '--overwrite')} (this deletes its checkpoints)"


def write_run(folder: str | Path, content: dict[str, Any]) -> None:
    """Write the run file. Raises RunError if that fails; then the earlier one is unchanged."""
    path = Path(folder) / RUN_FILE
    try:
        replace_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}). Make room, or choose another folder") from None


def refuse_used(folder: str) -> None:
    """Refuse a folder that has a run or another training, is a file, or cannot be written to; creates nothing."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InputError(f"--output {folder}: is a file; give a folder")
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"--output {folder}: {nearest} is not writable. Choose another folder")
    if (run := read_run(folder)) is not None:
        raise _used_folder_error(folder, run["status"], f"--output {folder}", ", or choose another folder")
    if trained := _trained_files(path):
        raise InputError(f"--output {folder}: has {trained}, which memkit did not write. Choose another folder")


def _used_folder_error(folder: str | Path, status: str, place: str, otherwise: str = "") -> InputError:
    replace_it = f"--overwrite to replace it{otherwise}"
    trained = _trained_files(folder) if status == WRITTEN else ""
    if trained:  # `python train_….py` trained here
        fix = f"has {trained}, and no memkit run has trained there. "
        if (newest := last_checkpoint(folder)) is not None:
            resume = command("memkit", "run", folder, "--resume")
            fix += f"To continue from {Path(newest).name}, type: {resume}. "
        fix += f"To replace them, add --overwrite{otherwise}"
    elif status == WRITTEN:
        start = command("memkit", "run", folder)
        fix = f"has a run that has not started. To start it, type: {start}. Or add {replace_it}"
    elif status == "finished":
        fix = f"has a finished run. Add {replace_it}"
    else:
        fix = f"has an unfinished run. Add --resume to continue it, or {replace_it}"
    return InputError(f"{place}: {fix}")


def _trained_files(folder: str | Path) -> str:
    """Names of the checkpoints and of the model in the folder, for a message; empty: none."""
    names = [path.name for path in Path(folder).glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    names.sort(key=lambda name: int(name.partition("-")[2]))
    if any(Path(folder, "model").glob("*")):
        names.append("model")
    return ", ".join(names)


def refuse_state(folder: str | Path, status: str, *, resume: bool, overwrite: bool) -> None:
    """Refuse to start the run in `folder`, or to continue it with `resume`, if its status or its files forbid that:
    the exported script may have trained there without `memkit run`."""
    refuse_running(folder)
    if not resume and not overwrite and (status != WRITTEN or _trained_files(folder)):
        raise _used_folder_error(folder, status, str(folder))
    if resume and status == "finished":
        raise InputError(f"--resume: the run in {folder} is finished. To train anew, {start_again(folder)}")
    if resume and status == WRITTEN and last_checkpoint(folder) is None:
        if trained := _trained_files(folder):
            why = f"{folder} has {trained}, but no complete checkpoint. Move them away, or {start_again(folder)}"
            raise InputError(f"--resume: {why}")
        raise InputError(f"--resume: nothing has run in {folder} yet. Omit --resume to start it")


def refuse_running(folder: str | Path) -> None:
    """Refuse a folder in which a training runs now: another would delete or overwrite its checkpoints."""
    from hf_memkit.measuring.report.load import load_run

    try:
        ending = load_run(folder).ending
    except InputError:  # no records
        return
    if ending.kind == "running":
        raise InputError(f"{folder}: a training goes on there ({ending.why}). Wait for its end, or stop its process")


def clear(folder: str | Path, *, whole: bool = True) -> None:
    """Remove the run in `folder`, but no other files; without `whole`, its script stays. A damaged run file is an
    error, and nothing is removed."""
    path = Path(folder)
    if (run := read_run(folder)) is None:
        return  # no run of memkit wrote these files
    for old in (*path.glob("checkpoint-*"), path / "model", path / "nvme", path / "runs", path / "__pycache__"):
        if old.is_dir():
            shutil.rmtree(old)
    files = [path / RUN_FILE, *(path / Path(name).name for name in run["files"])] if whole else []
    for old in (*path.glob("memory-rank*.jsonl"), path / "memory-report.html", *files):
        old.unlink(missing_ok=True)


def unfinished_run(recipe: str, variant: str, folder: str) -> Path:
    """The folder of the run to resume: `folder` or, if empty, that of the newest unfinished run of this recipe (and
    variant, unless `"auto"`) in `memkit-runs/`. Raises InputError if there is none."""
    if folder:
        run = read_run(folder)
        if run is None:
            raise InputError(f"--resume: {folder} has no run. Omit --resume to start one")
        if run["recipe"] != recipe:
            other = f"the run in {folder} is of recipe {run['recipe']!r}, not {recipe!r}"
            raise InputError(
                f"--resume: {other}. To continue it, type: {command('memkit', 'run', folder, '--resume')}"
            )
        return Path(folder)
    pattern = f"{recipe}-*" if variant == "auto" else f"{recipe}-{variant}*"
    files = sorted(_HOME.glob(f"{pattern}/{RUN_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        run = read_run(file.parent)
        if run is None or run["status"] in ("finished", WRITTEN):
            continue
        if variant in ("auto", run["variant"]):
            return file.parent
    raise InputError(f"--resume: no unfinished run of {recipe} in {_HOME}/. Give its folder: --output FOLDER")
