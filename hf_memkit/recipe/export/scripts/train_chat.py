"""Trains a model to answer, with TRL's SFTTrainer. What it trains, on what and how stands in args.yaml, with reasons.

Rows are conversations in one of four forms: `messages`, ShareGPT's `conversations`, `prompt` and `completion`, or
Alpaca's `instruction`, `input` and `output`. The last ones are held out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from hf_memkit import attach
from hf_memkit.recipe.export.scripts.job import TrainingJob
from hf_memkit.recipe.tasks.chat_markup import CHATML, LLAMA_MARKED, LLAMA_TURN

ROLES = {"human": "user", "gpt": "assistant"}
"""What ShareGPT calls them → what chat templates do."""


def as_messages(rows: Dataset, column: str) -> Dataset:
    """The rows with their `messages`, which are those of `column` if there is one, and `tools`, if they have any."""
    if column not in rows.column_names:
        return rows.map(messages_of, remove_columns=rows.column_names)
    rows = rows if column == "messages" else rows.rename_column(column, "messages")
    return rows.select_columns([name for name in ("messages", "tools") if name in rows.column_names])


def messages_of(row: dict[str, Any]) -> dict[str, Any]:
    """The messages of a row in another form."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if "conversations" in row:
        turns = [
            (turn.get("from") or turn["role"], turn.get("value") or turn["content"]) for turn in row["conversations"]
        ]
        return {"messages": [*system, *({"role": ROLES.get(who, who), "content": text} for who, text in turns)]}
    if isinstance(row.get("prompt"), list):
        return {"messages": row["prompt"] + row["completion"]}
    if "prompt" in row:
        question, answer = row["prompt"], row["completion"]
    else:
        question = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
        answer = row["output"]
    asked, answered = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return {"messages": [*system, asked, answered]}


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)

    rows = as_messages(job.load_rows(), job.data["columns"]["messages"])
    train_dataset, eval_dataset = job.hold_out(rows)
    tokenizer = job.load_tokenizer("\n".join(each["content"] for each in messages) for messages in rows["messages"])
    if job.data["tokenizer"] is None:
        tokenizer.chat_template = CHATML
    own_template = tokenizer.chat_template
    if job.arguments["assistant_only_loss"] and isinstance(own_template, str):
        # The loss is taken over the assistant's turns, which the chat template must mark. TRL does that for many
        # families, and not for Llama 3.1 to 3.3. What is saved is the model's own template.
        tokenizer.chat_template = own_template.replace(LLAMA_TURN, LLAMA_MARKED)

    arguments = job.training_arguments(SFTConfig)
    model = job.load_model(AutoModelForCausalLM)
    trainer = SFTTrainer(
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **job.trainer_options(model, arguments, tokenizer),
    )
    tokenizer.chat_template = own_template
    longest = arguments.max_length
    cut = 0 if arguments.packing else sum(len(ids) >= longest for ids in trainer.train_dataset["input_ids"])
    if cut and arguments.process_index == 0:
        print(f"{cut} of {len(train_dataset)} conversations fill {longest} tokens, and were cut if they were longer")
    job.ready(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    trainer.train()
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.leave()


if __name__ == "__main__":
    main()
