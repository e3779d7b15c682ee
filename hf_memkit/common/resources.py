"""Find `recipes/`, `ds_configs/` (installed or in a checkout) and pages of `docs/`. A file's stem is its name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hf_memkit.common.errors import InputError, did_you_mean

REPOSITORY: Final = "https://github.com/hf-memkit/hf-memkit"

_INSIDE = Path(__file__).with_name("shipped")
_CHECKOUT = Path(__file__).resolve().parents[2]
_SUFFIX = {"recipes": ".yaml", "ds_configs": ".json"}


def documentation(page: str) -> str:
    """URL of a page of `docs/`, such as `"plan.md"`; an installation has no such files."""
    return f"{REPOSITORY}/blob/main/docs/{page}"


def folder(kind: str) -> Path:
    """The folder of `kind`, `"recipes"` or `"ds_configs"`: beside this module in a wheel, else atop the checkout."""
    inside = _INSIDE / kind
    return inside if inside.is_dir() else _CHECKOUT / kind


def names(kind: str) -> list[str]:
    """All names of `kind`, sorted."""
    return sorted(path.stem for path in folder(kind).glob(f"*{_SUFFIX[kind]}"))


def find(kind: str, name: str) -> Path:
    """The file of `kind` with this name. Raises InputError with the nearest name and the command that lists all."""
    known = names(kind)
    if name not in known:
        named = {"recipes": ("recipe", "memkit recipe"), "ds_configs": ("DeepSpeed preset", "memkit ds list")}
        noun, command = named[kind]
        near = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise InputError(f"unknown {noun} {name!r} (`{command}` lists all){near}")
    return folder(kind) / f"{name}{_SUFFIX[kind]}"
