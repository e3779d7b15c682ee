"""A run as `memkit report --json` prints it. Names and units are those of the records."""

from __future__ import annotations

from typing import Any

from hf_memkit.measuring.report import wording
from hf_memkit.measuring.report.advice import advise
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.summary import summarise, summarise_ranks


def report_json(run: Run) -> dict[str, Any]:
    summary = summarise(run)
    ranks = [
        {
            **one.to_json(),
            "ending": rank.ending.to_json(),
            "file": str(rank.path),
            "ooms": list(rank.ooms),
            "earlier": [ending.to_json() for _, ending in rank.earlier],
        }
        for rank, one in zip(run.ranks, summarise_ranks(run), strict=True)
    ]
    return {
        "folder": str(run.folder),
        "ending": {"rank": run.ended_by, **run.ending.to_json()},
        "verdict": wording.verdict(run, summary),
        "run": run.first.run,
        "summary": summary.to_json(),
        **advise(run, summary).to_json(),
        "ranks": ranks,
        "modules": list(run.first.modules),
        "notes": list(run.notes),
    }
