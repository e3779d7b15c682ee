"""The measured process of `gpu.py`: trains a setup on made-up data of the shape that was predicted.

In: a folder with `job.json`. Out: `result.json` there, and the records of the training.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from hf_memkit.units import GIB

TURN: Final = "MEMKIT_BENCHMARK_TURN"
"""Variable with the file whose lock a measured process holds while it uses the GPU."""

_POOL: Final = 2**20
"""Random numbers that are made once and repeated: drawing billions of them would take minutes."""


def take_gpu() -> None:
    """Waits until no other measured process uses the GPU, and keeps it until this process ends.

    Several cases may start at once, because libraries and models load on the CPU; they train one after another.
    """
    if path := os.environ.get(TURN):
        turn = os.open(path, os.O_RDWR | os.O_CREAT)  # never closed: its end gives the turn back
        fcntl.flock(turn, fcntl.LOCK_EX)


def run(folder: Path, job: dict[str, Any]) -> int:
    """Trains `job["setup"]`; one that runs out of memory raises.

    `result.json` then holds `expected_steps` and `optimizer_class`, or `refused`: why memkit would not run this.
    """
    import torch
    from transformers import Trainer, default_data_collator
    from transformers.trainer_utils import set_seed

    from benchmarks.allocator_history import record_history
    from hf_memkit import train
    from hf_memkit.callback import attach
    from hf_memkit.errors import MemkitError
    from hf_memkit.prediction.child.setup_trainer import rows_for
    from hf_memkit.prediction.setup_training import SetupTraining
    from hf_memkit.setup import Setup

    on_cpu: bool = job["on_cpu"]
    setup = Setup.from_json(job["setup"])
    model = None if "model.quantization" in setup else build_model(setup)  # on the CPU, beside another case's training
    take_gpu()
    if job["cap_bytes"] is not None and not on_cpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["cap_bytes"] / total))
    records = job["history"] and not on_cpu
    recording = record_history(folder / "history.json.gz") if records else contextlib.nullcontext()
    with recording:
        try:
            train.require_packages(setup)
            arguments = train.build_arguments(setup, own_arguments(folder, job))
            set_seed(arguments.seed)
            model = build_model(setup) if model is None else model
            train.install_model_parts(model, setup)
            options = train.trainer_options(setup, model=model, arguments=arguments)
        except MemkitError as error:
            return write(folder, {"refused": str(error)})
        options.setdefault("data_collator", default_data_collator)
        rows = rows_for(SetupTraining(setup, job["length"]), setup, model)  # as predicted, padding included
        size = arguments.per_device_train_batch_size
        data = as_tensors(rows(size, job["max_steps"] * size * arguments.gradient_accumulation_steps))
        trainer = Trainer(model=model, args=arguments, train_dataset=data, **options)
        del model
        attach(trainer, output_dir=folder, summary=False, html=False)
        trainer.train()
        if job["evaluates"]:
            size = arguments.per_device_eval_batch_size
            trainer.evaluate(as_tensors(rows(size, 2 * size)))
        found: dict[str, Any] = {"expected_steps": trainer.state.global_step}
        if torch.cuda.is_available():
            found["reserved_at_end_gib"] = torch.cuda.memory_reserved() / GIB
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return write(folder, {**found, "optimizer_class": type(optimizer).__name__})


def as_tensors(rows: Any) -> Any:
    """The same rows, converted once: an image as nested lists takes longer to put into a batch than to train on."""
    import torch

    from hf_memkit.prediction.child.inputs import Rows

    if not isinstance(rows, Rows):
        return rows
    made: dict[tuple[int, ...], dict[str, Any]] = {}
    found = []
    for row in (rows[index] for index in range(len(rows))):
        key = tuple(map(id, row.values()))  # copies of a row share its values
        if key not in made:
            made[key] = {name: torch.as_tensor(value) for name, value in row.items()}
        found.append(made[key])
    return found


def own_arguments(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """A short training that leaves nothing behind; what decides memory is the setup's."""
    return {
        "output_dir": str(folder),
        "max_steps": job["max_steps"],
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": job["on_cpu"],
    }


def build_model(setup: Any) -> Any:
    """The setup's model with random weights. A quantised one is initialised as transformers does, slowly."""
    import transformers
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    from hf_memkit import train

    if "model.quantization" in setup:
        return train.build_model(setup, print, random_weights=True)
    with no_init_weights():
        if "model.class" in setup:
            values = dict(setup["model.architecture"])
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            model = getattr(transformers, setup["model.class"])(config)
        else:
            model = train.build_model(setup, print, random_weights=True)
    if hasattr(model, "tie_weights"):  # `no_init_weights` leaves that out too; adapters have tied ones already
        model.tie_weights()
    fill(model)
    return model


def fill(model: Any) -> None:
    """Weights that a training can start from: small and random, norms at one, biases at nought."""
    import torch

    pool = 0.02 * torch.randn(_POOL, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            flat = parameter.data.view(-1)
            for start in range(0, flat.numel(), _POOL):
                part = flat[start : start + _POOL]
                part.copy_(pool[: part.numel()])


def write(folder: Path, content: Any) -> int:
    (folder / "result.json").write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    there = Path(sys.argv[1])
    raise SystemExit(run(there, json.loads((there / "job.json").read_text())))
