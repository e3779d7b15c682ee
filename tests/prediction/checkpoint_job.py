"""A script that trains a small model with FSDP2, saves and resumes; `checkpoint_rank.py` runs it as real ranks.

python checkpoint_job.py FOLDER OPTIONS      # JSON: fields of TrainingArguments
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def arguments_of(folder: str, options: dict[str, Any]) -> TrainingArguments:
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **options.pop("fsdp_config", {})}
    return TrainingArguments(
        folder, max_steps=2, save_steps=1, report_to=[], bf16=True, per_device_train_batch_size=1, fsdp=True,
        fsdp_config=config, resume_from_checkpoint=f"{folder}/checkpoint-1", **options,
    )  # fmt: skip


def trainer_of(arguments: TrainingArguments) -> Trainer:
    """A model whose shards are uneven, and an optimizer with the temporaries that it has on a GPU."""
    # Page-locked shards are rounded up to powers of two: under offload, they are such.
    vocabulary, wide, width = (1024, 256, 64) if arguments.fsdp_config.get("cpu_offload") else (1003, 252, 96)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=wide, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=vocabulary, use_cache=False,
        )
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
    adamw = torch.optim.AdamW, {"lr": 1e-3, "foreach": True}
    return Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=adamw)


if __name__ == "__main__":
    trainer_of(arguments_of(sys.argv[1], json.loads(sys.argv[2]))).train()
