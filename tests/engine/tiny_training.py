"""A model of two million parameters and a Trainer that says the loss of every micro-batch to the last bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, Trainer, TrainingArguments

from hf_memkit.setup.process_group import join_process_group

MODEL: Final[dict[str, Any]] = {
    "model_type": "gpt2", "vocab_size": 2048, "n_positions": 32, "n_embd": 256, "n_layer": 2, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
"""Three of its matrices have a mebibyte or more in fp32: DeepSpeed swaps nothing that is smaller."""

LORA: Final[dict[str, Any]] = {"r": 4, "target_modules": ["c_attn", "c_fc", "c_proj"], "task_type": "CAUSAL_LM"}

MICRO_BATCH: Final = 2
LENGTH: Final = 16


def save_initial_weights(folder: Path) -> None:
    """The weights that every case starts from: under `zero.Init` the same seed makes others."""
    torch.manual_seed(0)
    values = {key: value for key, value in MODEL.items() if key != "model_type"}
    AutoModelForCausalLM.from_config(GPT2Config(**values)).save_pretrained(folder)


def load_model(folder: Path, *, bf16_weights: bool, lora: bool) -> PreTrainedModel:
    dtype = torch.bfloat16 if bf16_weights else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(**LORA))
    return model


def cpu_arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Of a quiet training on the CPU, in its process group."""
    values = {"use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(folder), **{**values, **more})
    join_process_group(arguments)
    return arguments


@functools.cache
def blocks() -> list[dict[str, torch.Tensor]]:
    """Enough for four steps of eight sequences. A vocabulary of 128 words leaves something to learn."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (64, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


class LossTrainer(Trainer):  # type: ignore[misc]
    """`micro_losses`: mean loss of each micro-batch of this process, before Trainer scales it by any count."""

    def __init__(self, model: PreTrainedModel, args: TrainingArguments) -> None:
        super().__init__(model=model, args=args, train_dataset=blocks())
        self.micro_losses: list[float] = []

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        logits, labels = outputs.logits.detach().double()[:, :-1], inputs["labels"][:, 1:]
        exact = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        self.micro_losses.append(float(exact))
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(blocks())
