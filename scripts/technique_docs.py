#!/usr/bin/env python3
"""Writes the tables of docs/techniques/ and the first example of its README; with --check only compares.

.venv/bin/python scripts/technique_docs.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from evidence_tables import RESULTS, ROOT, excerpt, output_of, shown, update

from benchmarks.techniques_cases import COVERED, LADDERS, MODELS, Case, Comparison, comparisons, rungs
from hf_memkit.technique import FAMILIES, TECHNIQUES, Family, Technique

PAGES: Final = ROOT / "docs" / "techniques"
NOT_YET: Final = (
    "Not yet measured on a GPU: `python benchmarks/gpu.py --section techniques` does it, where there is one."
)

NEAR: Final = 0.02  # other kernels and 16-bit rounding, over a dozen steps

Rows = Mapping[str, Mapping[str, Any]]


def main(arguments: list[str]) -> int:
    return update(tables(), arguments, "technique_docs.py")


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    gpu = measured(RESULTS)
    found = {PAGES / f"{family}.md": {"gpu": gpu_table(family, gpu)} for family in FAMILIES}
    found[PAGES / "README.md"] = {
        "list": first_example(),
        "techniques": overview_table(gpu),
        "ladders": ladder_tables(gpu),
    }
    for name, (page, table) in EVIDENCE.items():
        found[PAGES / page][name] = table(json.loads((RESULTS / f"{name}.json").read_text()))
    return found


def first_example() -> str:
    """Two techniques of the list."""
    command = "memkit preset list --techniques"
    families = (("checkpointing", "  every-nth"), ("loss", "  liger"))
    return shown(command, excerpt(output_of(command), *families))


def measured(results: Path = RESULTS) -> Rows:
    """Case → its row of `techniques.json`; empty while nothing was measured on a GPU."""
    path = results / "techniques.json"
    return {row["case"]: row for row in json.loads(path.read_text())["cases"]} if path.exists() else {}


def overview_table(gpu: Rows) -> str:
    """Every technique: a row each, in the order in which they are applied."""
    tests = proving_tests()
    lines = ["| technique | family | saves | costs | not when | proof |", "|---|---|---|---|---|---|"]
    for family in FAMILIES:
        for one in (one for one in TECHNIQUES.values() if one.family == family):
            name = f"[`{one.name}`]({family}.md#{one.name})"
            words = [_cell(text) for text in (one.saves, one.costs, one.not_when)]
            lines.append(f"| {' | '.join([name, family, *words, evidence_of(one, tests, gpu)])} |")
    return "\n".join(lines)


def evidence_of(one: Technique, tests: Mapping[tuple[str, str], list[str]], gpu: Rows) -> str:
    """What shows that a technique works, with links, and what does not yet."""
    parts = []
    for kind, words in (("same-result", "same result"), ("memory", "memory")):
        links = [f"[{words}](../../{path})" for path in tests.get((kind, one.name), [])]
        parts += links[:1]
    if one.proof == "curve":
        parts.append("[curve](optimizers.md)" if one.family == "optimizers" else "curve")
    if one.gpu_only:
        parts.append(f"memory only on a GPU: {_cell(one.gpu_only)}")
    return "; ".join([*parts, *gpu_words(one, gpu)])


def gpu_words(one: Technique, gpu: Rows) -> list[str]:
    if one.name in COVERED:
        return [f"GPU: {COVERED[one.name]}"]
    for comparison in comparisons():
        with_it, base = gpu.get(comparison.case.name), gpu.get(comparison.base.name)
        if comparison.technique != one.name or not with_it or not base:
            continue
        peaks = [row.get("peak_allocated_gib") for row in (base, with_it)]
        if all(peaks):
            return [f"GPU: {peaks[0]:.2f} → {peaks[1]:.2f} GiB"]
        return [f"GPU: {with_it['status']}"]
    return ["not yet measured on a GPU"]


def ladder_tables(gpu: Rows) -> str:
    """A table a model: one technique more in each row."""
    parts = []
    for model in LADDERS:
        size = MODELS[model]
        lines = [
            f"`{size.hub_id}`, random weights, {size.micro_batch_size} × {size.accumulation} sequences of "
            f"{size.sequence_length} tokens a step:",
            "",
            "| adds | peak, GiB | reserved, GiB | highest in | tokens/s | loss of the last step |",
            "|---|---|---|---|---|---|",
        ]
        for adds, rung in rungs(model):
            lines.append(f"| `{adds}` | {' | '.join(_figures(gpu.get(rung.name)))} |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, _where_measured(gpu)])


def gpu_table(family: Family, gpu: Rows) -> str:
    """The techniques of a family, each beside the same training without it."""
    names = [one.name for one in TECHNIQUES.values() if one.family == family]
    notes = [f"`{name}`: {COVERED[name]}." for name in names if name in COVERED]
    found = [one for one in comparisons() if one.technique in names]
    lines = []
    if found:
        lines = [
            "| with | without it | with it |",
            "|---|---|---|",
        ]
        for one in found:
            base, with_it = (gpu.get(each.name) for each in (one.base, one.case))
            differs = " **the losses differ**" if losses_differ(one, base, with_it) else ""
            words = [f"{_short(row)}{_extra(family, row)}" for row in (base, with_it)]
            lines.append(f"| {_case(one.case)} | {words[0]} | {words[1]}{differs} |")
        if not any(one.case.name in gpu for one in found):
            lines = ["To be trained:", "", *(f"- {_case(one.case)}, beside {_case(one.base)}" for one in found)]
        lines += ["", _where_measured(gpu)]
    return "\n".join([*lines, *(["", *notes] if notes and lines else notes)])


def losses_differ(one: Comparison, base: Mapping[str, Any] | None, with_it: Mapping[str, Any] | None) -> bool:
    """Whether a technique that should change no result ends further than `NEAR` from the training without it, on the
    same sequences."""
    if TECHNIQUES[one.technique].proof == "curve" or one.case.data != "equal" or base is None or with_it is None:
        return False
    losses = [row["losses"][-1] for row in (base, with_it) if row.get("losses")]
    return len(losses) == 2 and not abs(losses[1] / losses[0] - 1) <= NEAR


def _case(one: Case) -> str:
    model, _, rest = one.name.partition(": ")
    techniques, bracket, details = rest.partition(" (")
    return f"`{techniques}` on {model}{bracket}{details}"


def _short(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not yet measured"
    if "peak_allocated_gib" not in row:
        return f"{row['status']}: {_cell(str(row.get('why', '')))[:120]}"
    peak, _, _, speed, loss = _figures(row)
    return f"{peak} GiB, {speed} tokens/s, loss {loss}"


def _extra(family: Family, row: Mapping[str, Any] | None) -> str:
    """What a family is about besides the peak of training."""
    key, words = {
        "loading": ("host_peak_gib", "of RAM"),
        "evaluation": ("evaluate_peak_allocated_gib", "in evaluation"),
    }.get(family, ("", ""))
    return f", {row[key]:.2f} GiB {words}" if row is not None and key in row else ""


def _figures(row: Mapping[str, Any] | None) -> list[str]:
    """Peak allocated, peak reserved, phase of the peak, tokens a second, last loss."""
    if row is None:
        return ["not yet measured", "", "", "", ""]
    if row["status"] != "fits":
        return [f"{row['status']}: {_cell(str(row.get('why', '')))[:120]}", "", "", "", ""]
    phases = row.get("phases", {})
    losses = row.get("losses", [])
    return [
        _number(row.get("peak_allocated_gib"), ".2f"),
        _number(row.get("peak_reserved_gib"), ".2f"),
        max(phases, key=lambda phase: phases[phase]) if phases else "–",
        _number(row.get("tokens_per_s"), ",.0f"),
        _number(losses[-1] if losses else None, ".3f"),
    ]


def _where_measured(gpu: Rows) -> str:
    if not gpu:
        return NOT_YET
    row = next(iter(gpu.values()))
    versions = row["versions"]
    name = (row["hardware"].get("gpu") or {}).get("name", "unknown GPU")
    return (
        f"Measured on {name} with torch {versions['torch']} and transformers {versions['transformers']}; evidence: "
        f"`benchmarks/results/techniques.json`, made by `python benchmarks/gpu.py --section techniques`."
    )


def proving_tests() -> dict[tuple[str, str], list[str]]:
    """(kind of proof, technique) → test files that carry its marker."""
    found: dict[tuple[str, str], list[str]] = {}
    marker = re.compile(r'@?proves\(\s*"(same-result|memory)"((?:,\s*"[\w-]+")+)')
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for kind, names in marker.findall(path.read_text()):
            for name in re.findall(r'"([\w-]+)"', names):
                files = found.setdefault((kind, name), [])
                if (relative := str(path.relative_to(ROOT))) not in files:
                    files.append(relative)
    return found


def curves_table(content: Mapping[str, Any]) -> str:
    """Held-out loss at the end of each optimizer's training, beside its baseline's."""
    arms = content["arms"]
    lines = [
        "| optimizer | technique | learning rate | held-out loss | its baseline's | difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        loss, base = _last(arm), _last(arms[arm["baseline"]]) if arm["baseline"] in arms else None
        difference = "–" if base is None or name == arm["baseline"] else f"{loss / base - 1:+.2%}".replace("%", " %")
        technique = f"`{arm['technique']}`" if arm["technique"] else "–"
        lines.append(
            f"| {name} | {technique} | {arm['learning_rate']:g} | {loss:.4f} | {_number(base, '.4f')} | {difference} |"
        )
    model, text = content["model"], content["text"]
    return "\n".join(
        [
            *lines,
            "",
            f"{content['steps']} steps of {model['batch']} sequences of {model['length']} tokens, {model['layers']} "
            f"layers of width {model['width']}, vocabulary {model['vocabulary']}, {model['parameters']:,} parameters; "
            f"text: {text['source']}. Evidence: `benchmarks/results/optimizer_curves.json`, made by "
            f"`benchmarks/optimizer_curves.py` on a CPU.",
        ]
    )


def bytes_table(content: Mapping[str, Any]) -> str:
    """Bytes of states and gradients of each optimizer, counted after a step."""
    lines = [
        "| technique | model | states, fp32 weights | states, bf16 weights | gradients held, of all |",
        "|---|---|---|---|---|",
    ]
    rows = {(row["technique"], row["weights"]): row for row in content["rows"]}
    for name in dict.fromkeys(row["technique"] for row in content["rows"]):
        both = [rows[name, weights] for weights in ("float32", "bfloat16")]
        states = " | ".join(f"{row['state_bytes_a_parameter']:.3f}" for row in both)
        share = both[0]["gradient_bytes"] / (4 * both[0]["parameters"])
        lines.append(f"| `{name}` | {both[0]['model']} | {states} | {share:.0%} |".replace("%", " %"))
    models = content["models"].values()
    sizes = "; ".join(", ".join(f"{key} {value}" for key, value in model.items()) for model in models)
    return "\n".join(
        [
            *lines,
            "",
            f"Bytes a trained parameter, counted in the real optimizer after one step of Trainer on a CPU: {sizes}. "
            f"Embeddings are most of these shallow models, so that bitsandbytes' states are larger here than in deep "
            f"ones. Evidence: `benchmarks/results/optimizer_bytes.json`, made by "
            f"`benchmarks/optimizer_bytes.py`.",
        ]
    )


def _last(arm: Mapping[str, Any]) -> float:
    return float(arm["held_out"][-1][1])


EVIDENCE: Final[Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]]] = {
    "optimizer_bytes": ("optimizers.md", bytes_table),
    "optimizer_curves": ("optimizers.md", curves_table),
}
"""Evidence file (without .json) → its page, and what makes a table of it."""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
