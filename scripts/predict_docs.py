#!/usr/bin/env python3
"""Writes the tables of docs/predict.md, comparison.md and your-script.md, and the names of GPUs; --check compares.

.venv/bin/python scripts/predict_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, update

from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS

Row = Mapping[str, Any]


def equality_table(path: Path = RESULTS / "predict_equality.json") -> str:
    """The largest error of each architecture on the CPU; of those that were kept aside, also the first figures."""
    if not path.exists():
        return "Not measured yet."
    evidence = json.loads(path.read_text())
    lines = [
        f"`{path.name}`: torch {evidence['versions']['torch']}, transformers {evidence['versions']['transformers']}. "
        f"The bar is {_percent(evidence['bar'], 1)} of the peak.",
        "",
        "| architecture | settings compared | within the bar | largest error of a peak | on its first run |",
        "|---|---|---|---|---|",
    ]
    for half in ("known", "unseen"):
        rows = evidence[half]["rows"]
        for name in dict.fromkeys(row["architecture"] for row in rows):
            of_it = [row for row in rows if row["architecture"] == name]
            now = [row.get("now", row) for row in of_it]
            first = [row["first"] for row in of_it if "first" in row]
            errors = _errors(now)
            within = sum(error <= evidence["bar"] for error in errors)
            cells = [
                f"{name} (not known when the tracer was made)" if half == "unseen" else name,
                str(len(errors)) + _not_compared(now),
                str(within),
                _percent(max(errors), 2) if errors else "–",
                (_percent(max(_errors(first)), 2) if _errors(first) else "no figure") if first else "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Made by `{evidence['command']}`."])


def speed_table(path: Path = RESULTS / "predict_speed.json") -> str:
    """How long the command takes."""
    if not path.exists():
        return "Not measured yet."
    evidence = json.loads(path.read_text())
    lines = [
        f"`{path.name}`: {evidence['hardware']['cpu_count']} CPU cores, torch {evidence['versions']['torch']}.",
        "",
        "| model, one sequence of | whole command, s | a second setting in the same process, s | RAM, GiB | "
        "peak allocated, GiB |",
        "|---|---|---|---|---|",
    ]
    for row in evidence["rows"]:
        lines.append(
            f"| {row['model']}, {row['length']} tokens | {row['whole_s']:.1f} | {_number(row.get('kept_s'))} | "
            f"{row['ram_gib']:.1f} | {row['answer_gib']:.2f} |"
        )
    return "\n".join([*lines, "", f"Made by `{evidence['command']}`."])


def _measured(folder: Path) -> dict[Path, list[Row]]:
    """The measured cases of each evidence file of a GPU; those that are only predicted wait for one."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob("predict*.json"))}
    return {
        path: [row for row in content["cases"] if row["status"] != "predicted"]
        for path, content in files.items()
        if content.get("section") == "predict" and not content.get("rehearsal")
    }


def gpu_table(folder: Path = RESULTS) -> str:
    """Predictions beside trainings on a GPU, of every evidence file."""
    parts = [_of_gpu(path, rows) for path, rows in _measured(folder).items() if rows]
    return "\n\n".join(parts) or "Not yet measured on a GPU."


def _of_gpu(path: Path, rows: Sequence[Row]) -> str:
    from benchmarks.gpu_summary import summary

    found = summary(rows)
    versions = rows[0]["versions"]
    lines = [
        f"`{path.name}`: {found.cases} trainings on an {rows[0]['hardware']['gpu']['name']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}. All but the first were predicted "
        f"before, on a machine without a GPU. Models have random weights.",
    ]
    if found.median_error is not None and found.worst_error is not None:
        lines += [
            "",
            "| of the peaks | median error | worst error |",
            "|---|---|---|",
            f"| allocated | {_percent(found.median_error, 1)} | {_percent(found.worst_error, 1)} "
            f"({found.worst_case}) |",
        ]
    if found.median_reserved_error is not None and found.worst_reserved_error is not None:
        lines.append(
            f"| reserved | {_percent(found.median_reserved_error, 1)} | {_percent(found.worst_reserved_error, 1)} |"
        )
    wrong = ", ".join(found.wrongly_fits) or "none"
    lines += ["", f'Called "fits", and did not: {wrong}.']
    if found.edges:
        lines.append(
            f"Completed with exactly the predicted smallest cap, and not with 3 % less: {found.edges_right} of "
            f"{found.edges}."
        )
    if found.histories:
        lines.append(
            f"Allocator histories that memkit's allocator followed to the end: {found.histories_exact} of "
            f"{found.histories}."
        )
    if found.median_step_error is not None and found.worst_step_error is not None:
        lines.append(
            f"Step time, as predicted before: median error {_percent(found.median_step_error, 0)}, worst "
            f"{_percent(found.worst_step_error, 0)}."
        )
    if found.median_step_error_since is not None:
        lines.append(
            f"memkit now prices the kernels that were slower than assumed as these trainings took them. The same "
            f'trainings then have a median error of {_percent(found.median_step_error_since, 0)}: column "priced now".'
        )
    lines += [
        "",
        "| case | measured, GiB | predicted, GiB | error | step measured, ms | predicted | priced now |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.get("kind") not in ("script", "train") or "peak_allocated_gib" not in row:
            continue
        of_step, since = row.get("predicted_step_s"), row.get("priced_since_s")
        cells = [
            row["case"],
            _number(row.get("peak_allocated_gib"), 2),
            _number(row["prediction"]["peak_allocated_gib"], 2) if "prediction" in row else "–",
            _signed(row["errors"].get("peak_allocated")) if row.get("errors") else "–",
            _number(row.get("step_time_ms"), 0),
            _number(1000 * of_step[1], 0) if of_step else "–",
            _number(1000 * since[1], 0) if since else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(error: float | None) -> str:
    if error is None:
        return "–"
    return f"{error:+.1%}".replace("%", " %").replace("-0.0", "0.0").replace("+0.0", "0.0")


def gpu_line(folder: Path = RESULTS) -> str:
    """What GPUs of ours showed, in a paragraph."""
    from benchmarks.gpu_summary import summary

    kept = [rows for rows in _measured(folder).values() if rows]
    if not kept:
        return "Not yet measured on a GPU."
    found = summary([row for rows in kept for row in rows])
    names = " and an ".join(str(rows[-1]["hardware"]["gpu"]["name"]) for rows in kept)
    assert found.median_error is not None and found.worst_error is not None
    assert found.worst_reserved_error is not None
    return (
        f"**On an {names} of ours**: {found.cases} trainings. Peak of tensors: median "
        f"error {_percent(found.median_error, 1)}, worst {_percent(found.worst_error, 1)}. Outside of the predicted "
        f"range of reserved memory: {_percent(found.worst_reserved_error, 1)} at most ([all of them]"
        f"(docs/predict.md#on-a-gpu-of-ours))."
    )


def gpu_names() -> str:
    """The GPUs that have a name, in lines of at most 110 columns."""
    names = ", ".join(f"`{name.replace(' ', '~')}`" for name in KNOWN_GPUS)  # a name is not broken
    return textwrap.fill(f"{names}.", 110, break_long_words=False).replace("~", " ")


def overhead_table(path: Path = RESULTS / "script_overhead.json") -> str:
    """What a prediction of a script takes beside its own imports and data."""
    if not path.exists():
        return "Not measured yet."
    evidence = json.loads(path.read_text())
    lines = ["| model | the script's own imports and data | `memkit predict` | more |", "|---|---|---|---|"]
    for row in evidence["rows"]:
        alone, whole = row["script_alone_s"], row["predict_s"]
        lines.append(f"| {row['model']} | {alone:.1f} s | {whole:.1f} s | {whole - alone:.1f} s |")
    cores = evidence["hardware"]["cpu_count"]
    return "\n".join([*lines, "", f"On {cores} CPU cores. Made by `{evidence['command']}`."])


def peers_table(path: Path = RESULTS / "predict_speed.json") -> str:
    """What memkit and other tools answer to the same jobs."""
    if not path.exists():
        return "Not measured yet."
    evidence = json.loads(path.read_text())
    versions, day = evidence["versions"], time.strftime("%Y-%m-%d", time.gmtime(evidence["time"]))
    lines = [
        f"Run on {day}: accelerate {versions['accelerate']}, deepspeed {versions['deepspeed']}, "
        f"torch {versions['torch']}.",
        "",
        "| job | tool | its answer, GiB | what it counts | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in evidence["rows"]:
        job = f"{row['model']}, {row['length']} tokens"
        lines.append(f"| {job} | memkit | {row['answer_gib']:.2f} | peak allocated, whole | {row['whole_s']:.1f} |")
        for name, peer in row["peers"].items():
            answer = f"{peer['answer_gib']:.2f}" if "answer_gib" in peer else "none: it failed"
            lines.append(f"| {job} | {name} | {answer} | {peer.get('of', '–')} | {peer['whole_s']:.1f} |")
    return "\n".join([*lines, "", f"Made by `{evidence['command']}`."])


def tables(folder: Path = RESULTS) -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    return {
        ROOT / "docs" / "predict.md": {
            "equality": equality_table(folder / "predict_equality.json"),
            "speed": speed_table(folder / "predict_speed.json"),
            "gpu": gpu_table(folder),
            "gpus": gpu_names(),
        },
        ROOT / "README.md": {"gpu": gpu_line(folder)},
        ROOT / "docs" / "comparison.md": {"peers": peers_table(folder / "predict_speed.json")},
        ROOT / "docs" / "your-script.md": {"overhead": overhead_table(folder / "script_overhead.json")},
    }


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "predict_docs.py")


def _errors(rows: Sequence[Row]) -> list[float]:
    return [abs(row["error"]) for row in rows if row.get("error") is not None]


def _not_compared(rows: Sequence[Row]) -> str:
    refused, failed = (sum(bool(row.get(kind)) for row in rows) for kind in ("refused", "failed"))
    said = [f"{refused} refused"] * bool(refused) + [f"{failed} failed"] * bool(failed)
    return f" ({', '.join(said)})" if said else ""


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
