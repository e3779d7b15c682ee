"""Asks the child process of `fake_and_real.py`: the parent's side of the comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

BAR: Final = 0.005
"""How far the peak on fake tensors may be from the real one, as a share of it."""

PHASES: Final = ("data", "forward", "backward", "optimizer", "evaluate", "save")
"""Those that a user's training has too; a model is loaded there, and built from its config here."""

REFUSED: Final = {("convnext", "checkpointing"): "does not support activation checkpointing"}
"""Models that transformers refuses, with its message."""

_ROOT: Final = Path(__file__).resolve().parents[2]


class Child:
    """The child, from `with` on. What has been asked once is not run again, but with `again`."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str, str], dict[str, Any]] = {}

    def __enter__(self) -> Self:
        path = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH")) if part)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.prediction.fake_and_real"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("SHOW") else None,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, architecture: str, setting: str, kind: str, *, again: bool = False) -> dict[str, Any]:
        """The answer to one case; see `fake_and_real.py`."""
        case = (architecture, setting, kind)
        if again or case not in self._answers:
            assert self._process.stdin is not None and self._process.stdout is not None
            line = json.dumps({"architecture": architecture, "setting": setting, "kind": kind})
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the child died at {line}, exit code {self._process.wait()}")
            self._answers[case] = json.loads(answer)
        return self._answers[case]


def difference(found: float, expected: float) -> float:
    """The difference relative to the expected value."""
    return found / expected - 1


def assert_equal(fake: dict[str, Any], real: dict[str, Any]) -> None:
    assert "error" not in fake and "error" not in real, (fake, real)
    assert abs(difference(fake["peak_bytes"], real["peak_bytes"])) <= BAR, (fake, real)
    assert fake["phases"].keys() == real["phases"].keys()
    for phase in PHASES:
        if phase in real["phases"]:
            assert abs(difference(fake["phases"][phase], real["phases"][phase])) <= BAR, (phase, fake, real)
