"""Trains the cases of `preset_cases` one after the other in this process, or in each process of a launcher.

    python -m tests.engine.preset_driver [--exhaustive] [--half 0|1] FOLDER

`FOLDER/initial` holds the weights to start from. What each case came to is written to `FOLDER/CASE/rank0.json`. With
one process an error ends the case; with several it ends the run, because the other processes wait. `--half`: every
other case, so that a process a core trains them all; what else is looked at belongs to the second.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

from hf_memkit.setup.process_group import single_process_environment

os.environ.update(single_process_environment())

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import TrainingArguments
from transformers.utils import logging

from hf_memkit.deepspeed.engine_tensors import swapped_bytes
from hf_memkit.deepspeed.nvme_resume import RestoreSwappedStates
from hf_memkit.deepspeed.presets import load
from hf_memkit.deepspeed.wiring import DeepSpeedWiring
from hf_memkit.setup.process_group import leave_process_group
from tests.engine import stepping_cases, zero_r_cases
from tests.engine.live_engine import LiveEngine
from tests.engine.preset_cases import CHECKPOINT, STEPS, Case, not_on_cpu, one_process, small_config, two_processes
from tests.engine.tiny_training import MICRO_BATCH, LossTrainer, cpu_arguments, load_model
from tests.engine.zero_r_cases import CASES as ZERO_R

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(folder: Path, half: int | None, *, exhaustive: bool) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    every = one_process() if WORLD_SIZE == 1 else two_processes()
    cases = [case for case in every if exhaustive or not case.exhaustive]
    for case in cases if half is None else cases[half::2]:
        result: dict[str, Any] = {"error": None}
        place = folder / case.name
        place.mkdir(exist_ok=True)
        try:
            run(case, folder / "initial", place, result)
        except Exception:
            result["error"] = traceback.format_exc()
        (place / f"rank{RANK}.json").write_text(json.dumps(result))
        print(case.name, result["error"] or "ok", flush=True)
        if result["error"] and WORLD_SIZE > 1:
            sys.stdout.flush()
            os._exit(1)
    if half != 0:
        more = one_more(folder) if WORLD_SIZE == 1 else {name: zero_r_cases.train(name, folder) for name in ZERO_R}
        (folder / f"more-rank{RANK}.json").write_text(json.dumps(more))
    leave_process_group()
    (folder / f"threads-{half}-rank{RANK}.json").write_text(json.dumps(thread_names()))


def one_more(folder: Path) -> dict[str, Any]:
    """What else needs a real engine in one process."""
    return {
        "read": {name: read_by_deepspeed(name) for name in not_on_cpu()},
        "stepping": {
            name: stepping_cases.stepping_class(name, folder / "initial", folder) for name in stepping_cases.CASES
        },
    }


def thread_names() -> list[str]:
    """Of this process, native ones too."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def read_by_deepspeed(preset: str) -> str | None:
    """Whether Trainer can fill the preset's "auto" and DeepSpeed's config classes take it; the error if not."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    config = HfTrainerDeepSpeedConfig(load(preset))
    try:
        config.trainer_config_process(arguments)
        config.trainer_config_finalize(arguments, None, STEPS)
        DeepSpeedConfig(config.config)
    except Exception:
        return traceback.format_exc()
    return None


def run(case: Case, initial: Path, place: Path, result: dict[str, Any]) -> None:
    """Fills `result` step by step, so that what was found before an error is there too."""
    nvme_path = place / "nvme"
    config = small_config(case.preset, str(nvme_path)) if case.preset else None
    trainer = train(case, config, initial, place, result)
    if case.saves:
        trainer.save_model(str(place / "saved"))
        if RANK == 0:
            result["saved_difference"] = difference(place / "saved", live_weights(trainer))
        else:
            live_weights(trainer)
    result["disk"] = swapped_bytes(nvme_path, RANK)
    result["gathered"] = gathered_bytes(trainer)
    close(trainer)
    del trainer
    gc.collect()
    if case.resumes:
        checkpoint = place / f"checkpoint-{CHECKPOINT}"
        again: dict[str, Any] = {}
        close(train(case, config, initial, place, again, checkpoint=checkpoint))
        result["resumed_losses"] = again["losses"]
        gc.collect()
    shutil.rmtree(nvme_path, ignore_errors=True)
    for checkpoint in place.glob("checkpoint-*") if RANK == 0 else ():
        shutil.rmtree(checkpoint, ignore_errors=True)


def gathered_bytes(trainer: LossTrainer) -> int:
    """What rank 0 holds in RAM while it saves, as Trainer asks for it; 0 where nothing is split."""
    engine = trainer.model_wrapped
    if not getattr(engine, "zero_gather_16bit_weights_on_model_save", bool)():
        return 0
    adapters = hasattr(trainer.model, "peft_config")
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=adapters) or {}
    return sum({each.data_ptr(): each.nbytes for each in state.values()}.values())


def train(
    case: Case, config: dict[str, Any] | None, initial: Path, place: Path, result: dict[str, Any],
    checkpoint: Path | None = None,
) -> LossTrainer:  # fmt: skip
    arguments = cpu_arguments(
        place, deepspeed=config, bf16=case.bf16, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=case.accumulation, activation_checkpointing=case.recomputes, max_steps=STEPS,
        learning_rate=2e-2 if case.lora else 1e-3, lr_scheduler_type="constant", weight_decay=0.01,
        max_grad_norm=1.0 if case.clips else 0.0, save_steps=CHECKPOINT,
        save_strategy="steps" if case.saves and checkpoint is None else "no",
    )  # fmt: skip
    # Under DeepSpeed's bf16 the model has 16-bit weights; plain Trainer's bf16 keeps them in fp32.
    model = load_model(initial, bf16_weights=case.bf16 and case.preset is not None, lora=case.lora)
    result["split_when_made"] = all(parameter.numel() == 0 for parameter in model.base_model.parameters())
    trainer = LossTrainer(model, arguments)
    live = LiveEngine(trainer)
    if config is not None:
        trainer.add_callback(DeepSpeedWiring(lambda: trainer.deepspeed))
        trainer.add_callback(live)
        if checkpoint is not None:
            trainer.add_callback(RestoreSwappedStates(lambda: trainer.deepspeed, checkpoint))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    engine = trainer.deepspeed
    result["losses"] = trainer.micro_losses
    result["held"] = [[place, term, size] for (place, term), size in live.held.items()]
    result["classes"] = [
        type(part).__name__ for part in (engine and engine.optimizer, engine and engine.basic_optimizer)
    ]
    return trainer


def live_weights(trainer: LossTrainer) -> dict[str, torch.Tensor]:
    """The weights that the engine trained, gathered from all processes."""
    import deepspeed

    found = {}
    for name, parameter in trainer.model.named_parameters():
        gathered = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if gathered else contextlib.nullcontext():
            found[name] = parameter.detach().clone()
    return found


def difference(saved: Path, weights: dict[str, torch.Tensor]) -> float:
    """The largest between saved and trained weights. A missing weight is an error."""
    stored = load_file(saved / "model.safetensors")
    return max(float((stored[name] - weight).abs().max()) for name, weight in weights.items())


def close(trainer: LossTrainer) -> None:
    """Lets go of the engine; the process group stays for the next case."""
    if trainer.deepspeed is not None:
        from deepspeed.runtime.zero.partition_parameters import Init

        trainer.deepspeed.destroy()
        Init.param_id = 0  # as in a new process: swap files are named after it, in checkpoints too
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", type=int, choices=(0, 1))
    parser.add_argument("--exhaustive", action="store_true")
    asked = parser.parse_args()
    main(asked.folder, asked.half, exhaustive=asked.exhaustive)
