"""The result of one check of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "missing"]
"""`ok`: works. `warning`: works, at a cost that `found` names. `missing`: does not work."""


@dataclass(frozen=True)
class Check:
    """One check and its result.

    Attributes:
        group: its heading.
        name: the checked item.
        status: ok, warning or missing.
        finding: what was found and its consequence.
        fix: the command or setting that fixes it; empty if there is nothing to fix.
        core: whether memkit cannot work without it.
    """

    group: str
    name: str
    status: Status
    finding: str
    fix: str = ""
    core: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "found": self.finding, "fix": self.fix}
