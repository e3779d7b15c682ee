"""Which rank's failure is the cause, told in one line: with torchrun's own records of failed processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from hf_memkit.common.errors import InputError, MemkitError, RunError
from hf_memkit.run.launch import all_stopped, cause_of_failure

LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4711")
Fail = Callable[..., ProcessFailure]


@pytest.fixture
def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """A rank that ended with this exit code, having recorded `error` as a rank does; in torchrun's folders."""

    def made(rank: int, exitcode: int, error: Exception | None = None, stderr: str = "") -> ProcessFailure:
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(stderr)
        if error is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            try:
                raise error
            except Exception as raised:
                ErrorHandler().record_exception(raised)
        return ProcessFailure(
            local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(folder / "error.json")
        )

    return made


def reported(tmp_path: Path, *failures: ProcessFailure) -> MemkitError:
    return cause_of_failure({failure.local_rank: failure for failure in failures}, tmp_path)


def test_a_killed_rank_is_the_cause_and_not_those_that_lost_it(fail: Fail, tmp_path: Path) -> None:
    error = reported(tmp_path, fail(0, 1, LOST), fail(1, -signal.SIGKILL), fail(2, -signal.SIGTERM))
    assert str(error).startswith("rank 1 (process 101) was killed (SIGKILL") and "another --variant" in str(error)
    assert error.exit_code == 1


def test_an_abort_comes_with_its_last_words(fail: Fail, tmp_path: Path) -> None:
    last = "Loading\nterminate called without an active exception\n\n"
    error = reported(tmp_path, fail(0, -signal.SIGTERM), fail(1, -signal.SIGABRT, stderr=last))
    assert "died of SIGABRT, last line: terminate called without an active exception;" in str(error)


def test_memkit_s_own_errors_keep_their_text_and_exit_code(fail: Fail, tmp_path: Path) -> None:
    error = reported(tmp_path, fail(0, 2, InputError("--output x: is a file\nsecond line")), fail(1, -signal.SIGTERM))
    assert (str(error), error.exit_code) == ("--output x: is a file\nsecond line", 2)
    error = reported(tmp_path / "again", fail(2, 1, LOST), fail(3, 1, RunError("out of memory in step 3")))
    assert (str(error), error.exit_code) == ("rank 3: out of memory in step 3", 1)


def test_a_bug_keeps_one_traceback(fail: Fail, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = reported(tmp_path, fail(0, 1, LOST), fail(1, 1, KeyError("loss")))
    assert str(error) == "rank 1: KeyError: 'loss'"
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1 and "test_rank_failure.py" in printed and "Connection closed" not in printed


def test_only_a_lost_connection_is_left(fail: Fail, tmp_path: Path) -> None:
    assert "lost the connection to another process" in str(
        reported(tmp_path, fail(0, 1, LOST), fail(1, -signal.SIGTERM))
    )


def test_a_process_stopped_by_a_signal_is_no_failure(fail: Fail) -> None:
    stopped = {0: fail(0, 1), 1: fail(1, -signal.SIGTERM), 2: fail(2, 1, LOST)}
    assert all_stopped(stopped)
    assert not all_stopped({**stopped, 3: fail(3, -signal.SIGKILL)})
    assert not all_stopped({**stopped, 4: fail(4, 1, RunError("out of memory"))})
