"""A ledger: computed bytes of a job by place and category, a row a term, with the source of its formula. Device rows
are those of one GPU; host, pinned and disk rows those of one machine with all its processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from hf_memkit.common.terms import Category, Phase, Place
from hf_memkit.common.units import GIB

PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True, slots=True)
class Row:
    """One term of the ledger. `phase`: the only phase with these bytes, if they are not always held: gradients in
    backward and tensors of the optimizer step never coexist."""

    place: Place
    category: Category
    term: str
    size_bytes: int
    source: str
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows in the order they were added. Immutable: `with_rows` makes another ledger."""

    rows: tuple[Row, ...] = ()

    def with_rows(self, rows: Iterable[Row]) -> Ledger:
        return Ledger((*self.rows, *rows))

    def total_bytes(self, *places: Place) -> int:
        """Bytes at these places: always held ones plus those of the largest phase."""
        return sum(self._total(place)[0] for place in places)

    def peak_phase(self, place: Place) -> Phase | None:
        """The phase that adds most at `place`; None if no row there has a phase."""
        return self._total(place)[1]

    def _total(self, place: Place) -> tuple[int, Phase | None]:
        by_phase: dict[Phase | None, int] = {}
        for row in self.rows:
            if row.place == place:
                by_phase[row.phase] = by_phase.get(row.phase, 0) + row.size_bytes
        always = by_phase.pop(None, 0)
        phase = max(by_phase, key=lambda name: by_phase[name], default=None)
        return always + by_phase.get(phase, 0), phase

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Ledger:
        """The ledger from `to_json`'s result."""
        rows = []
        for place in PLACES:
            for row in content.get(place, ()):
                size_bytes = round(row["gib"] * GIB)
                rows.append(Row(place, row["category"], row["term"], size_bytes, row["source"], row["phase"]))
        return cls(tuple(rows))

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """`{"device": [{"category", "term", "gib", "phase", "source"}, …], "host": …, "pinned": …, "disk": …}`."""
        content: dict[str, list[dict[str, Any]]] = {place: [] for place in PLACES}
        for row in self.rows:
            figures = {"category": row.category, "term": row.term, "gib": row.size_bytes / GIB}
            content[row.place].append({**figures, "phase": row.phase, "source": row.source})
        return content
