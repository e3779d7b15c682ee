"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

__all__ = ["STATUSES", "Check", "Status"]

Status = Literal["ok", "warning", "missing"]
"""`ok`: as it should be. `warning`: works, and costs something that `found` names. `missing`: what it is for does not
work."""

STATUSES: Final[tuple[Status, ...]] = get_args(Status)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        group: heading that it stands under.
        name: what was looked at.
        status: see `Status`.
        found: what is so, and what it means.
        fix: the command or setting that fixes it; empty where nothing has to be fixed.
        core: whether memkit does not work at all without it.
    """

    group: str
    name: str
    status: Status
    found: str
    fix: str = ""
    core: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "found": self.found, "fix": self.fix}
