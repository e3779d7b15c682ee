"""What `accelerate launch` and Trainer really make of a YAML."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from transformers import TrainingArguments

from hf_memkit.prediction.child.script.read_launch import read_launch


def launched(content: dict[str, Any]) -> dict[str, str]:
    """The variables that the launcher sets."""
    path = Path(tempfile.mkdtemp()) / "acc.yaml"
    path.write_text(yaml.safe_dump(content))
    real = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count", "is_bf16_supported")}
    with mock.patch.multiple(torch.cuda, **real):  # the reader replaces them
        result = read_launch(["accelerate", "launch", "--config_file", str(path), "train.py"])
    return dict(result.environment)


def trained_with(content: dict[str, Any], **arguments: Any) -> TrainingArguments:
    """TrainingArguments as each process makes them."""
    with mock.patch.dict(os.environ, launched(content)):
        return TrainingArguments(output_dir="x", use_cpu=True, **arguments)
