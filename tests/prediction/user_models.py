"""Example of a user's package: a model, a function that creates it, a Trainer with its own loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

WIDTH = 256
CLASSES = 10


class Classifier(nn.Module):
    """Sees 3 × 16 × 16 images; its two inner layers share one weight, the first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.into = nn.Linear(8 * 16 * 16, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two.weight = self.one.weight
        self.out = nn.Linear(WIDTH, CLASSES)
        self.convolution.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = torch.relu(self.norm(self.convolution(x))).flatten(1)
        logits = self.out(self.two(torch.relu(self.one(torch.relu(self.into(hidden))))))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


class Recurrent(nn.Module):
    """Keeps a second list of its weights, and a table of whole numbers that it asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.cells = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.out = nn.Linear(32, 50)
        self.register_buffer("kept", torch.tensor([0, 2, 4]))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        hidden, _ = self.cells(self.embedding(input_ids))
        logits = self.out(hidden)[:, self.kept[self.kept > 0]]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, :2].flatten()), "logits": logits}


def build() -> Classifier:
    return Classifier()


def build_nothing() -> str:
    return "no model"


LARGE = 2**21


class LossyTrainer(Trainer):  # type: ignore[misc]
    """Its loss needs a tensor of 8 MiB that backward needs too."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        noise = torch.ones(LARGE, device=inputs["labels"].device)
        loss = outputs["loss"] * 1 + (noise * outputs["logits"].mean()).mean()
        return (loss, outputs) if return_outputs else loss
