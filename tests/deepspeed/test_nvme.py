"""The folder for ZeRO-Infinity: tried on real file systems, held by one run at a time, nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_memkit.catalog.memlock import can_lock
from hf_memkit.common.errors import DoesNotFitError, InputError, MissingPackageError, RunError
from hf_memkit.common.units import MIB
from hf_memkit.deepspeed import nvme, swap_guard
from hf_memkit.deepspeed.nvme import preflight
from tests.conftest import ROOT


def in_mount_namespace(script: str) -> str:
    """What a shell script prints that may mount what only it sees; loud where this machine does not allow that."""
    command = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has mkfs and losetup
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    try:
        tried = subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
        refused = tried.stderr.strip() if tried.returncode else ""
    except FileNotFoundError:
        refused = "unshare is not installed"
    if refused:
        pytest.skip(f"NOT TESTED: this machine mounts nothing for tests ({refused})")
    ran = subprocess.run([*command, "bash", "-ec", script], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def files_below(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


def leave_swap_files(folder: Path) -> Path:
    """What a plain DeepSpeed script leaves behind."""
    file = nvme.swap_folder(folder) / "optimizer" / "rank0" / "0.tensor.swp"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(2 * MIB))
    return file


def test_a_good_folder_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not" / "yet"):
        result = preflight(folder, needed_bytes=MIB, locked_bytes=4096)
        assert (result.unusable, result.shortages, result.missing) == ((), (), ())
        result.raise_problems()
    assert files_below(tmp_path) == []


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("a-file", "cannot be made (File exists)"),
        ("/proc/self", "cannot be written to"),
        ("/proc/no", "cannot be made"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, folder: str, expected: str) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(InputError, match=rf"^--nvme-path .*{folder}: ") as raised:
        preflight(tmp_path / folder, needed_bytes=0).raise_problems()
    assert expected in str(raised.value) and "give another folder" in str(raised.value)


def test_file_systems_that_deepspeed_cannot_swap_to(tmp_path: Path) -> None:
    """A read-only one, one without O_DIRECT, one in RAM, one that is too small, and one whose quota is: all real."""
    try_it = """$PYTHON -c 'import sys, json
from hf_memkit.deepspeed.nvme import preflight
found = preflight(sys.argv[1], needed_bytes=int(sys.argv[2]))
print(json.dumps([found.unusable, found.shortages, found.notes]))' "$1" "$2"; }"""
    out = in_mount_namespace(f"""
try_it() {{ {try_it}
cd {tmp_path}
mkdir m; mount -t tmpfs -o ro none m; try_it m 0; umount m
mount -t ramfs none m; try_it m 0; umount m
mount -t tmpfs -o size=8m none m; try_it m {9 * MIB}; try_it m {7 * MIB}; ls -A m
mkdir m/zero_stage_3; head -c 4M /dev/zero > m/zero_stage_3/a.swp; try_it m {6 * MIB}
touch m/memkit-swap.lock; try_it m {6 * MIB}
""")
    read_only, ram_fs, small, fits, others, left = map(json.loads, out.splitlines())
    assert "Read-only file system" in read_only[0][0]
    assert "(ramfs) refuses O_DIRECT" in ram_fs[0][0] and ram_fs[1] == []
    if small[0]:
        pytest.skip(f"NOT TESTED in part: this kernel's tmpfs has no O_DIRECT: {small[0]}")
    assert "0.01 GiB are free; " in small[1][0]
    assert fits[:2] == [[], []] and "is in RAM (tmpfs)" in fits[2][0]
    assert others[0] and "0.00 GiB are free" in others[1][0]
    assert left[:2] == [[], []], "what a killed run left is removed at the start, and counts as free"


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root makes loop devices")
def test_a_disk_with_sectors_of_4096_bytes_is_refused(tmp_path: Path) -> None:
    """DeepSpeed's last piece of a tensor is refused by such a disk, and it does not notice."""
    out = in_mount_namespace(f"""
cd {tmp_path}
truncate -s 16M image; mkfs.ext4 -q -b 4096 image; mkdir m
loop=$(losetup --find --show --sector-size 4096 image) || {{ echo no loop devices; exit 0; }}
trap 'umount m || true; losetup -d $loop' EXIT
mount $loop m
$PYTHON -c 'from hf_memkit.deepspeed.nvme import preflight; print(preflight("m", needed_bytes=0).unusable)'
""")
    if "no loop devices" in out:
        pytest.skip("NOT TESTED: this machine has no loop devices")
    assert "accepts pieces of 4096 bytes only" in out


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"will be swapped there, and .* GiB are free"):
        preflight(tmp_path, needed_bytes=2**60).raise_problems()
    assert files_below(tmp_path) == []


def test_the_gravest_problem_is_raised(tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match=r"^libaio$"):
        nvme.Preflight(missing=("libaio",)).raise_problems()
    with pytest.raises(DoesNotFitError, match=r"^full$"):
        nvme.Preflight(shortages=("full",), missing=("libaio",)).raise_problems()
    with pytest.raises(InputError, match=r"^file\nheld$"):
        nvme.Preflight(unusable=("file", "held"), shortages=("full",)).raise_problems()


def test_locked_memory_is_tried_without_being_used() -> None:
    """In a process that may lock a mebibyte and has no capability."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, MIB))
            small = preflight("/dev/shm", needed_bytes=0, locked_bytes=MIB // 2)
            large = preflight("/dev/shm", needed_bytes=0, locked_bytes=2 * MIB)
            reported = any("this process may not; run: ulimit -l unlimited" in line for line in large.shortages)
            code = 0 if can_lock(MIB // 2) and not can_lock(2 * MIB) and reported and not small.shortages else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_run_holds_its_folder_and_clears_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "nvme"
    with nvme.ready(folder, print, needed_bytes=MIB):
        leave_swap_files(folder)
        assert nvme.swap_bytes(folder) >= 2 * MIB
        busy = preflight(folder, needed_bytes=0)
        assert f"another run (process {os.getpid()} on " in busy.unusable[0]
        with pytest.raises(InputError, match=r"another run \(.*\) uses this folder now"), nvme.hold(folder):
            pytest.fail("two runs in one folder")
        assert nvme.swap_bytes(folder) >= 2 * MIB, "the second run removed the first one's files"
    assert files_below(tmp_path) == []
    with pytest.raises(RuntimeError), nvme.hold(folder):
        leave_swap_files(folder)
        raise RuntimeError("training failed")
    assert files_below(tmp_path) == []


def test_files_of_another_program_are_not_touched(tmp_path: Path) -> None:
    file = leave_swap_files(tmp_path)
    result = preflight(tmp_path, needed_bytes=0)
    assert "0.00 GiB of swap files" in result.unusable[0] and f"rm -r {file.parents[2]}" in result.unusable[0]
    with pytest.raises(InputError, match="by a program other than memkit"), nvme.hold(tmp_path):
        pass
    assert [path for path in files_below(tmp_path) if path.is_file()] == [file]


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with nvme.hold(tmp_path):
            leave_swap_files(tmp_path)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert nvme.swap_bytes(tmp_path) >= 2 * MIB
    result = preflight(tmp_path, needed_bytes=MIB)
    assert result.unusable == () and "left by a run that was killed (process " in result.notes[0]
    messages: list[str] = []
    with nvme.ready(tmp_path, messages.append, needed_bytes=MIB):
        assert nvme.swap_bytes(tmp_path) == 0
    assert "left by a run that was killed" in messages[0]
    assert files_below(tmp_path) == []


def test_a_read_in_the_middle_needs_the_file_that_far(tmp_path: Path) -> None:
    file = tmp_path / "a.swp"
    file.write_bytes(bytes(12))
    guard = swap_guard._Guard(SimpleNamespace(async_pread=lambda *given: 0), [])
    assert guard.async_pread(memoryview(bytes(8)), str(file), 4) == 0
    with pytest.raises(RunError, match="has 12 of 13 bytes"):
        guard.async_pread(memoryview(bytes(8)), str(file), 5)
