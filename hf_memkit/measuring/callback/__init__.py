"""The callback for a user's script: turns Trainer's events into records, dashboard numbers, OOM notes and a summary.

Names are imported on first use: this package alone loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memkit.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_memkit.measuring.callback.callback import MemoryReportCallback, attach
    from hf_memkit.measuring.callback.oom_watch import oom_advice

__all__ = ["MemoryReportCallback", "attach", "oom_advice"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"MemoryReportCallback": "callback", "attach": "callback", "oom_advice": "oom_watch"},
)
