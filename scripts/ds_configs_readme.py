#!/usr/bin/env python3
"""Writes ds_configs/README.md from ds_configs/index.yaml and the ledger's formulas; with --check only compares.

.venv/bin/python scripts/ds_configs_readme.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_memkit.architectures import ARCHITECTURES  # noqa: E402
from hf_memkit.models import ModelFacts, describe  # noqa: E402
from hf_memkit.units import GIB  # noqa: E402
from hf_memkit.zero.ledger import zero_ledger  # noqa: E402
from hf_memkit.zero.presets import (  # noqa: E402
    PresetInfo,
    load,
    preset_index,
)

TARGET = ROOT / "ds_configs" / "README.md"

INTRODUCTION = """\
# DeepSpeed presets

Each file works unchanged: `TrainingArguments(..., deepspeed="ds_configs/zero2-offload.json")`. `"auto"` appears only
in keys that Trainer fills in. Every buffer has a number, never DeepSpeed's default of 5e8 elements. Presets with
NVMe have a placeholder for `nvme_path`.

```bash
memkit ds list
memkit ds show zero3-infinity
memkit ds copy zero3-infinity ds.json --model gpt2-xl --gpu-memory 16GB --ram 32GB --nvme-path /fast
memkit ds check ds.json
```

With `--model`, memkit computes every buffer for that model and machine, and prints a ledger of what the result holds
on the GPU, in RAM and on disk. Under ZeRO-3 create `TrainingArguments` before the model and keep them: only then does
DeepSpeed split the model while it is loaded.

`scripts/ds_configs_readme.py` generates this page from `index.yaml` and the ledger's formulas.
"""

MODEL = "openai-community/gpt2-xl"
PLACES = (("device",), ("host", "pinned"), ("disk",))


def needs(info: PresetInfo) -> str:
    found = [f"{info.gpus} GPUs"] if info.gpus > 1 else []
    found += [f"deepspeed{info.deepspeed}"] if info.deepspeed else []
    found += info.packages
    found += ["a GPU: " + info.not_on_cpu] if info.not_on_cpu else []
    return ", ".join(found) or "–"


def descriptions() -> list[str]:
    lines = ["| preset | what it is | for | saves | costs | needs |", "|---|---|---|---|---|---|"]
    for info in preset_index().values():
        cells = (
            f"[`{info.name}`]({info.name}.json)",
            info.summary,
            info.for_whom,
            info.saves,
            info.costs,
            needs(info),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sizes(model: ModelFacts) -> list[str]:
    lines = ["| preset | GPU | RAM | disk | GPU | RAM | disk |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name in preset_index():
        cells = []
        for gpus in (1, 8):
            ledger = zero_ledger(load(name), model, gpus=gpus)
            totals = [ledger.total_bytes(*places) / GIB for places in PLACES]
            cells += [f"{total:.1f}" if total >= 0.05 else "–" for total in totals]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def readme() -> str:
    model = describe(MODEL, ARCHITECTURES[MODEL].config, use_hub=False)
    return "\n".join(
        [
            INTRODUCTION,
            "## Presets",
            "",
            *descriptions(),
            "",
            "## Sizes",
            "",
            f"GiB that DeepSpeed holds to train all of {MODEL} ({model.parameters / 1e9:.2f} B parameters)",
            "with these constants: by formula, not measured. Columns: one GPU, and the RAM and disk of one machine;",
            "first with one GPU in the machine, then with eight. Not included: activations, loss and processes.",
            "With stage 3, RAM includes the weights that rank 0 gathers for each checkpoint",
            "(`stage3_gather_16bit_weights_on_model_save`).",
            "",
            *sizes(model),
            "",
        ]
    )


def main() -> int:
    text = readme()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            print(f"{TARGET.relative_to(ROOT)} is out of date. Run: scripts/ds_configs_readme.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
