"""One published row, traced with the libraries of its day: transformers, PEFT and accelerate of then, torch of today.

    PYTHONPATH=<folder of those libraries> python benchmarks/published_then.py ROWS ID [ID ...]

`published.py` calls it. memkit itself needs a newer transformers; its tracer does not: a Trainer of then takes two
steps on the same fake GPU, recorded by the same tracer and replayed by the same allocator. Prints one line of JSON a
row: what `predict` gives for a training, or `{"id", "error"}`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import published_models as models
from benchmarks.published_models import Row


def main(path: str, names: list[str]) -> int:
    os.environ[models.ROWS] = path
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    _load()
    rows = models.read_rows(path)
    for name in names:  # each in a process of its own, which it changes
        child = os.fork()
        if child == 0:
            _case(rows[name], answers)
        os.waitpid(child, 0)
    return 0


def _load() -> None:
    """Imports what every row needs, before torch seems to have a GPU."""
    import transformers.utils
    import transformers.utils.import_utils

    for package in ("datasets", "deepspeed", "liger_kernel"):  # newer ones than this transformers knows
        for module in (transformers.utils, transformers.utils.import_utils):
            vars(module)[f"is_{package}_available"] = lambda *args, **kwargs: False
    from hf_memkit.prediction.child import cuda_device_guard

    cuda_device_guard.install()
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers.trainer
    from transformers.quantizers import base, quantizers_utils

    # What `quantise_linears` asks of today's transformers: everything but the output layer is quantised
    # (transformers 4.45.2: integrations/bitsandbytes.py, `get_keys_to_not_convert`).
    vars(quantizers_utils)["should_convert_module"] = lambda name, kept: "lm_head" not in name
    base.HfQuantizer.get_modules_to_not_convert = staticmethod(lambda *args, **kwargs: ["lm_head"])


def _case(row: Row, answers: Any) -> None:
    try:
        found = {"id": row["id"], **_predicted(row)}
    except BaseException as error:
        traceback.print_exc()
        found = {"id": row["id"], "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    print(json.dumps(found), file=answers, flush=True)
    os._exit(0)


def _predicted(row: Row) -> dict[str, Any]:
    from hf_memkit.hardware import described_machine
    from hf_memkit.prediction.allocator_settings import AllocatorSettings
    from hf_memkit.prediction.capacity import reserved_interval, smallest_cap
    from hf_memkit.prediction.replay import replay
    from hf_memkit.units import GIB

    gpu = described_machine(row["gpu"].removeprefix("NVIDIA "), None, None, None).gpu
    assert gpu is not None and gpu.capability is not None
    trace = _traced(row, (int(gpu.capability), round(gpu.capability * 10) % 10), gpu.capacity_bytes)
    found = replay(trace, card_bytes=gpu.capacity_bytes)
    settings = AllocatorSettings()
    cap = smallest_cap(trace, settings, card_bytes=gpu.capacity_bytes, without_cap=found)
    low, high = reserved_interval(
        trace, settings, card_bytes=gpu.capacity_bytes, smallest_cap_bytes=cap, without_cap=found
    )
    peak = trace.peak()
    return {
        "peak_allocated_gib": found.peak_allocated_bytes / GIB,
        "peak_reserved_gib": [low / GIB, high / GIB],
        "outside_allocator_gib": gpu.context_bytes / GIB,
        "between_steps_gib": found.allocated_by_phase["data"] / GIB,
        "peak_phase": peak.phase,
        "peak_operation": peak.operation,
        "peak_category": max(peak.categories, key=lambda name: peak.categories[name]),
    }


def _traced(row: Row, capability: tuple[int, int], capacity_bytes: int) -> Any:
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_memkit.prediction.child.attention import install_cuda_attention
    from hf_memkit.prediction.child.fake_gpu import made_up_values, movable_modules, one_card
    from hf_memkit.prediction.child.kernel_rules import learn_counts
    from hf_memkit.prediction.child.phase_hooks import TrainingWatch
    from hf_memkit.prediction.child.tracer import StorageTracer

    one_card(capability, capacity_bytes)
    install_cuda_attention(capability)
    movable_modules()
    made_up_values()
    learn_counts()
    tracer = StorageTracer("cuda", capability)
    watch = TrainingWatch(tracer)
    with tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True), tracer:
        model = getattr(models, models.attribute(row))()
        tokens = torch.zeros(row["seq_len"], dtype=torch.int64)
        rows = [{"input_ids": tokens, "labels": tokens}] * (8 * row["micro_batch"])
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=row["micro_batch"],
            gradient_accumulation_steps=row["accumulation"],
            gradient_checkpointing=row["checkpointing"],
            gradient_checkpointing_kwargs={"use_reentrant": True},  # the default of that day
            optim="adamw_torch",
            max_steps=2,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **models.precision_of(row),
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch])
        trainer.train()
        return tracer.finish(watch.phase)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
