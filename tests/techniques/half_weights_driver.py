"""Trains the same model in fp32 and as half-weights-deepspeed; prints a JSON line. Runs in a separate process.

`python -m tests.techniques.half_weights_driver`
"""

from __future__ import annotations

import json
import os
from typing import Any


def main() -> None:
    from hf_memkit.deepspeed import ops
    from hf_memkit.setup.process_group import single_process_environment

    os.environ.update(single_process_environment(), DS_ACCELERATOR="cpu")
    ops.build(("deepspeed_shm_comm",), print, cpu=True)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    import torch
    from transformers import Trainer

    from hf_memkit.setup import techniques
    from hf_memkit.setup.setup import Setup
    from hf_memkit.setup.techniques.registry import TECHNIQUES
    from tests.checks.configs import ds
    from tests.checks.real import arguments, model, rows
    from tests.techniques.jobs import gpt2_job

    assert techniques  # imported for the registry that it fills
    results: dict[str, Any] = {}
    for name in ("fp32", "half-weights-deepspeed"):
        setup = TECHNIQUES[name](Setup(preset="test", job=gpt2_job(None)))
        torch.manual_seed(0)
        trained = model().to(getattr(torch, setup["model.dtype"]))
        values = {"max_steps": 8, "logging_strategy": "steps", "logging_steps": 1, "learning_rate": 1e-3}
        args = arguments(ds(2) if "deepspeed" in name else None, **{**values, **setup.arguments})
        trainer = Trainer(model=trained, args=args, train_dataset=rows(16))
        trainer.train()
        results[name] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "weights": sum(parameter.nbytes for parameter in trained.parameters()),
            "parameters": trained.num_parameters(),
        }
        if "deepspeed" in name:
            optimizer = trainer.model_wrapped.optimizer
            master = optimizer.single_partition_of_fp32_groups
            results[name]["master"] = sum(group.nbytes for group in master)
            results[name]["moments"] = sum(
                value.nbytes
                for group in master
                for value in optimizer.optimizer.state[group].values()
                if torch.is_tensor(value) and value.dim()
            )
    print("FOUND " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
