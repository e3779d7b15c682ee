"""The tables of the docs are those that the evidence gives."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_tables_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "report_docs.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
