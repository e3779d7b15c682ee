"""Writes the tables of docs/techniques/ and the first example of its README."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from evidence_tables import RESULTS, ROOT, excerpt, output_of, shown, table

from hf_memkit.measuring.out_of_memory.change import assignment
from hf_memkit.setup.techniques.registry import CATALOGUE, FAMILIES, TECHNIQUES, Family, Technique

PAGES: Final = ROOT / "docs" / "techniques"


def tables() -> dict[Path, dict[str, str]]:
    """Each page's tables."""
    found = {PAGES / "README.md": {"list": first_example(), "techniques": overview_table()}}
    found[ROOT / "docs" / "out-of-memory.md"] = {"changes": changes()}
    for name, (page, made) in EVIDENCE.items():
        found.setdefault(PAGES / page, {})[name] = made(json.loads((RESULTS / f"{name}.json").read_text()))
    return found


def first_example() -> str:
    """Two techniques of the list."""
    command = "memkit preset list --techniques"
    families = (("checkpointing", "  every-nth"), ("loss", "  liger"))
    return shown(command, excerpt(output_of(command), *families))


def overview_table() -> str:
    """Every technique: a row each, in the order in which they are applied."""
    tests = proving_tests()
    rows = []
    for family in FAMILIES:
        for one in (one for one in TECHNIQUES.values() if one.family == family):
            name = f"[`{one.name}`]({family}.md#{one.name})"
            words = [_cell(text) for text in (one.saves, one.costs, one.not_when)]
            rows.append([name, family, *words, evidence_of(one, tests)])
    return table("technique | family | saves | costs | not when | proof", rows)


def changes() -> str:
    """Every change that advice may propose: a row each."""
    rows = []
    for one in sorted(CATALOGUE.values(), key=lambda one: get_args(Family).index(one.family)):
        if one.settings:
            named = f"[`{one.name}`](techniques/{one.family}.md#{one.name})" if one.apply else f"`{one.name}`"
            shown = assignment(one.key, one.settings[one.key])
            rows.append([named, f"`{_cell(shown)}`", _cell(one.saves), _cell(one.costs), one.group])
    return table("name | change | what it does | cost | result", rows)


def evidence_of(one: Technique, tests: Mapping[tuple[str, str], list[str]]) -> str:
    """What shows that a technique works, with links."""
    parts = []
    for kind, words in (("same-result", "same result"), ("memory", "memory")):
        links = [f"[{words}](../../{path})" for path in tests.get((kind, one.name), [])]
        parts += links[:1]
    if one.proof == "curve":
        parts.append("[curve](optimizers.md)" if one.family == "optimizers" else "curve")
    if one.gpu_only:
        parts.append(f"memory only on a GPU: {_cell(one.gpu_only)}")
    return "; ".join(parts)


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
    rows = []
    for name, arm in arms.items():
        loss, base = _last(arm), _last(arms[arm["baseline"]]) if arm["baseline"] in arms else None
        difference = "–" if base is None or name == arm["baseline"] else f"{loss / base - 1:+.2%}".replace("%", " %")
        technique = f"`{arm['technique']}`" if arm["technique"] else "–"
        of_base = "–" if base is None else f"{base:.4f}"
        rows.append([name, technique, f"{arm['learning_rate']:g}", f"{loss:.4f}", of_base, difference])
    model, text = content["model"], content["text"]
    columns = "optimizer | technique | learning rate | held-out loss | its baseline's | difference"
    return (
        f"{table(columns, rows)}\n\n"
        f"{content['steps']} steps of {model['batch']} sequences of {model['length']} tokens, {model['layers']} "
        f"layers of width {model['width']}, vocabulary {model['vocabulary']}, {model['parameters']:,} parameters; "
        f"text: {text['source']}. Evidence: `benchmarks/results/optimizer_curves.json`, made by "
        f"`benchmarks/optimizer_curves.py` on a CPU."
    )


def bytes_table(content: Mapping[str, Any]) -> str:
    """Bytes of states and gradients of each optimizer, counted after a step."""
    cells = []
    rows = {(row["technique"], row["weights"]): row for row in content["rows"]}
    for name in dict.fromkeys(row["technique"] for row in content["rows"]):
        both = [rows[name, weights] for weights in ("float32", "bfloat16")]
        states = (f"{row['state_bytes_a_parameter']:.3f}" for row in both)
        share = both[0]["gradient_bytes"] / (4 * both[0]["parameters"])
        cells.append([f"`{name}`", both[0]["model"], *states, f"{100 * share:.0f} %"])
    models = content["models"].values()
    sizes = "; ".join(", ".join(f"{key} {value}" for key, value in model.items()) for model in models)
    columns = "technique | model | states, fp32 weights | states, bf16 weights | gradients held, of all"
    return (
        f"{table(columns, cells)}\n\n"
        f"Bytes a trained parameter, counted in the real optimizer after one step of Trainer on a CPU: {sizes}. "
        f"Embeddings are most of these shallow models, so that bitsandbytes' states are larger here than in deep "
        f"ones. Evidence: `benchmarks/results/optimizer_bytes.json`, made by `benchmarks/optimizer_bytes.py`."
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
