"""DeepSpeed's C++ operators: which a setup needs, and building them visibly.

DeepSpeed silently compiles an operator on first use, for up to some minutes, and a killed compilation leaves a lock on
which the next one waits forever. Here operators are built before the engine starts, one line each, in a separate
folder for every version of DeepSpeed and torch and every environment, which torch's folders do not distinguish.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final

from hf_memkit.common.errors import MissingPackageError, RunError

_BUILDERS: Final = {
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
    "quantizer": "QuantizerBuilder",
}
"""Name of the operator → name of its builder (deepspeed:op_builder/)."""


def extensions_folder(*, cpu: bool) -> Path:
    """Folder for operators of this DeepSpeed and torch, next to its other extensions; CPU and GPU flags differ."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    key = f"deepspeed-{version('deepspeed')}-torch-{version('torch')}-{python}-{platform.machine()}"
    # Build commands contain the environment's folders: another environment would silently build everything again.
    prefix = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    key += f"-{'cpu' if cpu else 'cuda'}-{prefix}"
    return root if root.name == key else root / key


def needed(config: Mapping[str, Any], *, cpu: bool) -> tuple[str, ...]:
    """The operators that a DeepSpeed config needs. On a CPU the communication backend is one of them."""
    zero = config.get("zero_optimization", {})
    devices = {zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")}
    names = ["deepspeed_shm_comm"] if cpu else []
    if devices & {"cpu", "nvme"}:
        names.append("cpu_adam")
    if "nvme" in devices:
        names += ["pin_memory", "async_io"]  # async_io loads the other one first
    quantized = (zero.get(f"zero_quantized_{part}") for part in ("weights", "nontrainable_weights", "gradients"))
    if any(value is True for value in quantized):
        names.append("quantizer")
    return tuple(names)


def missing_tools(names: tuple[str, ...], *, cpu: bool) -> list[str]:
    """Debian packages that are missing to build these operators. On a GPU async_io needs CUDA's compiler."""
    packages = []
    compiler = os.environ.get("CXX", "g++")
    if names and shutil.which(compiler) is None:
        packages.append("g++")
    if names and not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        packages.append("python3-dev")
    if "async_io" in names and not packages:
        command = [compiler, "-E", "-x", "c++", "-"]
        if subprocess.run(command, input="#include <libaio.h>\n", text=True, capture_output=True).returncode != 0:
            packages.append("libaio-dev")
    if {"async_io", "quantizer"} & set(names) and not cpu:
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
            packages.append("nvidia-cuda-toolkit")
    return packages


def build(names: tuple[str, ...], say: Callable[[str], None], *, cpu: bool) -> None:
    """Build missing operators, with messages; sets TORCH_EXTENSIONS_DIR and PATH for this process.

    Raises:
        MissingPackageError: build tools are missing; names their packages.
        RunError: a build failed; ends with the compiler's last lines.
        KeyboardInterrupt: Ctrl-C stopped a build. The next one starts it again.
    """
    folder = extensions_folder(cpu=cpu)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    # ninja comes with DeepSpeed as a Python package: its program lies next to the interpreter, maybe not on PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    to_build = tuple(name for name in names if not (folder / name / f"{name}.so").exists())
    packages = missing_tools(to_build, cpu=cpu)
    if packages:
        raise MissingPackageError(
            f"DeepSpeed must compile {', '.join(to_build)}; missing: {', '.join(packages)}; run: "
            f"sudo apt-get install {' '.join(packages)}"
        )
    if to_build:
        operators = " and ".join(to_build)
        say(f"Building DeepSpeed's {operators}, the first time only (measured on 2 cores: 2 to 6 minutes each) …")
    with _locked(folder, say):
        for name in to_build:
            if (folder / name / f"{name}.so").exists():
                continue  # another process built it while this one waited
            started = time.monotonic()
            _build_one(name)
            say(f"Built {name} in {time.monotonic() - started:.0f} s.")


@contextlib.contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the folder for this process, and remove locks of killed builds."""
    with (folder / "memkit.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another memkit that is building DeepSpeed's operators …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for lock_file in stale_locks([folder]):
            lock_file.unlink(missing_ok=True)
        yield


_NINJA_INTERRUPTED: Final = "interrupted by user"
"""ninja receives Ctrl-C too, and torch reports its end as a failed build."""


def _build_one(name: str) -> None:
    with tempfile.TemporaryFile("w+") as output:
        try:
            with _output_to(output):
                from deepspeed.accelerator import get_accelerator

                # With DeepSpeed's flags: with others, the engine would silently build it again.
                get_accelerator().create_op_builder(_BUILDERS[name]).load(verbose=False)
        except Exception as error:
            output.seek(0)
            lines = [line for line in f"{output.read()}\n{error}".splitlines() if line.strip()]
            if any(_NINJA_INTERRUPTED in line for line in lines):
                raise KeyboardInterrupt from error
            raise RunError(
                f"DeepSpeed's {name} does not build: {' | '.join(lines[-5:])[-800:]}; check what is missing: "
                f"memkit doctor"
            ) from error


@contextlib.contextmanager
def _output_to(file: IO[str]) -> Iterator[None]:
    """Redirect the output of this process and its compilers to `file`. By file descriptor: DeepSpeed's test for libaio
    duplicates `sys.stdout.fileno()`, and reports a missing library if that fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def extension_roots() -> tuple[Path, ...]:
    """Folders in which torch builds extensions for this user: TORCH_EXTENSIONS_DIR if set, and the default."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    default = Path.home() / ".cache" / "torch_extensions"
    return (Path(given), default) if given and Path(given) != default else (default,)


def stale_locks(roots: Iterable[Path]) -> list[Path]:
    """Every build lock under `roots`, at most two folders deep as torch and memkit make them, that no process of this
    machine holds. torch makes `<folder>/<operator>/lock` and keeps it open during a build (torch:
    utils/cpp_extension.py, FileBaton); a killed build leaves it behind, and the next one silently waits on it forever.
    """
    locks = {lock for root in roots for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)}
    return sorted(lock for lock in locks if not is_held(lock))


def is_held(lock: Path) -> bool:
    """Whether a process has the lock file open. Processes of other users are invisible and do not count."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return False
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            opened = descriptor.stat()
        except OSError:  # the process has ended, or is another user's
            continue
        if (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
