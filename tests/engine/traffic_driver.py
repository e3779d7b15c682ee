"""Trains in two processes, and writes how many bytes each step gave to each collective of the real engine.

    python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.engine.traffic_driver FOLDER

`FOLDER/traffic.json`: case → collective → elements × bytes in the last step, counted whole (not what a ring sends).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, TrainerCallback
from transformers.utils import logging

from hf_memkit.setup.process_group import leave_process_group
from tests.engine.preset_cases import small_config
from tests.engine.tiny_training import MICRO_BATCH, MODEL, LossTrainer, cpu_arguments

STEPS: Final = 3
"""Stage 3 records the order of its modules in the first, and prefetches from the second on."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        preset: None: DistributedDataParallel.
        zero, whole: added to `zero_optimization`, and to the JSON.
        layers: of the model.
    """

    preset: str | None
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    recomputes: bool = False
    layers: int = 2

    @property
    def config(self) -> dict[str, Any] | None:
        if self.preset is None:
            return None
        config = {**small_config(self.preset, "/nowhere"), **self.whole}
        config["zero_optimization"] |= self.zero
        return config


_NEVER: Final = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 100_000}
_ALWAYS: Final = {"stage3_max_reuse_distance": 10**9}
_BETWEEN: Final = {"stage3_max_reuse_distance": 6_000_000, "stage3_prefetch_bucket_size": 100_000}

CASES: Final[dict[str, Case]] = {
    "ddp": Case(None),
    "ddp x2": Case(None, 2),
    "stage 1": Case("zero1"),
    "stage 1 x2": Case("zero1", 2),
    "stage 1, fp32 accumulators": Case("zero1", 2, whole={"data_types": {"grad_accum_dtype": "fp32"}}, bf16=True),
    "stage 2": Case("zero2"),
    "stage 2 x2": Case("zero2", 2),
    "stage 2, to owners": Case("zero2", 2, {"use_multi_rank_bucket_allreduce": False}),
    "stage 2, bf16": Case("zero2", bf16=True),
    "stage 2, offloaded": Case("zero2-offload", 2),
    "stage 3, none kept": Case("zero3", 2, _NEVER, layers=12),
    "stage 3, all kept": Case("zero3", 1, _ALWAYS),
    "stage 3, all kept x2": Case("zero3", 2, _ALWAYS),
    "stage 3, some kept": Case("zero3", 1, _BETWEEN, layers=12),
    "stage 3, some kept, recomputed": Case("zero3", 1, _BETWEEN, recomputes=True, layers=12),
    "stage 3, recomputed, all kept": Case("zero3", 1, _ALWAYS, recomputes=True),
    "stage 3, all-reduced": Case("zero3", 1, _ALWAYS | {"reduce_scatter": False}),
    "stage 3, offloaded": Case("zero3-offload", 2, _ALWAYS),
}


def model_of(case: Case) -> PreTrainedModel:
    values = {key: value for key, value in MODEL.items() if key != "model_type"} | {"n_layer": case.layers}
    return AutoModelForCausalLM.from_config(GPT2Config(**values), dtype=torch.bfloat16 if case.bf16 else torch.float32)


class Counting(TrainerCallback):  # type: ignore[misc]
    """`sent`: of the last step, by collective."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.sent: dict[str, int] = {}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.sent = dict(self.now)
        self.now.clear()

    def count(self, name: str, tensors: list[torch.Tensor]) -> None:
        """The largest of them is the whole; what is of 64 bytes or less is a norm or a flag."""
        size = max((each.nbytes for each in tensors), default=0)
        if size > 64:
            self.now[name] += size


def count_engine(counting: Counting) -> None:
    """Every collective of DeepSpeed goes through its backend's methods."""
    import deepspeed.comm.comm as comm

    for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather"):
        method = getattr(type(comm.cdb), name)

        def counted(self: Any, *values: Any, _name: str = name, _method: Any = method, **named: Any) -> Any:
            counting.count(_name, [each for each in (*values, *named.values()) if isinstance(each, torch.Tensor)])
            return _method(self, *values, **named)

        setattr(comm.cdb, name, counted.__get__(comm.cdb))


class CountBuckets(TrainerCallback):  # type: ignore[misc]
    """What DistributedDataParallel reduces, bucket by bucket."""

    def __init__(self, trainer: LossTrainer, counting: Counting) -> None:
        self.trainer, self.counting = trainer, counting

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(group: Any, bucket: Any) -> Any:
            self.counting.count("all_reduce", [bucket.buffer()])
            return allreduce_hook(group, bucket)

        # A lambda: an annotation that is a string is refused.
        self.trainer.model_wrapped.register_comm_hook(None, lambda group, bucket: counted(group, bucket))


def train(case: Case, folder: Path) -> dict[str, int]:
    arguments = cpu_arguments(
        folder, deepspeed=case.config, bf16=case.bf16, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=case.accumulation, activation_checkpointing=case.recomputes, max_steps=STEPS,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = LossTrainer(model_of(case), arguments)
    counting = Counting()
    trainer.add_callback(counting)
    if case.preset is None:
        trainer.add_callback(CountBuckets(trainer, counting))
    else:
        count_engine(counting)
    trainer.train()
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    return counting.sent


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    found = {name: train(case, folder) for name, case in CASES.items()}
    if os.environ["RANK"] == "0":
        (folder / "traffic.json").write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
