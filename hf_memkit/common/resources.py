"""Finds `recipes/` and `ds_configs/`, inside the installed package or beside it in a checkout, and pages of `docs/`.

A file's stem is its name; there is no registry to keep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hf_memkit.common.errors import InputError, did_you_mean

REPOSITORY: Final = "https://github.com/hf-memkit/hf-memkit"

_INSIDE = Path(__file__).with_name("shipped")
_CHECKOUT = Path(__file__).resolve().parents[2]
_SUFFIX = {"recipes": ".yaml", "ds_configs": ".json"}


def documentation(page: str) -> str:
    """URL of a page of `docs/`, such as `"plan.md"`: an installation has none."""
    return f"{REPOSITORY}/blob/main/docs/{page}"


def folder(kind: str) -> Path:
    """The folder of `kind` (`"recipes"` or `"ds_configs"`).

    A wheel carries it beside this module; an editable install leaves it at the top of the checkout.
    """
    inside = _INSIDE / kind
    return inside if inside.is_dir() else _CHECKOUT / kind


def names(kind: str) -> list[str]:
    """Every name of `kind`, sorted."""
    return sorted(path.stem for path in folder(kind).glob(f"*{_SUFFIX[kind]}"))


def find(kind: str, name: str) -> Path:
    """The file of `kind` that is called `name`.

    Raises:
        InputError: there is none; the message names the nearest one and the command that lists them.
    """
    known = names(kind)
    if name not in known:
        what = {"recipes": "recipe", "ds_configs": "DeepSpeed preset"}[kind]
        command = {"recipes": "memkit recipe", "ds_configs": "memkit ds list"}[kind]
        near = did_you_mean(name, known) or f"; known: {', '.join(known)}"
        raise InputError(f"unknown {what} {name!r} (`{command}` lists all){near}")
    return folder(kind) / f"{name}{_SUFFIX[kind]}"
