"""Text and page of a run that ended out of memory, word for word: whoever changes how they are made sees what changes.

`python -m tests.report.test_golden` writes them anew.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from hf_memkit.report import load_run, text_report
from hf_memkit.report.page import page
from tests.report import synthetic_records as made

GOLDEN = Path(__file__).parent / "golden"


def reports() -> dict[str, str]:
    """By name of the file, of a run in the folder `out` of the current one."""
    run = load_run(made.write(Path("out"), made.out_of_memory()))
    html = re.sub(r"<(script|style|meta)\b[^>]*>(?:.*?</\1>)?", "", page(run), flags=re.DOTALL)
    return {"out-of-memory.txt": text_report(run, modules=True), "out-of-memory.html": html.replace("><", ">\n<")}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("here")
def test_reports_are_word_for_word_what_they_were() -> None:
    for name, report in reports().items():
        assert report == (GOLDEN / name).read_text(), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for name, report in reports().items():
            (GOLDEN / name).write_text(report)
