"""Writes a plan as YAML for `memkit run --plan`, with a comment on top that describes it."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from hf_memkit._version import __version__
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import user_path, write_text
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.wording import batch_note, headline
from hf_memkit.setup.script_overrides import PLAN_END, PLAN_HEAD


def plan_text(plan: Plan, path: str) -> str:
    """The YAML of a plan that fits. `path`: of the file, for the command in its comment."""
    verdict, details = headline(plan)
    best = plan.proposed
    result = best.candidate.result if best is not None else ""
    use = f"Use it: {plan.launch_with(path)}"
    if plan.script is not None:
        uses = [f"# {use}, with the script's arguments."]
    else:
        uses = [
            f"# {use}, with your own training script for SCRIPT.",
            "# Your script sets all else: the model, the length of rows.",
        ]
    head = [
        f"{PLAN_HEAD} {__version__} for {plan.name}.",
        f"# {verdict}: {details}.",
        *([f"# {note}"] if (note := batch_note(plan)) else []),
        *([f"# What it does to the result: {result}."] if result else []),
        "#",
        *uses,
        "# These settings override the script's. `about` describes the setup and sets nothing.",
    ]
    settings = yaml.safe_dump(plan.file(), sort_keys=False, allow_unicode=True, width=110)
    return "\n".join(head) + f"\n{settings}{PLAN_END}\n"


def check_plan_file(path: str) -> None:
    """Refuses a path that cannot be written, or a file that is not a memkit plan."""
    target = user_path(path)
    if target.is_dir():
        raise InputError(f"--write {path}: a folder; give a file in it, such as {target / 'plan.yaml'}")
    if target.is_symlink() and not target.exists():
        raise InputError(f"--write {path}: a broken link; remove it, or give another file")
    if target.exists() and not _is_plan(target):
        raise InputError(f"--write {path}: exists and is not a memkit plan; give another file")
    if not target.exists() and not target.absolute().parent.is_dir():
        folder = target.absolute().parent
        raise InputError(f"--write {path}: no folder {folder}. Type: {command('mkdir', '-p', folder)}")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise InputError(f"--write {path}: not writable; give another file")


def write_plan(plan: Plan, path: str) -> Path:
    """Writes the plan to a file, which may hold an earlier plan."""
    check_plan_file(path)
    target = user_path(path)
    write_text(target, plan_text(plan, path), overwrite=True)
    return target


def _is_plan(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(PLAN_HEAD)) == PLAN_HEAD.encode()
    except OSError:
        return False
