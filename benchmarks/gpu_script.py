"""The script of `gpu.py`: GPT-2 (124 M parameters), random weights, made-up data, any arguments."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50257, (1024,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    Trainer(model=GPT2LMHeadModel(GPT2Config()), args=arguments, train_dataset=Rows()).train()
