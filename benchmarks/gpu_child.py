"""The measured process of `gpu.py`: trains a setup on made-up data of the shape that was predicted.

In: a line of standard input with a folder that has `job.json`, after this has said `ready`; then any line, upon which
it trains. Out: `result.json` in that folder, the records of the training, and what was printed (`output.txt`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from hf_memkit.common.units import GIB

READY: Final = "ready"

_POOL: Final = 2**20
"""Random numbers that are made once and repeated: drawing billions of them would take minutes."""


def run(folder: Path, job: dict[str, Any]) -> int:
    """Trains `job["setup"]`; one that runs out of memory raises.

    `result.json` then holds `expected_steps` and `optimizer_class`, or `refused`: why memkit would not run this.
    """
    import torch
    from transformers import Trainer, default_data_collator
    from transformers.trainer_utils import set_seed

    from benchmarks.allocator_history import record_history
    from hf_memkit import attach
    from hf_memkit.common.errors import MemkitError
    from hf_memkit.prediction.child.training.setup_trainer import rows_for
    from hf_memkit.prediction.setup_as_script import SetupJob
    from hf_memkit.setup import build
    from hf_memkit.setup.setup import Setup

    on_cpu: bool = job["on_cpu"]
    setup = Setup.from_json(job["setup"])
    if job["cap_bytes"] is not None and not on_cpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["cap_bytes"] / total))
    records = job["history"] and not on_cpu
    recording = record_history(folder / "history.json.gz") if records else contextlib.nullcontext()
    with recording:
        try:
            build.require_packages(setup)
            arguments = build.build_arguments(setup, own_arguments(folder, job))
            set_seed(arguments.seed)
            model = build_model(setup)
            build.install_model_parts(model, setup)
            options = build.trainer_options(setup, model=model, arguments=arguments)
        except MemkitError as error:
            return write(folder, {"refused": str(error)})
        options.setdefault("data_collator", default_data_collator)
        rows = rows_for(SetupJob(setup, job["length"]), setup, model)  # as predicted, padding included
        size = arguments.per_device_train_batch_size
        data = as_tensors(rows(size, job["max_steps"] * size * arguments.gradient_accumulation_steps))
        trainer = Trainer(model=model, args=arguments, train_dataset=data, **options)
        del model
        attach(trainer, output_dir=folder, summary=False, html=False)
        kernels = KernelTimes() if job["kernels"] and not on_cpu else None
        if kernels is not None:
            trainer.add_callback(kernels.callback())
        sys.stdin.readline()  # until nothing else loads on this machine
        trainer.train()
        if job["evaluates"]:
            size = arguments.per_device_eval_batch_size
            trainer.evaluate(as_tensors(rows(size, 2 * size)))
        found: dict[str, Any] = {"expected_steps": trainer.state.global_step}
        if kernels is not None:
            found["kernels"] = kernels.by_operation()
        if torch.cuda.is_available():
            found["reserved_at_end_gib"] = torch.cuda.memory_reserved() / GIB
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return write(folder, {**found, "optimizer_class": type(optimizer).__name__})


class KernelTimes:
    """Which operation's kernels take how long in one step, the first after `WARM`."""

    WARM: Final = 3

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def callback(self) -> Any:
        import torch
        from transformers import TrainerCallback

        recorded, warm = self._profile, self.WARM

        class AroundOneStep(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == warm:
                    torch.cuda.synchronize()
                    recorded.start()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == warm + 1:
                    torch.cuda.synchronize()
                    recorded.stop()

        return AroundOneStep()

    def by_operation(self) -> dict[str, list[int]]:
        """`{operation: [calls, microseconds of its kernels]}`; a kernel that no operation starts by its own name."""
        rows = self._profile.key_averages()
        return {row.key: [row.count, round(row.self_device_time_total)] for row in rows if row.self_device_time_total}


def as_tensors(rows: Any) -> Any:
    """The same rows, converted once: an image as nested lists takes longer to put into a batch than to train on."""
    import torch

    from hf_memkit.prediction.child.example_inputs import Rows

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

    from hf_memkit.setup import build

    if "model.quantization" in setup:
        return build.build_model(setup, print, random_weights=True)
    with no_init_weights():
        if "model.class" in setup:
            values = dict(setup["model.architecture"])
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            model = getattr(transformers, setup["model.class"])(config)
        else:
            model = build.build_model(setup, print, random_weights=True)
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


def main() -> int:
    """Loads the libraries, says `ready`, and does the job whose folder it is then given."""
    from transformers import Trainer  # noqa: F401

    import hf_memkit.measuring.callback
    import hf_memkit.setup.build  # noqa: F401

    print(READY, flush=True)
    folder = Path(sys.stdin.readline().strip())
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    return run(folder, json.loads((folder / "job.json").read_text()))


if __name__ == "__main__":
    raise SystemExit(main())
