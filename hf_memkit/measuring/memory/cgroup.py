"""Memory limit of a container or a batch system, from /proc and /sys. Linux's Documentation/admin-guide/cgroup-v2.rst
(`memory.max`, `memory.current`, `memory.stat`, `memory.events`) and cgroup-v1/memory.rst (`memory.limit_in_bytes`,
`memory.usage_in_bytes`, `memory.oom_control`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a huge number where version 2 writes "max"


def boot_id() -> str | None:
    """The machine's boot; None except on Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def process_start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since the boot (proc(5): field 22 of `stat`); None except on Linux."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def limit_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """The lowest limit of this process's groups; None without a limit."""
    return min((limit for _, limit in _limits(root, membership)), default=None)


def available_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes left before a limit is reached, or None; file pages that the kernel can drop do not count as used."""
    left = []
    for folder, limit in _limits(root, membership):
        used = _number(folder / "memory.current")
        if used is None:
            used = _number(folder / "memory.usage_in_bytes")
        if used is not None:
            stat = _fields(folder / "memory.stat")
            droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            left.append(max(0, limit - max(0, used - droppable)))
    return min(left, default=None)


def oom_kills(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Number of processes in this process's group that the kernel has killed because memory ran out."""
    for folder in _groups(root, membership):
        for name in ("memory.events", "memory.oom_control"):
            count = _fields(folder / name).get("oom_kill")
            if count is not None:
                return count
    return None


def _groups(root: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's groups, innermost first. In a container its own group is the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        folder = top / path.lstrip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _limits(root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    for folder in _groups(root, membership):
        limit = _number(folder / "memory.max")
        if limit is None:
            limit = _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            yield folder, limit


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _fields(path: Path) -> dict[str, int]:
    """A file of lines `name number`."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}
