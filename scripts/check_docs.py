"""Writes docs/checks.md from the rules."""

from __future__ import annotations

from pathlib import Path

from evidence_tables import ROOT, table

from hf_memkit.checks import RULES

SCREEN = ROOT / "tests" / "checks" / "check_screen.txt"
"""The output of `memkit check ds.json` that a test compares with the command's."""

_HEAD = r"""# Rules of `memkit check`

```bash
memkit check ds.json                       # a DeepSpeed JSON; memkit ds check ds.json does the same
memkit check ds.json --args args.yaml      # also against Trainer's arguments
memkit check args.yaml                     # the YAML or JSON of HfArgumentParser, with the JSON its deepspeed: names
memkit check zero3.yaml --args args.yaml   # the YAML of accelerate launch, with the JSON that it names
memkit check recipe.yaml
memkit check ds.json --model gpt2-xl --gpu T4 --ram 64GB    # also buffers and memory; --gpu-memory and --gpus too
```

```text
SCREEN
```

`memkit check` finds known mistakes before any model is loaded. It lists all problems at once, errors first. For each
it prints the key, its value, what the library does with it, the rule, and what to write instead.

| severity | means | SARIF |
|---|---|---|
| error | the run fails, or its result is wrong | error |
| warning | the run loses memory or time, or a setting has no effect | warning |
| hint | advice that a good config may ignore | note |

| exit code | means |
|---|---|
| 0 | no problem of the severity `--fail-on` or worse (default: `error`; also `warning`, `hint`) |
| 1 | at least one such problem |
| 2 | wrong input, such as a file that cannot be read, or files of which memkit checks none |

The tables give each rule's default severity; a case can be milder or worse. memkit's own presets and recipes refuse
errors and warnings, and list hints as notes.

Names and values of arguments are compared with the installed transformers and TRL, whose source is read and not
imported. Files of other tools (axolotl, LLaMA-Factory, ms-swift, torchtune, …), shell scripts and
a model's own JSON files are recognised and not checked: alone they end with exit code 2 and one line; beside other
files each is a hint (`not-checked`).

In CI, `memkit check ds.json --output-format sarif > memkit.sarif` writes SARIF 2.1.0 for code scanning.

As a [pre-commit](https://pre-commit.com) hook, with memkit installed in the same environment as pre-commit:

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

The repository also provides the hook `memkit-check` (`repo: https://github.com/hf-memkit/hf-memkit`, with a tag as
`rev`). pre-commit then installs memkit in a separate environment, and checks
JSON files named after DeepSpeed or ZeRO.

The test of each rule first shows that the real library fails or ignores the setting. `scripts/check_docs.py` generates
this page from the rules.

"""

_GROUPS = {
    "keys": "Keys",
    "values": "Values",
    "trainer": "DeepSpeed config against Trainer's arguments",
    "launcher": "The YAML of accelerate launch",
    "batch": "Batch sizes and accumulation",
    "optimizer_deepspeed": "Optimizers under DeepSpeed",
    "optimizer_choice": "Optimizers: conflicts",
    "optimizer_options": "Optimizers: ignored options",
    "optimizer_states": "Optimizers: states and rounding",
    "stages": "ZeRO stages",
    "offload": "Offloading",
    "nvme": "NVMe",
    "buffers": "Buffers",
    "capacity": "GPU memory, RAM, locked memory and disk",
    "precision": "Precision, states and activations",
    "zenflow": "ZenFlow",
    "saving": "Saving and evaluating",
    "argument_names": "Names of arguments",
    "arguments": "Trainer's arguments",
    "refused_arguments": "Values that TrainingArguments refuse",
    "trl_values": "Values that TRL refuses or ignores",
    "loading": "Loading weights and data",
    "allocator": "PyTorch's allocator",
    "checkpointing": "Activation checkpointing",
    "compiling": "torch.compile",
    "sequences": "Padding, packing and sampling",
    "evaluation": "Evaluation",
    "loss": "The loss",
    "attention": "Attention and activation functions",
    "adapters": "Adapters and quantised weights",
    "cpu_offload": "Optimizer in RAM without DeepSpeed",
}
"""Module of `hf_memkit.checks.rules` → heading."""


def page() -> str:
    """The page, with a row a rule.

    Raises:
        SystemExit: a module of rules has no heading.
    """
    if missing := {rule.module for rule in RULES.values()} - set(_GROUPS):
        raise SystemExit(f"scripts/check_docs.py: _GROUPS has no heading for {', '.join(sorted(missing))}. Add one")
    parts = [_HEAD.replace("SCREEN", SCREEN.read_text().rstrip())]
    for module, heading in _GROUPS.items():
        rules = [rule for rule in RULES.values() if rule.module == module]
        rows = [[f"`{each.id}`", each.severity, each.why, each.fix, each.source] for each in rules]
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        parts.append(f"## {heading}\n\n{table('rule | severity | why | fix | source', cells)}\n\n")
    return "".join(parts).rstrip() + "\n"


def tables() -> dict[Path, str]:
    """The whole page."""
    return {ROOT / "docs" / "checks.md": page()}
