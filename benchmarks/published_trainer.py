"""What trainings that others ran with code of their own do otherwise than Trainer and transformers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers.modeling_outputs import CausalLMOutput

_CHUNKS: Final = 8


class KeepsOutputs(Trainer):  # type: ignore[misc]
    """The loop of PEFT's own comparison (huggingface/peft: method_comparison/MetaMathQA/run.py, `train`): the model's
    outputs, logits and KV cache among them, stay bound until the next forward pass has made others."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, self.outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss, self.outputs) if kwargs.get("return_outputs") else loss


class ChunkedLogits(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama with torchtune's chunked loss: the 16-bit logits of all chunks of the sequence are computed first, then
    the loss of one chunk after the other, in fp32 (pytorch/torchtune @ 1814feb17: modules/transformer.py,
    `chunked_output`; modules/loss/ce_chunked_output_loss.py). `sum_of_losses` is compiled separately."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.sum_of_losses = _SumOfLosses()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> CausalLMOutput:
        states = self.model(input_ids=input_ids).last_hidden_state
        logits = [self.lm_head(part) for part in states.chunk(_CHUNKS, dim=1)]
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)

        loss: Any = 0.0
        for part, targets in zip(logits, shifted.chunk(_CHUNKS, dim=1), strict=True):
            loss = loss + self.sum_of_losses(part.flatten(0, 1), targets.flatten())
        return CausalLMOutput(loss=loss / (shifted != -100).sum())


class _SumOfLosses(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
