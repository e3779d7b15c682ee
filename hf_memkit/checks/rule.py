"""Rules, one known mistake each, in a registry that generates docs/checks.md; and problems, the mistakes in a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.common.secrets import masked_value

Severity = Literal["error", "warning", "hint"]
"""error: the run fails, or its result is wrong. warning: the run loses memory or time, a setting has no effect, or
something is lost that the run itself does not need. hint: advice that a good config may ignore."""

SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""From worst to least."""


@dataclass(frozen=True)
class Problem:
    """A mistake that a rule found, and its fix.

    Attributes:
        rule: ID of the rule that found it (docs/checks.md lists all).
        severity: how bad it is here.
        file: the file with the key; empty if there is none.
        key: dotted path in the file, such as `zero_optimization.offload_param.buffer_size`; empty if
            the file as a whole is not checked.
        value: the key's value; None if the key is missing.
        why: the library's behaviour; a clause without a full stop.
        fix: the correction; an imperative without a full stop.
        null: the key is in the file, and its value is null.
    """

    rule: str
    severity: Severity
    file: str
    key: str
    value: Any
    why: str
    fix: str
    null: bool = False

    @property
    def refuses(self) -> bool:
        """Whether memkit's own presets and recipes refuse it: they refuse errors and warnings, not hints."""
        return self.severity != "hint"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "null"}

    @property
    def missing(self) -> bool:
        """Whether the key is not in the file."""
        return self.value is None and not self.null

    @property
    def place(self) -> str:
        """`ds.json: bf16.enabled = true`; a long value is cut."""
        file = f"{self.file}: " if self.file else ""
        if not self.key:
            return f"{file}not checked"
        if self.missing:
            return f"{file}{self.key} is missing"
        value = json.dumps(self.value, default=str)
        return f"{file}{self.key} = {value if len(value) <= 60 else f'{value[:57]}…'}"

    def __str__(self) -> str:
        end = "" if self.fix.endswith("?") else "."
        return f"{self.place}: {self.why}. Fix: {self.fix}{end}"


@dataclass(frozen=True, slots=True)
class Match:
    """Where a rule applies. `why`, `fix` and `severity` override the rule's own.

    `argument` is true for a key of Trainer's arguments, `launcher` for one of accelerate's YAML; else it is of the
    DeepSpeed config or of a setup. A missing `value` is looked up. `file`: the key's file, if it is none of these.
    """

    key: str
    value: Any = ABSENT
    why: str = ""
    fix: str = ""
    argument: bool = False
    launcher: bool = False
    severity: Severity | None = None
    file: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One known mistake.

    Attributes:
        id: its name, in kebab-case.
        severity: the default severity; a case can override it.
        why: the library's behaviour, in one line.
        fix: the correction, in one line.
        source: file and line of the library that show the behaviour.
        find: yields where it applies.
        module: its module in `hf_memkit.checks.rules`.
        techniques: names of the techniques whose misuse it reports.
    """

    id: str
    severity: Severity
    why: str
    fix: str
    source: str
    find: Callable[[Subject], Iterable[Match]]
    module: str
    techniques: tuple[str, ...] = ()

    def problems(self, subject: Subject) -> list[Problem]:
        problems = []
        for case in self.find(subject):
            file = subject.arguments_file if case.argument else subject.config_file
            file = case.file or (subject.launcher_file if case.launcher else file)
            value = subject.shown_value(case.key, case.argument) if case.value is ABSENT else case.value
            null = case.value in (None, ABSENT) and subject.is_null(case.key, case.argument)
            why, fix = case.why or self.why, case.fix or self.fix
            head, dot, rest = case.key.partition(".")
            key = f"{subject.written(head)}{dot}{rest}" if case.argument else case.key
            problems.append(
                Problem(self.id, case.severity or self.severity, file, key, masked_value(key, value), why, fix, null)
            )
        return problems


RULES: dict[str, Rule] = {}
"""Every rule by its ID, in the order of application."""

_Find = Callable[[Subject], Iterable[Match]]


def _rule(
    severity: Severity, needs_config: bool, *, why: str, fix: str, source: str, techniques: tuple[str, ...] = ()
) -> Callable[[_Find], _Find]:
    def add(find: _Find) -> _Find:
        id = find.__name__.replace("_", "-")
        if id in RULES:
            raise ValueError(f"there are two rules {id!r}")

        def guarded(subject: Subject) -> Iterable[Match]:
            return () if subject.config is None and needs_config else find(subject)

        RULES[id] = Rule(id, severity, why, fix, source, guarded, find.__module__.rpartition(".")[2], techniques)
        return find

    return add


class Rules:
    """Decorators that add a function to the registry as a rule of its name: `two_precisions` is `two-precisions`. They
    are named after the rule's severity, and take its `why`, `fix`, `source` and `techniques`.

    Args:
        needs_config: the rules apply only to jobs with a DeepSpeed config.
        techniques: the rules' default `techniques`.
    """

    def __init__(self, *, needs_config: bool = False, techniques: tuple[str, ...] = ()) -> None:
        self.error = partial(_rule, "error", needs_config, techniques=techniques)
        self.warning = partial(_rule, "warning", needs_config, techniques=techniques)
        self.hint = partial(_rule, "hint", needs_config, techniques=techniques)


any_job: Final = Rules()
"""For rules about every job."""

deepspeed: Final = Rules(needs_config=True)
"""For rules about jobs with a DeepSpeed config only."""
