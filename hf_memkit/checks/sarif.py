"""Problems as SARIF 2.1.0 (OASIS 2020), the format of GitHub's and others' code scanning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from hf_memkit._version import __version__
from hf_memkit.checks.reading import key_lines
from hf_memkit.checks.rule import RULES, Problem, Severity
from hf_memkit.common.resources import REPOSITORY, documentation

_LEVELS: Final[Mapping[Severity, str]] = {"error": "error", "warning": "warning", "hint": "note"}


def sarif(problems: Sequence[Problem]) -> dict[str, Any]:
    """The SARIF log of one run: its problems with their rules and, where a file has the key, its line."""
    ids = list(dict.fromkeys(problem.rule for problem in problems))
    lines = {file: key_lines(file) for file in {problem.file for problem in problems} if file}
    driver = {"name": "memkit", "version": __version__, "informationUri": REPOSITORY, "rules": list(map(_rule, ids))}
    results = [_result(problem, ids.index(problem.rule), lines.get(problem.file, {})) for problem in problems]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _rule(id: str) -> dict[str, Any]:
    rule = RULES.get(id)
    if rule is None:  # each problem has its own text
        text = "a file that memkit does not check" if id == "not-checked" else "the recipe file is not valid"
        return {"id": id, "shortDescription": {"text": text}}
    return {
        "id": id,
        "shortDescription": {"text": rule.why},
        "help": {"text": f"Fix: {rule.fix}. Source: {rule.source}."},
        "helpUri": documentation("checks.md"),
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(problem: Problem, index: int, lines: Mapping[str, int]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": problem.rule,
        "ruleIndex": index,
        "level": _LEVELS[problem.severity],
        "message": {"text": str(replace(problem, file=""))},
    }
    if problem.file:
        path = Path(problem.file).absolute()
        uri = path.as_uri()
        if path.is_relative_to(Path.cwd()):  # as code scanning requires
            uri = quote(path.relative_to(Path.cwd()).as_posix())
        place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
        if lines:
            place["region"] = {"startLine": _line(problem.key, lines)}
        result["locations"] = [{"physicalLocation": place}]
    return result


def _line(key: str, lines: Mapping[str, int]) -> int:
    """The key's line; for an absent key that of its section: the top level starts at line 1."""
    path = key.partition(": ")[0]  # keys of a recipe's variants: "variant: setup's key"
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path, 1)
