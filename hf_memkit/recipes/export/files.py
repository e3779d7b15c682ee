"""Files of an exported job: the task's script and `job.py` from `scripts/`, `args.yaml` with every value and its
reason, and further files that the job needs: components (`hf_memkit/components`), `ds_config.json`, examples.

The sections of `args.yaml` are the setup's, without values that only memkit reads (source of the model, classes that
the script imports). Its section `data` names the rows and their tokenizer:

| keys | where the rows are |
|---|---|
| `files`, `format`, `format_options` | local files, as `datasets.load_dataset` reads them |
| `hub_id`, `hub_config`, `hub_split` | the hub |
| `folder`, `folders` | folders of sound or images |
| `made_up` | in a file next to the script that creates them, if the hub is unreachable |
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit import components
from hf_memkit._version import __version__
from hf_memkit.catalog.models import hub_reachable
from hf_memkit.common.errors import DataError, InputError
from hf_memkit.common.user_files import write_text
from hf_memkit.presets.argument_file import reasoned_yaml, with_installed_names
from hf_memkit.recipes.export.scripts import __name__ as SCRIPTS
from hf_memkit.recipes.sources import local_files, local_path, only_table, quiet_datasets
from hf_memkit.recipes.tasks import DEFAULT_TASK, Task, task_of
from hf_memkit.recipes.tasks import __name__ as TASKS_PACKAGE
from hf_memkit.recipes.tasks.task import Settings
from hf_memkit.run.folder import ARGUMENTS_FILE, RUN_FILE, RecipeRun
from hf_memkit.run.machine import nvme_path
from hf_memkit.setup.build import needed_packages
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.recipes.export.scripts.rows import Source

_WIRING, _PROCESS_GROUP = "hf_memkit.deepspeed.wiring", "hf_memkit.setup.process_group"
_NAMES: Final = {_WIRING: "deepspeed_wiring"}
"""Module → its name next to a script, if different."""

_IMPORT: Final = re.compile(r"^( *)from (hf_memkit\.[\w.]+) import ", re.MULTILINE)


def export_script(job: RecipeRun, folder: Path) -> list[Path]:
    """Write the job into `folder`, for `memkit run` or to start alone; returns the files, the script first. Raises
    InputError if the folder has files of these names, or cannot be written to."""
    setup = job.setup
    task = task_of(setup)
    data = _data_section(setup)
    script = f"{task.script}.py"
    modules = [f"{SCRIPTS}.{task.script}", f"{SCRIPTS}.job", *_parts(setup), *data.modules]
    if "offload_param" in setup.zero or nvme_path(setup) is not None:
        modules.append(_WIRING)
    if job.processes > 1 or "deepspeed.config" in setup:
        modules.append(_PROCESS_GROUP)
    files = _copies(modules)
    rehearsal = "the rehearsal (no GPU) of " if job.is_rehearsal else ""
    again = "Ctrl-C saves a checkpoint; started again, it continues from the newest one"
    if (setup.zero.get("offload_optimizer") or {}).get("device") == "nvme":
        again = "It cannot continue after a stop, because the optimizer is on NVMe; memkit run can"
    heading = [
        f"Trains {rehearsal}recipe {job.recipe}, variant {job.variant}; written by memkit {__version__}, read by "
        f"{script}.",
        "",
        f"Run:    {start_command(job, script, 'RANK_OF_THIS_MACHINE')}",
        f"        {again}",
        "Or:     memkit run FOLDER: Ctrl-C saves a checkpoint, --resume continues from it",
        *textwrap.wrap(f"Needs:  {_requirements(setup, task.script_needs)}", 110, subsequent_indent=" " * 8),
    ]
    files[ARGUMENTS_FILE] = _args_text(job, heading, data.settings)
    if "deepspeed.config" in setup:
        files[_CONFIG_FILE] = json.dumps(setup["deepspeed.config"], indent=2) + "\n"
    files |= data.files
    files[RUN_FILE] = json.dumps(job.new_file(list(files)), indent=2) + "\n"
    taken = [name for name in files if os.path.lexists(folder / name)]
    if taken:
        raise InputError(f"{folder}: already has {', '.join(taken)}; give another folder")
    written: list[Path] = []
    is_new = not folder.exists()
    try:
        for name, text in files.items():
            write_text(folder / name, text)
            written.append(folder / name)
    except InputError:
        for path in written:
            path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return [folder / name for name in files]


def start_command(job: RecipeRun, script: str, node_rank: str = "0") -> str:
    """Command that starts the exported script: on several machines once on each, with its own number."""
    if job.processes == 1:
        return f"python {script}"
    processes = f"--nproc-per-node {job.gpus}"
    if job.nodes == 1:
        return f"torchrun --standalone {processes} {script}"
    machines = f"--nnodes {job.nodes} --node-rank {node_rank} --master-addr ADDRESS_OF_MACHINE_0"
    return f"torchrun {machines} {processes} {script}"


def _copies(modules: Iterable[str]) -> dict[str, str]:
    """`{file name: text}` of these modules, and of memkit's modules that they import at the top, except the package
    itself. The copies import each other by their file names."""
    texts: dict[str, str] = {}
    remaining = list(modules)
    while remaining:
        module = remaining.pop(0)
        if module not in texts:
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin is not None
            texts[module] = Path(spec.origin).read_text(encoding="utf-8")
            remaining += [name for indent, name in _IMPORT.findall(texts[module]) if not indent]

    def with_local_imports(text: str, script: bool) -> str:
        """`text` with renamed imports: all of a script's, else only those of modules next to it."""
        return _IMPORT.sub(lambda m: f"{m[1]}from {_name(m[2])} import " if script or m[2] in texts else m[0], text)

    return {
        f"{_name(module)}.py": with_local_imports(text, module.startswith(SCRIPTS)) for module, text in texts.items()
    }


def _name(module: str) -> str:
    return _NAMES.get(module, module.rpartition(".")[2])


def _parts(setup: Setup) -> list[str]:
    """memkit's modules named by args.yaml."""
    names = [*setup.section("model_parts"), *setup.section("trainer_parts")]
    optimizer = str(setup.get("optimizer.class", ""))
    if _local_module(optimizer) != optimizer:
        names.append(_local_module(optimizer).partition(":")[0])
    return [f"{components.__name__}.{name}" for name in names]


def _requirements(setup: Setup, needs: Iterable[str]) -> str:
    names = ["torch", "transformers", "accelerate", "datasets", "hf-memkit"]
    names += ["deepspeed"] if "deepspeed.config" in setup else []
    names += ["peft"] if setup.section("adapter") else []
    names += [package.replace("_", "-") for package in needed_packages(setup)]
    names += needs
    versions = f"made with torch {version('torch')}, transformers {version('transformers')}"
    return f"{', '.join(dict.fromkeys(names))} ({versions})"


_CONFIG_FILE: Final = "ds_config.json"

_LOADED: Final = (
    "name", "dtype", "attn_implementation", "config", "quantization", "device_map", "use_safetensors",
    "ignore_mismatched_sizes", "pad_vocabulary_to_multiple_of",
)  # fmt: skip
_BUILT: Final = ("architecture", "dtype", "attn_implementation", "config", "pad_vocabulary_to_multiple_of")


def _args_text(job: RecipeRun, heading: Iterable[str], data: Settings) -> str:
    """Text of the file: comment lines `heading`, the section `data`, and the rest of the setup."""
    setup = job.setup
    arguments = with_installed_names(_with_reasons(setup, "arguments"))
    arguments["output_dir"] = (".", "checkpoints and the records of memory, beside this file")
    if "deepspeed.config" in setup:
        reason = next(setting.reason for setting in setup.settings if setting.key == "deepspeed.preset")
        arguments["deepspeed"] = (_CONFIG_FILE, reason)
    optimizer = _with_reasons(setup, "optimizer")
    if optimizer:
        path, reason = optimizer["class"]
        optimizer["class"] = (_local_module(path), reason)
    sections = {
        "environment": _environment(job),
        "data": data,
        "model": _model(setup),
        "adapter": _with_reasons(setup, "adapter"),
        "model_parts": _with_reasons(setup, "model_parts"),
        "arguments": arguments,
        "optimizer": optimizer,
        "trainer_parts": _with_reasons(setup, "trainer_parts"),
    }
    blocks = ["".join(f"# {line}".rstrip() + "\n" for line in heading)]
    blocks += [f"{name}:\n{reasoned_yaml(values, '  ')}" for name, values in sections.items() if values]
    return "\n".join(blocks)


def _local_module(path: str) -> str:
    """`module:class`, with a component's file name next to a script."""
    return path.removeprefix("hf_memkit.components.")


def _local_or_hub(name: str) -> str:
    """A hub ID unchanged, a folder as an absolute path: the script may start elsewhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _with_reasons(setup: Setup, section: str, names: Iterable[str] | None = None) -> dict[str, tuple[Any, str]]:
    """The section's values with their reasons; with `names` those, in their order."""
    settings = (setting for setting in setup.settings if setting.key.startswith(f"{section}."))
    values = {setting.key.partition(".")[2]: (setting.value, setting.reason) for setting in settings}
    return values if names is None else {name: values[name] for name in names if name in values}


def _environment(job: RecipeRun) -> Settings:
    variables = _with_reasons(job.setup, "environment")
    if job.processes > 1:
        return variables  # torchrun sets the rest
    if not job.setup.get("arguments.use_cpu"):
        why = "one GPU: with several visible Trainer would multiply the batch"
        variables["CUDA_VISIBLE_DEVICES"] = ("0", why)
    if "deepspeed.config" in job.setup:
        why = "a launcher's value, for one process"
        single_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        variables |= {name: (value, why) for name, value in single_process.items()}
        variables["MASTER_PORT"] = ("0", "any free port: two scripts on one machine would both use 29500")
    return variables


def _model(setup: Setup) -> Settings:
    is_random = setup.get("arguments.use_cpu") or setup.get("model.random_weights")
    if setup["model.origin"] == "architecture" and is_random:
        settings = _with_reasons(setup, "model", _BUILT)
        values = {name: value for name, value in settings["architecture"][0].items() if name != "transformers_version"}
        return {**settings, "architecture": (values, f"RANDOM weights: {settings['architecture'][1]}")}
    settings = _with_reasons(setup, "model", _LOADED)
    name, reason = settings["name"]
    return {**settings, "name": (_local_or_hub(name), reason)}


_EXAMPLES: Final = "examples.jsonl"
"""File next to a script: rows for a rehearsal without a hub."""


@dataclass(frozen=True)
class _ScriptData:
    """`settings`: the section; `modules`: memkit's modules next to the script; `files`: others, name → text."""

    settings: Settings
    modules: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def _data_section(setup: Setup) -> _ScriptData:
    """The section `data` of an exported script."""
    task, known = task_of(setup), _with_reasons(setup, "data")
    rows, tokens = _rows(setup, task), _tokens(setup, task)
    names = (*task.script_reads, "held_out", "evaluated_blocks")
    settings = {**rows.settings, **{name: known[name] for name in names}}
    if task.name == "text-pairs":
        longest, why = known.get("target_length", known["sequence_length"])
        settings["target_length"] = (min(longest, known["sequence_length"][0]), why)
    return _ScriptData({**settings, **tokens.settings}, (*rows.modules, *tokens.modules), rows.files)


def _has_hub(setup: Setup) -> bool:
    """Whether the script may load from the hub. A script for a GPU runs elsewhere, with the real model: there an
    unreachable hub is an error. A rehearsal, or a training with random weights, runs here, with what is available."""
    return hub_reachable() or not (setup.get("arguments.use_cpu") or setup.get("model.random_weights"))


def _rows(setup: Setup, task: Task) -> _ScriptData:
    """Source of the rows, and the names of their columns there."""
    data = setup.section("data")
    source = data["source"]
    path = None if source is None else local_path(str(source))
    if source is None and not _has_hub(setup):
        if task.made_up_by:
            made_up = _section(setup, {"made_up": True})
            return _ScriptData(made_up.settings, (f"{TASKS_PACKAGE}.{task.made_up_by}",))
        section = _section(setup, {"files": [_EXAMPLES], "format": "json"}, columns=task.columns)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in task.examples())
        return _ScriptData(section.settings, files={_EXAMPLES: "".join(lines)})
    if path is None:
        name, config, split = data["hub_id"], data["hub_config"], data.get("hub_split", "train")
        if source is not None:
            name, _, config = str(source).partition(":")
            split = "train"
        where = {"hub_id": name, "hub_config": config or None, "hub_split": split}
        return _section(setup, where, data["text_column"], data.get("columns", {}))
    if path.is_dir() and task.made_up_by:  # image or sound files, with or without a table of them
        table = only_table(path)
        if table is None:
            return _section(setup, task.folders(path))
        path = table
    is_text = task.name == DEFAULT_TASK
    kind, paths = local_files(path, task.local_form, texts=is_text)
    if kind == "text":
        return _section(setup, _files(paths, kind, sample_by="document"), "text")
    if kind in ("csv", "tsv"):  # without keep_default_na the text "NA" would be null
        where = _files(paths, "csv", keep_default_na=False, sep="\t" if kind == "tsv" else ",")
    else:
        where = _files(paths, kind)
    if is_text:
        return _section(setup, where, data["text_column"])
    columns = opened(task, where, lambda source: source.load().column_names)
    return _section(setup, where, columns=task.columns_among(data["columns"], columns))


def opened(task: Task, data: Mapping[str, Any], ask: Callable[[Source], Any]) -> Any:
    """Result of `ask` for the rows of a section `data` with absolute paths. Wrong rows: DataError, in one line."""
    from hf_memkit.recipes.export.scripts.rows import Source

    with quiet_datasets():
        try:
            return ask(Source(data, Path(), task.reading.EXAMPLE))
        except SystemExit as exit:
            raise DataError(str(exit)) from None


def check_data(task: Task, setup: Setup) -> None:
    """Read the rows of `data.source` with the script's reader, except files of images and sound. Raises DataError with
    the place, the mistake, and the expected value."""
    data = {name: value for name, (value, _) in _rows(setup, task).settings.items()}
    opened(task, data, getattr(task.reading, "list_rows", task.reading.read))


def _section(
    setup: Setup, where: Mapping[str, Any], text_column: str = "text", columns: Mapping[str, str] | None = None
) -> _ScriptData:
    """`where` with the reason of the setup's source; columns, if any, with their own."""
    known = _with_reasons(setup, "data")
    settings = {name: (value, known["source"][1]) for name, value in where.items()}
    if task_of(setup).name == DEFAULT_TASK:
        settings["text_column"] = (text_column, known["text_column"][1])
    elif columns is not None:
        settings["columns"] = (dict(columns), known["columns"][1])
    return _ScriptData(settings)


def _files(paths: Sequence[Path], kind: str, **options: Any) -> dict[str, Any]:
    settings = {"files": [str(path.resolve()) for path in paths], "format": kind}
    return {**settings, "format_options": options} if options else settings


def _tokens(setup: Setup, task: Task) -> _ScriptData:
    """The processor of texts, images or sound: the model's own, or one made here."""
    known = _with_reasons(setup, "data")
    name, why = known["tokenizer"]
    own = name is not None and (_has_hub(setup) or Path(name).is_dir())
    settings: dict[str, tuple[Any, str]] = {"tokenizer": (_local_or_hub(name), why) if own else (None, why)}
    further, modules = task.processor_settings(setup, own)
    settings |= further
    framing = None if own else task.framing(setup)
    if framing is not None or (modules and not own):  # a tokenizer is trained
        settings["vocabulary_size"] = known["vocabulary_size"]
    if framing is not None:
        why = "for the tokenizer trained here, in the order of their IDs"
        settings["special_tokens"] = (dict(framing.tokens), why)
        if framing.single:
            settings["one_text"] = (framing.single, "its template for one text")
        if framing.pair:
            settings["two_texts"] = (framing.pair, "and for two")
    return _ScriptData(settings, modules)
