"""Writes published measurements beside predictions into docs/predict.md, comparison.md, README.md."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evidence_tables import RESULTS, ROOT, table

from benchmarks.published_summary import (
    ALLOCATED,
    RESERVED,
    Errors,
    allocated_error,
    calibrations,
    errors,
    protocol,
    reserved_error,
    total_error,
)
from hf_memkit.catalog.fit import CONTEXT_SLACK_BYTES
from hf_memkit.common.units import MIB

EVIDENCE = RESULTS / "published.json"

Row = Mapping[str, Any]

_CODE = {
    "same": "the code of both is the same",
    "near": "the code differs by less than 1.25 % of the peak, as computed from shapes",
    "different": "the code differs: not comparable, kept for completeness",
}


def short(content: Mapping[str, Any]) -> str:
    """Whether it fits, in a sentence; then a line for each kind of figure."""
    rows = content["rows"]
    fits = json.loads((RESULTS / "plan_choices.json").read_text())["fits"]
    refused, narrowly = len(fits["ran_and_called_not_fitting"]), len(fits["of_these_below_the_whole_gpu"])
    ran = fits["ran_and_fit"] + refused
    ran_out = fits["out_of_memory"]
    lines = [
        f"**Does it fit?** {fits['rows']} trainings: {ran} ran, {ran_out} ran out of memory. "
        f"memkit predicts [*fits*](docs/predict.md#what-fits-means) for {fits['ran_and_fit']} of the {ran}, and for "
        f"{len(fits['false_fits']) or 'none'} of the {ran_out}. {narrowly} of the other {refused} need more than "
        f"{100 * fits['full_share']:.0f} % of the GPU, but not more than all of it.",
    ]
    cells = [
        _line("peak memory of tensors (allocated)", errors(allocated_error(row, "then") for row in rows)),
        _line(
            "peak of PyTorch's allocator (reserved), outside of the predicted range¹",
            errors(reserved_error(row, "then") for row in rows),
        ),
        _line("peak in nvidia-smi, outside of the predicted range¹", errors(total_error(row, "then") for row in rows)),
    ]
    for name, group in json.loads((RESULTS / "plan_speed.json").read_text())["groups"].items():
        found = f"{group['predicted']} of {group['rows']}" + "²" * (group["predicted"] < group["rows"])
        cells.append([f"step time: {name}", found, _percent(group["median"]), _percent(group["worst"])])
    lines += [
        table("what others measured | trainings | median error | worst error", cells),
        f"¹ Inside the range the error is 0. Median width of a range: {_width(rows)} of the measured figure.",
        "² Without Mixtral, whose code in transformers differs from that of the measured runs.",
    ]
    return "\n\n".join(lines)


def _width(rows: Iterable[Row]) -> str:
    """The median width of predicted ranges, of rows whose reserved memory or nvidia-smi's figure was measured."""
    found = []
    for row in rows:
        answer = row.get("then", {})
        smi = row.get("also", {}).get("nvidia_smi_peak_gib")
        for error, seen in ((reserved_error(row, "then"), row.get("gib")), (total_error(row, "then"), smi)):
            if error is not None:
                low, high = answer["peak_reserved_gib"]
                found.append((high - low) / seen)
    return _percent(statistics.median(found))


def whole(content: Mapping[str, Any]) -> str:
    """Every row, by its source; then what was not predicted, and why."""
    rows = content["rows"]
    parts = [
        f"`{EVIDENCE.name}`: memkit {content['versions']['memkit']}, torch {content['versions']['torch']}, "
        f"transformers {content['versions']['transformers']}, peft {content['versions']['peft']}.",
    ]
    measured = [row for row in rows if "today" in row and row.get("gib") is not None]
    codes = {**_CODE, None: "code not compared"}
    for what, kinds in (("allocated", ALLOCATED), ("reserved", RESERVED)):
        for code, words in codes.items():
            if found := [row for row in measured if row["measured"] in kinds and row.get("code") == code]:
                shown = _allocated(found) if what == "allocated" else _reserved(found, content)
                parts += [f"**Peak {what}; {words}**", shown, _reasons(found)]
    if found := [row for row in rows if "today" in row and row.get("gib") is None]:
        parts += ["**Whether it fits**", _outcomes(found)]
    skipped = Counter(
        f"{row['source'].split()[0]}: {reason}" for row in rows if (reason := row.get("not_predicted")) is not None
    )
    parts += ["**Not predicted**", table("source and reason | trainings", sorted(skipped.items()))]
    parts.append(f"Made by `{content['command']}`. Rows and sources: `benchmarks/published_rows/`.")
    return "\n\n".join(part for part in parts if part)


def _allocated(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        then, best = row.get("then", {}), _best(row)
        seen = row.get("also", {}).get("nvidia_smi_peak_gib")
        cells = [
            _name(row),
            f"{row['micro_batch']} × {row['seq_len']}",
            _where(row),
            f"{row['gib']:.3f}",
            _predicted(then, row) if then else "–",
            _predicted(row["today"], row),
            f"{seen:.1f}" if seen else "–",
            _range(best, context=True),
            f"{best['peak_phase']}: {best['peak_category']}" if "peak_phase" in best else "–",
        ]
        lines.append(cells)
    return table(
        "model, method | batch × tokens | GPU, transformers | measured, GiB | with the libraries of that day | with "
        "today's | nvidia-smi, GiB | predicted range, GiB | peak in",
        lines,
    )


def _reserved(rows: Iterable[Row], content: Mapping[str, Any]) -> str:
    rows, lines, said = list(rows), [], ""
    if any(row["seq_len"] is None for row in rows):
        said = (
            "The longest batch of PEFT's table is not told. It is the same in every row: fitted on one of them "
            f"(marked), it has {content['fitted_length']} tokens.\n\n"
        )
    for row in rows:
        cells = [
            _name(row) + (" (fitted)" if row["id"] == content["fitted_on"] else ""),
            f"{row['micro_batch']} × {row['seq_len'] or content['fitted_length']}",
            _where(row),
            f"{row['gib']:.3f}",
        ]
        for which in ("then", "today"):
            error = reserved_error(row, which)
            cells.append(_range(row[which], context=False) if which in row else "–")
            cells.append("–" if error is None else "within" if error == 0 else _signed(error))
        lines.append(cells)
    return said + table(
        "model, method | batch × tokens | GPU, transformers | measured, GiB | with the libraries of that day, GiB "
        "| outside it | with today's, GiB | outside it",
        lines,
    )


def _outcomes(rows: Iterable[Row]) -> str:
    cells = (
        [
            _name(row), f"{row['micro_batch']} × {row['seq_len']}", _where(row), row["outcome"].replace("_", " "),
            row["today"].get("verdict", "cannot be traced"),
        ]
        for row in rows
    )  # fmt: skip
    return table("model, method | batch × tokens | GPU, transformers | what happened | predicted", cells)


def _name(row: Row) -> str:
    return f"{row['model'].split('/')[-1]}, {_method(row)}"


def _where(row: Row) -> str:
    several = f"{row['gpus']} × " if row.get("gpus", 1) > 1 else ""
    return f"{several}{row['gpu'].removeprefix('NVIDIA ')}, {row.get('versions', {}).get('transformers', 'not told')}"


def _reasons(rows: Iterable[Row]) -> str:
    """Why the code counts as it does, once for each reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if "why" not in row:
            continue
        kind = "PEFT's methods" if row["method"].startswith("{") else _method(row)
        name = f"{row['model'].split('/')[-1]} {kind}, {row['versions']['transformers']}"
        if name not in found.setdefault(row["why"], []):
            found[row["why"]].append(name)
    return "\n".join(f"* {'; '.join(names)}: {why}" for why, names in found.items())


def protocols(content: Mapping[str, Any]) -> str:
    """The table of xMem's protocol."""
    lines = []
    for way in protocol(content["rows"]):
        of_it = way.errors
        cells = [
            way.name, str(of_it.count), _percent(of_it.median), _percent(of_it.mean), _percent(of_it.worst),
            f"{way.too_low} of {of_it.count}", f"{way.saved_gib:.1f}",
        ]  # fmt: skip
        lines.append(cells)
    return table(
        "estimate | trainings | median error | mean error | worst error | would have run out with it as cap "
        "| memory that the cap saves, mean, GiB",
        lines,
    )


def calibrated(content: Mapping[str, Any]) -> str:
    """What the slack of verdicts was fitted on, and how it does on the other half."""
    slack = CONTEXT_SLACK_BYTES / MIB
    lines = []
    for half in calibrations(content["rows"], content["fitted_on"], slack):
        count = half.below + half.within + half.above
        worst = f"{half.worst_mib:.0f}" if half.worst_mib > 0 else "none"
        models = ", ".join(half.models)
        lines.append([half.half, models, count, half.below, half.within, half.above, half.covered, worst])
    return table(
        "half | models | trainings | below the range | within | above | covered with slack | worst beyond it, MiB",
        lines,
    )


def _line(measured: str, found: Errors | None) -> list[str]:
    if found is None:
        return [measured, "0", "–", "–"]
    return [measured, str(found.count), _percent(found.median), _percent(found.worst)]


def _best(row: Row) -> Mapping[str, Any]:
    """The prediction with the libraries of that day where there is one."""
    then: Mapping[str, Any] = row.get("then", {})
    return then if "peak_allocated_gib" in then else row["today"]


def _method(row: Row) -> str:
    text = str(row["method"])
    if text.startswith("{"):
        name = row["id"].removeprefix("peft-2026-07-").split("--llama-3.2-3B-")
        return " ".join(part for part in name if part)
    kind = text.split()[0].strip(",").replace("full", "full fine-tuning")
    upcast = "upcast" in row.get("why", "") or "Norms in fp32" in row.get("why", "")
    return f"{kind}, norms in fp32" if kind == "QLoRA" and upcast else kind


def _predicted(answer: Mapping[str, Any], row: Row) -> str:
    if "peak_allocated_gib" not in answer:
        return "cannot be traced"
    return f"{answer['peak_allocated_gib']:.3f} ({_signed(answer['peak_allocated_gib'] / row['gib'] - 1)})"


def _range(answer: Mapping[str, Any], *, context: bool) -> str:
    if "peak_reserved_gib" not in answer:
        return "cannot be traced"
    low, high = (each + context * answer["outside_allocator_gib"] for each in answer["peak_reserved_gib"])
    return f"{low:.1f} to {high:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    content = json.loads(EVIDENCE.read_text())
    return {
        ROOT / "docs" / "predict.md": {
            "published": whole(content),
            "slack": calibrated(content),
        },
        ROOT / "docs" / "comparison.md": {"protocol": protocols(content)},
        ROOT / "README.md": {"published": short(content)},
    }
