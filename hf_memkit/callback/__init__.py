"""The line in a user's script: Trainer's events become records, dashboards, OOM notes, and a summary at the end.

Names are imported when first used: this package alone loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memkit.callback.callback import MemoryReportCallback, attach
    from hf_memkit.callback.oom_watch import oom_advice

__all__ = ["MemoryReportCallback", "attach", "oom_advice"]

_MODULE = {"MemoryReportCallback": "callback", "attach": "callback", "oom_advice": "oom_watch"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
