"""The end of a training, shown. In: its folder. Out: a summary on the console, one HTML page beside the records."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

__all__ = ["print_summary", "write_page_beside"]

_WIDEST: Final = 120


def write_page_beside(folder: Path) -> None:
    """Writes the page.

    Raises:
        OSError: it cannot be written.
        InputError: the records cannot be read, or something else has the page's name.
    """
    from hf_memkit.report import load_run, write_page
    from hf_memkit.report.text import PAGE

    write_page(load_run(folder), folder / PAGE)


def print_summary(folder: Path) -> None:
    """Prints the summary, which names the page if there is one.

    Raises:
        InputError: the records cannot be read.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    from hf_memkit.report import load_run, text_report

    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    tqdm.write(text_report(load_run(folder), width))  # a plain print would land in the middle of a progress bar
