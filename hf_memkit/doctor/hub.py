"""Whether the hub can be reached."""

from __future__ import annotations

from typing import Final

from hf_memkit.doctor.check import Check
from hf_memkit.models import hub_reachable, hub_switched_off

__all__ = ["checks"]

_GROUP: Final = "Hub"


def checks() -> list[Check]:
    """One check: reached, switched off, or not answering."""
    if hub_reachable():
        return [Check(_GROUP, "huggingface.co", "ok", "answers")]
    without = "models and data must be local or cached"
    if off := hub_switched_off():
        names = " ".join(each.partition("=")[0] for each in off.split(" and "))
        found = f"switched off by {off}; {without}"
        return [Check(_GROUP, "huggingface.co", "warning", found, f"unset {names}")]
    found = f"does not answer; {without}"
    return [Check(_GROUP, "huggingface.co", "warning", found, "curl -sI https://huggingface.co (shows why)")]
