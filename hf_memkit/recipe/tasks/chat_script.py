"""What an exported script has of a chat recipe: it gives SFTTrainer the conversations, which prepares them itself."""

from __future__ import annotations

import json
from typing import Any, Final

from hf_memkit.recipe.export_data import literal, tokenizer_is_trained, uses_fallback
from hf_memkit.recipe.table_rows import find_tables, read_rows
from hf_memkit.recipe.tasks.chat_made_up import made_up_conversations
from hf_memkit.recipe.tasks.chat_rows import EXAMPLE, form_of
from hf_memkit.recipe.tasks.chat_template import CHATML, CHATML_FRAMING, LLAMA_MARKED, LLAMA_TURN
from hf_memkit.recipe.tasks.task import Script
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.user_files import user_path

__all__ = ["chat_script"]

_MADE_UP: Final = "conversations.jsonl"
_TEMPLATE: Final = "chatml.jinja"
_TURN, _MARKED = "llama_turn.jinja", "llama_turn_marked.jinja"
_LOADERS: Final = {"JSON": ("json", ""), "CSV": ("csv", ""), "TSV": ("csv", ', sep="\\t"'), "parquet": ("parquet", "")}

_CONVERTERS: Final = {
    "conversations": """\
ROLES = {"human": "user", "gpt": "assistant"}


def messages_of(row: dict) -> dict:
    turns = [(turn.get("from") or turn["role"], turn.get("value") or turn["content"]) for turn in row["conversations"]]
    return {"messages": [{"role": ROLES.get(who, who), "content": text} for who, text in turns]}""",
    "prompt and completion": """\
def messages_of(row: dict) -> dict:
    if isinstance(row["prompt"], list):
        return {"messages": row["prompt"] + row["completion"]}
    question, answer = row["prompt"], row["completion"]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}""",
    "instruction and output": """\
def messages_of(row: dict) -> dict:
    question = "\\n\\n".join(text for text in (row["instruction"], row.get("input")) if text)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]}""",
}
_SYSTEM: Final = """


def with_system(row: dict) -> dict:
    system = [{"role": "system", "content": row["system"]}] if row["system"] else []
    return {"messages": system + messages_of(row)["messages"]}"""


def chat_script(job: Any) -> Script:
    """The lines that make conversations, tokenizer and what SFTTrainer needs beside them."""
    setup: TrainingSetup = job.setup
    trained = tokenizer_is_trained(setup)
    is_llama = setup["model.architecture"].get("model_type") == "llama"
    marks_llama = not trained and is_llama and bool(setup["arguments.assistant_only_loss"])
    lines, files = _rows(setup)
    if trained:
        lines += ["", *_trained_tokenizer(setup)]
        files[_TEMPLATE] = CHATML + "\n"
    else:
        lines += ["", "# Tokenizer.", f'tokenizer = AutoTokenizer.from_pretrained("{setup["data.tokenizer"]}")']
        if marks_llama:
            files |= {_TURN: LLAMA_TURN + "\n", _MARKED: LLAMA_MARKED + "\n"}
            lines += [
                "# The loss is taken over the assistant's turns, which the chat template must mark. TRL does that for",
                "# many families, and not for Llama 3.1 to 3.3. What is saved is the model's own template.",
                "own_template = tokenizer.chat_template",
                f'turn, marked = ((HERE / name).read_text().strip() for name in ("{_TURN}", "{_MARKED}"))',
                "tokenizer.chat_template = own_template.replace(turn, marked)",
            ]
    lines += [
        "",
        "# The last conversations are held out.",
        f"held_out = min(max(1, round({setup['data.held_out']} * len(rows))), len(rows) - 1)",
        "train_dataset = rows.select(range(len(rows) - held_out))",
        f"evaluated = min(held_out, {setup['data.evaluated_blocks']})",
        "eval_dataset = rows.select(range(len(rows) - held_out, len(rows) - held_out + evaluated))",
    ]
    return Script(
        data="\n".join(lines),
        imports=("from datasets import load_dataset", *(["from tokenizers import ByteLevelBPETokenizer"] * trained)),
        transformers=("PreTrainedTokenizerFast" if trained else "AutoTokenizer",),
        after=_after(setup, marks_llama),
        requirements=("trl",),
        files=files,
    )


def _rows(setup: TrainingSetup) -> tuple[list[str], dict[str, str]]:
    """(lines that make `rows`, files that they read)."""
    data = setup.section("data")
    source, column = data["source"], data["columns"]["messages"]
    form, has_system, files = "messages", False, {}
    lines = ["# Conversations."]
    if uses_fallback(setup):
        files[_MADE_UP] = "".join(
            json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in made_up_conversations()
        )
        column = "messages"
        lines.append(f'rows = load_dataset("json", data_files=str(HERE / "{_MADE_UP}"), split="train")')
    elif source is None or not user_path(str(source)).exists():
        name, config, split = data["hub_id"], data["hub_config"], data["hub_split"]
        if source is not None:
            name, _, config = str(source).partition(":")
            config, split = config or None, "train"
        lines.append(f'rows = load_dataset("{name}", {literal(config)}, split="{split}")')
    else:
        tables = find_tables(user_path(str(source)), EXAMPLE)
        where, first = next(read_rows(tables.paths[0], tables.kind))
        form, has_system = form_of(data["columns"], where, first), "system" in first
        kind, options = _LOADERS[tables.kind]
        listed = "".join(f"    {literal(str(path.resolve()))},\n" for path in tables.paths)
        lines += [f"files = [\n{listed}]", f'rows = load_dataset("{kind}", data_files=files, split="train"{options})']
    if form == "messages":
        if column != "messages":
            lines.append(f'rows = rows.rename_column("{column}", "messages")')
        lines.append('kept = [name for name in ("messages", "tools") if name in rows.column_names]')
        lines.append("rows = rows.select_columns(kept)")
        return lines, files
    function = "with_system" if has_system else "messages_of"
    lines += ["", "", _CONVERTERS[form] + (_SYSTEM if has_system else ""), "", ""]
    lines.append(f"rows = rows.map({function}, remove_columns=rows.column_names)")
    return lines, files


def _trained_tokenizer(setup: TrainingSetup) -> list[str]:
    return [
        "# Tokenizer: trained on the conversations, with a plain ChatML template; it is not the model's own.",
        'texts = ("\\n".join(message["content"] for message in messages) for messages in rows["messages"])',
        "bpe = ByteLevelBPETokenizer()",
        "bpe.train_from_iterator(",
        "    texts,",
        f"    vocab_size={setup['data.vocabulary_size']},",
        f"    special_tokens=[{', '.join(map(literal, CHATML_FRAMING.listed))}],",
        "    show_progress=False,",
        ")",
        "tokenizer = PreTrainedTokenizerFast(",
        "    tokenizer_object=bpe._tokenizer,",
        *(f'    {name}="{token}",' for name, token in CHATML_FRAMING.tokens.items()),
        ")",
        f'tokenizer.chat_template = (HERE / "{_TEMPLATE}").read_text().strip()',
    ]


def _after(setup: TrainingSetup, marks_llama: bool) -> tuple[str, ...]:
    lines = []
    if marks_llama:
        lines.append("tokenizer.chat_template = own_template")
    if setup.get("arguments.fp16"):
        lines += [
            "for parameter in model.parameters():  # SFTTrainer makes adapters beside 4-bit weights bf16",
            "    if parameter.requires_grad:  # which this card cannot compute with, nor fp16's loss scaling",
            "        parameter.data = parameter.data.float()",
        ]
    return tuple(lines)
