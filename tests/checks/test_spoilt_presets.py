"""Every shipped preset is clean; with any one key spoilt, that key is named, and nothing is raised."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hf_memkit.checks import Problem, Subject, check
from hf_memkit.checks.deepspeed_keys import SECTIONS
from hf_memkit.checks.subject import walk
from hf_memkit.common import resources
from hf_memkit.deepspeed.presets import load
from tests.checks.case import MACHINE, NVME, NVME_PARAM, SMALL, ZENFLOW, of

PRESETS = resources.names("ds_configs")
_WITH_1_BIT = "0.19.6"
_NOT_FINITE = [json.loads(text) for text in ("NaN", "Infinity", "-Infinity")]
_NUMBERS = [
    (name, key) for name, section in SECTIONS.items() for key, kind in (section.keys or {}).items()
    if kind.kind in ("whole", "number")
]  # fmt: skip


def _problems(config: dict[str, Any]) -> list[Problem]:
    return check(Subject(config, deepspeed=_WITH_1_BIT))


def _parent(config: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    return config, name


def _spoilt(value: Any) -> list[Any]:
    """Wrong values instead of this one: text for a number, one below zero, NaN, a list for anything."""
    if isinstance(value, bool):
        return ["true", 7]
    if isinstance(value, int | float):
        return [str(value), f"{value:e}", -1, True, [value], None, *_NOT_FINITE]
    if isinstance(value, dict):
        return ["on", 3, [1]]
    return [17, [value], {}]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_clean(name: str) -> None:
    assert [str(problem) for problem in _problems(load(name))] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_misspelt_key_is_named(name: str) -> None:
    for path, _ in walk(load(name)):
        config = load(name)
        section, key = _parent(config, path)
        wrong = f"{key[:2]}{key[3:]}" if len(key) > 3 else f"{key}x"
        section[wrong] = section.pop(key)
        named = path.removesuffix(key) + wrong
        assert named in {problem.key for problem in _problems(config)}, named


@pytest.mark.parametrize("name", PRESETS)
def test_a_wrong_value_is_named(name: str) -> None:
    for path, value in walk(load(name)):
        for wrong in _spoilt(value):
            config = copy.deepcopy(load(name))
            section, key = _parent(config, path)
            section[key] = wrong
            assert path in {problem.key for problem in _problems(config)}, (path, wrong)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("section", "key"), _NUMBERS)
def test_any_number_is_described_and_none_raises(stage: int, section: str, key: str) -> None:
    """With all that is known of the job, so that every formula is computed."""
    path = f"{section}.{key}".lstrip(".")
    known = {"model": SMALL, "machine": MACHINE, "gpus": 2, "nodes": 2}
    base = {**NVME, **NVME_PARAM} if stage == 3 else ZENFLOW
    for value in (*_NOT_FINITE, 0, -0.5, -1, -(10**30), 10**30):
        subject = of(stage, copy.deepcopy(base), **known)
        assert isinstance(subject.config, dict)
        node = subject.config
        for part in section.split(".") if section else ():
            node = node.setdefault(part, {})
        node[key] = value
        named = {problem.key for problem in check(subject)}
        unread = path == "steps_per_print" or section == "activation_checkpointing"  # by anything under Trainer
        assert unread or path in named or value in (0, -1, 10**30), (path, value)  # some keys take 0 or -1
    check(Subject(subject.config, None, SMALL, MACHINE))
