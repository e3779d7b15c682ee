"""What a key of a DeepSpeed config may hold, and the sections that keys stand in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FREE", "Key", "Section", "choice", "number", "switch", "text", "whole"]

Kind = Literal["whole", "number", "switch", "text", "list", "section", "any"]


@dataclass(frozen=True, slots=True)
class Key:
    """What a key may hold.

    Attributes:
        kind: whole number, number, switch (true or false), text, list, section (a mapping), any.
        least, most: bounds, themselves allowed.
        above, below: bounds, themselves not allowed.
        choices: the only texts allowed, in lower case; empty if any text is.
        optional: `null` is allowed.
    """

    kind: Kind
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

    def type_error(self, value: Any) -> str | None:
        """What belongs here instead of `value`: "a whole number"; None if its type is right."""
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"  # Python's JSON reads NaN, Infinity and 1e999
        if value is None:
            return None if self.optional or self.kind == "any" else self._wanted
        if self.kind == "any":
            return None
        if self.kind in ("whole", "number"):
            right = isinstance(value, int | float) and not isinstance(value, bool)
            if right and self.kind == "whole" and isinstance(value, float):
                right = value.is_integer()  # JSON writes 5e8 for 500000000
        elif self.kind == "switch":
            right = isinstance(value, bool)
        elif self.kind == "text":
            right = isinstance(value, str)
        elif self.kind == "list":
            right = isinstance(value, list | tuple)
        else:
            right = isinstance(value, Mapping)
        return None if right else self._wanted

    def range_error(self, value: Any) -> str | None:
        """What the value must be: "at least 0"; None if it is in range. Only for values of the right type."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.least is not None and value < self.least:
                return f"at least {self.least:g}"
            if self.most is not None and value > self.most:
                return f"at most {self.most:g}"
            if self.above is not None and value <= self.above:
                return f"above {self.above:g}"
            if self.below is not None and value >= self.below:
                return f"below {self.below:g}"
        if self.choices and isinstance(value, str) and value.lower() not in self.choices:
            return f"one of {', '.join(self.choices)}"
        return None

    @property
    def _wanted(self) -> str:
        return {
            "whole": "a whole number",
            "number": "a number",
            "switch": "true or false",
            "text": "a text",
            "list": "a list",
            "section": "a section in braces",
            "any": "anything",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Section:
    """Keys of one section.

    Attributes:
        keys: what it may hold, by name; None if anything goes.
        strict: DeepSpeed refuses unknown keys here. Elsewhere it ignores them.
    """

    keys: Mapping[str, Key] | None
    strict: bool


def whole(least: float | None = 0, **more: Any) -> Key:
    return Key("whole", least=least, **more)


def number(least: float | None = 0, **more: Any) -> Key:
    return Key("number", least=least, **more)


def choice(*choices: str, optional: bool = False) -> Key:
    return Key("text", choices=choices, optional=optional)


def switch(optional: bool = False) -> Key:
    return Key("switch", optional=optional)


def text(optional: bool = False) -> Key:
    return Key("text", optional=optional)


FREE = Key("any")
