"""The measured process of section `report`: trains a case, and writes what it reads beside the report's records."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.report_cases import NEIGHBOUR_GIB, Case
from hf_memkit.architectures import ARCHITECTURES
from hf_memkit.units import GIB

REHEARSED: Final = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256}
REHEARSED_STEPS: Final = 5
NEIGHBOUR_STEPS: Final = 120
NEIGHBOUR_FROM: Final = 40
OVERHEAD_ROUNDS: Final = 2
OVERHEAD_STEPS: Final = 30


def run(case: Case, folder: Path, job: dict[str, Any], *, gpu: Any = None, readers: Any = None) -> None:
    """Trains as the case says. A case that runs out of memory raises.

    Args:
        GPU: what is asked for counters, in the place of `torch.cuda`.
        readers: the report's, in the place of this machine's.
    """
    on_cpu: bool = job["on_cpu"]
    if case.does == "overhead":
        write(folder, measure_overhead(case, on_cpu=on_cpu))
        return
    import torch

    gpu = torch.cuda if gpu is None else gpu
    max_steps = REHEARSED_STEPS if on_cpu else NEIGHBOUR_STEPS if case.does == "neighbour" else job["max_steps"]
    if case.does == "run out":
        if not on_cpu and case.cap_gib is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_gib * GIB / total))
        trainer = make_trainer(case, folder, job, max_steps)
        attach_report(trainer, folder, oom_snapshot=True)
        if on_cpu:
            trainer.add_callback(runs_out(case.phases[0]))
        trainer.train()
        return
    truth: list[dict[str, Any]] = []
    left_gib = 0.0
    if case.does == "train":
        own = folder / "truth"
        train(make_trainer(case, own, job, max_steps), own, read_counters(truth, gpu), phases=False, readers=readers)
        left_gib = forget(gpu)
    trainer = make_trainer(case, folder, job, max_steps)
    train(trainer, folder, start_neighbour(truth) if case.does == "neighbour" else None, readers=readers)
    result = {"truth": truth, "complaints": complaints(folder), "findings": findings(folder), "left_gib": left_gib}
    write(folder, result)
    if case.deepspeed is not None:
        from hf_memkit.zero.process_group import leave_process_group

        leave_process_group()


def write(folder: Path, content: Any) -> None:
    (folder / "result.json").write_text(json.dumps(content))


def attach_report(trainer: Any, folder: Path, **options: Any) -> Any:
    from hf_memkit.callback import attach

    return attach(trainer, output_dir=folder, summary=False, html=False, **options)


def make_trainer(case: Case, folder: Path, job: dict[str, Any], max_steps: int) -> Any:
    """A Trainer with a GPT-2 of random weights and random tokens, the same at each call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_memkit.compat import to_installed_arguments
    from hf_memkit.zero.process_group import join_process_group

    on_cpu: bool = job["on_cpu"]
    values = {**ARCHITECTURES[case.model].config, **(REHEARSED if on_cpu else {})}
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": case.batch, "max_steps": max_steps, "seed": 0,
        "learning_rate": 1e-5, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": on_cpu, **case.arguments, **({"deepspeed": job["config"]} if case.deepspeed else {}),
    }  # fmt: skip
    arguments = TrainingArguments(**to_installed_arguments(settings))
    join_process_group(arguments)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=16, target_modules=["c_attn", "c_fc", "c_proj"], task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        model = get_peft_model(model, lora)
    length = min(case.length, config.n_positions)
    rows = torch.randint(0, config.vocab_size, (64, length), generator=torch.Generator().manual_seed(0))
    return Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def train(trainer: Any, folder: Path, other: Any = None, **options: Any) -> None:
    """Trains with the report and another callback, and lets go of DeepSpeed's engine if there is one."""
    attach_report(trainer, folder, **options)
    if other is not None:
        trainer.add_callback(other)
    trainer.train()
    if getattr(trainer, "deepspeed", None) is not None:
        from accelerate.state import AcceleratorState, GradientState

        trainer.deepspeed.destroy()
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()


def forget(gpu: Any) -> float:
    """The next training begins with an empty GPU but for what libraries keep: the GiB of that."""
    gc.collect()
    if not gpu.is_available():
        return 0.0
    gpu.empty_cache()
    gpu.reset_peak_memory_stats()
    return float(gpu.memory_allocated() / GIB)


def read_counters(rows: list[dict[str, Any]], gpu: Any) -> Any:
    """A callback that adds a row at each step's end: torch's own counters, and tensors counted one by one."""
    from transformers import TrainerCallback

    class ReadCounters(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.counted: dict[str, float] = {}
            if args.deepspeed is None:  # its weights and states are parts and copies, in buffers of the engine's
                model = kwargs["model"]
                self.counted["weights_gib"] = on_device([*model.parameters(), *model.buffers()], args.device)
                self.counted["optimizer_gib"] = on_device(states_of(kwargs["optimizer"]), args.device)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            row: dict[str, Any] = {"step": state.global_step}
            if gpu.is_available():
                free, total = gpu.mem_get_info()
                row |= {
                    "peak_allocated_gib": gpu.max_memory_allocated() / GIB,
                    "peak_reserved_gib": gpu.max_memory_reserved() / GIB,
                    "allocated_gib": gpu.memory_allocated() / GIB,
                    "device_used_gib": (total - free) / GIB,
                }
                row |= self.counted
                gpu.reset_peak_memory_stats()
            rows.append(row)

    return ReadCounters()


def states_of(optimizer: Any) -> list[Any]:
    import torch

    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def on_device(tensors: list[Any], device: Any) -> float:
    """GiB of the distinct storages among them that lie in that device's allocator."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == device.type and not getattr(tensor, "is_paged", False)
    }
    return float(sum(sizes.values()) / GIB)


def start_neighbour(rows: list[dict[str, Any]]) -> Any:
    """A callback that starts another process with 4 GiB on the GPU, in the middle of training."""
    from transformers import TrainerCallback

    code = (
        f"import torch; held = torch.zeros(int({NEIGHBOUR_GIB} * 2**30), dtype=torch.uint8, device='cuda'); "
        "torch.cuda.synchronize(); print('ready', flush=True); input()"
    )

    class StartNeighbour(TrainerCallback):  # type: ignore[misc]
        process: subprocess.Popen[str] | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == NEIGHBOUR_FROM:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                assert self.process.stdout is not None
                self.process.stdout.readline()
            time.sleep(0.05)  # NVML is read every half second: that is some steps, and some of each kind
            rows.append({"step": state.global_step, "neighbour": self.process is not None})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.process is not None:
                self.process.communicate("\n")

    return StartNeighbour()


def runs_out(phase: str) -> Any:
    """On a CPU nothing runs out: a callback that raises what CUDA's allocator would."""
    import torch
    from transformers import TrainerCallback

    text = (
        "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 123.00 "
        "GiB is free. 16.00 GiB allowed; Of the allocated memory 15.85 GiB is allocated by PyTorch, and 80.00 MiB is "
        "reserved by PyTorch but unallocated."
    )

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(text)

    class RunsOut(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and phase != "optimizer":
                next(kwargs["model"].children()).register_forward_pre_hook(fail)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and phase == "optimizer":
                fail()

    return RunsOut()


def complaints(folder: Path) -> dict[str, Any]:
    """What went wrong in measuring, by the `end` record; empty if nothing did."""
    from hf_memkit.memory.records import read_records

    end = read_records(folder / "memory-rank0.jsonl")[-1]
    found = {"reader_errors": end.get("reader_errors"), "messages": end.get("callback_error_messages")}
    if end.get("status") != "finished":
        found["status"] = end.get("status")
    return {key: value for key, value in found.items() if value}


def findings(folder: Path) -> list[str]:
    """The kinds that the diagnosis names."""
    from hf_memkit.report import diagnose, load_run

    run = load_run(folder)
    return [finding.kind for finding in diagnose(run.ranks[0].steps, run.ranks[0].run)]


def measure_overhead(case: Case, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Rows of `report_overhead` for Trainer alone, the report, and reading counters at every step, interleaved."""
    from benchmarks.overhead_arms import ARMS, OURS, Arm, Size, memkit, torchtitan_style, with_trainer
    from benchmarks.report_overhead import WARM_UP, measure_rounds, summarize

    config = ARCHITECTURES[case.model].config
    size = (
        Size() if on_cpu else Size(config["n_embd"], config["n_layer"], case.batch, case.length, config["vocab_size"])
    )
    options = {} if on_cpu else case.arguments
    nothing = next(arm for arm in ARMS if arm.name == "nothing")
    arms = [
        Arm("nothing", nothing.what, with_trainer(**options), against=None),
        Arm("memkit", "MemoryReportCallback()", with_trainer(memkit(), OURS, **options)),
        Arm("memkit-no-phases", "phases=False", with_trainer(memkit(phases=False), OURS, **options)),
        Arm("counters", "torchtitan's counters at every step", with_trainer(torchtitan_style, **options)),
    ]
    rounds, steps = (1, 4) if on_cpu else (OVERHEAD_ROUNDS, OVERHEAD_STEPS)
    measured = measure_rounds(arms, size, rounds, steps)
    rows = [summarize(arm, measured) for arm in arms]
    for arm, row in zip(arms, rows, strict=True):
        row["first_steps_us"] = statistics.fmean(measured[arm.name][0].step_us[:WARM_UP])
    return rows
