"""Writes the examples of README.md and the first of docs/predict.md and docs/your-script.md: a recorded plan, and
commands that are run here."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from evidence_tables import RESULTS, ROOT, output_of, shown, trimmed
from plan_docs import command_lines

from benchmarks.script_overhead import MODELS, SCRIPT

LOG: Final = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 812.44 MiB is free. Including non-PyTorch memory, this process has 22.84 GiB memory in use. Of the allocated \
memory 22.09 GiB is allocated by PyTorch, and 248.00 MiB is reserved by PyTorch but unallocated.
"""


def plan() -> str:
    """Up to the arguments that are to be pasted."""
    content = json.loads((RESULTS / "plan_example.json").read_text())
    found = content["examples"]["one"]
    answer, paste = found["output"].split("\n\n")[:2]
    text = f"{trimmed(answer)}\n\n{trimmed(paste)}\n…"
    took = f"That took {found['seconds']:.0f} s on {content['hardware']['cpu_count']} CPU cores."
    return f"```bash\n{command_lines(found['command'])}\n```\n\n```text\n{text}\n```\n\n{took}"


def explain() -> str:
    """The cause, and the first two changes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.log").write_text(LOG)
        command = "memkit explain train.log"
        output = output_of(command, Path(folder))
    cause, fixes = (output[output.index(heading) :] for heading in ("Cause:", "Generic fixes"))
    first_two = fixes[: fixes.index("  3. ")]
    paragraphs = [output.split("\n\n")[0], "…", cause.split("\n\n")[0], "…", f"{first_two}  …"]
    return shown(command, "\n\n".join(paragraphs))


def recipe() -> str:
    """A dry run."""
    command = "memkit recipe gpt2-on-16gb --gpu T4 --ram 64GB --dry-run --short"
    return shown(command, output_of(command))


def prediction() -> str:
    """One screen, and a page."""
    command = (
        'memkit predict --model gpt2-xl --preset resident --gpu "RTX 4080" \\\n'
        "    --batch-size 8 --sequence-length 1024 --short --html prediction.html"
    )
    with tempfile.TemporaryDirectory() as folder:
        return shown(command, output_of(command, Path(folder)))


def script() -> str:
    """One screen, of the script whose prediction is timed."""
    command = (
        'memkit predict train.py --gpu "RTX 4090" --short -- \\\n    --output_dir out --bf16 '
        "--gradient_checkpointing --per_device_train_batch_size 2 --optim adamw_8bit"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        (Path(folder) / "config.json").write_text(json.dumps(MODELS["GPT-2 XL"]))
        return shown(command, output_of(command, Path(folder)))


def tables() -> dict[Path, dict[str, str]]:
    """Each page's examples."""
    of_script = script()
    return {
        ROOT / "README.md": {"predict": of_script, "example": plan(), "explain": explain(), "recipe": recipe()},
        ROOT / "docs" / "predict.md": {"first": prediction()},
        ROOT / "docs" / "your-script.md": {"example": of_script},
    }
