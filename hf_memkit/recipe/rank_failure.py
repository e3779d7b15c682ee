"""Which rank's failure ended a run, and that in one line. In: what torchrun knows of each rank. Out: one error.

A rank that memkit started writes its error into torchrun's error file
(`hf_memkit.recipe.ranks.errors_to_launcher`); one that was killed says nothing.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit import errors
from hf_memkit.errors import MemkitError, RunError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["only_stopped", "what_failed"]

_TOGETHER_S: Final = 10
"""Failures within so many seconds have one cause. torchrun ends the other ranks with SIGTERM, and with SIGKILL 30
seconds later (torch:distributed/run.py, --shutdown-timeout)."""

_LOST_PEER: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_WHAT_IS_LEFT: Final = "its records and the checkpoints made before are whole: --resume goes on from them"


def what_failed(failures: Mapping[int, ProcessFailure], logs: Path) -> MemkitError:
    """The cause of these failures (rank → failure), as an error with one line to show.

    When one rank dies, the others lose their connection to it, and torchrun ends those that go on: of all that failed
    at about the same time the cause is the rank that says most about itself. An error that is none of memkit's own is
    printed with its traceback.

    Args:
        failures: by global rank, of this machine.
        logs: torchrun's `--log-dir`.
    """
    first = min(failure.timestamp for failure in failures.values())
    together = {rank: failure for rank, failure in failures.items() if failure.timestamp <= first + _TOGETHER_S}
    rank, failure = min(together.items(), key=lambda item: (_weight(item[1]), item[1].timestamp, item[0]))
    message = _recorded(failure)
    if message is None:
        how = _how_it_ended(failure, logs)
        return RunError(f"rank {rank} (process {failure.pid}) {how}; {_WHAT_IS_LEFT}")
    name, _, text = message["message"].partition(": ")
    known = getattr(errors, name, None)
    if known is not None:
        told = MemkitError(text if rank == 0 else f"rank {rank}: {text}")
        told.exit_code = known.exit_code
        return told
    if _lost_peer(failure):
        return RunError(f"rank {rank} lost the connection to another process, which has ended; {_WHAT_IS_LEFT}")
    print(message["extraInfo"]["py_callstack"], file=sys.stderr)
    return RunError(f"rank {rank}: {name}: {text.splitlines()[0] if text else 'no message'}")


def only_stopped(failures: Mapping[int, ProcessFailure]) -> bool:
    """Whether these are what is left of a run that a signal ended before there was a step to finish: no rank has an
    error of its own, and none was killed by anybody else."""
    return all(
        _lost_peer(failure)
        or (_recorded(failure) is None and failure.exitcode in (1, -signal.SIGINT, -signal.SIGTERM))
        for failure in failures.values()
    )


def _recorded(failure: ProcessFailure) -> dict[str, Any] | None:
    """What the rank said of itself: `{"message": "NAME: text", "extraInfo": {"py_callstack", …}}`, or None."""
    message = failure.error_file_data.get("message")
    return message if isinstance(message, dict) else None


def _weight(failure: ProcessFailure) -> int:
    """How likely this failure is only the consequence of another one; 0 is the cause."""
    if failure.exitcode == -signal.SIGTERM:
        return 4
    if _recorded(failure) is None:
        return 0 if failure.exitcode < 0 else 2
    return 3 if _lost_peer(failure) else 1


def _lost_peer(failure: ProcessFailure) -> bool:
    message = _recorded(failure)
    return message is not None and any(text in message["message"] for text in _LOST_PEER)


def _how_it_ended(failure: ProcessFailure, logs: Path) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL; the kernel does so where RAM runs out)"
    how = f"died of {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
    # What a rank other than the first of its machine prints goes to a file.
    for log in logs.rglob(f"{failure.local_rank}/stderr.log"):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            how += f", its last words: {lines[-1][:300]}"
    return how
