"""ZeRO-R's checkpointing in two tensor-parallel processes: real Trainer, DeepSpeed's AutoTP, a small Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_memkit.deepspeed.checkpointing import zero_r_checkpointing
from tests.engine.preset_cases import small_config
from tests.engine.tiny_training import LENGTH, MICRO_BATCH, LossTrainer, cpu_arguments

WIDTH: Final = 64
CHECKPOINT_ELEMENTS: Final = MICRO_BATCH * LENGTH * WIDTH

CASES: Final[dict[str, dict[str, bool]]] = {
    "plain": {},
    "partition": {"partition": True},
    "partition, contiguous": {"partition": True, "contiguous": True},
    "partition, in RAM": {"partition": True, "cpu": True},
    "partition, contiguous, in RAM": {"partition": True, "contiguous": True, "cpu": True},
}
"""Name → arguments of `zero_r_checkpointing`; none: plain activation checkpointing."""


class Wiring(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: LossTrainer, options: dict[str, bool]) -> None:
        self.trainer, self.options = trainer, options
        self.kept_elements: list[int] = []
        self.undone = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.layers = list(self.trainer.model.model.layers)
        self.before = [layer._gradient_checkpointing_func for layer in self.layers]
        group = self.trainer.deepspeed.mpu
        self.undo = zero_r_checkpointing(self.trainer.model, **self.options, tensor_parallel=group)
        self.layers[-1].register_full_backward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        """The buffers that DeepSpeed fills with this rank's share of each layer's input."""
        from deepspeed.runtime.activation_checkpointing import checkpointing

        self.kept_elements = [
            buffer.numel() for buffers in checkpointing.contiguous_data_buffers for buffer in buffers
        ]

    def on_train_end(self, *_: Any, **__: Any) -> None:
        from deepspeed.runtime.activation_checkpointing import checkpointing

        self.undo()
        restored = [layer._gradient_checkpointing_func for layer in self.layers] == self.before
        self.undone = restored and not checkpointing.PARTITION_ACTIVATIONS


def train(name: str, output: Path) -> dict[str, Any]:
    config = {**small_config("zero1", "/nowhere"), "tensor_parallel": {"autotp_size": 2}}
    arguments = cpu_arguments(
        output, deepspeed=config, per_device_train_batch_size=MICRO_BATCH, activation_checkpointing=True, max_steps=3,
        learning_rate=1e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2 * LENGTH)
    model = LlamaForCausalLM(config)
    trainer = LossTrainer(model, arguments)
    wiring = Wiring(trainer, CASES[name])
    if CASES[name]:
        trainer.add_callback(wiring)
    trainer.train()
    trainer.deepspeed.destroy()
    return {"losses": trainer.micro_losses, "kept_elements": wiring.kept_elements, "undone": wiring.undone}
