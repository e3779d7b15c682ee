"""Setup → a plain training script that its owner can read and change, and that needs memkit only for its callback.

`train.py` holds the whole job in the order in which it happens; every setting stands there with its reason as a
comment. Beside it the parts that it uses (`hf_memkit/components`: an optimizer, a loss in chunks …), `ds_config.json`
(with DeepSpeed), `deepspeed_wiring.py` (with NVMe) and `process_group.py` (with DeepSpeed or several processes).
"""

from __future__ import annotations

import json
import os
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Final

from hf_memkit import compat
from hf_memkit._version import __version__
from hf_memkit.errors import InputError
from hf_memkit.recipe.export_data import has_hub, literal
from hf_memkit.recipe.export_parts import (
    comment,
    copied_parts,
    library_imports,
    model_part_lines,
    optimizer_lines,
    part_imports,
    trainer_part_lines,
)
from hf_memkit.recipe.run import Run
from hf_memkit.recipe.tasks import Script, task_of
from hf_memkit.train import needed_packages
from hf_memkit.train.model import LOADING_ONLY, model_options
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.user_files import write_text

__all__ = ["export_script", "start_command"]

_LONGEST_LINE: Final = 119


def export_script(job: Run, folder: Path) -> list[Path]:
    """Writes the job into `folder`; returns the files, the script first.

    Raises:
        InputError: the folder holds files of that name already, or cannot be written to.
    """
    task = task_of(job.setup).script(job)
    files = {"train.py": _script(job, task), **task.files}
    if "deepspeed.config" in job.setup:
        files["ds_config.json"] = json.dumps(job.setup["deepspeed.config"], indent=2) + "\n"
    files |= copied_parts(job.setup)
    if _on_nvme(job.setup):
        source = Path(__file__).parents[1] / "zero" / "wiring.py"
        files["deepspeed_wiring.py"] = source.read_text(encoding="utf-8")
    if _has_process_group(job):
        source = Path(__file__).parents[1] / "zero" / "process_group.py"
        files["process_group.py"] = source.read_text(encoding="utf-8")
    taken = [name for name in files if os.path.lexists(folder / name)]
    if taken:
        raise InputError(f"--export {folder}: holds {', '.join(taken)} already; give another folder")
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def start_command(job: Run, script: str, node_rank: str = "0", master_addr: str = "ADDRESS_OF_MACHINE_0") -> str:
    """The command that starts the exported script: on several machines once on each, with its own number."""
    if job.processes == 1:
        return f"python {script}"
    each = f"--nproc-per-node {job.gpus}"
    if job.nodes == 1:
        return f"torchrun --standalone {each} {script}"
    return f"torchrun --nnodes {job.nodes} --node-rank {node_rank} --master-addr {master_addr} {each} {script}"


def _has_process_group(job: Run) -> bool:
    return job.processes > 1 or "deepspeed.config" in job.setup


def _on_nvme(setup: TrainingSetup) -> bool:
    return "offload_param" in setup.get("deepspeed.config", {}).get("zero_optimization", {})


def _script(job: Run, task: Script) -> str:
    setup = job.setup
    what = "the rehearsal (no GPU) of " if job.is_rehearsal else ""
    parts = [
        f'"""Trains {what}recipe {job.recipe}, variant {job.variant}; written by memkit {__version__}.\n\n'
        f"Run:    {start_command(job, 'train.py', 'RANK_OF_THIS_MACHINE')}\n"
        f"{textwrap.fill(f'Needs:  {_requirements(setup, task)}', 119, subsequent_indent=' ' * 8)}\n"
        f'"""',
        _imports(job, task),
        "HERE = Path(__file__).resolve().parent",
        _environment(job),
        task.data,
        _arguments(job),
        _model(setup, task),
        _training(job, task),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _requirements(setup: TrainingSetup, task: Script) -> str:
    names = ["torch", "transformers", "accelerate", "datasets", "hf-memkit"]
    names += ["deepspeed"] if "deepspeed.config" in setup else []
    names += ["peft"] if setup.section("adapter") else []
    names += [package.replace("_", "-") for package in needed_packages(setup)]
    names += task.requirements
    made = f"made with torch {version('torch')}, transformers {version('transformers')}"
    return f"{', '.join(dict.fromkeys(names))} ({made})"


def _imports(job: Run, task: Script) -> str:
    setup = job.setup
    lines = ["import os"] if _variables(job) else []
    lines += [*task.standard, "from pathlib import Path", ""]
    others = ["import deepspeed"] if _needs_gloo(job) else []
    others += ["import torch", "from hf_memkit import attach", *task.imports, *library_imports(setup)]
    others += ["from peft import LoraConfig, get_peft_model"] if setup.section("adapter") else []
    names = ["AutoConfig"] if _random_weights(setup) else []
    names += [_auto_class(setup), *task.transformers]
    names += ["BitsAndBytesConfig"] if "model.quantization" in setup else []
    by_module: dict[str, list[str]] = {}
    for trainer in _trainer(setup):
        module, _, name = trainer.partition(":")
        by_module.setdefault(module, []).append(name)
    names += by_module.pop("transformers", [])
    copied = "hf_memkit.components."  # copied there
    others += [
        f"from {module.removeprefix(copied)} import {', '.join(sorted(each))}" for module, each in by_module.items()
    ]
    others += [_import_from("transformers", [*sorted(set(names)), "set_seed"])]
    here = {Path(name).stem for name in (*task.files, *copied_parts(setup))}
    beside = [*part_imports(setup), *(line for line in others if line.split()[1] in here)]
    others = [line for line in others if line.split()[1] not in here]
    lines += sorted(others, key=lambda line: (line.startswith("from"), line.split()[1]))
    beside += ["from deepspeed_wiring import DeepSpeedWiring"] if _on_nvme(setup) else []
    beside += ["from process_group import leave_process_group"] if _has_process_group(job) else []
    lines += ["", *sorted(beside, key=lambda line: line.split()[1])] if beside else []
    return "\n".join(_sorted_standard_library(lines))


def _import_from(module: str, names: list[str]) -> str:
    """One line, or a line a name where that is too long."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LONGEST_LINE:
        return line
    listed = "".join(f"    {name},\n" for name in names)
    return f"from {module} import (\n{listed})"


def _sorted_standard_library(lines: list[str]) -> list[str]:
    """The first group of imports as isort has it: `import …` first, then `from …`."""
    end = lines.index("")
    return sorted(lines[:end], key=lambda line: (line.startswith("from"), line)) + lines[end:]


def _needs_gloo(job: Run) -> bool:
    """Whether DeepSpeed's communication has to be started by hand (see `hf_memkit.zero.process_group`)."""
    return "deepspeed.config" in job.setup and bool(job.setup.get("arguments.use_cpu")) and job.processes > 1


def _variables(job: Run) -> dict[str, tuple[str, str]]:
    """Environment variables with their reasons."""
    setup = job.setup
    found = {
        s.key.partition(".")[2]: (str(s.value), s.reason) for s in setup.settings if s.key.startswith("environment.")
    }
    if job.processes > 1:
        return found  # torchrun says the rest
    if not setup.get("arguments.use_cpu"):
        found["CUDA_VISIBLE_DEVICES"] = ("0", "one card: with several in sight Trainer would multiply the batch")
    if "deepspeed.config" in setup:
        why = "what a launcher would set, for one process"
        port = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        found |= {name: (value, why) for name, value in port.items()}
    return found


def _environment(job: Run) -> str:
    variables = _variables(job)
    if not variables:
        return ""
    lines = ["# Read when torch and DeepSpeed start."]
    reason = ""
    for name, (value, why) in variables.items():
        lines += comment(why) if why != reason else []
        lines.append(f"os.environ.setdefault({name!r}, {value!r})".replace("'", '"'))
        reason = why
    return "\n".join(lines)


def _random_weights(setup: TrainingSetup) -> bool:
    return setup["model.origin"] == "architecture" and bool(setup.get("arguments.use_cpu") or not has_hub(setup))


def _arguments(job: Run) -> str:
    setup = job.setup
    reasons = {s.key: s.reason for s in setup.settings}
    installed = {key: compat.to_installed_arguments({key: value}) for key, value in setup.arguments.items()}
    lines = [f"arguments = {_trainer(setup)[1].partition(':')[2]}("]
    for key, named in installed.items():
        (name, value), reason = next(iter(named.items())), reasons[f"arguments.{key}"]
        if key == "output_dir":
            lines.append('    output_dir=str(HERE / "run"),')
            continue
        lines += comment(reason, "    ")
        lines.append(f"    {name}={literal(value)},")
    if "deepspeed.config" in setup:
        lines += comment(reasons["deepspeed.preset"], "    ")
        lines.append('    deepspeed=str(HERE / "ds_config.json"),')
    lines.append(")")
    if _needs_gloo(job):
        lines += comment("On a CPU nobody else starts DeepSpeed's communication before the model is made.")
        lines.append('deepspeed.init_distributed(dist_backend="gloo")')
    return "\n".join([*lines, "set_seed(arguments.seed)"])


def _auto_class(setup: TrainingSetup) -> str:
    return str(setup.get("model.auto_class", "AutoModelForCausalLM"))


def _trainer(setup: TrainingSetup) -> tuple[str, str]:
    """`module:class` of the Trainer and of its arguments."""
    own, arguments = setup.get("trainer.class"), setup.get("trainer.arguments_class")
    return str(own or "transformers:Trainer"), str(arguments or "transformers:TrainingArguments")


def _model(setup: TrainingSetup, task: Script) -> str:
    reasons = {s.key: s.reason for s in setup.settings}
    lines = [line for key in _LOADED if key in setup for line in comment(reasons[key])]
    if _random_weights(setup):
        architecture = {**setup["model.architecture"], **setup.get("model.config", {})}
        architecture.pop("transformers_version", None)
        model_type = architecture.pop("model_type")
        architecture = {key: value for key, value in architecture.items() if key not in task.decided}
        values = textwrap.indent("".join(f"{key}={literal(value)},\n" for key, value in architecture.items()), "    ")
        lines += ["# RANDOM weights: a small model of the same architecture, for the rehearsal."]
        values += "".join(f"    {value},\n" for value in task.model_values)
        lines += [f'config = AutoConfig.for_model(\n    "{model_type}",\n{values})']
        lines += [f"model = {_auto_class(setup)}.from_config(config{_options(setup, loaded=False)})"]
    else:
        options = _options(setup, loaded=True) + "".join(f", {value}" for value in task.model_values)
        lines += [f'model = {_auto_class(setup)}.from_pretrained("{setup["model.name"]}"{options})']
    multiple = setup.get("model.pad_vocabulary_to_multiple_of")
    if multiple:
        lines += comment(reasons["model.pad_vocabulary_to_multiple_of"])
        lines += [f"model.resize_token_embeddings(pad_to_multiple_of={multiple})"]
    if setup.section("adapter"):
        options = textwrap.indent("".join(f"{k}={literal(v)},\n" for k, v in setup.section("adapter").items()), "    ")
        lines += [f"adapters = LoraConfig(\n{options})", "model = get_peft_model(model, adapters)"]
        if setup.get("arguments.fp16") and _trains_a_head(setup):
            lines += [
                "for parameter in model.parameters():  # PEFT trains the new head in the weights' fp16",
                "    if parameter.requires_grad:  # and fp16's loss scaling wants fp32",
                "        parameter.data = parameter.data.float()",
            ]
    return "\n".join([*lines, *model_part_lines(setup)])


def _trains_a_head(setup: TrainingSetup) -> bool:
    adapter = setup.section("adapter")
    return bool(adapter.get("modules_to_save")) or adapter.get("task_type") in ("SEQ_CLS", "TOKEN_CLS")


_LOADED: Final = ("model.dtype", "model.attn_implementation", "model.quantization", "model.device_map")


def _options(setup: TrainingSetup, *, loaded: bool) -> str:
    """Further arguments of the call that makes the model, from the comma on. Only loading quantises, and a model made
    from a config has that config's values already."""
    options = model_options(setup)
    quantization = options.pop("quantization_config", None)
    config = setup.get("model.config", {})
    parts = [
        f"{name}={f'torch.{value}' if name == 'dtype' else literal(value)}"
        for name, value in options.items()
        if loaded or name not in (*config, *LOADING_ONLY)
    ]
    if loaded and quantization is not None:
        fields = ", ".join(f"{name}={literal(value)}" for name, value in quantization.items())
        parts.append(f"quantization_config=BitsAndBytesConfig({fields})")
    return "".join(f", {part}" for part in parts)


def _training(job: Run, task: Script) -> str:
    setup = job.setup
    from_parts = "".join(f"{line}\n" for line in trainer_part_lines(setup, task.processing))
    given = [*task.trainer, *optimizer_lines(setup)]
    given += ["    callbacks=callbacks,", "    **from_parts,"] if from_parts else []
    optimizer = "".join(f"{line}\n" for line in given)
    wiring = ""
    if _on_nvme(setup):
        wiring = "trainer.add_callback(DeepSpeedWiring(lambda: trainer.deepspeed))  # saves with NVMe\n"
    after = "".join(f"{line}\n" for line in task.after)
    ending = "\nleave_process_group()  # otherwise Python can abort while it exits" if _has_process_group(job) else ""
    return (
        f"{from_parts}"
        f"trainer = {_trainer(setup)[0].partition(':')[2]}(\n"
        "    model=model,\n"
        "    args=arguments,\n"
        "    train_dataset=train_dataset,\n"
        "    eval_dataset=eval_dataset,\n"
        f"    processing_class={task.processing},\n"
        f"{optimizer}"
        ")\n"
        f"{after}"
        "attach(trainer)  # memory at every step: run/memory-rank0.jsonl, one file a process\n"
        f"{wiring}"
        "trainer.train()\n"
        'trainer.save_model(str(HERE / "run" / "model"))'
        f"{ending}"
    )
