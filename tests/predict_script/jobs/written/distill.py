"""Knowledge distillation with a Trainer of our own."""
import logging
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

logger = logging.getLogger(__name__)


@dataclass
class DistillationTrainingArguments(TrainingArguments):
    alpha: float = 0.5
    temperature: float = 2.0


@dataclass
class ScriptArguments:
    student: str
    teacher: str
    train_file: str
    max_seq_length: int = 128


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher_model=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher_model.to(self.args.device)
        self.teacher.eval()
        for p in self.teacher.parameters():
            p.requires_grad_(False)
        self._parts = {"ce": 0.0, "kd": 0.0, "n": 0}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        student_loss = outputs.loss
        with torch.no_grad():
            teacher_logits = self.teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        t = self.args.temperature
        mask = (inputs["labels"][:, 1:] != -100).unsqueeze(-1)
        kd = F.kl_div(
            F.log_softmax(outputs.logits[:, :-1].float() / t, dim=-1),
            F.softmax(teacher_logits[:, :-1].float() / t, dim=-1),
            reduction="none",
        )
        kd = (kd * mask).sum() / mask.sum() * t**2
        self._parts["ce"] += student_loss.item()
        self._parts["kd"] += kd.item()
        self._parts["n"] += 1
        loss = self.args.alpha * student_loss + (1.0 - self.args.alpha) * kd
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        n = max(self._parts["n"], 1)
        logs = {**logs, "ce_loss": self._parts["ce"] / n, "kd_loss": self._parts["kd"] / n}
        self._parts = {"ce": 0.0, "kd": 0.0, "n": 0}
        super().log(logs, *args, **kwargs)


def main():
    args, training_args = HfArgumentParser((ScriptArguments, DistillationTrainingArguments)).parse_args_into_dataclasses()
    os.makedirs(training_args.output_dir, exist_ok=True)
    logging.basicConfig(filename=os.path.join(training_args.output_dir, "distill.log"), level=logging.INFO)

    tokenizer = AutoTokenizer.from_pretrained(args.student)
    student = AutoModelForCausalLM.from_pretrained(args.student)
    teacher = AutoModelForCausalLM.from_pretrained(args.teacher)
    assert student.config.vocab_size == teacher.config.vocab_size
    logger.info("student %d, teacher %d parameters", student.num_parameters(), teacher.num_parameters())

    dataset = load_dataset("text", data_files={"train": args.train_file})["train"]
    dataset = dataset.filter(lambda x: len(x["text"]) > 0)
    dataset = dataset.map(
        lambda x: tokenizer(x["text"], truncation=True, max_length=args.max_seq_length, return_token_type_ids=False),
        batched=True, remove_columns=["text"],
    )
    trainer = DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    result = trainer.train()
    logger.info("done: %s", result.metrics)
    trainer.save_model()


if __name__ == "__main__":
    main()
