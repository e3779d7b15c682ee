"""`"lean+lora"` → techniques in order → a setup. Two that decide the same thing differently are an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from hf_memkit.checks import RULES, check
from hf_memkit.common.errors import InputError, SettingError, did_you_mean
from hf_memkit.presets.named import PRESETS
from hf_memkit.setup.job import Job, shortages
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques import setup_ledger
from hf_memkit.setup.techniques.registry import TECHNIQUES, Family, Technique, find_technique, in_order


@dataclass(frozen=True, slots=True)
class _Named:
    """A technique, and the preset that brings it (or itself, where it was named)."""

    technique: Technique
    by: str

    def __str__(self) -> str:
        return repr(self.by) if self.by == self.technique.name else f"{self.by!r} ({self.technique.name})"


def compose(name: str, extra: Iterable[str] = ()) -> list[Technique]:
    """The techniques of presets and techniques joined by `+`, such as `"lean+lora"` or
    `"8bit+selective-checkpointing"`, each once, in the order in which they are applied. Those of `extra` replace those
    of the same slot without a conflict; of two others that decide the same thing a SettingError names both, all such
    pairs at once."""
    found: list[_Named] = []
    problems = []
    for part in _parts(name):
        for new in part:
            clash = next((old for old in found if _clash(old.technique, new.technique)), None)
            if clash is not None:
                problems.append(
                    f"preset {name!r}: {clash} and {new} both set {new.technique.slot}. Choose one, or "
                    f"replace the other by {new.technique.name!r}: --technique {new.technique.name}"
                )
            found.append(new)
    if problems:
        raise SettingError("\n".join(dict.fromkeys(problems)))
    return _with_techniques([each.technique for each in found], extra)


def leave_out_impossible(name: str, extra: Iterable[str], build: Callable[[Mapping[str, str]], Setup]) -> Setup:
    """What `build` makes, without what a preset of `name` has only where it applies and a rule says that it does not.
    What is named there or in `extra` itself stays. `build` takes the techniques to leave out, each with why, which it
    notes."""
    words = [word.strip() for word in name.split("+")]
    optional = {each for word in words if word in PRESETS for each in PRESETS[word].where_possible}
    optional -= {*words, *extra}
    left_out: dict[str, str] = {}
    while True:
        setup = build(left_out)
        impossible = {
            each: problem.why
            for problem in check(setup)
            for each in RULES[problem.rule].techniques
            if each in optional and each in setup.techniques and each not in left_out
        }
        if not impossible:
            return setup
        left_out.update(impossible)


def _with_techniques(techniques: list[Technique], extra: Iterable[str]) -> list[Technique]:
    """`techniques` with those named in `extra`, which replace others of the same slot; in order."""
    new: list[Technique] = []
    for name in extra:
        if name in PRESETS and name not in TECHNIQUES:
            raise InputError(f"techniques: {name!r} is a preset. Join it to the preset by +: --preset PRESET+{name}")
        one = find_technique(name)
        clash = next((old for old in new if _clash(old, one)), None)
        if clash is not None:
            raise SettingError(f"techniques {clash.name!r} and {name!r} both set {one.slot}. Choose one")
        new.append(one)
    kept = [old for old in techniques if not any(_clash(old, one) for one in new)]
    return in_order([*kept, *new])


def _clash(one: Technique, other: Technique) -> bool:
    return one.name != other.name and bool(one.slot) and one.slot == other.slot


def _parts(name: str) -> list[list[_Named]]:
    if not isinstance(name, str):
        raise InputError(f"preset {name!r}: must be a name, such as 'lean+lora'; known: {', '.join(PRESETS)}")
    parts = []
    for word in name.split("+"):
        word = word.strip()
        if word in PRESETS:
            parts.append([_Named(TECHNIQUES[each], word) for each in PRESETS[word].techniques])
        elif word in TECHNIQUES:
            parts.append([_Named(TECHNIQUES[word], word)])
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
    """The preset resolved for `job`. What the machine lacks for it is in the setup's `problems`. Refuses as `compose`.

    Args:
        extra: techniques that replace those of the same slot.
        without: families of which no technique is applied.
        left_out: techniques that are left out, each with why, which is noted.
        change: what is done to the setup after its techniques, before its ledger is computed.
    """
    setup = Setup(preset=name, job=job)
    left_out = left_out or {}
    techniques = [one for one in compose(name, extra) if one.name not in left_out and one.family not in without]
    owner: dict[str, Technique] = {}
    for technique in techniques:
        before = {setting.key: setting.value for setting in setup.settings}
        setup = technique(setup)
        for setting in setup.settings:
            if setting.key in before and before[setting.key] != setting.value:
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
    setup = setup.with_notes(*(f"{each} is left out: {why}" for each, why in left_out.items()))
    return setup.with_problems(shortages(setup.ledger, job.machine))
