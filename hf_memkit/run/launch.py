"""Start the processes of one machine through torchrun, forward signals to them, and report the cause of a failure.

torchrun runs inside this process (`torch.distributed.run.run`, as in accelerate's launcher), so that the failed rank
and its error are data instead of printed tracebacks. The ranks run this same command line; their environment shows
that a launcher started them (`hf_memkit.run.ranks`). A rank started by memkit writes its error into torchrun's error
file (`hf_memkit.run.ranks.errors_to_launcher`); a killed one writes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import psutil

from hf_memkit.common import boot, errors
from hf_memkit.common.errors import InputError, MemkitError, RunError
from hf_memkit.run.ranks import FOLDER_VARIABLE, INTACT, LAUNCHER_VARIABLE, LaunchLayout, exit_code_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def torchrun_options(place: LaunchLayout) -> list[str]:
    """Options of `torchrun` for these processes on this machine."""
    processes = [f"--nproc-per-node={place.gpus}"]
    if place.nodes == 1:
        return ["--standalone", *processes]
    address = [f"--master-addr={place.master_addr}", f"--master-port={place.master_port}"]
    return [f"--nnodes={place.nodes}", f"--node-rank={place.node_rank}", *address, *processes]


def launch(arguments: Sequence[str], layout: LaunchLayout) -> int:
    """Run `memkit ARGUMENTS` (with `-m` first: a module of memkit) in `layout.gpus` processes on this machine, and
    return the exit code. Raises MemkitError if a rank failed: it names the rank and the cause.

    SIGINT and SIGTERM make the ranks stop after their step, with a checkpoint; a second signal ends them at once.
    """
    import torch.distributed.run
    from accelerate.utils.environment import check_cuda_p2p_ib_support
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from hf_memkit.presets.sharing import threads_per_process

    torchrun: Any = torch.distributed.run
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(len(os.sched_getaffinity(0)), layout.gpus)))
    # Older drivers lack peer access for the RTX 40 series. accelerate refuses to start without it, unless its own
    # launcher started it (accelerate:state.py, utils/launch.py).
    if not check_cuda_p2p_ib_support():
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    with tempfile.TemporaryDirectory(prefix="memkit-launch-") as folder, _signals_to_ranks() as stopping:
        os.environ |= {FOLDER_VARIABLE: folder, LAUNCHER_VARIABLE: str(os.getpid())}
        options = torchrun_options(layout)
        # The first rank of each machine prints; output of the other ranks goes to files.
        redirects = ",".join(f"{rank}:{3 if rank else 0}" for rank in range(layout.gpus))
        options += [f"--redirects={redirects}", f"--log-dir={folder}"]
        # SIGINT and SIGTERM are handled here: torchrun would give the ranks 30 seconds, too few to save a large model.
        options += ["--signals-to-handle=SIGHUP,SIGQUIT", boot.BOOT, *arguments]
        try:
            with _quiet_torchrun():
                torchrun.run(torchrun.parse_args(options))
        except ChildFailedError as error:
            code = _code_of_ranks(Path(folder), stopping)
            if code is None and stopping and all_stopped(error.failures):
                raise KeyboardInterrupt from None
            failed = cause_of_failure(error.failures, Path(folder))
            if failed.exit_code != InputError.exit_code:
                print(file=sys.stderr)  # a progress bar has left its line open
            if code is None:
                raise failed from None
            print(f"memkit: warning: after the run had ended and everything was saved: {failed}", file=sys.stderr)
            return code
        except SignalException:
            raise KeyboardInterrupt from None
        finally:
            del os.environ[FOLDER_VARIABLE], os.environ[LAUNCHER_VARIABLE]
        return _code_of_ranks(Path(folder), stopping) or 0


def _code_of_ranks(folder: Path, stopping: Sequence[int]) -> int | None:
    """The exit code that the ranks left. They received each signal as SIGINT: the code is that of the first one."""
    code = exit_code_of(folder)
    return 128 + stopping[0] if stopping and code == 128 + signal.SIGINT else code


@contextlib.contextmanager
def _signals_to_ranks() -> Iterator[list[int]]:
    """Forward SIGINT and SIGTERM to the ranks as SIGINT; yields the list of received signals."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        if received or not ranks:
            raise KeyboardInterrupt(*[INTACT] * bool(received))  # torchrun then ends the ranks at once
        received.append(number)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Suppress torchrun's log of failures: they are returned as an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


_TOGETHER_S: Final = 10
"""Failures within these seconds have one cause. torchrun ends the other ranks with SIGTERM, and with SIGKILL 30
seconds later (torch:distributed/run.py, --shutdown-timeout)."""

_LOST_PEER: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_WHAT_IS_LEFT: Final = "records and earlier checkpoints are intact; continue with --resume"
_AFTER_A_KILL: Final = (
    "Give the machine more RAM before --resume, or start again with fewer --gpus or another --variant. If RAM did not "
    "run out (sudo dmesg -T | grep -i 'killed process'), continue with --resume"
)


def cause_of_failure(failures: Mapping[int, ProcessFailure], logs: Path) -> MemkitError:
    """The cause of these failures as an error with one line to show.

    When one rank dies, the others lose their connection to it, and torchrun ends the rest. Of all failures at about
    the same time the cause is the one that is most specific. The traceback of an error outside memkit is printed.

    Args:
        failures: global rank → failure.
        logs: torchrun's `--log-dir`.
    """
    first = min(failure.timestamp for failure in failures.values())
    together = {rank: failure for rank, failure in failures.items() if failure.timestamp <= first + _TOGETHER_S}
    rank, failure = min(together.items(), key=lambda item: (_consequence_order(item[1]), item[1].timestamp, item[0]))
    message = _recorded(failure)
    if message is None:
        process = f"rank {rank} (process {failure.pid})"
        if failure.exitcode == -signal.SIGKILL:
            killed = "was killed (SIGKILL: typically by the kernel, because RAM ran out)"
            return RunError(f"{process} {killed}. {_AFTER_A_KILL}")
        code = failure.exitcode
        ending = f"died of {failure.signal_name()}" if code < 0 else f"ended with exit code {code}"
        # The output of all but the first rank of a machine is in files.
        for log in logs.rglob(f"{failure.local_rank}/stderr.log"):
            if lines := [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]:
                ending += f", last line: {lines[-1][:300]}"
        return RunError(f"{process} {ending}; {_WHAT_IS_LEFT}")
    name, _, text = message["message"].partition(": ")
    known = getattr(errors, name, None)
    if known is not None:
        error = MemkitError(text if rank == 0 else f"rank {rank}: {text}")
        error.exit_code = known.exit_code
        return error
    if _lost_peer(failure):
        return RunError(f"rank {rank} lost the connection to another process, which ended; {_WHAT_IS_LEFT}")
    print(message["extraInfo"]["py_callstack"], file=sys.stderr)
    return RunError(f"rank {rank}: {name}: {text.splitlines()[0] if text else 'no message'}")


def all_stopped(failures: Mapping[int, ProcessFailure]) -> bool:
    """Whether all ranks were stopped by a signal before the first step, without an error recorded by any of them."""
    return all(
        _lost_peer(failure)
        or (_recorded(failure) is None and failure.exitcode in (1, -signal.SIGINT, -signal.SIGTERM))
        for failure in failures.values()
    )


def _recorded(failure: ProcessFailure) -> dict[str, Any] | None:
    """The error that the rank recorded: `{"message": "NAME: text", "extraInfo": {"py_callstack", …}}`, or None."""
    message = failure.error_file_data.get("message")
    return message if isinstance(message, dict) else None


def _consequence_order(failure: ProcessFailure) -> int:
    """How likely this failure is a consequence of another one; 0: the cause."""
    if failure.exitcode == -signal.SIGTERM:
        return 4
    if _recorded(failure) is None:
        return 0 if failure.exitcode < 0 else 2
    return 3 if _lost_peer(failure) else 1


def _lost_peer(failure: ProcessFailure) -> bool:
    message = _recorded(failure)
    return message is not None and any(text in message["message"] for text in _LOST_PEER)


def launch_command(gpus: int, *arguments: str) -> tuple[str, ...]:
    """Arguments of `boot.command` for `launch` in a separate process."""
    return "-m", "hf_memkit.run.launch", str(gpus), *arguments


def _main(gpus: str, *arguments: str) -> int:
    try:
        return launch(arguments, LaunchLayout(int(gpus)))
    except MemkitError as error:
        print(f"memkit: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 1


if __name__ == "__main__":
    raise SystemExit(_main(*sys.argv[1:]))
