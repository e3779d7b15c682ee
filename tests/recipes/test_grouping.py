"""Grouping by length where every text is cut to one length: it has no effect, and must not stop the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_memkit.cli import main


def test_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{' '.join(f'word{n} {i}' for i in range(80))},{'good' if n % 2 else 'bad'}" for n in range(20)]
    (tmp_path / "long.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    data, output = str(tmp_path / "long.csv"), str(tmp_path / "run")
    arguments = ["--variant", "resident", "--data", data, "--max-steps", "1", "--output", output]
    with pytest.warns(UserWarning, match="every sample has 64 tokens"):
        assert main(["recipe", "bert-large-on-8gb", *arguments]) == 0
    assert "Done: 1 steps" in capsys.readouterr().out
