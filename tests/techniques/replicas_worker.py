"""One rank of a small training with the setup of `data-parallel`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed
from transformers import Trainer

from hf_memkit.setup.build import build_arguments
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.replicas import data_parallel
from tests.techniques.jobs import gpt2_job
from tests.tiny_trainer import samples, tiny_gpt2


def train(folder: str, processes: int, accumulation: int) -> dict[str, Any]:
    """Losses, norms of the weights, and what was set and wrapped."""
    setup = data_parallel(Setup(preset="data-parallel", job=gpt2_job(None, gpus=processes)))
    own = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "logging_steps": 1,
        "save_strategy": "no", "learning_rate": 1e-2, "optim": "adamw_torch",
    }  # fmt: skip
    model = tiny_gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # every rank draws its own
    trainer = Trainer(model=model, args=build_arguments(setup, own), train_dataset=samples())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [float(parameter.detach().norm()) for parameter in model.parameters()]
    return {"losses": losses, "norms": norms, "wrapped": type(trainer.model_wrapped).__name__, **setup.arguments}


def start_as_rank(rank: int, port: int) -> None:
    """Sets this process up as one of two ranks, as a launcher does."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    torch.set_num_threads(1)


def train_rank(rank: int, port: int, folder: str) -> dict[str, Any]:
    """One of two ranks, as a launcher starts them."""
    start_as_rank(rank, port)
    try:
        return train(folder, 2, 1)
    finally:
        distributed.destroy_process_group()
