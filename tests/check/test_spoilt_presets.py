"""Every shipped preset is clean; with any one key spoilt, that key is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hf_memkit import resources
from hf_memkit.check import Problem, Subject, check
from hf_memkit.check.subject import walk
from hf_memkit.zero.presets import load

PRESETS = resources.names("ds_configs")
_WITH_1_BIT = "0.19.6"


def _problems(config: dict[str, Any]) -> list[Problem]:
    return check(Subject(config, deepspeed=_WITH_1_BIT))


def _parent(config: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *sections, name = path.split(".")
    for section in sections:
        config = config[section]
    return config, name


def _spoilt(value: Any) -> list[Any]:
    """Wrong values instead of this one: text for a number, a number below zero, a list for anything."""
    if isinstance(value, bool):
        return ["true", 7]
    if isinstance(value, int | float):
        return [str(value), f"{value:e}", -1, True, [value], None]
    if isinstance(value, dict):
        return ["on", 3, [1]]
    return [17, [value], {}]


def test_there_are_presets() -> None:
    assert len(PRESETS) >= 15


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
