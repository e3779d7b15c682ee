"""Whether the hub can be reached."""

from __future__ import annotations

import os
from typing import Final

from hf_memkit.doctor.line import Line
from hf_memkit.models import hub_reachable

__all__ = ["lines"]

_GROUP: Final = "Hub"
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def lines() -> list[Line]:
    """One line: reached, switched off, or not answering."""
    if hub_reachable():
        return [Line(_GROUP, "huggingface.co", "ok", "answers")]
    without = "models and data must be local or cached"
    switched = [name for name in _OFFLINE if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}]
    if switched:
        found = f"switched off by {' and '.join(f'{name}={os.environ[name]}' for name in switched)}; {without}"
        return [Line(_GROUP, "huggingface.co", "warning", found, f"unset {' '.join(switched)}")]
    found = f"does not answer; {without}"
    return [Line(_GROUP, "huggingface.co", "warning", found, "curl -sI https://huggingface.co (shows why)")]
