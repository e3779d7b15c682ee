"""Under which names modules have a function."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from hf_memkit.prediction.child.names import Names


class Api:
    def create(self) -> None:
        pass


def test_modules_that_have_changed_are_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a script's push that is sent, because its library was imported after the first case."""
    first, later, other = ModuleType("made.first"), ModuleType("made.later"), ModuleType("foreign")
    for module in (first, other):
        vars(module)["create"] = Api().create
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = Names([Api.create], "made")
    assert list(names.places()) == [(vars(first), "create")]
    vars(first)["make"] = vars(later)["make"] = Api.create
    monkeypatch.setitem(sys.modules, "made.later", later)
    assert [key for _, key in names.places()] == ["create", "make", "make"]
