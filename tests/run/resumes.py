"""A user's script that trains a tiny ViT, whose weights transformers saves under other names.

python resumes.py OUT [--resume] [--load] [--best]
"""

import sys

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


def main():
    out, *how = sys.argv[1:]
    given = TrainingArguments(
        out, use_cpu=True, max_steps=4 if "--resume" in how else 2, report_to="none", disable_tqdm=True, eval_steps=2,
        eval_strategy="steps", save_steps=2, load_best_model_at_end="--best" in how,
    )  # fmt: skip
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if "--load" in how:
        model = ViTForImageClassification.from_pretrained(f"{out}/checkpoint-2")
    else:
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))
    images = [{"pixel_values": torch.ones(3, 8, 8), "labels": number % 2} for number in range(16)]
    Trainer(model, given, train_dataset=images, eval_dataset=images).train(resume_from_checkpoint="--resume" in how)


if __name__ == "__main__":
    main()
