"""Reading records: how a run ended, diagnosis over steps, text, one HTML page.

Names are imported when first used. Nothing here needs torch: records are read on any machine. Only `write_page` loads
Plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memkit.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_memkit.measuring.report.diagnosis import Finding, diagnose
    from hf_memkit.measuring.report.ending import Ending
    from hf_memkit.measuring.report.following import follow
    from hf_memkit.measuring.report.load import RankRun, Run, load_run
    from hf_memkit.measuring.report.page import write_page
    from hf_memkit.measuring.report.text import report_json, text_report

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
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
    },
)
