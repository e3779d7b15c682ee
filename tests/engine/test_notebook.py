"""The notebooks, executed from the first cell to the last as they are, without a GPU: they rehearse."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "160")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = "\n".join(
        str(output.get("text", "")) for cell in notebook.cells for output in cell.get("outputs", ()) if cell.outputs
    )
    assert "memkit: error" not in printed and "Traceback" not in printed, printed[-3000:]
    assert "memkit recipe" in printed and "REHEARSAL" in printed
    assert (tmp_path / "run" / "memory-report.html").exists() and (tmp_path / "run" / "model").is_dir()
