"""Keys: those that DeepSpeed rejects, ignores or reads elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.checks.deepspeed_keys import REMOVED, RENAMED, key_at, places_of, section_at, section_name
from hf_memkit.checks.rule import Found, Severity, any_job, deepspeed
from hf_memkit.checks.subject import Subject, walk
from hf_memkit.common.errors import did_you_mean

_DEPRECATED: Final[dict[str, tuple[Severity, str, str]]] = {
    "zero_optimization.cpu_offload": (
        "error",
        "accelerate does not read it and keeps Trainer's optimizer, which DeepSpeed then rejects with ZeRO-Offload",
        '"offload_optimizer": {"device": "cpu"}',
    ),
    "zero_optimization.cpu_offload_param": (
        "warning",
        "DeepSpeed maps it to offload_param, with a warning, but Trainer does not see that parameters are offloaded",
        '"offload_param": {"device": "cpu"}',
    ),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "warning",
        "DeepSpeed accepts it and ignores it",
        '"pin_memory" inside offload_optimizer and offload_param',
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "hint",
        "deprecated: DeepSpeed maps it to the new name, with a warning",
        '"stage3_gather_16bit_weights_on_model_save"',
    ),
    "bfloat16": ("warning", 'DeepSpeed reads it, but Trainer fills in and compares only "bf16"', 'a section "bf16"'),
}


def _unknown(subject: Subject, *, strict: bool) -> Iterator[tuple[str, list[str]]]:
    """Keys that their section does not know, and the names that it does know."""
    for path, _ in walk(subject.config or {}):
        section = section_at(subject, section_name(path))
        if section is None or section.keys is None or section.strict is not strict:
            continue
        name = path.rpartition(".")[2]
        known = key_at(subject, path) is not None or (name.startswith("_") and not strict)  # "_comment" and its like
        if not (known or path in REMOVED or path in RENAMED or path in _DEPRECATED or _misplaced(subject, path)):
            yield path, list(section.keys)


def _misplaced(subject: Subject, path: str) -> str:
    """Where this key belongs, if it is known in another section and not in its own: a dotted path, or nothing."""
    if key_at(subject, path) is not None or path in REMOVED:
        return ""
    own, name = section_name(path), path.rpartition(".")[2]
    places = [place for place in places_of(name) if section_name(place) != own]
    nearest = [place for place in places if section_name(place).rpartition(".")[0] == own.rpartition(".")[0]]
    return next(iter(nearest or places), "")


@deepspeed.error(
    why="DeepSpeed removed this key and rejects the whole file",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/config.py 67-141",
)
def removed_key(subject: Subject) -> Iterator[Found]:
    for path, note in REMOVED.items():
        if subject.has(path):
            yield Found(path, fix=f"delete the key ({note})")


@deepspeed.error(
    why='DeepSpeed rejects this key: "Extra inputs are not permitted"',
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/config_utils.py 110",
)
def rejected_key(subject: Subject) -> Iterator[Found]:
    for path, known in _unknown(subject, strict=True):
        section, _, name = path.rpartition(".")
        why = "its class does not accept this parameter: TypeError when the engine starts"
        why = why if section.endswith(".params") else ""
        yield Found(path, why=why, fix=f"delete the key{did_you_mean(name, known)}")


@deepspeed.warning(
    why="unknown key; DeepSpeed silently ignores it",
    fix="delete the key",
    source="deepspeed 0.19.8: runtime/config.py 485-590, which reads the keys that it knows",
)
def unknown_key(subject: Subject) -> Iterator[Found]:
    for path, known in _unknown(subject, strict=False):
        yield Found(path, fix=f"delete the key{did_you_mean(path.rpartition('.')[2], known)}")


@deepspeed.warning(
    why="DeepSpeed reads this setting under another name and silently ignores this key",
    fix="rename it to the name that DeepSpeed reads",
    source="deepspeed 0.19.8: runtime/swap_tensor/aio_config.py 23-36, runtime/activation_checkpointing/config.py 76",
)
def renamed_key(subject: Subject) -> Iterator[Found]:
    for path, name in RENAMED.items():
        if subject.has(path):
            yield Found(path, fix=f"rename it to {name!r}")


@deepspeed.warning(
    why="the key belongs to another section",
    fix="move it there",
    source="deepspeed 0.19.8: runtime/config_utils.py 110; runtime/config.py 485-590",
)
def misplaced_key(subject: Subject) -> Iterator[Found]:
    for path, _ in walk(subject.config or {}):
        own = section_at(subject, section_name(path))
        place = _misplaced(subject, path) if own is not None and own.keys is not None else ""
        if not place or own is None or path in RENAMED or path in _DEPRECATED:
            continue
        effect = "DeepSpeed rejects it here" if own.strict else "DeepSpeed silently ignores it here"
        target = section_name(place) or "the top level"
        severity: Severity = "error" if own.strict else "warning"
        fix = f"move it to {place}"
        if section_name(path) in ("bf16", "bfloat16") and target == "fp16":
            fix = "delete it: bf16 needs no loss scaling"
        yield Found(path, why=f"{effect}: it belongs to {target}", fix=fix, severity=severity)


@deepspeed.warning(
    why="deprecated name that no longer has its full effect",
    fix="write the new name",
    source="deepspeed 0.19.8: runtime/zero/config.py 188-220, 287; accelerate 1.15.0: accelerator.py 2373",
)
def deprecated_key(subject: Subject) -> Iterator[Found]:
    for path, (severity, why, new) in _DEPRECATED.items():
        if subject.has(path):
            yield Found(path, why=why, fix=f"write {new} instead", severity=severity)


@any_job.warning(
    why="the key appears twice: under Trainer the last one silently takes precedence; without Trainer "
    "DeepSpeed rejects the file",
    fix="keep one of the two",
    source="accelerate 1.15.0: utils/deepspeed.py 143; deepspeed 0.19.8: runtime/config_utils.py 205; transformers "
    "5.23.0: hf_argparser.py 426 (yaml.safe_load)",
)
def duplicate_key(subject: Subject) -> Iterator[Found]:
    for path in subject.duplicates:
        yield Found(path)
    given = dict(walk(subject.arguments or {}))
    for path in subject.duplicate_arguments:
        why = "the key appears twice; the last one silently takes precedence"
        yield Found(path, given.get(path), why=why, argument=True)
