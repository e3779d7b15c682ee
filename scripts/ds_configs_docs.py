"""Writes the first examples of ds_configs/README.md and docs/deepspeed.md, and the tables of the former."""

from __future__ import annotations

import tempfile
from pathlib import Path

from evidence_tables import ROOT, excerpt, output_of, shown, table

from hf_memkit.catalog.architectures import ARCHITECTURES
from hf_memkit.catalog.models import describe
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.presets import PresetInfo, load, preset_index

MODEL = "openai-community/gpt2-xl"
PLACES = (("device",), ("host", "pinned"), ("disk",))


def needs(info: PresetInfo) -> str:
    found = [f"{info.gpus} GPUs"] if info.gpus > 1 else []
    found += [f"deepspeed{info.deepspeed}"] if info.deepspeed else []
    found += info.packages
    found += ["a GPU: " + info.not_on_cpu] if info.not_on_cpu else []
    return ", ".join(found) or "–"


def descriptions() -> str:
    """A row a preset, from index.yaml."""
    rows = (
        [f"[`{each.name}`]({each.name}.json)", each.summary, each.audience, each.saves, each.costs, needs(each)]
        for each in preset_index().values()
    )
    return table("preset | what it is | for | saves | costs | needs", rows)


def sizes() -> str:
    """What each preset holds, by formula."""
    model = describe(MODEL, ARCHITECTURES[MODEL].config, use_hub=False)
    rows = []
    for name in preset_index():
        cells = [f"`{name}`"]
        for gpus in (1, 8):
            ledger = zero_ledger(load(name), model, gpus=gpus)
            totals = [ledger.total_bytes(*places) / GIB for places in PLACES]
            cells += [f"{total:.1f}" if total >= 0.05 else "–" for total in totals]
        rows.append(cells)
    of = f"Of {MODEL}, {model.parameters / 1e9:.2f} B parameters, all of them trained:"
    return f"{of}\n\n{table('preset | GPU | RAM | disk | GPU | RAM | disk', rows, '---:')}"


def one() -> str:
    """For whom a preset is, and its stage."""
    command = "memkit ds show zero2-offload"
    parts = (("zero2-offload:", "Note"), ('  "zero_optimization"', "}"))
    return shown(command, excerpt(output_of(command), *parts))


def sized() -> str:
    """Three buffers that were computed, and what the result holds on the GPU and on disk."""
    command = "memkit ds copy zero3-infinity ds.json --model gpt2-xl --gpu-memory 16GB --ram 32GB --nvme-path /fast"
    with tempfile.TemporaryDirectory() as folder:
        output = output_of(command, Path(folder))
    parts = (
        ("key", ""),
        ("stage3_prefetch_bucket_size", "offload_optimizer.pin_memory"),
        ("place", "host"),
        ("disk", "Note"),
        ("Wrote", ""),
        ("Use it", ""),
    )
    return shown(command, excerpt(output, *parts))


def tables() -> dict[Path, dict[str, str]]:
    """Each page's parts."""
    return {
        ROOT / "ds_configs" / "README.md": {"show": one(), "presets": descriptions(), "sizes": sizes()},
        ROOT / "docs" / "deepspeed.md": {"sized": sized()},
    }
