"""Section `deepspeed`: every preset trains GPT-2 XL, and what it holds is laid beside the ledger, term by term.

Short sequences and one sequence a micro-batch keep activations small, two micro-batches a step make it accumulate. The
engine's own tensors give each term; the allocator gives the peaks of the phases, with the terms that come and go.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.children import judge, run_child
from hf_memkit.architectures import ARCHITECTURES
from hf_memkit.errors import MemkitError, RunError
from hf_memkit.hardware import this_machine
from hf_memkit.memory.records import read_records
from hf_memkit.models import ModelFacts, describe
from hf_memkit.units import GIB
from hf_memkit.zero import ops
from hf_memkit.zero.ledger import zero_ledger
from hf_memkit.zero.nvme import preflight
from hf_memkit.zero.presets import preset_index
from hf_memkit.zero.sizing import size_preset
from hf_memkit.zero.stage_3 import SWAP_BUFFERS

MODEL: Final = "openai-community/gpt2-xl"
SEQUENCE_LENGTH: Final = 128
ACCUMULATION: Final = 2
REHEARSED: Final = {  # 2.1 M parameters: matrices of more than 1 MiB, so that they are swapped
    "model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 2, "n_positions": SEQUENCE_LENGTH,
    "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One preset, sized for the GPU that is here."""

    preset: str

    @property
    def name(self) -> str:
        return self.preset


def cases() -> list[Case]:
    return [Case(name) for name in preset_index()]


def architecture(*, on_cpu: bool) -> dict[str, Any]:
    return dict(REHEARSED if on_cpu else ARCHITECTURES[MODEL].config)


def facts(*, on_cpu: bool) -> ModelFacts:
    return describe(MODEL, architecture(on_cpu=on_cpu), use_hub=False, use_built_in=False)


def sized_config(case: Case, nvme_path: str, *, on_cpu: bool) -> dict[str, Any]:
    """The case's DeepSpeed JSON. A CPU pins nothing, and its model is small enough to need smaller buffers."""
    machine = this_machine(nvme_path)
    config = size_preset(case.preset, facts(on_cpu=on_cpu), machine, nvme_path=nvme_path).config
    zero = config["zero_optimization"]
    if on_cpu and zero["stage"] == 3:
        zero["sub_group_size"] = 600_000
        zero["stage3_param_persistence_threshold"] = 1000
    return config


def refusal(case: Case, *, on_cpu: bool) -> str | None:
    """Why this case does not run here, if so."""
    from importlib.metadata import version

    info = preset_index()[case.preset]
    if on_cpu and info.not_on_cpu:
        return info.not_on_cpu
    if not info.runs_on(version("deepspeed")):
        return f"needs deepspeed{info.deepspeed}"
    return None


def measure(case: Case, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
    """Runs one case in a child process and returns its evidence."""
    why = refusal(case, on_cpu=on_cpu)
    if why is not None:
        return {"status": "refused", "why": why}
    folder = tempfile.mkdtemp(prefix="memkit-benchmark-")
    started = time.monotonic()
    try:
        config = sized_config(case, folder, on_cpu=on_cpu)
        try:
            build_operators(config, on_cpu=on_cpu)
            ready_disk(config, folder, on_cpu=on_cpu)
        except MemkitError as error:
            return {"status": "refused", "why": str(error)}
        # Computed here: in the child the model of ZeRO-3 splits everything that is made.
        ledger = zero_ledger(config, facts(on_cpu=on_cpu), accumulation="zenflow" not in case.preset)
        job = {
            "config": config,
            "ledger": ledger.to_json(),
            "formula_device_gib": ledger.total_bytes("device") / GIB,
            "on_cpu": on_cpu,
            "max_steps": max_steps,
            "zenflow": "zenflow" in case.preset,
        }
        (Path(folder) / "job.json").write_text(json.dumps(job))
        environment = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        outcome, output = run_child("deepspeed", folder, environment)
        records = Path(folder) / "memory-rank0.jsonl"
        held = Path(folder) / "held.json"
        return {
            **judge(outcome, output, read_records(records) if records.exists() else [], max_steps),
            **(json.loads(held.read_text()) if held.exists() else {}),
            "config": job["config"],
            "wall_time_s": time.monotonic() - started,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_operators(config: dict[str, Any], *, on_cpu: bool) -> None:
    """Before the case, so that compiling does not count as its time; in a process of its own, so that this one makes
    no CUDA context that would count as the case's memory."""
    names = ops.needed(config, cpu=on_cpu)
    code = f"from hf_memkit.zero import ops; ops.build({names!r}, print, cpu={on_cpu})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    if on_cpu:
        environment["DS_ACCELERATOR"] = "cpu"
    built = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if built.returncode != 0:
        raise RunError((built.stderr.strip().splitlines() or ["no message"])[-1])


def ready_disk(config: dict[str, Any], folder: str, *, on_cpu: bool) -> None:
    """Raises what stands in the way of swapping to `folder`, where the preset swaps."""
    ledger = zero_ledger(config, facts(on_cpu=on_cpu))
    needed = ledger.total_bytes("disk")
    if needed:
        locked = sum(row.size_bytes for row in ledger.rows if row.term in SWAP_BUFFERS)
        preflight(folder, needed_bytes=needed, locked_bytes=locked).raise_problems()


def child(folder: str) -> int:
    """The measured process: trains with the JSON that `measure` left in `folder`, and writes `held.json`."""
    job = json.loads((Path(folder) / "job.json").read_text())
    on_cpu, config = bool(job["on_cpu"]), job["config"]
    from hf_memkit.zero.process_group import join_process_group, leave_process_group, single_process_environment

    os.environ.update(single_process_environment())
    ops.build(ops.needed(config, cpu=on_cpu), lambda line: print(line, file=sys.stderr), cpu=on_cpu)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_memkit.callback import attach

    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=1, max_steps=job["max_steps"], learning_rate=1e-5,
        gradient_accumulation_steps=1 if job["zenflow"] else ACCUMULATION, bf16=True, use_cpu=on_cpu,
        save_strategy="no", report_to=[], disable_tqdm=True, deepspeed=config,
    )  # fmt: skip
    join_process_group(arguments)
    values = architecture(on_cpu=on_cpu)
    model_config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    tokens = torch.randint(
        0, model_config.vocab_size, (8, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(0)
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    attach(trainer)
    trainer.add_callback(_write_held(trainer, Path(folder), job))
    trainer.train()
    leave_process_group()
    return 0


def _write_held(trainer: Any, folder: Path, job: dict[str, Any]) -> Any:
    """A callback that writes what engine, allocator and disk hold after the second step, beside the ledger."""
    from transformers import TrainerCallback

    class WriteHeld(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                text = json.dumps(compare(trainer.deepspeed, folder, job))
                (folder / "held.json").write_text(text)

    return WriteHeld()


def compare(engine: Any, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Every row of the ledger with what was found of it, in GiB; what cannot be found between steps is absent."""
    import torch

    from hf_memkit.zero.engine_tensors import engine_bytes, swapped_bytes

    found = {**engine_bytes(engine), **{("disk", term): size for term, size in swapped_bytes(folder).items()}}
    rows = []
    for place, terms in job["ledger"].items():
        for row in terms:
            measured = found.get((place, row["term"]))
            rows.append(
                {
                    "place": place, "term": row["term"], "phase": row["phase"], "formula_gib": row["gib"],
                    **({} if measured is None else {"measured_gib": measured / GIB}),
                }
            )  # fmt: skip
    result: dict[str, Any] = {"rows": rows, "formula_device_gib": job["formula_device_gib"]}
    if torch.cuda.is_available():
        result["allocated_between_steps_gib"] = torch.cuda.memory_allocated() / GIB
        stats = torch.cuda.host_memory_stats()
        result["pinned_by_torch_gib"] = stats.get("allocated_bytes.current", 0) / GIB
    return result
