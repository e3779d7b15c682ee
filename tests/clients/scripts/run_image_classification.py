"""A script of a user: a vision transformer on pictures that are read and turned into tensors as batches are made."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    set_seed,
)


@dataclass
class ScriptArguments:
    train_dir: str = field(default="")


class Pictures(torch.utils.data.Dataset):
    """One folder a class, as in `imagefolder`."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*/*.png"))
        self.labels = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        pixels = torch.from_numpy(np.array(Image.open(self.files[index]).convert("RGB"))).permute(2, 0, 1) / 255
        if torch.rand(()) < 0.5:  # augmentation: draws from the same generator as dropout does
            pixels = pixels.flip(-1)
        return {"pixel_values": pixels, "labels": self.labels.index(self.files[index].parent.name)}


def collate_fn(examples: list[dict]) -> dict:
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "labels": torch.tensor([example["labels"] for example in examples])}


def main() -> None:
    script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    pictures = Pictures(script_args.train_dir)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        num_labels=len(pictures.labels), hidden_dropout_prob=0.1,
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=pictures,
        eval_dataset=pictures,
        data_collator=collate_fn,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
