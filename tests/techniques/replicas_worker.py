"""One rank of a small training with the setup of `data-parallel`; rank 0 prints a JSON line. Run by torchrun."""

from __future__ import annotations

import json
import sys

import torch
from transformers import Trainer

from hf_memkit.build import build_arguments
from hf_memkit.technique import find_technique
from hf_memkit.training_setup import TrainingSetup
from tests.techniques.jobs import gpt2_job
from tests.tiny_trainer import samples, tiny_gpt2


def main(folder: str, processes: int, accumulation: int) -> None:
    setup = find_technique("data-parallel")(TrainingSetup(preset="data-parallel"), gpt2_job(None, gpus=processes))
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
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [float(parameter.norm()) for parameter in model.parameters()]
        wrapped = type(trainer.model_wrapped).__name__
        print("RESULT " + json.dumps({"losses": losses, "norms": norms, "wrapped": wrapped, **setup.arguments}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
