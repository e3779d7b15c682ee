"""A script of a user: a Trainer of his own, whose loss runs the model twice (R-Drop) and whose step adds noise."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str = field(default="")
    train_file: str = field(default="")


class RDropTrainer(Trainer):
    """Two passes with different dropout, pulled together by their divergence (Liang et al., 2021)."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        first, second = model(**inputs), model(**inputs)
        loss = functional.cross_entropy(first.logits, labels) + functional.cross_entropy(second.logits, labels)
        divergence = functional.kl_div(
            first.logits.log_softmax(-1), second.logits.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        inputs["labels"] = labels
        loss = loss / 2 + 0.5 * divergence
        return (loss, first) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += 1e-6 * torch.randn_like(parameter.grad)
        return loss


def main() -> None:
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script_args.model)
    model = AutoModelForSequenceClassification.from_pretrained(script_args.model)
    rows = [json.loads(line) for line in Path(script_args.train_file).read_text().splitlines()]
    encoded = [{**tokenizer(row["sentence1"]), "labels": row["label"]} for row in rows]
    trainer = RDropTrainer(
        model=model,
        args=training_args,
        train_dataset=encoded[:64],
        eval_dataset=encoded[64:80],
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    print(f"first weights: {model.classifier.weight.detach().flatten()[:2].tolist()}")


if __name__ == "__main__":
    main()
