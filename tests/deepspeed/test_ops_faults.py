"""Building DeepSpeed's operators where something is missing or was killed: one clear line, or it recovers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.cpp_extension  # noqa: F401 - first: after some other tests its setuptools was seen to fail

from hf_memkit.common.errors import MissingPackageError, RunError
from hf_memkit.deepspeed import ops
from hf_memkit.deepspeed.ops import extension_roots, stale_locks


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine's operators, which has none yet. What a build sets is taken back."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return ops.extensions_folder(cpu=True)


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Makes `line` of shell the C++ compiler."""
    path = tmp_path / "c++"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_no_compiler(operators: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingPackageError, match=r"compile cpu_adam; missing: g\+\+.* apt-get install g\+\+"):
        ops.build(("cpu_adam",), pytest.fail, cpu=True)
    assert not (operators / "cpu_adam").exists()


def test_no_header_of_libaio(operators: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.missing_tools(("async_io",), cpu=True) == [], "this test needs libaio-dev, to hide it"
    compiler(tmp_path, monkeypatch, 'exec g++ -nostdinc "$@"')
    with pytest.raises(MissingPackageError, match=r"missing: libaio-dev; run: sudo apt-get install libaio-dev"):
        ops.build(("pin_memory", "async_io"), pytest.fail, cpu=True)
    assert not (operators / "pin_memory").exists(), "it began to build what it cannot finish"


def test_a_compiler_that_fails_is_quoted(operators: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})  # an operator that this process has is not built again
    compiler(tmp_path, monkeypatch, 'case "$*" in *-c*) echo "fatal: out of paper" >&2; exit 1;; esac; exec g++ "$@"')
    messages: list[str] = []
    with pytest.raises(RunError, match=r"deepspeed_shm_comm does not build: .*out of paper.*; .*memkit doctor$"):
        ops.build(("deepspeed_shm_comm",), messages.append, cpu=True)
    assert messages[0].startswith("Building DeepSpeed's deepspeed_shm_comm")
    assert stale_locks([operators]) == [], "the next build would wait for ever"


INTERRUPT_NINJA = """case "$*" in *-c*)
  process=$PPID
  while [ "$(cat /proc/$process/comm)" != ninja ]; do process=$(cut -d' ' -f4 /proc/$process/stat); done
  kill -INT $process; sleep 60;;
esac
exec g++ "$@\""""


def test_ctrl_c_in_a_build_is_no_broken_compiler(
    operators: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ninja alone receives it: this process may ignore it, as in the background of a shell. All builds are
    announced before the first."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    compiler(tmp_path, monkeypatch, INTERRUPT_NINJA)
    messages: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        ops.build(("deepspeed_shm_comm", "cpu_adam"), messages.append, cpu=True)
    assert len(messages) == 1 and messages[0].startswith("Building DeepSpeed's deepspeed_shm_comm and cpu_adam")
    assert stale_locks([operators]) == [], "the next build would wait for ever"


def test_the_lock_of_a_killed_build_is_cleared_and_that_of_a_live_one_kept(operators: Path) -> None:
    for name in ("cpu_adam", "async_io"):
        (operators / name).mkdir(parents=True)
        (operators / name / f"{name}.so").touch()
        (operators / name / "lock").touch()
    live = os.open(operators / "async_io" / "lock", os.O_RDONLY)  # as torch keeps it open while it builds
    try:
        assert stale_locks(extension_roots()[:1]) == [operators / "cpu_adam" / "lock"]
        ops.build(("cpu_adam", "async_io"), pytest.fail, cpu=True)
        assert not (operators / "cpu_adam" / "lock").exists()
        assert (operators / "async_io" / "lock").exists()
    finally:
        os.close(live)
    ops.build(("cpu_adam", "async_io"), pytest.fail, cpu=True)
    assert not (operators / "async_io" / "lock").exists()


@pytest.mark.operators
def test_the_engine_loads_what_was_built_and_builds_nothing() -> None:
    ops.build(("cpu_adam",), print, cpu=True)
    built = ops.extensions_folder(cpu=True) / "cpu_adam" / "cpu_adam.so"
    before = built.stat().st_mtime_ns
    loads = "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder; CPUAdamBuilder().load()"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(ops.extensions_folder(cpu=True)), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", loads], env=environment, check=True, capture_output=True)
    assert built.stat().st_mtime_ns == before
