"""Rules, one known mistake each, in a registry that docs/checks.md is written from; and problems: mistakes that were
found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

from hf_memkit.checks.subject import ABSENT, Subject

__all__ = ["RULES", "SEVERITIES", "Found", "Problem", "Rule", "Severity", "any_job", "deepspeed"]

Severity = Literal["error", "warning", "hint"]
"""error: the run fails, or its result is wrong. warning: memory or time is lost, a setting has no effect, or something
is lost that the run itself does not need. hint: advice that a good config may rightly ignore."""

SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""The worst first."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do.

    Attributes:
        rule: ID of the rule that found it (docs/checks.md has a row for each).
        severity: how bad it is here.
        file: the file that the key stands in; empty if there is none.
        key: dotted path as it is nested in the file, such as `zero_optimization.offload_param.buffer_size`.
        value: what stands there; None if the key is absent.
        why: what the library does with it.
        fix: what to write instead.
    """

    rule: str
    severity: Severity
    file: str
    key: str
    value: Any
    why: str
    fix: str

    @property
    def refuses(self) -> bool:
        """Whether memkit's own presets and recipes stop at it: a hint stops nothing."""
        return self.severity != "hint"

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        place = f"{self.file}: {self.key}" if self.file else self.key
        shown = "absent" if self.value is None else repr(self.value)
        end = "" if self.fix.endswith("?") else "."
        return f"{place} = {shown}: {self.why}. Fix: {self.fix}{end}"


@dataclass(frozen=True, slots=True)
class Found:
    """Where a rule applies. `why`, `fix` and `severity` stand in place of the rule's own where the case needs it.

    `argument` is true if the key is one of Trainer's arguments rather than one of the DeepSpeed config, or of a setup.
    `value` is looked up unless it is given.
    """

    key: str
    value: Any = ABSENT
    why: str = ""
    fix: str = ""
    argument: bool = False
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One known mistake.

    Attributes:
        id: its name, in kebab-case.
        severity: how bad it is, unless a case says otherwise.
        why: what the library does, in one line.
        fix: what to do, in one line.
        source: file and line of the library that show it.
        find: yields where it applies.
        module: the module of `hf_memkit.checks.rules` that it stands in.
        techniques: names of the techniques that it says when not to use.
    """

    id: str
    severity: Severity
    why: str
    fix: str
    source: str
    find: Callable[[Subject], Iterable[Found]]
    module: str
    techniques: tuple[str, ...] = ()

    def problems(self, subject: Subject) -> list[Problem]:
        return [
            Problem(
                rule=self.id,
                severity=found.severity or self.severity,
                file=subject.arguments_file if found.argument else subject.config_file,
                key=found.key,
                value=subject.stands_at(found.key, found.argument) if found.value is ABSENT else found.value,
                why=found.why or self.why,
                fix=found.fix or self.fix,
            )
            for found in self.find(subject)
        ]


RULES: dict[str, Rule] = {}
"""Every rule by its ID, in the order in which they are applied."""

_Find = Callable[[Subject], Iterable[Found]]


def _rule(
    severity: Severity, needs_config: bool, *, why: str, fix: str, source: str, techniques: tuple[str, ...] = ()
) -> Callable[[_Find], _Find]:
    def add(find: _Find) -> _Find:
        id = find.__name__.replace("_", "-")
        if id in RULES:
            raise ValueError(f"there are two rules {id!r}")

        def guarded(subject: Subject) -> Iterable[Found]:
            return () if subject.config is None and needs_config else find(subject)

        RULES[id] = Rule(id, severity, why, fix, source, guarded, find.__module__.rpartition(".")[2], techniques)
        return find

    return add


class Rules:
    """Decorators that add a function to the registry as a rule of its name: `two_precisions` is `two-precisions`.

    They are named after the rule's severity, and take its `why`, `fix`, `source` and `techniques`.
    """

    def __init__(self, *, needs_config: bool) -> None:
        self.error = partial(_rule, "error", needs_config)
        self.warning = partial(_rule, "warning", needs_config)
        self.hint = partial(_rule, "hint", needs_config)


any_job: Final = Rules(needs_config=False)
"""Of rules that are asked about every job."""

deepspeed: Final = Rules(needs_config=True)
"""Of rules that are asked only about jobs with a DeepSpeed config."""
