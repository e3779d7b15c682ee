"""The loop of PEFT's own comparison, as a Trainer (huggingface/peft: method_comparison/MetaMathQA/run.py, `train`)."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


class KeepsOutputs(Trainer):  # type: ignore[misc]
    """The model's outputs, logits and KV cache among them, stay bound until the next forward pass has made others."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, self.outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss, self.outputs) if kwargs.get("return_outputs") else loss
