"""The page's lower half: the moment of an OOM, the table by module, what the run was, and what the words mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.report import wording
from hf_memkit.report.html import Html, el, figure_table
from hf_memkit.report.load import Run
from hf_memkit.report.modules import places, shown_rows
from hf_memkit.report.sanitize import number, text, whole

__all__ = ["facts", "glossary", "modules", "out_of_memory"]

_WORDS: Final = (
    ("allocated", "Bytes of tensors that are alive. The peak is the highest they came to."),
    (
        "reserved",
        "What PyTorch's allocator has taken from the card: allocated bytes and its cache. This is what must fit.",
    ),
    (
        "outside the allocator",
        "What else the card holds: the CUDA context, libraries such as NCCL, other processes. nvidia-smi counts it.",
    ),
    ("headroom", "The card less the highest reserved and what is outside the allocator."),
    (
        "fragmentation",
        "Reserved but not in use. Where no free piece is long enough, memory runs out while there is some.",
    ),
    (
        "weights, gradients, optimizer",
        "The model's parameters, their gradients, and what the optimizer keeps for each.",
    ),
    (
        "activations",
        "What forward keeps for backward. It grows with the batch and its length; checkpointing recomputes it.",
    ),
    ("loss", "Logits and what the loss makes of them: tokens times vocabulary, often in 32 bits."),
    ("buffers, other", "Communication buckets and workspaces; and what cannot be told apart, so that all adds up."),
    ("held", "What lives on after the optimizer's step, by the place where it lies."),
    ("phase", "What training was doing: load, data, forward, backward, optimizer, evaluate, save."),
    ("GiB", "2³⁰ bytes, 7 % more than a GB."),
)

_OF_THE_MODEL: Final = (
    "model_class",
    "model_type",
    "parameters",
    "trainable_parameters",
    "vocabulary",
    "weights_dtypes",
    "attention",
    "optimizer_classes",
    "engine",
)


def out_of_memory(run: Run) -> Html | None:
    """The last OOM of the rank that the run ended by."""
    rank = next(rank for rank in run.ranks if rank.rank == run.ended_by)
    if not rank.ooms:
        return None
    oom = rank.ooms[-1]
    rows = [(label, shown) for label, shown in _moment(oom) if shown]
    listed = el("dl", *(part for label, shown in rows for part in (el("dt", label), el("dd", shown))), class_="facts")
    message = el("pre", text(oom.get("error", ""), 3000)) if oom.get("error") else None
    line = wording.out_of_memory(run) or ""
    return el("section", el("h2", "The moment memory ran out"), el("p", line), listed, message, id="oom")


def _moment(oom: Mapping[str, Any]) -> list[tuple[str, str]]:
    def gib(name: str) -> str:
        value = number(oom, name)
        return "" if value is None else f"{value:.2f} GiB"

    def count(name: str) -> str:
        value = whole(oom, name)
        return "" if value is None else f"{value:,}"

    inputs = oom.get("inputs", {})
    shapes = ", ".join(f"{text(name, 40)} {text(shape, 40)}" for name, shape in inputs.items())
    return [
        ("Step", count("step")),
        ("Phase", text(oom.get("phase", ""), 20)),
        ("Micro-batch", count("micro_batch")),
        ("Samples", count("samples")),
        ("Tokens", count("tokens")),
        ("Longest sequence", count("longest_sequence")),
        ("Inputs", shapes),
        ("Asked for", gib("requested_gib")),
        ("Free on the card", gib("free_gib")),
        ("Allocated", gib("allocated_gib")),
        ("Reserved", gib("reserved_gib")),
        ("Cause", text(oom.get("cause", ""), 80)),
        ("Error", text(oom.get("error_type", ""), 80)),
        ("Allocator snapshot", text(oom.get("snapshot", ""), 120)),
    ]


def modules(run: Run) -> Html | None:
    """The table by module, as of the first rank."""
    rows = shown_rows(run.first.modules)
    if not rows:
        return None
    shown = [
        (
            row.name, row.kind, row.parameters, row.trained, row.size, places(row),
        )
        for row in rows
    ]  # fmt: skip
    columns = ("module", "class", "parameters", "trained", "size", "where")
    table = figure_table("Parameters and their bytes by module", columns, shown, numbers=(2, 3, 4))
    return el("section", el("h2", "By module"), el("div", table, class_="tall"), id="modules")


def facts(run: Run) -> Html:
    """What ran: the facts that the records have of it."""
    record = run.first.run
    groups = [
        ("Model", {name: record.get(name) for name in _OF_THE_MODEL}),
        ("Arguments", record.get("arguments", {})),
        ("Machine", {**record.get("hardware", {}), "world_size": record.get("world_size")}),
        ("Versions", record.get("versions", {})),
        ("Given by the user", record.get("facts", {})),
    ]  # fmt: skip
    shown = []
    for heading, values in groups:
        known = {name: value for name, value in values.items() if value is not None}
        if known:
            rows = [part for name, value in known.items() for part in (el("dt", name), el("dd", _fact(value)))]
            shown.append(el("div", el("h3", heading), el("dl", *rows, class_="facts")))
    files = ", ".join(text(rank.path.name, 60) for rank in run.ranks[:8]) + (", …" if len(run.ranks) > 8 else "")
    source = el("p", f"Records: {files} in {text(run.folder, 300)}", class_="soft")
    return el("section", el("h2", "The run"), el("div", *shown, class_="pair"), source, id="facts")


def _fact(value: Any) -> str:
    if isinstance(value, bool | str):
        return text(value, 300)
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    return text(json.dumps(value, ensure_ascii=False), 300)


def glossary() -> Html:
    """The words, two lines each."""
    words = [part for word, meaning in _WORDS for part in (el("dt", word), el("dd", meaning))]
    return el("section", el("h2", "Words"), el("dl", *words, class_="glossary"), id="words")
