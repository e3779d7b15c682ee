"""Every key that DeepSpeed 0.19 knows, by section, and the key that stands at a dotted path.

`deepspeed_0_19.json` is what DeepSpeed's own classes say, written by `scripts/deepspeed_keys.py`: importing DeepSpeed
takes seconds. `deepspeed_by_hand.py` has what they do not say.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from hf_memkit.checks.deepspeed_by_hand import BOUNDS, OPTIMIZER_PARAMS, REMOVED_OPTIMIZERS, TORCH_OPTIMIZERS, UNTYPED
from hf_memkit.checks.keys import FREE, Key, Section
from hf_memkit.checks.subject import Subject

__all__ = ["OPTIMIZERS", "SCHEDULERS", "SECTIONS", "key_at", "places_of", "section_at", "section_name"]

_GENERATED: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("deepspeed_0_19.json").read_text())

SCHEDULERS: Final[dict[str, list[str]]] = _GENERATED["schedulers"]
"""DeepSpeed's own schedulers → their parameters."""

OPTIMIZERS: Final = (*_GENERATED["optimizers"], *TORCH_OPTIMIZERS, *REMOVED_OPTIMIZERS)
"""Names that DeepSpeed takes or took; its own, which come first, in upper or lower case."""

_ALIASES: Final = {"bfloat16": "bf16"}


def _sections() -> dict[str, Section]:
    found = {name: Section(keys, strict=False) for name, keys in UNTYPED.items()}
    for name, section in _GENERATED["sections"].items():
        keys = {}
        for key, says in section["keys"].items():
            says["choices"] = tuple(says.get("choices", ()))
            keys[key] = BOUNDS.get(f"{name}.{key}") or Key(**says)
        found[name] = Section(keys, strict=section["strict"])
    return found


SECTIONS: Final = _sections()
"""Sections whose keys are checked, by dotted path. What stands in another one is not looked at."""


def section_name(path: str) -> str:
    """`zero_optimization.offload_param` of `zero_optimization.offload_param.device`; empty for the top level."""
    return path.rpartition(".")[0]


def section_at(subject: Subject, name: str) -> Section | None:
    """The section of that name; None if its keys are not known. Two depend on the type that stands beside them."""
    if name == "optimizer.params":
        return Section(OPTIMIZER_PARAMS.get(str(subject.at("optimizer.type")).lower()), strict=True)
    if name == "scheduler.params":
        names = SCHEDULERS.get(str(subject.at("scheduler.type")))
        return Section(dict.fromkeys(names, FREE) if names else None, strict=True)
    return SECTIONS.get(_ALIASES.get(name, name))


def key_at(subject: Subject, path: str) -> Key | None:
    """What may stand at a dotted path; None if the section does not know the key, or is not known itself."""
    section, name = section_at(subject, section_name(path)), path.rpartition(".")[2]
    if section is None or section.keys is None:
        return None
    if section_name(path) == "zero_optimization" and f"stage3_{name}" in section.keys:
        name = f"stage3_{name}"  # deepspeed takes both names: runtime/config_utils.py 109, populate_by_name
    return section.keys.get(name)


@cache
def places_of(name: str) -> tuple[str, ...]:
    """Every dotted path at which a key of this name is known, the shortest first. Common words are left out."""
    if name in ("enabled", "type", "params", "dtype", "device"):
        return ()
    found = [f"{section}.{name}".lstrip(".") for section, known in SECTIONS.items() if name in (known.keys or {})]
    return tuple(sorted(found, key=len))
