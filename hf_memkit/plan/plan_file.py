"""A plan as a file that `memkit run --plan` reads: YAML, with a head that says what it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import yaml

from hf_memkit._version import __version__
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import user_path, write_text
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.wording import answer, other_batch

_HEAD: Final = "# A plan by memkit"


def plan_text(plan: Plan, path: str) -> str:
    """The text of the file of a plan that fits; `path`: where it will stand, for the command that uses it."""
    verdict, said = answer(plan)
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
        f"{_HEAD} {__version__} for {plan.name}.",
        f"# {verdict}: {said}.",
        *([f"# {each}"] if (each := other_batch(plan)) else []),
        *([f"# What it does to the result: {result}."] if result else []),
        "#",
        *uses,
        "# These settings override the script's. `about` sets nothing; it has what they rest on.",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(plan.file(), sort_keys=False, allow_unicode=True, width=110)


def check_plan_file(path: str) -> None:
    """Refuses a place where a plan cannot be written, or that holds what memkit did not write."""
    target = user_path(path)
    if target.is_dir():
        raise InputError(f"--write {path}: a folder; give a file in it, such as {target / 'plan.yaml'}")
    if target.is_symlink() and not target.exists():
        raise InputError(f"--write {path}: a broken link; remove it, or give another file")
    if target.exists() and not _is_plan(target):
        raise InputError(f"--write {path}: exists and is not a memkit plan; give another file")
    if not target.exists() and not target.absolute().parent.is_dir():
        raise InputError(f"--write {path}: no folder {target.absolute().parent}; create it first")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise InputError(f"--write {path}: not writable; give another file")


def write_plan(plan: Plan, path: str) -> Path:
    """Writes the plan; an earlier plan of memkit is replaced."""
    check_plan_file(path)
    target = user_path(path)
    write_text(target, plan_text(plan, path), overwrite=True)
    return target


def _is_plan(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_HEAD)) == _HEAD.encode()
    except OSError:
        return False
