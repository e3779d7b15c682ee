"""The label of a row in, the name of its class out."""

from __future__ import annotations

from typing import Any

from hf_memkit.errors import DataError
from hf_memkit.recipe.text_readers import name_of

__all__ = ["OneKind", "label_name"]


def label_name(value: Any, column: str, where: str, example: str) -> str:
    """The name of a class. A class may be a number, also one that a library has made 1.0 of.

    Raises:
        DataError: there is none, or something that is not one.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        if value >= 0:
            return str(value)
        raise DataError(f"{where}: column {column!r}: {value} stands for no label; leave such rows out")
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r}: expected one class, a name or a whole number, found {name_of(value)}; "
            f"such as {example}"
        )
    if not value.strip():
        raise DataError(f"{where}: column {column!r}: empty; expected a class, such as {example}")
    return value.strip()


class OneKind:
    """Sees to it that the labels of one table are all numbers or all names: `1` beside `"positive"` is a second way of
    writing, and would be a class of its own. Text that is a number goes with both: in CSV all is text."""

    def __init__(self, example: str) -> None:
        self._example, self._first = example, ("", "", "")

    def add(self, value: Any, column: str, where: str) -> None:
        """Takes a label that `label_name` has taken.

        Raises:
            DataError: it is of the other kind than those before.
        """
        if isinstance(value, str):
            kind = "" if value.strip().isdecimal() else "a name"
        else:
            kind = "true or false" if isinstance(value, bool) else "a number"
        if not kind:
            return
        before, first, place = self._first
        if not before:
            self._first = kind, str(value), where
        elif kind != before:
            raise DataError(
                f"{where}: column {column!r}: {str(value)[:40]!r} is {kind}, and {first[:40]!r} in {place} is "
                f"{before}; write all labels in one way, such as {self._example}"
            )
