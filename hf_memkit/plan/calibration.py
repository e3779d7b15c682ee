"""What a calibration has found of a GPU: factors by kind of operation, kept in a file of the user's cache.

Plans for a GPU of that name take them, and say so. A file that cannot be read is left alone, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import InputError
from hf_memkit.hardware import Gpu, named_gpu
from hf_memkit.prediction.work import KINDS

ALL, HOST = "all", "host"
"""Beside the kinds of operations: all of them with the host, and the host."""

MOST: Final = 20.0
"""A factor above it, or below its inverse, is none of a GPU."""

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """
    Attributes:
        gpu: its name, as `plain_name` has it.
        driver, torch: versions; empty: not known.
        factors: by kind of operation, `"host"` or `"all"`: how much longer it takes than computed. A kind's time is
            multiplied with its factor and that of `"all"`.
        how: where they are from, such as `"products, copies and launches on this GPU"`.
        when: the day, `"2026-11-23"`.
    """

    gpu: str
    driver: str
    torch: str
    factors: Mapping[str, float]
    how: str
    when: str

    def of_kinds(self) -> dict[str, float]:
        """For `step_time`."""
        every = self.factors.get(ALL, 1.0)
        return {kind: self.factors.get(kind, 1.0) * every for kind in (*KINDS, HOST)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def said(self) -> str:
        factors = ", ".join(f"{kind} × {factor:.3g}" for kind, factor in self.factors.items())
        return f"calibrated {self.when} by {self.how}: {factors}"


def plain_name(name: str) -> str:
    """`"NVIDIA L4"` → `"L4"`; of a GPU that memkit does not know its own name."""
    try:
        return named_gpu(name).name
    except InputError:
        return name


def driver_version() -> str:
    """Of this machine's GPU; empty: there is none, or NVML does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return ""
    return found if isinstance(found, str) else str(found.decode())


def torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def cache_file() -> Path:
    """By the XDG Base Directory Specification, which wants an absolute path."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return folder / "memkit" / "calibration.json"


def stored(gpu: Gpu | None) -> tuple[Calibration | None, tuple[str, ...]]:
    """(the calibration of such a GPU, or None; warnings)."""
    if gpu is None:
        return None, ()
    found, warnings = _read(cache_file())
    mine = next((each for each in found if each.gpu == plain_name(gpu.name)), None)
    if mine is None:
        return None, warnings
    driver = driver_version()
    for what, then, now in (("torch", mine.torch, torch_version()), ("driver", mine.driver, driver)):
        if then and now and then != now:
            return None, (
                *warnings,
                f"the calibration of {mine.gpu} is not used: it is for {what} {then}, and this is {now}. Renew it: "
                "memkit plan --calibrate",
            )
    return mine, warnings


def store(calibration: Calibration) -> Path:
    """Keeps it in the place of another of that GPU; a file that cannot be read is put aside. Returns the file.

    Raises:
        InputError: it cannot be written.
    """
    path = cache_file()
    found, warnings = _read(path)
    content = {
        "version": _VERSION,
        "calibrations": [calibration.to_json(), *(each.to_json() for each in found if each.gpu != calibration.gpu)],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if warnings and path.exists():
            path.replace(path.with_suffix(".unreadable"))
        # Beside it, then in its place: two that calibrate at a time leave a whole file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            made = Path(file.name)
            try:
                json.dump(content, file, indent=2)
                file.close()
                made.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    made.unlink()
                raise
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return path


def today() -> str:
    return time.strftime("%Y-%m-%d")


def _read(path: Path) -> tuple[list[Calibration], tuple[str, ...]]:
    """(what the file holds, warnings)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}")
        return [_checked(each) for each in content["calibrations"]], ()
    except FileNotFoundError:
        return [], ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = (str(error).splitlines() or [""])[0][:120]
        return [], (
            f"{path}: not used, not a calibration ({type(error).__name__}: {said}). Renew it: memkit plan --calibrate",
        )


def _checked(content: Mapping[str, Any]) -> Calibration:
    factors = {str(kind): float(factor) for kind, factor in content["factors"].items()}
    for kind, factor in factors.items():
        if kind not in (*KINDS, HOST, ALL) or not (math.isfinite(factor) and 1 / MOST <= factor <= MOST):
            raise ValueError(f"factor {kind}: {factor}")
    texts = {name: content[name] for name in ("gpu", "driver", "torch", "how", "when")}
    if not all(isinstance(each, str) for each in texts.values()):
        raise ValueError(f"{', '.join(texts)} must be text")
    return Calibration(factors=factors, **texts)
