"""Writes the tables of docs/predict.md, comparison.md and your-script.md, and the names of GPUs."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, table

from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS

Row = Mapping[str, Any]


def equality_table() -> str:
    """The largest error of each architecture on the CPU; of those that were kept aside, also the first figures."""
    evidence = _read("predict_equality.json")
    said = (
        f"`predict_equality.json`: torch {evidence['versions']['torch']}, transformers "
        f"{evidence['versions']['transformers']}. The bar is {_percent(evidence['bar'], 1)} of the peak."
    )
    cells = []
    for half in ("known", "unseen"):
        rows = evidence[half]["rows"]
        for name in dict.fromkeys(row["architecture"] for row in rows):
            of_it = [row for row in rows if row["architecture"] == name]
            now = [row.get("now", row) for row in of_it]
            first = [row["first"] for row in of_it if "first" in row]
            errors = _errors(now)
            within = sum(error <= evidence["bar"] for error in errors)
            row = [
                f"{name} (not known when the tracer was made)" if half == "unseen" else name,
                str(len(errors)) + _not_compared(now),
                str(within),
                _percent(max(errors), 2) if errors else "–",
                (_percent(max(_errors(first)), 2) if _errors(first) else "no figure") if first else "–",
            ]
            cells.append(row)
    columns = "architecture | settings compared | within the bar | largest error of a peak | on its first run"
    return f"{said}\n\n{table(columns, cells)}\n\nMade by `{evidence['command']}`."


def speed_table() -> str:
    """How long the command takes."""
    evidence = _read("predict_speed.json")
    cores, torch = evidence["hardware"]["cpu_count"], evidence["versions"]["torch"]
    rows = (
        [
            f"{row['model']}, {row['length']} tokens", f"{row['whole_s']:.1f}", _number(row.get("kept_s")),
            f"{row['ram_gib']:.1f}", f"{row['answer_gib']:.2f}",
        ]
        for row in evidence["rows"]
    )  # fmt: skip
    columns = (
        "model, one sequence of | whole command, s | a second setting in the same process, s | RAM, GiB | "
        "peak allocated, GiB"
    )
    said = f"`predict_speed.json`: {cores} CPU cores, torch {torch}."
    return f"{said}\n\n{table(columns, rows)}\n\nMade by `{evidence['command']}`."


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


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
    return "\n\n".join(_of_gpu(path, rows) for path, rows in _measured(folder).items() if rows)


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
    cases = []
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
        cases.append(cells)
    columns = "case | measured, GiB | predicted, GiB | error | step measured, ms | predicted | priced now"
    return "\n".join([*lines, "", table(columns, cases)])


def _signed(error: float | None) -> str:
    if error is None:
        return "–"
    return f"{error:+.1%}".replace("%", " %").replace("-0.0", "0.0").replace("+0.0", "0.0")


def gpu_line() -> str:
    """What GPUs of ours showed, in a paragraph."""
    from benchmarks.gpu_summary import summary

    kept = [rows for rows in _measured(RESULTS).values() if rows]
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


def overhead_table() -> str:
    """What a prediction of a script takes beside its own imports and data."""
    evidence = _read("script_overhead.json")
    rows = []
    for row in evidence["rows"]:
        alone, whole = row["script_alone_s"], row["predict_s"]
        rows.append([row["model"], *(f"{seconds:.1f} s" for seconds in (alone, whole, whole - alone))])
    columns, cores = "model | the script's own imports and data | `memkit predict` | more", evidence["hardware"]
    return f"{table(columns, rows)}\n\nOn {cores['cpu_count']} CPU cores. Made by `{evidence['command']}`."


def peers_table() -> str:
    """What memkit and other tools answer to the same jobs."""
    evidence = _read("predict_speed.json")
    versions, day = evidence["versions"], time.strftime("%Y-%m-%d", time.gmtime(evidence["time"]))
    said = (
        f"Run on {day}: accelerate {versions['accelerate']}, deepspeed {versions['deepspeed']}, "
        f"torch {versions['torch']}."
    )
    rows = []
    for row in evidence["rows"]:
        job = f"{row['model']}, {row['length']} tokens"
        rows.append([job, "memkit", f"{row['answer_gib']:.2f}", "peak allocated, whole", f"{row['whole_s']:.1f}"])
        for name, peer in row["peers"].items():
            answer = f"{peer['answer_gib']:.2f}" if "answer_gib" in peer else "none: it failed"
            rows.append([job, name, answer, peer.get("of", "–"), f"{peer['whole_s']:.1f}"])
    compared = table("job | tool | its answer, GiB | what it counts | seconds", rows)
    return f"{said}\n\n{compared}\n\nMade by `{evidence['command']}`."


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    return {
        ROOT / "docs" / "predict.md": {
            "equality": equality_table(),
            "speed": speed_table(),
            "gpu": gpu_table(),
            "gpus": gpu_names(),
        },
        ROOT / "README.md": {"gpu": gpu_line()},
        ROOT / "docs" / "comparison.md": {"peers": peers_table()},
        ROOT / "docs" / "your-script.md": {"overhead": overhead_table()},
    }


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
