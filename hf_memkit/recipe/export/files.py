"""The files of an exported job: the task's script and `job.py` as they stand in `scripts/`, `args.yaml` with every
value and its reason, and beside them what the job needs: parts (`hf_memkit/components`), `ds_config.json`, examples.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import textwrap
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Final

from hf_memkit import components
from hf_memkit._version import __version__
from hf_memkit.errors import InputError
from hf_memkit.recipe.export.args_file import CONFIG_FILE, args_text, beside
from hf_memkit.recipe.export.data_section import data_section
from hf_memkit.recipe.export.scripts import __name__ as SCRIPTS
from hf_memkit.recipe.run import RecipeRun
from hf_memkit.recipe.tasks import task_of
from hf_memkit.setup import Setup
from hf_memkit.train import needed_packages
from hf_memkit.user_files import write_text

__all__ = ["export_script", "start_command"]

_WIRING, _PROCESS_GROUP = "hf_memkit.zero.wiring", "hf_memkit.zero.process_group"
_NAMES: Final = {_WIRING: "deepspeed_wiring"}
"""Module → its name beside a script, where that is not its own."""

_IMPORT: Final = re.compile(r"^( *)from (hf_memkit\.[\w.]+) import ", re.MULTILINE)


def export_script(job: RecipeRun, folder: Path) -> list[Path]:
    """Writes the job into `folder`; returns the files, the script first.

    Raises:
        InputError: the folder holds files of that name already, or cannot be written to.
    """
    setup = job.setup
    task = task_of(setup)
    data = data_section(setup)
    script = f"{task.script}.py"
    files = _copies([f"{SCRIPTS}.{task.script}", f"{SCRIPTS}.job", *_parts(setup), *data.modules, *_engine(job)])
    what = "the rehearsal (no GPU) of " if job.is_rehearsal else ""
    heading = [
        f"Trains {what}recipe {job.recipe}, variant {job.variant}; written by memkit {__version__}, read by {script}.",
        "",
        f"Run:    {start_command(job, script, 'RANK_OF_THIS_MACHINE')}",
        *textwrap.wrap(f"Needs:  {_requirements(setup, task.script_needs)}", 110, subsequent_indent=" " * 8),
    ]
    files["args.yaml"] = args_text(job, heading, data.settings)
    if "deepspeed.config" in setup:
        files[CONFIG_FILE] = json.dumps(setup["deepspeed.config"], indent=2) + "\n"
    files |= data.files
    taken = [name for name in files if os.path.lexists(folder / name)]
    if taken:
        raise InputError(f"--export {folder}: holds {', '.join(taken)} already; give another folder")
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def start_command(job: RecipeRun, script: str, node_rank: str = "0", master_addr: str = "ADDRESS_OF_MACHINE_0") -> str:
    """The command that starts the exported script: on several machines once on each, with its own number."""
    if job.processes == 1:
        return f"python {script}"
    each = f"--nproc-per-node {job.gpus}"
    if job.nodes == 1:
        return f"torchrun --standalone {each} {script}"
    return f"torchrun --nnodes {job.nodes} --node-rank {node_rank} --master-addr {master_addr} {each} {script}"


def _copies(modules: Iterable[str]) -> dict[str, str]:
    """`{file name: its text}` of these modules, and of what they import of memkit at their tops, the package apart.
    Beside one another they import each other by their own names."""
    texts: dict[str, str] = {}
    left = list(modules)
    while left:
        module = left.pop(0)
        if module not in texts:
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin is not None
            texts[module] = Path(spec.origin).read_text(encoding="utf-8")
            left += [name for indent, name in _IMPORT.findall(texts[module]) if not indent]

    def beside_it(text: str, ours: bool) -> str:
        """`text` with the imports of a script (`ours`), or of what lies beside it, renamed."""
        known = texts.keys()
        return _IMPORT.sub(
            lambda found: f"{found[1]}from {_name(found[2])} import " if ours or found[2] in known else found[0], text
        )

    return {f"{_name(module)}.py": beside_it(text, module.startswith(SCRIPTS)) for module, text in texts.items()}


def _name(module: str) -> str:
    return _NAMES.get(module, module.rpartition(".")[2])


def _parts(setup: Setup) -> list[str]:
    """The modules of memkit that args.yaml names."""
    names = [*setup.section("model_parts"), *setup.section("trainer_parts")]
    optimizer = str(setup.get("optimizer.class", ""))
    if beside(optimizer) != optimizer:
        names.append(beside(optimizer).partition(":")[0])
    return [f"{components.__name__}.{name}" for name in names]


def _engine(job: RecipeRun) -> list[str]:
    """What DeepSpeed and several processes need."""
    modules = []
    if "offload_param" in job.setup.get("deepspeed.config", {}).get("zero_optimization", {}):
        modules.append(_WIRING)
    if job.processes > 1 or "deepspeed.config" in job.setup:
        modules.append(_PROCESS_GROUP)
    return modules


def _requirements(setup: Setup, needs: Iterable[str]) -> str:
    names = ["torch", "transformers", "accelerate", "datasets", "hf-memkit"]
    names += ["deepspeed"] if "deepspeed.config" in setup else []
    names += ["peft"] if setup.section("adapter") else []
    names += [package.replace("_", "-") for package in needed_packages(setup)]
    names += needs
    made = f"made with torch {version('torch')}, transformers {version('transformers')}"
    return f"{', '.join(dict.fromkeys(names))} ({made})"
