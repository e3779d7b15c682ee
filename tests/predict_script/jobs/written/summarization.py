import logging
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("summarization")


@dataclass
class Arguments:
    model_name_or_path: str = field(default="google-t5/t5-small")
    train_file: str = field(default="train.json")
    validation_file: str = field(default="validation.json")
    text_column: str = field(default="document")
    summary_column: str = field(default="summary")
    source_prefix: str = field(default="summarize: ")
    max_source_length: int = field(default=256)
    max_target_length: int = field(default=48)
    ignore_pad_token_for_loss: bool = field(default=True)


def overlap_f1(prediction, reference):
    """ROUGE-1 without the package."""
    p, r = prediction.split(), reference.split()
    common = sum(min(p.count(w), r.count(w)) for w in set(p))
    if not common:
        return 0.0
    precision, recall = common / len(p), common / len(r)
    return 2 * precision * recall / (precision + recall)


def main():
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    dataset = load_dataset("json", data_files={"train": args.train_file, "validation": args.validation_file})
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)
    if model.config.decoder_start_token_id is None:
        raise ValueError("Make sure that `config.decoder_start_token_id` is correctly defined")

    def preprocess(examples):
        inputs = [args.source_prefix + doc for doc in examples[args.text_column]]
        model_inputs = tokenizer(inputs, max_length=args.max_source_length, truncation=True)
        labels = tokenizer(text_target=examples[args.summary_column], max_length=args.max_target_length, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    with training_args.main_process_first():
        tokenized = dataset.map(preprocess, batched=True, remove_columns=dataset["train"].column_names)

    data_collator = DataCollatorForSeq2Seq(
        tokenizer,
        model=model,
        label_pad_token_id=-100 if args.ignore_pad_token_for_loss else tokenizer.pad_token_id,
        pad_to_multiple_of=8 if training_args.fp16 else None,
    )

    def compute_metrics(eval_pred):
        predictions, labels = eval_pred
        if isinstance(predictions, tuple):
            predictions = predictions[0]
        predictions = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        decoded_preds = [s.strip() for s in tokenizer.batch_decode(predictions, skip_special_tokens=True)]
        decoded_labels = [s.strip() for s in tokenizer.batch_decode(labels, skip_special_tokens=True)]
        scores = [overlap_f1(p, r) for p, r in zip(decoded_preds, decoded_labels)]
        gen_len = [np.count_nonzero(p != tokenizer.pad_token_id) for p in predictions]
        return {"rouge1": round(float(np.mean(scores)) * 100, 4), "gen_len": float(np.mean(gen_len))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    log.info("training on %d documents", len(tokenized["train"]))
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate(max_length=args.max_target_length, num_beams=2, metric_key_prefix="eval")
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

    results = trainer.predict(tokenized["validation"], metric_key_prefix="predict", max_length=args.max_target_length)
    if trainer.is_world_process_zero() and training_args.predict_with_generate:
        predictions = np.where(results.predictions != -100, results.predictions, tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(predictions, skip_special_tokens=True, clean_up_tokenization_spaces=True)
        with open(f"{training_args.output_dir}/generated_predictions.txt", "w") as writer:
            writer.write("\n".join(t.strip() for t in texts))


if __name__ == "__main__":
    main()
