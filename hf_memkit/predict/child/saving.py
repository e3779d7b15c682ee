"""Trainer's save on tensors that hold nothing: everything is made that a real save makes, and no bytes are written.

What a save makes on the device is little: state dictionaries refer to the weights and states, and what is written is
copied to the host tensor by tensor. It is more where weights are kept in another form than they are saved in:
transformers splits the merged experts of a mixture into one copy each (`revert_weight_conversion`), and makes
contiguous what is not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["nothing_is_written"]


def nothing_is_written() -> None:
    """Replaces what writes tensors to files, and what looks at their addresses, in this process."""
    import huggingface_hub.serialization._torch as hub
    import safetensors.torch
    from transformers import Trainer

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        Path(filename).touch()

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, str | Path):
            Path(file).touch()

    def storage_of(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
        return tensor.device, tensor.untyped_storage()._cdata, tensor.nbytes

    safetensors.torch.save_file = save_file
    torch.save = save  # type: ignore[assignment]
    Trainer._save_rng_state = lambda self, folder: None  # asks the card's generator
    hub.get_torch_storage_id = storage_of
    replacements = {"safe_save_file": save_file, "id_tensor_storage": storage_of}
    for module in ("transformers.modeling_utils", "transformers.pytorch_utils", "peft.peft_model"):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        names.update({name: value for name, value in replacements.items() if name in names})
