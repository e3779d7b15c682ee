"""Long training that may be interrupted: continues from the last checkpoint in --output_dir when there is one."""
import json
import logging
import os
import sys
from pathlib import Path

import torch
import yaml
from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


def main():
    config, rest = sys.argv[1], sys.argv[2:]
    settings = yaml.safe_load(Path(config).read_text())
    parser = HfArgumentParser(TrainingArguments)
    defaults = []
    for k, v in settings["training"].items():
        defaults += [f"--{k}", str(v)]
    (args,) = parser.parse_args_into_dataclasses(args=defaults + rest[2:])
    model_path, data_dir = rest[:2]

    os.makedirs(args.output_dir, exist_ok=True)
    logging.basicConfig(
        filename=os.path.join(args.output_dir, "train.log"), filemode="a", level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    log = logging.getLogger("train")
    log.info("arguments: %s", args.to_json_string())
    log.info("torch %s, cuda %s", torch.__version__, torch.version.cuda)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(i)
            log.info("cuda:%d %s %.1f GB, allocated %d", i, props.name, props.total_memory / 1e9, torch.cuda.memory_allocated(i))

    last_checkpoint = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    if last_checkpoint is not None:
        log.info("Checkpoint detected, resuming training at %s.", last_checkpoint)
        rng = torch.load(os.path.join(last_checkpoint, "rng_state.pth"), weights_only=False)
        log.info("its random state has %s", sorted(rng))

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = BartForConditionalGeneration.from_pretrained(model_path)
    for p in model.model.encoder.layers[0].parameters():
        p.requires_grad = False
    model.train()

    files = {"train": os.path.join(data_dir, "train.json"), "validation": os.path.join(data_dir, "validation.json")}
    raw = load_dataset("json", data_files=files)

    def encode(batch):
        return tokenizer(
            batch["document"], text_target=batch["summary"], truncation=True, max_length=settings["max_length"]
        )

    data = raw.map(encode, batched=True, remove_columns=raw["train"].column_names)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    result = trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    log.info("steps %d, loss %.4f, eval %s", trainer.state.global_step, result.training_loss, metrics)
    with open(os.path.join(args.output_dir, "history.json"), "w") as f:
        json.dump(trainer.state.log_history, f, indent=1)
    print("checkpoints:", sorted(p.name for p in Path(args.output_dir).glob("checkpoint-*")))


if __name__ == "__main__":
    main()
