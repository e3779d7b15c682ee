"""What happens to a ZeRO-Infinity run when its disk, its libraries or its compiler fail: one clear line, nothing half
done, and checkpoints from before that still load. The real command and the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.errors import MissingPackageError
from hf_memkit.common.units import MIB
from hf_memkit.deepspeed import ops
from hf_memkit.deepspeed.aio import measure
from tests.conftest import ROOT, Memkit
from tests.deepspeed.test_nvme import in_mount_namespace

pytestmark = pytest.mark.operators

INFINITY = ("recipe", "gpt2-on-16gb", "--variant", "infinity", "--output", "run", "--data", "corpus.txt")

ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
    "OMP_WAIT_POLICY": "PASSIVE", "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    """Built once, where every run looks for them."""
    code = (
        "from hf_memkit.deepspeed import ops; ops.build(('deepspeed_shm_comm', 'cpu_adam', 'pin_memory', 'async_io'), "
    )
    built = subprocess.run([sys.executable, "-c", code + "print, cpu=True)"], env=ENVIRONMENT, cwd=ROOT)
    assert built.returncode == 0


@pytest.fixture(autouse=True)
def _corpus(tmp_path: Path) -> None:
    """Little text, so that no time goes into training a tokenizer."""
    (tmp_path / "corpus.txt").write_text("\n".join(f"{n} foxes jump over {n % 7} lazy dogs." for n in range(4000)))


def python(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, **{"env": ENVIRONMENT, "capture_output": True, "text": True, **options})


SEVERAL_STARTS = """
import contextlib, io, json, os, sys
from hf_memkit.cli import main
for arguments, environment in json.loads(sys.argv[1]):
    before, errors = dict(os.environ), io.StringIO()
    os.environ.update(environment)
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    os.environ.clear()
    os.environ.update(before)
    print(json.dumps([code, [line for line in errors.getvalue().splitlines() if line.startswith("memkit:")]]))
"""


def test_what_cannot_start_says_why_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    hidden = tmp_path / "c++"
    hidden.write_text('#!/bin/sh\nexec g++ -nostdinc "$@"\n')
    hidden.chmod(0o755)
    none_built = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "none-built")}
    cases: list[tuple[list[str], dict[str, str], int, str]] = [
        (["--nvme-path", "a-file"], {}, 2, "--nvme-path a-file/run: cannot be made (Not a directory); give another"),
        (["--nvme-path", "/proc/self"], {}, 2, "--nvme-path /proc/self/run: cannot be made"),
        (["--nvme-path", "/proc/none"], {}, 2, "--nvme-path /proc/none/run: cannot be made"),
        ([], {**none_built, "PATH": str(tmp_path)}, 1, "missing: g++; run: sudo apt-get install g++"),
        ([], {**none_built, "CXX": str(hidden)}, 1, "missing: libaio-dev; run: sudo apt-get install libaio-dev"),
    ]  # fmt: skip
    starts = json.dumps([([*INFINITY, *arguments], environment) for arguments, environment, _, _ in cases])
    ran = python(SEVERAL_STARTS, starts, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    for (_, _, code, expected), (found, lines) in zip(cases, answers, strict=True):
        assert found == code and len(lines) == 1 and lines[0].startswith("memkit: error: ")
        assert expected in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_disk_that_goes_away_ends_the_run_and_leaves_its_checkpoints(memkit: Memkit, tmp_path: Path) -> None:
    """As when it is unmounted. The run goes on from its last checkpoint once there is a disk again."""
    command = [sys.executable, "-m", "hf_memkit", *INFINITY, "--nvme-path", "nvme"]
    steps = ["--max-steps", "3", "--set", "save_steps=1"]
    with (tmp_path / "log").open("w+") as log:
        ran = subprocess.Popen([*command, *steps], cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log)
        while ran.poll() is None and not (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").exists():
            time.sleep(0.02)
        (tmp_path / "nvme").rename(tmp_path / "gone")
        code = ran.wait(300)
        log.seek(0)
        errors = [line for line in log.read().splitlines() if "memkit: error:" in line]
    assert code == 1 and len(errors) == 1, (code, errors)
    assert "swap file" in errors[0] and "then continue with --resume" in errors[0]
    assert json.loads((tmp_path / "run" / "memkit-run.json").read_text())["status"] == "running"

    again = memkit("recipe", "gpt2-on-16gb", "--variant", "infinity", "--output", "run", "--resume")
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert "Continuing from run/checkpoint-" in again.stdout
    content = json.loads((tmp_path / "run" / "memkit-run.json").read_text())
    assert content["status"] == "finished" and content["result"]["steps"] == 3
    assert not list((tmp_path / "nvme").rglob("*")), "the second run left something behind"


FILLED = """
import subprocess, sys, time, os
from pathlib import Path
command = [sys.executable, "-m", "hf_memkit", *sys.argv[1:], "--nvme-path", "disk", "--max-steps", "2"]
ran = subprocess.Popen(command)
records = Path("run/memory-rank0.jsonl")
while ran.poll() is None and not (records.exists() and records.stat().st_size):
    time.sleep(0.01)
free = os.statvfs("disk").f_bavail * os.statvfs("disk").f_frsize
with open("disk/another-program", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, free)
print("exit code", ran.wait())
"""


@pytest.mark.exhaustive
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Too small: refused before anything is written. Filled by another program while the engine has yet to write
    gradients and moments: the run ends, before states that are not there reach a checkpoint."""
    (tmp_path / "filled.py").write_text(FILLED)
    out = in_mount_namespace(f"""
cd {tmp_path}
export CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=PASSIVE
mkdir disk
mount -t tmpfs -o size=8m none disk
$PYTHON -m hf_memkit {" ".join(INFINITY)} --nvme-path disk 2>&1 || echo exit code $?
ls -A disk run 2>/dev/null || true
umount disk
mount -t tmpfs -o size=120m none disk
$PYTHON filled.py {" ".join(INFINITY)} 2>&1
ls -A disk
""")
    if "refuses O_DIRECT" in out:
        pytest.skip("NOT TESTED: this kernel's tmpfs has no O_DIRECT")
    small, filled = out.split("exit code 1", 1)
    errors = [line for line in small.splitlines() if "memkit: error:" in line]
    assert len(errors) == 1 and "0.01 GiB are free; " in errors[0]
    errors = [line for line in filled.splitlines() if "memkit: error:" in line]
    assert len(errors) == 1 and "cannot be written (No space left on device)" in errors[0]
    assert filled.splitlines()[-2:] == ["exit code 1", "another-program"], "swap files were left on the full disk"
    assert not list((tmp_path / "run").glob("checkpoint-*"))


GUARDED = """
import os, resource, sys
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from hf_memkit.common.errors import RunError
from hf_memkit.deepspeed.swap_guard import _Guard

guards = []
handle = AsyncIOBuilder().load(verbose=False).aio_handle(1 << 20, 8, False, True, 1)
guard = _Guard(handle, guards)
guards.append(guard)
buffer = guard.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8)).fill_(7)

def refused(call, *arguments):
    try:
        call(*arguments)
    except RunError as error:
        return str(error)
    sys.exit(f"not refused: {call} {arguments}")

assert guard.async_pwrite(buffer, "a", 0) == 0 and guard.wait() == 1
back = guard.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8)).zero_()
assert guard.async_pread(back, "a", 0) == 0 and guard.wait() == 1 and bool((back == 7).all())
assert guard.async_pwrite(buffer, "b", 0) == 0  # under way when the next one fails
print(refused(guard.async_pread, back, "none", 0))
os.truncate("a", 1 << 20)
print(refused(guard.async_pread, back, "a", 0))
print(refused(guard.async_pwrite, buffer, "no/folder", 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
print(refused(guard.async_pwrite, buffer, "c", 0))
print(handle.async_pwrite(buffer, "d", 0), handle.wait(), os.stat("d").st_size)  # what DeepSpeed says of that
"""


def test_the_guard_stops_what_deepspeed_does_not_notice(tmp_path: Path) -> None:
    extensions = {"TORCH_EXTENSIONS_DIR": str(ops.extensions_folder(cpu=True))}
    ran = python(GUARDED, cwd=tmp_path, env={**ENVIRONMENT, **extensions})
    assert ran.returncode == 0, ran.stderr[-2000:]
    missing, short, no_folder, too_large, unguarded = ran.stdout.splitlines()[-5:]
    assert "swap file none cannot be read (No such file or directory)" in missing
    assert f"swap file a has {MIB} of {4 * MIB} bytes: the disk is full" in short
    assert "swap file no/folder cannot be written (No such file or directory)" in no_folder
    assert "swap file c cannot be written (File too large)" in too_large
    assert unguarded == f"0 1 {2 * MIB}", "DeepSpeed now tells of a write that failed: the guard may go"


REFUSED = """
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from hf_memkit.common.errors import RunError
from hf_memkit.deepspeed.swap_guard import _Guard

guards = []
handle = AsyncIOBuilder().load(verbose=False).aio_handle(1 << 20, 8, False, True, 1)
guard = _Guard(handle, guards)
guards.append(guard)
for size in (2 << 20, (2 << 20) + 1024):  # the last piece of the second one is refused
    buffer = guard.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).fill_(7)
    try:
        guard.async_pwrite(buffer, f"m/{size}", 0)
        print("written", guard.wait())
    except RunError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root makes loop devices")
def test_a_disk_that_refuses_a_write(tmp_path: Path) -> None:
    """One whose sectors are larger than DeepSpeed's pieces, which `preflight` would not let through."""
    (tmp_path / "refused.py").write_text(REFUSED)
    out = in_mount_namespace(f"""
cd {tmp_path}
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR='{ops.extensions_folder(cpu=True)}' PATH='{ENVIRONMENT["PATH"]}'
truncate -s 16M image; mkfs.ext4 -q -b 4096 image; mkdir m
loop=$(losetup --find --show --sector-size 4096 image) || {{ echo no loop devices; exit 0; }}
trap 'umount m || true; losetup -d $loop' EXIT
mount $loop m
$PYTHON refused.py
""")
    if "no loop devices" in out:
        pytest.skip("NOT TESTED: this machine has no loop devices")
    whole, refused = out.splitlines()[-2:]
    assert whole == "written 1" and "was not written in full: the disk refused it" in refused


MEASURED = """
import json, sys
from hf_memkit.deepspeed.aio import measure
found = measure(sys.argv[1], cpu=True, start={"queue_depth": 32}, budget_s=1.0)
print(json.dumps([dict(found.settings), found.read_gb_s, found.write_gb_s, found.label]))
"""


def test_the_disk_is_measured_with_deepspeed_itself(tmp_path: Path) -> None:
    ran = python(MEASURED, str(tmp_path))
    assert ran.returncode == 0, ran.stderr[-2000:]
    settings, read, write, label = json.loads(ran.stdout)
    assert set(settings) == {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"}
    assert settings["block_size"] == MIB and 0 < read < 100 and 0 < write < 100
    assert label.startswith("measured: reads ") and "(file of 256 MiB" in label
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_measurement_that_fails_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    """A file may have 128 MiB: DeepSpeed does not notice the writes that fail, and is aborted when it reads."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**27, 2**27))"
    ran = python(f"{limit}{MEASURED}", str(tmp_path))
    assert ran.returncode == 1 and "RunError" in ran.stderr and "the measurement failed" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_without_async_io_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none-built"))
    with pytest.raises(MissingPackageError, match="async_io is not built yet"):
        measure(tmp_path, cpu=True)
