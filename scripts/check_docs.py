#!/usr/bin/env python3
"""Writes docs/checks.md from the rules; with --check only compares.

.venv/bin/python scripts/check_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_memkit.checks import RULES, Rule  # noqa: E402

PAGE = ROOT / "docs" / "checks.md"

_HEAD = r"""# What `memkit check` knows

`memkit check FILE…` and `memkit ds check FILE` apply these rules to a DeepSpeed JSON, an argument file (the YAML
or JSON that HfArgumentParser reads; its `deepspeed:` is followed) or a recipe, before any model is loaded. All
problems are listed at once, each with the key, its value, what the library does with it, and what to write
instead. `--args FILE` adds the arguments that a DeepSpeed JSON goes with; `--model`, `--gpu`, `--gpu-memory`,
`--ram` and `--gpus` add what buffers and memory are checked against.

| severity | means | SARIF |
|---|---|---|
| error | the run fails, or its result is wrong | error |
| warning | memory or time is lost, or a setting has no effect | warning |
| hint | advice that a good config may rightly ignore | note |

Exit code 0: nothing as bad as `--fail-on` says (`error`, unless you write `warning` or `hint`), 1: something, 2: a
file cannot be read. A rule's severity is its usual one: a case of it can be milder or worse, where the file shows
that. memkit's presets and recipes refuse errors and warnings in what they make, and name hints in a note.

In CI, `memkit check ds.json --output-format sarif > memkit.sarif` writes SARIF 2.1.0 for code scanning. As a
[pre-commit](https://pre-commit.com) hook, with memkit installed beside pre-commit:

```yaml
repos:
  - repo: local
    hooks:
      - id: memkit-check
        name: memkit check
        entry: memkit check  # --fail-on warning, --args args.yaml …
        language: system
        files: ^configs/ds_.*\.json$
        require_serial: true
```

The repository has that hook as `memkit-check` too (`repo: https://github.com/hf-memkit/hf-memkit`, with a tag as
`rev`). pre-commit then installs memkit with PyTorch and DeepSpeed in an environment of its own, several GB, and looks
at JSON files named after DeepSpeed or ZeRO.

Every rule's test first shows the real library refusing or ignoring what the rule is about. This page is written from
the rules by `scripts/check_docs.py`.

"""

_COLUMNS = "| rule | severity | what happens | what to do | shown by |\n|---|---|---|---|---|\n"

_GROUPS = {
    "keys": "Keys",
    "values": "Values",
    "trainer": "DeepSpeed config against Trainer's arguments",
    "batch": "Batch sizes and accumulation",
    "optimizer_deepspeed": "Optimizers under DeepSpeed",
    "optimizer_choice": "Optimizers: what they cannot go with",
    "optimizer_options": "Optimizers: what they never see",
    "optimizer_states": "Optimizers: states and rounding",
    "stages": "ZeRO stages",
    "offload": "Offloading",
    "nvme": "NVMe",
    "buffers": "Buffers",
    "capacity": "Card, RAM, locked memory and disk",
    "precision": "Precision, states and activations",
    "zenflow": "ZenFlow",
    "saving": "Saving and evaluating",
    "arguments": "Trainer's arguments",
    "loading": "Loading weights and data",
    "allocator": "PyTorch's allocator",
    "checkpointing": "Activation checkpointing",
    "compiling": "torch.compile",
    "sequences": "Padding, packing and sampling",
    "evaluation": "Evaluation",
    "loss": "The loss",
    "attention": "Attention and activation functions",
    "adapters": "Adapters and quantised weights",
    "cpu_offload": "The optimizer in RAM without DeepSpeed",
}
"""Module of `hf_memkit.checks.rules` → heading."""


def page() -> str:
    """The page, with a row a rule."""
    parts = [_HEAD]
    for module, heading in _GROUPS.items():
        rules = [rule for rule in RULES.values() if rule.module == module]
        parts.append(f"## {heading}\n\n{_COLUMNS}")
        parts += [_row(rule) for rule in rules]
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def _row(rule: Rule) -> str:
    cells = (f"`{rule.id}`", rule.severity, rule.why, rule.fix, rule.source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print("docs/checks.md is not what the rules say: run scripts/check_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
