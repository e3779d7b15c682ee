"""A run as one HTML page that needs nothing else. In: `Run`. Out: a file."""

from __future__ import annotations

from pathlib import Path

from hf_memkit.measuring.report import wording
from hf_memkit.measuring.report.advice import advise
from hf_memkit.measuring.report.charts import charts
from hf_memkit.measuring.report.document import check_file, document, write_document
from hf_memkit.measuring.report.html import join
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.sections import sections
from hf_memkit.measuring.report.summary import summarise


def write_page(run: Run, path: str | Path) -> Path:
    """Writes the page, replacing an earlier one of memkit's; returns its path. InputError where that is refused or
    fails."""
    check_file(path)
    return write_document(path, page(run))


def page(run: Run) -> str:
    """The page's HTML."""
    summary = summarise(run)
    drawn = charts(run, summary)
    body = join(sections(run, summary, advise(run, summary), drawn), "\n")
    return document(f"Memory: {wording.title(run, summary)}", body, drawn)
