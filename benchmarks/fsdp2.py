"""Predicts the FSDP2 trainings of `results/fsdp2-h200.json`, and writes each prediction beside its measurement.

python benchmarks/fsdp2.py                # on any machine, with the installed torch
python scripts/docs.py predict.md         # the table
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance

NAME: Final = "fsdp2-h200"
OPTIONAL: Final = "[--torch_compile True]"
"""The end of the measured command: only in the rows that are compiled."""


def predict(evidence: dict[str, Any], *, compiled: bool) -> dict[str, Any]:
    """`memkit predict --json` of the command that was measured."""
    command = evidence["command"].replace(OPTIONAL, OPTIONAL[1:-1] if compiled else "")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(evidence["script"])
        Path(folder, "fsdp.json").write_text(json.dumps(evidence["fsdp_config"]))
        gpu = evidence["gpu"].removeprefix("NVIDIA ")
        memkit = [sys.executable, "-m", "hf_memkit", "predict", "--gpu", gpu, "--json", "--", *shlex.split(command)]
        ran = subprocess.run(memkit, cwd=folder, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(ran.stderr)
    prediction: dict[str, Any] = json.loads(ran.stdout)
    return {key: prediction[key] for key in ("peak_allocated_gib", "peak_reserved_gib")}


def main() -> None:
    path = RESULTS / f"{NAME}.json"
    evidence = json.loads(path.read_text())
    for row in evidence["rows"]:
        row["prediction"] = predict(evidence, compiled=row["torch_compile"])
    evidence["predicted_on"] = provenance()
    path.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
