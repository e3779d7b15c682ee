"""Train a model to answer, with TRL's SFTTrainer. args.yaml has its model, data and settings, with reasons. Rows are
conversations in one of four forms: `messages`, ShareGPT's `conversations`, `prompt` and `completion`, or Alpaca's
`instruction`, `input` and `output`. The last ones are held out."""

from __future__ import annotations

from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from hf_memkit import attach
from hf_memkit.recipes.export.scripts.chat_rows import read
from hf_memkit.recipes.export.scripts.chat_templates import CHATML, training_template
from hf_memkit.recipes.export.scripts.job import TrainingJob


def main() -> None:
    job = TrainingJob(Path(__file__).resolve().parent)

    rows = read(job.source)
    train_dataset, eval_dataset = job.hold_out(rows)
    texts = ("\n".join(message["content"] for message in messages) for messages in rows["messages"])
    tokenizer = job.load_tokenizer(texts)
    if job.data["tokenizer"] is None:
        tokenizer.chat_template = CHATML
    own_template = tokenizer.chat_template
    # The template must mark the assistant's turns for the loss. The model is saved with its own template.
    tokenizer.chat_template = training_template(tokenizer, marked=job.arguments["assistant_only_loss"])

    arguments = job.training_arguments(SFTConfig)
    model = job.load_model(AutoModelForCausalLM)
    options = job.trainer_options(model, arguments, tokenizer)
    try:
        trainer = SFTTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
    except TemplateError as error:
        job.source.refuse(f"the model's chat template rejects a conversation ({error}). Correct it, or remove it")
    tokenizer.chat_template = own_template
    longest = arguments.max_length
    if not len(trainer.train_dataset):
        job.source.refuse(f"no answer of the assistant begins within {longest} tokens; give longer sequences")
    cut = 0 if arguments.packing else sum(len(ids) >= longest for ids in trainer.train_dataset["input_ids"])
    if cut and arguments.process_index == 0:
        print(f"{cut} of {len(train_dataset)} conversations fill {longest} tokens, and were cut if they were longer")
    job.prepare_trainer(trainer)
    attach(trainer)  # memory at every step: memory-rank0.jsonl, one file a process
    job.train(trainer)  # started again, it continues from the newest checkpoint; Ctrl-C saves one
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    job.finish()


if __name__ == "__main__":
    main()
