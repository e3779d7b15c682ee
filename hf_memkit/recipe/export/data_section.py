"""The section `data` of `args.yaml`: what was settled here of where the data is, and of who makes its tokens.

| keys | where the rows are |
|---|---|
| `files`, `format`, `format_options` | local files, as `datasets.load_dataset` reads them |
| `hub_id`, `hub_config`, `hub_split` | the hub |
| `folder`, `folders` | folders of sound or images |
| `made_up` | in a file beside the script that makes them, where no hub can be reached |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_memkit.models import hub_reachable
from hf_memkit.recipe.export.args_file import local_or_hub, with_reasons
from hf_memkit.recipe.tables import find_tables, read_rows
from hf_memkit.recipe.tasks import DEFAULT_TASK, Task, task_of
from hf_memkit.recipe.tasks import __name__ as TASKS_PACKAGE
from hf_memkit.recipe.tasks.media import files_in, only_table
from hf_memkit.recipe.tasks.task import Settings
from hf_memkit.recipe.text_readers import find_text_files
from hf_memkit.setup import Setup
from hf_memkit.user_files import user_path

__all__ = ["ScriptData", "data_section"]

_EXAMPLES: Final = "examples.jsonl"
"""Beside a script: the rows that stand in for the data of a rehearsal without a hub."""


@dataclass(frozen=True)
class ScriptData:
    """`settings`: the section; `modules`: of memkit, that lie beside the script; `files`: others, name → text."""

    settings: Settings
    modules: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def data_section(setup: Setup) -> ScriptData:
    """What an exported script reads of its data.

    Raises:
        DataError: local data cannot be used.
    """
    task, known = task_of(setup), with_reasons(setup, "data")
    where, tokens = _rows(setup, task), _tokens(setup, task)
    names = (*task.script_reads, "held_out", "evaluated_blocks")
    found = {**where.settings, **{name: known[name] for name in names}}
    if task.name == "text-pairs":
        longest, why = known.get("target_length", known["sequence_length"])
        found["target_length"] = (min(longest, known["sequence_length"][0]), why)
    return ScriptData({**found, **tokens.settings}, (*where.modules, *tokens.modules), where.files)


def _has_hub(setup: Setup) -> bool:
    """Whether the script may load from the hub. One for a card will run elsewhere, and is about the real model: there
    a hub that cannot be reached is an error that its owner sees. A rehearsal runs here, with what can be had here."""
    return hub_reachable() or not setup.get("arguments.use_cpu")


def _rows(setup: Setup, task: Task) -> ScriptData:
    """Where the rows are, and the columns that they have there."""
    data = setup.section("data")
    source, path = data["source"], None if data["source"] is None else user_path(str(data["source"]))
    if source is None and not _has_hub(setup):
        return _made_up(setup, task)
    if path is None or not path.exists():
        name, config, split = data["hub_id"], data["hub_config"], data.get("hub_split", "train")
        if source is not None:
            name, _, config = str(source).partition(":")
            split = "train"
        where = {"hub_id": name, "hub_config": config or None, "hub_split": split}
        return _section(setup, where, data["text_column"], data.get("columns", {}))
    if task.name == DEFAULT_TASK:
        texts = find_text_files(path)
        if texts.kind == "text":
            return _section(setup, _files(texts.paths, "text", sample_by="document"), "text")
        return _section(setup, _files(texts.paths, texts.kind.lower()), data["text_column"])
    if path.is_dir() and task.made_up_by:  # files of their own, with or without a table of them
        table = only_table(path, files_in(path)[1])
        if table is None:
            return _section(setup, task.folders(path))
        path = table
    found = find_tables(path, task.local_form)
    there = next((list(row) for _, row in read_rows(found.paths[0], found.kind)), [])
    if found.kind in ("JSON", "parquet"):
        where = _files(found.paths, found.kind.lower())
    else:  # without keep_default_na the text "NA" would be none
        where = _files(found.paths, "csv", keep_default_na=False, sep="\t" if found.kind == "TSV" else ",")
    return _section(setup, where, columns=task.columns_among(data["columns"], there))


def _section(
    setup: Setup, where: Mapping[str, Any], text_column: str = "text", columns: Mapping[str, str] | None = None
) -> ScriptData:
    """`where`, for the reason of the setup's source; the columns, where there are any, for that of its own."""
    known = with_reasons(setup, "data")
    found = {name: (value, known["source"][1]) for name, value in where.items()}
    if task_of(setup).name == DEFAULT_TASK:
        found["text_column"] = (text_column, known["text_column"][1])
    elif columns is not None:
        found["columns"] = (dict(columns), known["columns"][1])
    return ScriptData(found)


def _files(paths: Sequence[Path], kind: str, **options: Any) -> dict[str, Any]:
    found = {"files": [str(path.resolve()) for path in paths], "format": kind}
    return {**found, "format_options": options} if options else found


def _made_up(setup: Setup, task: Task) -> ScriptData:
    if task.made_up_by:
        section = _section(setup, {"made_up": True})
        return ScriptData(section.settings, (f"{TASKS_PACKAGE}.{task.made_up_by}",))
    section = _section(setup, {"files": [_EXAMPLES], "format": "json"}, columns=task.columns)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in task.examples())
    return ScriptData(section.settings, files={_EXAMPLES: "".join(lines)})


def _tokens(setup: Setup, task: Task) -> ScriptData:
    """Who makes tokens of texts, or tensors of images and sound: what the model came with, or what is made here."""
    known = with_reasons(setup, "data")
    name, why = known["tokenizer"]
    own = name is not None and (_has_hub(setup) or Path(name).is_dir())
    found: dict[str, tuple[Any, str]] = {"tokenizer": (local_or_hub(name), why) if own else (None, why)}
    further, modules = task.processor_settings(setup, own)
    found |= further
    framing = None if own else task.framing(setup)
    if framing is not None or (modules and not own):  # a tokenizer is trained
        found["vocabulary_size"] = known["vocabulary_size"]
    if framing is not None:
        why = "of a tokenizer that is trained here, in the order of their IDs"
        found["special_tokens"] = (dict(framing.tokens), why)
        if framing.single:
            found["one_text"] = (framing.single, "what it makes of a text")
        if framing.pair:
            found["two_texts"] = (framing.pair, "and of two")
    return ScriptData(found, modules)
