"""`"lean+lora"` → techniques in order → a setup. Two techniques with the same slot are an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_memkit.checks import RULES, check
from hf_memkit.common.errors import InputError, SettingError, did_you_mean
from hf_memkit.presets.named import PRESETS
from hf_memkit.setup.job import Job, shortages
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques import setup_ledger
from hf_memkit.setup.techniques.registry import TECHNIQUES, Family, Technique, find_technique, in_order


@dataclass(frozen=True, slots=True)
class _NamedTechnique:
    """A technique, and the preset that includes it (or its own name)."""

    technique: Technique
    by: str

    def __str__(self) -> str:
        return repr(self.by) if self.by == self.technique.name else f"{self.by!r} ({self.technique.name})"


def compose(name: str, extra: Iterable[str] = ()) -> list[Technique]:
    """The techniques of presets and techniques joined by `+`, such as `"lean+lora"` or
    `"8bit+selective-checkpointing"`, each once, in order of application. Those of `extra` replace others of the same
    slot. Raises SettingError if techniques in `name` have the same slot; names all such pairs."""
    named: list[_NamedTechnique] = []
    problems = []
    for part in _parts(name):
        for new in part:
            clash = next((old for old in named if _conflict(old.technique, new.technique)), None)
            if clash is not None:
                problems.append(
                    f"preset {name!r}: {clash} and {new} both set {new.technique.slot}. Choose one, or "
                    f"replace the other by {new.technique.name!r}: --technique {new.technique.name}"
                )
            named.append(new)
    if problems:
        raise SettingError("\n".join(dict.fromkeys(problems)))

    added: list[Technique] = []
    for word in extra:
        if word in PRESETS and word not in TECHNIQUES:
            raise InputError(f"techniques: {word!r} is a preset. Join it to the preset by +: --preset PRESET+{word}")
        technique = find_technique(word)
        other = next((old for old in added if _conflict(old, technique)), None)
        if other is not None:
            raise SettingError(f"techniques {other.name!r} and {word!r} both set {technique.slot}. Choose one")
        added.append(technique)
    kept = [old.technique for old in named if not any(_conflict(old.technique, technique) for technique in added)]
    return in_order([*kept, *added])


def _keeps(old: Any, new: Any) -> bool:
    """Whether `new` is `old`, or has all of its entries."""
    return old == new or (isinstance(old, dict) and isinstance(new, dict) and old.items() <= new.items())


def leave_out_impossible(name: str, extra: Iterable[str], build: Callable[[Mapping[str, str]], Setup]) -> Setup:
    """Result of `build` without a preset's optional techniques that a rule says do not apply. Techniques named in
    `name` or `extra` stay. `build` takes the techniques to omit, each with the reason, which it notes."""
    words = [word.strip() for word in name.split("+")]
    optional = {technique for word in words if word in PRESETS for technique in PRESETS[word].where_possible}
    optional -= {*words, *extra}
    left_out: dict[str, str] = {}
    while True:
        setup = build(left_out)
        impossible = {
            technique: problem.why
            for problem in check(setup)
            for technique in RULES[problem.rule].techniques
            if technique in optional and technique in setup.techniques and technique not in left_out
        }
        if not impossible:
            return setup
        left_out.update(impossible)


def _conflict(technique: Technique, other: Technique) -> bool:
    return technique.name != other.name and bool(technique.slot) and technique.slot == other.slot


def _parts(name: str) -> list[list[_NamedTechnique]]:
    if not isinstance(name, str):
        raise InputError(f"preset {name!r}: must be a name, such as 'lean+lora'; known: {', '.join(PRESETS)}")
    parts = []
    for word in name.split("+"):
        word = word.strip()
        if word in PRESETS:
            parts.append([_NamedTechnique(TECHNIQUES[name], word) for name in PRESETS[word].techniques])
        elif word in TECHNIQUES:
            parts.append([_NamedTechnique(TECHNIQUES[word], word)])
        else:
            known = (*PRESETS, *TECHNIQUES)
            near = did_you_mean(word, known) or f"; presets: {', '.join(PRESETS)}"
            place = f"preset {name!r}: " if word != name else ""
            raise InputError(
                f"{place}{word!r} is neither a preset nor a technique (`memkit preset list` names both){near}"
            )
    return parts


def apply_preset(
    name: str,
    job: Job,
    extra: Iterable[str] = (),
    *,
    without: Collection[Family] = (),
    left_out: Mapping[str, str] | None = None,
    change: Callable[[Setup], Setup] | None = None,
) -> Setup:
    """The preset resolved for `job`; its `problems` list what the machine lacks. Raises SettingError for a conflict.

    Args:
        extra: techniques that replace those of the same slot.
        without: families of which no technique is applied.
        left_out: techniques to omit, each with the reason, which is noted.
        change: changes the setup after its techniques, before its ledger is computed.
    """
    setup = Setup(preset=name, job=job)
    left_out = left_out or {}
    applied = (entry for entry in compose(name, extra) if entry.name not in left_out)
    techniques = [entry for entry in applied if entry.family not in without]
    owner: dict[str, Technique] = {}
    for technique in techniques:
        before = {setting.key: setting.value for setting in setup.settings}
        setup = technique(setup)
        for setting in setup.settings:
            if setting.key in before and not _keeps(before[setting.key], setting.value):
                other = owner.get(setting.key, technique)
                if other.family != technique.family:
                    raise SettingError(
                        f"preset {name!r}: {other.name!r} and {technique.name!r} both set {setting.key}, to "
                        f"{before[setting.key]!r} and {setting.value!r}. Choose one"
                    )
            if setting.key not in before or before[setting.key] != setting.value:
                owner[setting.key] = technique

    setup = setup if change is None else change(setup)
    setup = setup.with_rows(*setup_ledger.rows(setup))
    setup = setup.made_by(technique.name for technique in techniques)
    setup = setup.with_notes(*(f"{omitted} is left out: {why}" for omitted, why in left_out.items()))
    return setup.with_problems(shortages(setup.ledger, job.machine))
