"""The errors that memkit raises. The command line prints the message, `memkit: error: …`, and exits with `exit_code`.
Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class MemkitError(Exception):
    """Base of all errors that memkit raises on purpose."""

    exit_code = 1


class InputError(MemkitError):
    """Wrong input. The message names the bad value, its place, and the fix."""

    exit_code = 2


class RecipeError(InputError):
    """An invalid recipe file. `problems` has one line for each problem: file, key, value, allowed values."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(InputError):
    """Training data that cannot be read or used."""


class SettingError(InputError):
    """A setting that does not exist, has the wrong type, or cannot go with another one."""


class ScriptFailed(InputError):
    """A user's script that raised, or ended, before it trained.

    Attributes:
        text: the traceback that Python prints.
        place: the script's line, such as `"train.py, line 5"`, or its name.
        arguments: those that it gave TrainingArguments last; empty: unknown.
        refused_arguments: whether their class raised the error.
    """

    def __init__(
        self, message: str, *, text: str, place: str = "", arguments: Mapping[str, Any] = _NONE,
        refused_arguments: bool = False,
    ) -> None:  # fmt: skip
        self.text, self.place, self.arguments = text.rstrip("\n"), place, dict(arguments)
        self.refused_arguments = refused_arguments
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes too: by default an exception is restored from its message alone."""
        return partial(ScriptFailed, **vars(self)), (str(self),)


class NoKernel(InputError, NotImplementedError):
    """An operation that a GPU does not support: for the dtype of its tensors, or at all. Libraries that fall back on
    torch's own error here fall back on this one too."""


class Unmodelled(InputError):
    """A setting or operation whose memory a trace cannot show. The message names it and the reason."""


class DoesNotFitError(MemkitError):
    """The job needs more GPU memory, RAM or disk than this machine has."""


class MissingPackageError(MemkitError):
    """An optional package is needed. The message names the command that installs it."""


class RunError(MemkitError):
    """A run that started and could not continue."""


class TraceFailed(RunError):
    """A training that could not be traced.

    Attributes:
        kind: name of the exception in the child process, or the signal that ended it (`"SIGABRT"`).
        refused: whether memkit refused it, with a message for the user.
        details: end of the child's traceback.
    """

    def __init__(self, message: str, *, kind: str, refused: bool = False, details: str = "") -> None:
        self.kind, self.refused, self.details = kind, refused, details
        super().__init__(message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'resident'?"` if a name in `known` is close to `word`; otherwise an empty string."""
    known = list(known)
    extended = [name for name in known if word and name.startswith(word)]
    close = extended if len(extended) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
