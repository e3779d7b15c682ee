"""How a training ended, from its last records and this machine.

A file without an `end` record belongs to a training that runs or was killed. The `run` record names its machine, boot
and process: if they are this machine's, the process can be looked up. A control group counts the processes that the
kernel killed because RAM ran out (Linux's cgroup-v2.rst, `memory.events`: `oom_kill`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.terms import at
from hf_memkit.measuring.memory.cgroup import boot_id, oom_kills, process_start_ticks
from hf_memkit.measuring.record_types import HostFacts, RunRecord
from hf_memkit.measuring.report.rank_reader import Attempt

EndingKind = Literal["finished", "interrupted", "failed", "out of memory", "running", "killed", "unknown"]

_NEARLY_GONE: Final = 0.03
"""Share of RAM that is free on a full host: the kernel frees caches before it kills."""
_SAME_START_S: Final = 2.0
"""Seconds by which two readings of a process's start may differ, where no ticks are known."""
_SILENT_S: Final = 600.0
_SILENT_STEPS: Final = 20
"""A process without a record for both ten minutes and the time of twenty steps may hang, or be an idle notebook."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a training ended.

    Attributes:
        kind: "killed" is any end that was not recorded: a signal, the scheduler, the kernel, a power cut.
        why: a sentence with the evidence.
        step: the last finished step.
    """

    kind: EndingKind
    why: str
    cause: Literal["host memory"] | None = None
    step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _is_alive(pid: int, host: HostFacts) -> bool:
    """Whether the process of the records runs: it has not ended, also not as a zombie, and it is the one that started
    when the records say. Ticks since the boot show that also after the clock was set."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        recorded, ticks = host.get("process_start_ticks"), process_start_ticks(pid)
        if recorded is not None and ticks is not None:
            return recorded == ticks
        started = host.get("process_started")
        return started is None or abs(float(process.create_time()) - started) <= _SAME_START_S
    except (psutil.Error, ValueError, OverflowError):
        return False


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, now."""

    hostname: str = field(default_factory=socket.gethostname)
    boot_id: str | None = field(default_factory=boot_id)
    now_s: float = field(default_factory=time.time)
    count_oom_kills: Callable[[], int | None] = oom_kills


def judge_ending(attempt: Attempt, here: Here) -> Ending:
    """How the attempt ended. `here`: this machine."""
    step = attempt.last_step
    if attempt.end is not None:
        return _judge_recorded(attempt, attempt.end, step)
    host = attempt.run.get("host", {})
    pid = host.get("pid")
    if not host.get("hostname") or pid is None:
        return _judge_unknown(attempt, "the records do not name its machine and process")
    if host["hostname"] != here.hostname:
        where = f"it ran on another machine ({printable(host['hostname'], 60)})"
        return _judge_unknown(attempt, f"{where}: run memkit report there to see whether it is still running")
    if host.get("boot_id") != here.boot_id:
        return _judge_killed(attempt, host, None, f"{printable(here.hostname, 60)} has rebooted since the last record")
    if _is_alive(pid, host):
        return _judge_running(attempt, pid, here.now_s)
    return _judge_killed(attempt, host, here, f"its process {pid} is gone")


def judge_replaced(attempt: Attempt, following: RunRecord, here: Here) -> Ending:
    """How a start ended that was followed by another one; it may still run in another process. An error that
    `auto_find_batch_size` caught is recorded only in the next start's `run` record (`after_oom`)."""
    if "after_oom" in following and not attempt.ooms:
        return Ending("out of memory", _ran_out(following["after_oom"]), step=attempt.last_step)
    if attempt.end is not None:
        return _judge_recorded(attempt, attempt.end, attempt.last_step)
    if attempt.ooms:
        return _out_of_memory(attempt)
    if attempt.run.get("host", {}).get("pid") != following.get("host", {}).get("pid"):
        now = judge_ending(attempt, here)
        if now.kind == "running":
            return now
    return Ending("killed", f"ended without recording an exit, {_after(attempt)}", step=attempt.last_step)


def _after(attempt: Attempt) -> str:
    """The last step, and why later records are missing."""
    step = attempt.last_step
    after = f"after step {step}" if step is not None else "before its first step ended"
    return after + (f" or later: its records end there ({why})" if (why := _cut(attempt)) else "")


def _cut(attempt: Attempt) -> str | None:
    """Why no record could be written after the last one; None if one could."""
    lost = attempt.lost
    if lost is None:
        return None
    # By the clock; within its millisecond by the step.
    if (attempt.last.get("time", 0.0), attempt.last_step or 0) > (lost.get("time", 0.0), (lost.get("step") or 1) - 1):
        return None
    return printable(lost.get("write_error") or "unknown reason", 80)


def _judge_recorded(attempt: Attempt, end: Mapping[str, Any], recorded: int | None) -> Ending:
    """The ending in the `end` record, with a note if other records end earlier."""
    ended = _judge_end(attempt, end, recorded)
    if (ended.step or 0) <= (recorded or 0):
        return ended
    since = f"after step {recorded}" if recorded is not None else "before the first step"
    why = printable(end.get("write_error") or "they could not be written", 80)
    return replace(ended, why=f"{ended.why.rstrip('.')}. Its records end early, {since}: {why}")


def _judge_end(attempt: Attempt, end: Mapping[str, Any], step: int | None) -> Ending:
    status = end.get("status")
    if end.get("lost_records"):
        step = end.get("step") or step
    after = f" after step {step}" if step is not None else " before its first step ended"
    if status == "finished":
        return Ending("finished", f"finished{after if step is not None else ' without training a step'}", step=step)
    error = printable(end.get("error_type") or "", 80)
    message = printable(end.get("error") or "", 160).removeprefix(f"{error}:").strip()
    if status == "interrupted":
        by = " by Ctrl-C (SIGINT)" if error == "KeyboardInterrupt" else ""
        rest = ": ".join(part for part in ("" if by else error, message) if part)
        return Ending("interrupted", f"interrupted{by}{after}" + (f": {rest}" if rest else ""), step=step)
    if attempt.ooms:
        return _out_of_memory(attempt)
    if "outofmemory" in error.lower() or "out of memory" in message.lower():
        why = ": ".join(filter(None, (f"ran out of memory{after}", error, message)))
        return Ending("out of memory", why, step=step)
    why = f"failed{after}{f' with {error}' if error else ''}"
    return Ending("failed", f"{why}: {message}" if message else why, step=step)


def _out_of_memory(attempt: Attempt) -> Ending:
    return Ending("out of memory", _ran_out(attempt.ooms[-1]), step=attempt.last_step)


def _ran_out(oom: Mapping[str, Any]) -> str:
    return f"ran out of memory {at(printable(oom.get('phase') or '', 20), oom.get('step'))}".rstrip()


def _judge_unknown(attempt: Attempt, why: str) -> Ending:
    if attempt.ooms and attempt.last is attempt.ooms[-1]:
        return _out_of_memory(attempt)
    cut = f" {_after(attempt)}" if _cut(attempt) else ""
    return Ending("unknown", f"no exit was recorded{cut}; {why}", step=attempt.last_step)


def _judge_running(attempt: Attempt, pid: int, now_s: float) -> Ending:
    step = attempt.last_step
    done = f"step {step} is done" if step is not None else "its first step is in progress"
    why = f"running (process {pid}); {done}"

    silent_s = now_s - attempt.last.get("time", now_s)
    step_s = attempt.last.get("step_time_ms", 0.0) / 1000
    if (cut := _cut(attempt)) is not None:
        since = f"step {step}" if step is not None else "its start"
        why = f"running (process {pid}); since {since} its records cannot be written: {cut}"
    elif silent_s > max(_SILENT_S, _SILENT_STEPS * step_s):
        why = (
            f"process {pid} is alive but has written nothing for {silent_s / 60:.0f} min: it hangs, is in a long "
            f"operation, or is a notebook that no longer trains; {done}"
        )
    return Ending("running", why, step=step)


def _judge_killed(attempt: Attempt, host: HostFacts, here: Here | None, how: str) -> Ending:
    """The ending without an `end` record and without a process. `here`: None after a reboot."""
    if attempt.ooms and attempt.last is attempt.ooms[-1]:
        return _out_of_memory(attempt)
    step = attempt.last_step
    stopped = f"ended without recording an exit, {_after(attempt)}; {how}"

    kills_before = host.get("oom_kills")
    kills_now = here.count_oom_kills() if here is not None else None
    if kills_before is not None and kills_now is not None and kills_now > kills_before:
        killed = kills_now - kills_before
        count = "a process" if killed == 1 else f"{killed} processes"
        why = f"{stopped}. Since it started, host RAM ran out and the kernel killed {count} of this control group"
        return Ending("killed", f"{why}: most likely this one", "host memory", step)
    if (short := _nearly_gone(attempt)) is not None:
        why = f"{stopped}. Host RAM was almost full at the last record ({short}): the kernel's OOM killer is likely"
        return Ending("killed", why, "host memory", step)

    left_gib = attempt.last.get("host_available_gib")
    enough = f" Host RAM was not short at the last record ({left_gib:.1f} GiB left)." if left_gib is not None else ""
    why = f"{stopped}.{enough} Cause unknown: a signal, the scheduler, a crash or a power cut"
    return Ending("killed", why, None, step)


def _nearly_gone(attempt: Attempt) -> str | None:
    """The free RAM at the last record, as text; None if there was enough."""
    hardware = attempt.run.get("hardware", {})
    total = min(filter(None, (hardware.get("ram_limit_gib"), hardware.get("ram_gib"))), default=None)
    if total is None:
        return None
    left = attempt.last.get("host_available_gib")
    rss = attempt.last.get("host_rss_gib")
    if left is not None and left <= _NEARLY_GONE * total:
        return f"{left:.2f} of {total:.1f} GiB left"
    if rss is not None and rss >= (1 - _NEARLY_GONE) * total:
        return f"{rss:.2f} of {total:.1f} GiB used by this process alone"
    return None
