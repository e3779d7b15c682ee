"""A ledger: the bytes a job needs, by place and category, a row a term, each with the source of its formula.

Every number in a ledger is computed, never measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from hf_memkit.terms import Category, Place
from hf_memkit.units import GIB

__all__ = ["PLACES", "Ledger", "Row"]

PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True, slots=True)
class Row:
    """One term: `size_bytes` of `category` at `place`; `source` says where the formula comes from."""

    place: Place
    category: Category
    term: str
    size_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows in the order they were added. Immutable: `with_rows` makes another ledger."""

    rows: tuple[Row, ...] = ()

    def with_rows(self, rows: Iterable[Row]) -> Ledger:
        return Ledger((*self.rows, *rows))

    def total_bytes(self, *places: Place) -> int:
        """Bytes at these places, all terms together."""
        return sum(row.size_bytes for row in self.rows if row.place in places)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """`{"device": [{"category", "term", "gib", "source"}, …], "host": …, "pinned": …, "disk": …}`."""
        return {
            place: [
                {
                    "category": row.category,
                    "term": row.term,
                    "gib": row.size_bytes / GIB,
                    "source": row.source,
                }
                for row in self.rows
                if row.place == place
            ]
            for place in PLACES
        }
