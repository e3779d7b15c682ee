"""For each rule: a job that breaks it, a job that does not, and the key that the problem must name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.checks.case import Case

CASES: dict[str, list[Case]] = {
    rule: cases if isinstance(cases, list) else [cases]
    for path in sorted(Path(__file__).parent.glob("cases_*.py"))
    for rule, cases in import_module(f"tests.checks.{path.stem}").CASES.items()
}
