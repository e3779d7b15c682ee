"""The part of an exported script that reads documents, makes tokens of them, and cuts these into blocks."""

from __future__ import annotations

import json
import pprint
import textwrap
from pathlib import Path
from typing import Any

from hf_memkit.models import hub_reachable
from hf_memkit.recipe.run import Run
from hf_memkit.training_setup import TrainingSetup

__all__ = ["data_lines", "has_hub", "literal", "packing_lines", "tokenizer_is_trained", "uses_fallback"]


def has_hub(setup: TrainingSetup) -> bool:
    """Whether the script may load from the hub. One for a card will run elsewhere, and is about the real model: there
    a hub that cannot be reached is an error that its owner sees. A rehearsal runs here, with what can be had here."""
    return hub_reachable() or not setup.get("arguments.use_cpu")


def uses_fallback(setup: TrainingSetup) -> bool:
    return setup["data.source"] is None and not has_hub(setup)


def tokenizer_is_trained(setup: TrainingSetup) -> bool:
    name = setup["data.tokenizer"]
    return name is None or not (has_hub(setup) or Path(name).is_dir())


def data_lines(setup: TrainingSetup) -> str:
    source, column = setup["data.source"], setup["data.text_column"]
    lines = ["# Documents."]
    if uses_fallback(setup):
        lines.append("texts = [text for _, text in sorted(topics.items())]  # the text of Python's own help")
    elif source is None:
        lines.append(
            f'dataset = load_dataset("{setup["data.hub_id"]}", {literal(setup["data.hub_config"])}, split="train")'
        )
        lines.append(f'texts = dataset["{column}"]')
    else:
        lines += _load(str(source), column)
    lines += ["", "# Tokenizer."]
    if tokenizer_is_trained(setup):
        lines += [
            "bpe = ByteLevelBPETokenizer()",
            f"bpe.train_from_iterator(texts, vocab_size={setup['data.vocabulary_size']}, "
            'special_tokens=["<|endoftext|>"], show_progress=False)',
            "tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, "
            'eos_token="<|endoftext|>", pad_token="<|endoftext|>")',
        ]
    else:
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{setup["data.tokenizer"]}")')
    return "\n".join(lines)


def _load(source: str, column: str) -> list[str]:
    """Lines that load a `--data` value through datasets."""
    path = Path(source)
    if not path.exists():
        name, _, config = source.partition(":")
        return [
            f'dataset = load_dataset("{name}", {literal(config or None)}, split="train")',
            f'texts = dataset["{column}"]',
        ]  # fmt: skip
    files = (
        sorted(str(file.resolve()) for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else [str(path.resolve())]
    )
    suffix = Path(files[0]).suffix.lower()
    kind = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}.get(suffix, "text")
    sample = ', sample_by="document"' if kind == "text" else ""
    listed = textwrap.indent(",\n".join(f"    {literal(file)}" for file in files), "")
    return [
        f"files = [\n{listed},\n]",
        f'dataset = load_dataset("{kind}", data_files=files{sample}, split="train")',
        f'texts = dataset["{"text" if kind == "text" else column}"]',
    ]


def packing_lines(job: Run) -> str:
    setup = job.setup
    batch = setup["arguments.per_device_eval_batch_size"] * job.processes
    return textwrap.dedent(
        f"""\
        # Documents joined by the end-of-text token and cut into blocks: no padding. The last blocks are held out.
        LENGTH = {setup["data.sequence_length"]}  # tokens
        ids: list[int] = []
        for text in texts:
            if text and not text.isspace():
                tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                ids += [*tokens, tokenizer.eos_token_id]
        blocks = np.array(ids[: len(ids) // LENGTH * LENGTH], dtype=np.int32).reshape(-1, LENGTH)
        held_out = max(1, round({setup["data.held_out"]} * len(blocks)))


        def as_dataset(rows: np.ndarray) -> Dataset:
            labels = rows.copy()
            labels[:, 0] = -100  # nothing predicts the first token; Trainer's mean would count it
            return Dataset.from_dict({{"input_ids": rows, "labels": labels}}).with_format("torch")


        train_dataset = as_dataset(blocks[:-held_out])
        evaluated = min(held_out, {setup["data.evaluated_blocks"]})
        evaluated = evaluated // {batch} * {batch} or evaluated  # whole batches
        eval_dataset = as_dataset(blocks[-held_out:][:evaluated])"""
    )


def literal(value: Any) -> str:
    """A Python literal with double quotes, as formatters write it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return pprint.pformat(value)
