"""Applies every rule."""

from __future__ import annotations

from hf_memkit.check import rules
from hf_memkit.check.problem import Problem
from hf_memkit.check.rule import RULES
from hf_memkit.check.subject import Subject, walk

__all__ = ["check"]

assert rules.__all__  # imported for the registry that it fills


def check(subject: Subject) -> list[Problem]:
    """All problems of `subject` at once, in the order of the file's keys; empty if there are none."""
    found = [problem for rule in RULES.values() for problem in rule.problems(subject)]
    order = {path: number for number, (path, _) in enumerate(walk(subject.config or {}))}

    def place(problem: Problem) -> int:
        path = problem.key
        while path and path not in order:
            path = path.rpartition(".")[0]
        return order.get(path, len(order))

    return sorted(found, key=place)
