"""The block of sharded trainings that others measured on several GPUs, each beside its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docs_blocks import block, table
from docs_evidence import read, signed_percent, source

Row = Mapping[str, Any]

VERSIONS = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")


@block("docs/predict.md", "sharded")
def sharded_by_others() -> str:
    """Sharded trainings that others measured on several GPUs, each beside its prediction."""
    evidence = read("published_sharded")
    trainings = sorted(evidence["rows"], key=lambda row: not is_torchtitan(row))
    columns = (
        "training | batch | GPUs | sharded and traced with | peak | measured, GiB → predicted | difference | "
        "a step, s: measured → predicted | ratio"
    )
    figures = table(columns, [cells_of(row) for row in trainings])

    used = ", ".join(f"{name} {evidence['versions'][name].partition('+')[0]}" for name in VERSIONS)
    measured = "; ".join(sorted({versions_in_words(row) for row in trainings if row.get("versions")}))
    legend = f"Predicted with {used}. Measured with {measured}; fsdp_qlora in March 2024, without names of versions."

    others = []
    for row in filter(is_torchtitan, trainings):
        reserved = row["prediction"]["peak_reserved_gib"]["expandable"][1]
        others.append(f"{reserved:.1f} GiB ({signed_percent(error_of(row, 'expandable'))})")
    allocator = (
        "torchtitan does not name the allocator's settings of its rows. The table has torch's defaults; its script "
        f"for one machine sets `expandable_segments:True`, with which memkit predicts {', '.join(others)}."
    )
    return f"{figures}\n\n{legend} {allocator} {source('published_sharded')}"


def is_torchtitan(row: Row) -> bool:
    return str(row["id"]).startswith("titan-")


def versions_in_words(row: Row) -> str:
    """What a training was measured with."""
    names = ("torchtitan", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
    known = [f"{name} {row['versions'][name]}" for name in names if name in row["versions"]]
    return f"{row['source'].split()[0]}: {', '.join(known)}"


def error_of(row: Row, allocator: str = "default") -> float:
    """The difference of the prediction, as a share of what was measured. Of reserved memory it is that of the range's
    upper end, which a GPU with room reserves."""
    prediction = row["prediction"]
    predicted = prediction["peak_allocated_gib"]
    if row["measured"] == "max_reserved":
        predicted = prediction["peak_reserved_gib"][allocator][1]
    return float(predicted / row["gib"] - 1)


def cells_of(row: Row) -> list[Any]:
    """A training of `sharded_by_others`."""
    prediction = row["prediction"]
    reserved = row["measured"] == "max_reserved"
    predicted = f"{prediction['peak_allocated_gib']:.2f}"
    if reserved:
        low, high = prediction["peak_reserved_gib"]["default"]
        predicted = f"{low:.1f} to {high:.1f}"

    seconds = ratio = None
    if row.get("step_seconds"):
        low, middle, high = prediction["step_s"]
        seconds = f"{row['step_seconds']:.2f} → {middle:.2f} ({low:.2f} to {high:.2f})"
        ratio = f"{middle / row['step_seconds']:.2f}"
    method = "compiled" if row["id"].endswith("-compile") else row["method"].split()[0]
    engine = row["sharding"].split(",")[0].replace(" FULL_SHARD", "")
    engine = engine if engine.startswith(("FSDP1", "FSDP2")) else engine.replace("FSDP", "FSDP1")
    return [
        f"{row['source'].split()[0].partition('/')[2]}: {row['model'].rpartition('/')[2]}, {method}",
        f"{row['micro_batch']} × {row['seq_len']}",
        f"{row['gpus']} × {row['gpu'].removeprefix('2x ').partition(' HBM')[0]}",
        engine,
        "reserved" if reserved else "allocated",
        f"{row['gib']:.2f} → {predicted}",
        signed_percent(error_of(row)),
        seconds,
        ratio,
    ]
