"""Texts and pages word for word, one of each sort of run: whoever changes how they are made sees what changes.

`python -m tests.measuring.report.test_golden` writes them anew.
"""

from __future__ import annotations

import html
import os
import re
import tempfile
from pathlib import Path

import pytest

from hf_memkit.common.answer.page import page
from hf_memkit.measuring.report.answer import report_answer, text_report
from hf_memkit.measuring.report.load import load_run
from tests.measuring.report import synthetic_records as made

GOLDEN = Path(__file__).parent / "golden"


def reports() -> dict[str, str]:
    """By name of the file, of runs in folders of the current one."""
    result = {}
    for name, records in (("out-of-memory", made.out_of_memory()), ("rehearsal", made.rehearsal())):
        run = load_run(made.write(Path(name), records))
        whole = page(report_answer(run), guide="report.md")
        words = re.sub(r"<(script|style|head)\b[^>]*>.*?</\1>|<[^>]+>", "\n", whole, flags=re.DOTALL)
        shown = "\n".join(line for line in map(str.strip, html.unescape(words).splitlines()) if line)
        result |= {f"{name}.txt": text_report(run, modules=True), f"{name}-page.txt": f"{shown}\n"}
    lost = load_run(made.write(Path("lost"), made.healthy(30, world_size=2)[:-1]))
    on_a_cpu = load_run(made.write(Path("cpu"), made.on_a_cpu()))
    compiled = load_run(made.write(Path("compiled"), made.compiled()))
    texts = {"on-a-cpu": on_a_cpu, "lost-rank": lost, "compiled": compiled}
    return {**result, **{f"{name}.txt": text_report(run) for name, run in texts.items()}}


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
