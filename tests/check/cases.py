"""For each rule: a job that breaks it, a job that does not, and the key that the problem must name."""

from __future__ import annotations

from tests.check.case import Case
from tests.check.cases_keys import KEY_CASES
from tests.check.cases_zero import ZERO_CASES

__all__ = ["CASES", "Case"]

CASES: dict[str, list[Case]] = {**KEY_CASES, **ZERO_CASES}
