"""Images that a model can learn to distinguish in a few steps, used without data: striped and plain, in three colours.
Needs numpy and pillow only, so that it can be copied next to a script."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
from PIL import Image

LABELS: Final = ("blue", "blue-striped", "green", "green-striped", "red", "red-striped")

_SIDE: Final = 64
"""Pixels."""
_COLOURS: Final = {"red": 0, "green": 1, "blue": 2}


def made_up_images(count: int = 48) -> list[dict[str, Any]]:
    """`{"image": {"bytes": a PNG, "path": None}, "label": number}`, `each` of every label, equal in every process."""
    random = np.random.default_rng(0)
    rows = []
    for label, name in enumerate(LABELS):
        colour, _, striped = name.partition("-")
        for _ in range(count):
            pixels = random.integers(0, 60, (_SIDE, _SIDE, 3))
            pixels[..., _COLOURS[colour]] += random.integers(100, 190)
            if striped:
                period, start = random.integers(8, 15), random.integers(0, 15)
                dark = (np.arange(_SIDE) + start) % period < period // 2
                pixels[dark] //= 4
            file = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
            rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": label})
    return rows
