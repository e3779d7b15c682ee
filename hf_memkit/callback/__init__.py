"""The line in a user's script: Trainer's events become records, dashboards, OOM notes, and a summary at the end.

Names are imported when first used: this package alone loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memkit.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_memkit.callback.callback import MemoryReportCallback, attach
    from hf_memkit.callback.oom_watch import oom_advice

__all__ = ["MemoryReportCallback", "attach", "oom_advice"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"MemoryReportCallback": "callback", "attach": "callback", "oom_advice": "oom_watch"},
)
