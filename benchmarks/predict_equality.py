"""What a Trainer allocates on fake tensors, beside what it allocates on real ones: the same kernels, on a CPU.

    python benchmarks/predict_equality.py              # about five minutes on one core; writes the evidence
    python benchmarks/predict_equality.py --only t5    # prints, and writes nothing

`known`: the architectures that the tracer was made with, at five settings each. `unseen`: five more, chosen at that
time and run for the first time when nothing was left to be changed. What each case came to when it was run for the
first time is kept for ever under `first`, and what it comes to now stands under `now`: what was put right since then
was put right for all models, but these were seen by then.

Each training runs in a process of its own, with fake tensors and with real ones. `real_peak_bytes` is the profiler's,
without what a CPU's kernel makes and frees again while it runs; `real_peak_with_scratch_bytes` is with it: oneDNN's
convolutions have much. The batch that accelerate reads ahead is in neither: it lies on the host, whatever the GPU is.
`error` is the relative difference of the peaks, `phase_errors` that of each phase; loading differs by design: real
weights are initialised, fake ones are not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance
from tests.prediction.architectures import ARCHITECTURES, SETTINGS, UNSEEN, Architecture
from tests.prediction.fake_and_real_child import BAR, Child, difference

FIGURES = ("fake_peak_bytes", "real_peak_bytes", "error", "refused", "failed")


def measure(child: Child, architecture: Architecture, setting: str) -> dict[str, Any]:
    """One row: the figures, or why there are none."""
    fake, real = (child.ask(architecture.name, setting, kind) for kind in ("fake", "real"))
    row: dict[str, Any] = {"architecture": architecture.name, "class": architecture.model_class, "setting": setting}
    if "error" in fake or "error" in real:
        same = fake.get("error") == real.get("error")
        return {**row, "refused" if same else "failed": fake.get("error", real.get("error"))}
    phases = {phase: difference(fake["phases"].get(phase, 0), bytes_) for phase, bytes_ in real["phases"].items()}
    return {
        **row,
        "fake_peak_bytes": fake["peak_bytes"],
        "real_peak_bytes": real["peak_bytes"],
        "real_peak_with_scratch_bytes": real["peak_with_scratch_bytes"],
        "error": difference(fake["peak_bytes"], real["peak_bytes"]),
        "error_with_scratch": difference(fake["peak_bytes"], real["peak_with_scratch_bytes"]),
        "phase_errors": {phase: error for phase, error in phases.items() if phase != "load"},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows meet the bar, and the largest error."""
    errors = [abs(row["error"]) for row in rows if "error" in row]
    with_scratch = [abs(row["error_with_scratch"]) for row in rows if "error_with_scratch" in row]
    return {
        "compared": len(errors),
        "refused": sum("refused" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "within_bar": sum(error <= BAR for error in errors),
        **({"within_bar_with_scratch": sum(error <= BAR for error in with_scratch)} if with_scratch else {}),
        "largest_error": max(errors, default=None),
    }


def with_first(half: str, rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows, each with the figures that this case came to when it was run for the first time, and now."""
    before = json.loads(path.read_text())[half]["rows"] if path.exists() else []
    first = {(row["architecture"], row["setting"]): row.get("first", figures(row)) for row in before}
    return [
        {**row, "first": first.get((row["architecture"], row["setting"]), figures(row)), "now": figures(row)}
        for row in rows
    ]


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """What is compared of one row."""
    return {key: row[key] for key in FIGURES if key in row}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one architecture: printed, not written")
    parser.add_argument("--without-unseen", action="store_true", help="leave those out: printed, not written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    path = options.out / "predict_equality.json"
    halves: dict[str, list[dict[str, Any]]] = {"known": [], "unseen": []}
    with Child() as child:
        for half, architectures in (("known", ARCHITECTURES), ("unseen", UNSEEN)):
            for architecture in architectures:
                left_out = half == "unseen" and options.without_unseen
                if left_out or options.only not in (None, architecture.name):
                    continue
                for setting in SETTINGS:
                    row = measure(child, architecture, setting)
                    halves[half].append(row)
                    says = f"{row['error']:+.3%}" if "error" in row else str(row)
                    print(f"{half} {architecture.name} {setting}: {says}", flush=True)
    print({half: summary(rows) for half, rows in halves.items()})
    if options.only or options.without_unseen:
        return 0
    halves = {half: with_first(half, rows, path) for half, rows in halves.items()}
    evidence = {
        **provenance(),
        "command": "python benchmarks/predict_equality.py",
        "bar": BAR,
        **{
            half: {"summary": summary(rows), "first": summary([row["first"] for row in rows]), "rows": rows}
            for half, rows in halves.items()
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=2) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
