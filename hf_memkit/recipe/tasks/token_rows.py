"""What the tasks of texts share: a checked text of a row, rows as tokens, their checksum, and lines for scripts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.export_data import literal, tokenizer_is_trained, uses_fallback
from hf_memkit.recipe.table_rows import find_tables
from hf_memkit.recipe.tables import RowTask, Table, cell
from hf_memkit.recipe.text_readers import name_of
from hf_memkit.recipe.tokenizer import Framing
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.user_files import user_path

__all__ = [
    "EXAMPLES_FILE",
    "as_tokens",
    "checked_text",
    "checksum",
    "examples_file",
    "load_lines",
    "role_names",
    "tokenizer_for",
    "tokenizer_imports",
    "tokenizer_lines",
]

EXAMPLES_FILE: Final = "examples.jsonl"
"""Beside a script: the made-up rows of a rehearsal without a hub."""

_TOKENIZER_ROWS: Final = 20_000
"""Rows that a tokenizer is trained on, where one has to be."""

_BATCH: Final = 1000


def checked_text(task: RowTask, columns: Mapping[str, str], role: str, where: str, row: Mapping[str, Any]) -> str:
    """The text that has the role, as it stands there.

    Raises:
        DataError: no such column, no text in it, or an empty one.
    """
    value, column = cell(task, columns, role, where, row), columns[role]
    if column not in row:
        column = task.columns[role]
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r}: expected text, found {name_of(value)}; such as {task.example}")
    if not value or value.isspace():
        raise DataError(f"{where}: column {column!r}: empty; expected text, such as {task.example}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no character
        raise DataError(f"{where}: column {column!r}: half of a surrogate pair, which is no character") from error
    return value


def tokenizer_for(setup: TrainingSetup, table: Table, columns: Sequence[str], framing: Framing, say: Any) -> Any:
    """The model's own tokenizer, or one that is trained on the table's texts. It has a token for padding.

    Raises:
        DataError: it has more entries than the model.
    """
    from hf_memkit.recipe.data import Documents
    from hf_memkit.recipe.tokenizer import get_tokenizer

    data = setup.section("data")
    texts = [text for column in columns for text in table.rows[:_TOKENIZER_ROWS][column] if text]
    chosen = get_tokenizer(
        data["tokenizer"],
        Documents(texts, table.source, table.is_made_up, None),
        vocabulary_size=data["vocabulary_size"],
        allow_download=hub_reachable(),
        framing=framing,
    )
    say(f"Tokenizer: {chosen.reason}")
    if chosen.tokenizer.pad_token is None:
        chosen.tokenizer.pad_token = chosen.tokenizer.eos_token
    return chosen.tokenizer


def as_tokens(rows: Any, encode: Callable[[Mapping[str, list[Any]]], Mapping[str, list[Any]]]) -> Any:
    """The `datasets.Dataset` that `encode` makes of batches of rows; nothing of the old columns stays."""
    from hf_memkit.recipe.data import quiet_datasets

    with quiet_datasets():
        encode(rows[:1])  # a tokenizer's hash, by which `datasets` knows the result, changes at its first call
        return rows.map(encode, batched=True, batch_size=_BATCH, remove_columns=rows.column_names)


def checksum(rows: Any) -> str:
    """SHA-256 of the rows' names, lengths and numbers, however they lie in their files."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=_BATCH):
        for name in sorted(table.column_names):
            digest.update(name.encode())
            column = table.column(name)
            if hasattr(column.type, "value_type"):
                digest.update(compute.list_value_length(column).to_numpy().tobytes())
                column = compute.list_flatten(column)
            digest.update(column.to_numpy().tobytes())
    return digest.hexdigest()


def role_names(columns: Mapping[str, str], there: Sequence[str], usual: Mapping[str, str]) -> dict[str, str]:
    """Role → the name that its column has among those that are there."""
    return {role: name if name in there else usual.get(role, name) for role, name in columns.items()}


def examples_file(setup: TrainingSetup, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """`{file beside the script: its text}`: the made-up `rows`, where the script runs on them."""
    if not uses_fallback(setup):
        return {}
    return {EXAMPLES_FILE: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)}


def load_lines(task: Any, setup: TrainingSetup) -> tuple[list[str], dict[str, str]]:
    """(lines of a script that make `dataset`, role → the name of its column in it)."""
    data = setup.section("data")
    source, columns = data["source"], dict(data["columns"])
    if uses_fallback(setup):
        return [
            "# Made-up examples: they stand in for the data set where no hub can be reached.",
            f'dataset = load_dataset("json", data_files=str(HERE / "{EXAMPLES_FILE}"), split="train")',
        ], {role: task.columns.get(role, role) for role in columns}
    path = user_path(str(source)) if source is not None else None
    if path is None or not path.exists():
        name, _, config = str(source).partition(":") if source else (data["hub_id"], "", data["hub_config"])
        split = "train" if source else data["hub_split"]
        options = f", {literal(config)}" if config else ""
        return [f'dataset = load_dataset("{name}"{options}, split="{split}")'], columns
    files = find_tables(path, task.local_form)
    kind = {"JSON": "json", "parquet": "parquet"}.get(files.kind, "csv")
    options = ", keep_default_na=False" if kind == "csv" else ""  # or the text "NA" would be none
    options += ', sep="\\t"' if files.kind == "TSV" else ""
    listed = "".join(f"    {literal(str(file.resolve()))},\n" for file in files.paths)
    return [
        f"files = [\n{listed}]",
        f'dataset = load_dataset("{kind}", data_files=files{options}, split="train")',
    ], role_names(columns, _columns_of(files.paths[0], files.kind), task.columns)


def _columns_of(path: Path, kind: str) -> list[str]:
    from hf_memkit.recipe.table_rows import read_rows

    return next((list(row) for _, row in read_rows(path, kind)), [])


def tokenizer_imports(setup: TrainingSetup) -> tuple[list[str], list[str]]:
    """(import lines, names from transformers) of `tokenizer_lines`."""
    if not tokenizer_is_trained(setup):
        return [], ["AutoTokenizer"]
    return [
        "from tokenizers import ByteLevelBPETokenizer",
        "from tokenizers.processors import TemplateProcessing",
    ], ["PreTrainedTokenizerFast"]


def tokenizer_lines(setup: TrainingSetup, texts: str, framing: Framing) -> list[str]:
    """Lines of a script that make `tokenizer`. `texts`: an expression, a list of texts to train one on."""
    if not tokenizer_is_trained(setup):
        return [
            f'tokenizer = AutoTokenizer.from_pretrained("{setup["data.tokenizer"]}")',
            "if tokenizer.pad_token is None:",
            "    tokenizer.pad_token = tokenizer.eos_token",
        ]
    numbered = ", ".join(f"({literal(token)}, {number})" for number, token in enumerate(framing.listed))
    pair = f"    pair={literal(framing.pair)},\n" if framing.pair else ""
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if ":1" in framing.pair else [])]
    names = "".join(f"    {name}={literal(token)},\n" for name, token in framing.tokens.items())
    return [
        "bpe = ByteLevelBPETokenizer()",
        "bpe.train_from_iterator(",
        f"    {texts},",
        f"    vocab_size={setup['data.vocabulary_size']},",
        f"    special_tokens={json.dumps(framing.listed)},",
        "    show_progress=False,",
        ")",
        "bpe._tokenizer.post_processor = TemplateProcessing(",
        f"    single={literal(framing.single)},",
        f"{pair}    special_tokens=[{numbered}],",
        ")",
        "tokenizer = PreTrainedTokenizerFast(",
        "    tokenizer_object=bpe._tokenizer,",
        f"{names}    model_input_names={json.dumps(inputs)},",
        ")",
    ]
