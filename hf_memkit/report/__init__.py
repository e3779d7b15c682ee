"""Reading records: how a run ended, diagnosis over steps, text, one HTML page.

Names are imported when first used. Nothing here needs torch: records are read on any machine. Only `write_page` loads
Plotly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memkit.report.diagnosis import Finding, diagnose
    from hf_memkit.report.ending import Ending
    from hf_memkit.report.following import follow
    from hf_memkit.report.load import RankRun, Run, load_run
    from hf_memkit.report.page import write_page
    from hf_memkit.report.text import report_json, text_report

__all__ = [
    "Ending",
    "Finding",
    "RankRun",
    "Run",
    "diagnose",
    "follow",
    "load_run",
    "report_json",
    "text_report",
    "write_page",
]

_MODULE = {
    "Ending": "ending",
    "Finding": "diagnosis",
    "RankRun": "load",
    "Run": "load",
    "diagnose": "diagnosis",
    "follow": "following",
    "load_run": "load",
    "report_json": "text",
    "text_report": "text",
    "write_page": "page",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
