"""One published row, traced with the libraries of its day: transformers, PEFT and accelerate of then, torch of today.

    PYTHONPATH=<folder of those libraries> MEMKIT_PUBLISHED_ROWS=FILE python benchmarks/published_then.py ID [ID ...]

`published.py` calls it. memkit itself needs a newer transformers; its tracer does not: a Trainer of then takes two
steps on the same fake GPU, recorded by the same tracer and replayed by the same allocator. Prints one line of JSON a
row: what `predict` gives for a training, or `{"id", "error"}`. What torch before 1.11 did otherwise is
done here: see `_as_torch_1`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import published_models as models
from benchmarks.published_models import Row

_NOT_OF_THIS_DAY: Final = {"datasets", "deepspeed", "liger_kernel", "tensorboard", "tensorflow", "torchvision"}
_ASKED_FOR: Final = {"tokenizers": "0.10.3", "sacremoses": "0.0.53"}
"""What transformers before 4.20 wants to see installed and needs for texts alone: that tokenizers has no wheel for
this Python."""


def main(names: list[str]) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    load_libraries()
    rows = models.read_rows(*os.environ[models.ROWS].split(os.pathsep))
    for name in names:  # each in a process of its own, which it changes
        child = os.fork()
        if child == 0:
            _case(rows[name], answers)
        os.waitpid(child, 0)
    return 0


def load_libraries() -> None:
    """Imports what every row needs, before torch seems to have a GPU."""
    of_transformers = tuple(map(int, metadata.version("transformers").split(".")[:2]))
    # peft of today imports what transformers had later, and rows of before then use none
    hidden = _NOT_OF_THIS_DAY | ({"peft"} if of_transformers < (4, 36) else set())
    find_spec, version = importlib.util.find_spec, metadata.version
    vars(importlib.util)["find_spec"] = lambda name, *where: None if name in hidden else find_spec(name, *where)
    if of_transformers < (4, 20):
        vars(metadata)["version"] = lambda name: _ASKED_FOR.get(name) or version(name)
    from hf_memkit.prediction.child.gpu import cuda_device_guard, fake_gpu

    cuda_device_guard.install()
    fake_gpu.replace_compiler()  # before transformers compiles functions
    import bitsandbytes  # noqa: F401
    import transformers.trainer

    if of_transformers < (4, 20):  # where it had what is asked of this module
        import transformers.file_utils

        vars(transformers.utils)["import_utils"] = transformers.file_utils
        sys.modules["transformers.utils.import_utils"] = transformers.file_utils
    if "peft" in hidden:
        return
    import peft  # noqa: F401
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
        first_line = str(error).strip().partition("\n")[0]
        found = {"id": row["id"], "error": f"{type(error).__name__}: {first_line}"}
    print(json.dumps(found), file=answers, flush=True)
    os._exit(0)


def _predicted(row: Row) -> dict[str, Any]:
    from hf_memkit.catalog.hardware import described_machine
    from hf_memkit.common.units import GIB
    from hf_memkit.prediction.allocator.capacity import reserved_interval, smallest_cap
    from hf_memkit.prediction.allocator.replay import replay
    from hf_memkit.prediction.allocator.settings import AllocatorSettings

    gpu = described_machine(row["gpu"].removeprefix("NVIDIA "), None, None, None).gpu
    assert gpu is not None and gpu.capability is not None
    trace = traced(row, (int(gpu.capability), round(gpu.capability * 10) % 10), gpu.capacity_bytes)
    found = replay(trace, gpu_bytes=gpu.capacity_bytes)
    settings = AllocatorSettings()
    cap = smallest_cap(trace, settings, gpu_bytes=gpu.capacity_bytes, without_cap=found)
    low, high = reserved_interval(
        trace, settings, gpu_bytes=gpu.capacity_bytes, smallest_cap_bytes=cap, without_cap=found
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


def _as_torch_1() -> None:
    """`zero_grad` keeps gradients, as zeros (PyTorch 1.10.1: nn/modules/module.py, `set_to_none=False`), and softmax
    keeps its input beside its result (tools/autograd/derivatives.yaml, `_softmax_backward_data(grad, result, dim,
    self)`; pytorch/pytorch#65242, which is in 1.11, keeps the type of `self` alone)."""
    import torch

    torch.nn.Module.zero_grad.__defaults__ = (False,)
    softmax = torch.nn.functional.softmax

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Any) -> Any:
            result = softmax(scores, dim=-1)
            ctx.save_for_backward(scores, result)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            scores, result = ctx.saved_tensors
            return torch._softmax_backward_data(gradient, result, -1, scores.dtype)

    def keeps_input(scores: Any, dim: int, **options: Any) -> Any:
        assert dim == -1
        autocast = torch.is_autocast_enabled("cuda")  # which takes a softmax in fp32
        return Softmax.apply(scores.float() if autocast else scores)  # type: ignore[no-untyped-call]

    vars(torch.nn.functional)["softmax"] = keeps_input


def traced(row: Row, capability: tuple[int, int], capacity_bytes: int, *, work: bool = False) -> Any:
    """The trace of two steps of a row with the libraries that are imported; `work`: what they compute, too. Rows
    without a length have been given one, and are padded."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_memkit.prediction.child.gpu import fake_gpu
    from hf_memkit.prediction.child.gpu.attention import install_cuda_attention
    from hf_memkit.prediction.child.tracer.kernel_rules import learn_use_counts
    from hf_memkit.prediction.child.tracer.tracer import StorageTracer
    from hf_memkit.prediction.child.training.phase_hooks import TrainingWatch

    fake_gpu.patch_cuda_device(capability, capacity_bytes)
    install_cuda_attention(capability)
    fake_gpu.patch_streams()
    fake_gpu.patch_module_apply()
    fake_gpu.patch_fake_values()
    learn_use_counts()
    tracer = StorageTracer("cuda", capability, work=work)
    watch = TrainingWatch(tracer, lambda: trainer.model_wrapped)
    with tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True), tracer:
        if row["versions"].get("torch", "2").startswith("1."):
            _as_torch_1()
        model = getattr(models, models.attribute(row))()
        example = models.example_of(row, row["seq_len"])
        tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in example.items()}
        if row.get("padded"):
            tensors["attention_mask"] = torch.ones(row["seq_len"], dtype=torch.int64)
            tensors["attention_mask"][-1] = 0
        rows = [tensors] * (8 * row["micro_batch"] * row["accumulation"])
        arguments = {
            "output_dir": folder,
            "per_device_train_batch_size": row["micro_batch"],
            "gradient_accumulation_steps": row["accumulation"],
            "gradient_checkpointing": row["checkpointing"],
            "gradient_checkpointing_kwargs": {"use_reentrant": row.get("reentrant", True)},  # the default of that day
            "max_steps": 2,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **models.precision_of(row),
        }
        optimizer = models.optimizer_of(row)
        own = None
        if isinstance(optimizer, str):
            arguments["optim"] = optimizer
        elif optimizer is not None:
            own = optimizer[0](model.to("cuda").parameters(), **optimizer[1])
        # What its TrainingArguments do not know yet is as it was before one could say it.
        known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**{name: arguments[name] for name in arguments if name in known}),
            train_dataset=rows,
            callbacks=[watch],
            optimizers=(own, None),
        )
        trainer.train()
        return tracer.finish(watch.phase)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status)  # an ordinary exit runs destructors, which look for a GPU that does not exist
