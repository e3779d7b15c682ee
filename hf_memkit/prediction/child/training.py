"""One case: a real Trainer, two optimizer steps and an evaluation, on fake tensors; what it made and freed.

In: a request (`prediction/trace_request.py`). Out: a `Trace`. Runs in a process of its own, which it changes
(`fake_gpu.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch

from hf_memkit.prediction.child.fake_gpu import made_up_values, movable_modules, one_gpu
from hf_memkit.prediction.child.generation import answers_are_longest, arguments_class, generates, generation_config
from hf_memkit.prediction.child.inputs import Behind, Rows, example, pads, shortened
from hf_memkit.prediction.child.kernel_rules import learn_counts
from hf_memkit.prediction.child.libraries import install_library_rules, shapes_from_values_are_unmodelled, traceable
from hf_memkit.prediction.child.models import build_fake_model
from hf_memkit.prediction.child.saves import write_nothing
from hf_memkit.prediction.child.sft import as_dataset, install_fused_head, is_sft, sft_rows, tokenizer
from hf_memkit.prediction.trace import Trace
from hf_memkit.prediction.trace_request import TraceRequest
from hf_memkit.setup import Setup
from hf_memkit.train import after_making, build_arguments, prepared_rows, trainer_class, trainer_options

__all__ = ["MICRO_BATCHES", "SHORT_AND_QUIET", "STEPS", "made_trainer", "rows_for", "trace_training"]

STEPS = 2
"""Optimizer states exist from the end of the first step on: the second step has them all along."""

MICRO_BATCHES = 2
"""From the second micro-batch on gradients are there during forward; a third one is like the second."""

SHORT_AND_QUIET: Final[dict[str, Any]] = {
    "max_steps": STEPS,
    "save_steps": STEPS,
    "report_to": [],
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_strategy": "no",
    "load_best_model_at_end": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "auto_find_batch_size": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
}
"""Fields of TrainingArguments that every traced training has: it is short, and leaves nothing behind."""


def trace_training(request: TraceRequest) -> Trace:
    """Trains on fake tensors and records every allocation.

    Raises:
        Unmodelled: the setup has something whose memory a trace cannot show.
        Exception: whatever the libraries raise at this setup.
    """
    setup = request.setup
    if request.device == "cuda":
        pretend_gpu(request)
    if request.device != "real cpu":
        movable_modules()
        made_up_values()
        learn_counts()
        write_nothing()
        install_library_rules(setup, on_gpu=request.device == "cuda")
        if is_sft(setup) and request.device == "cuda":
            install_fused_head()
        setup = traceable(setup)
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_memkit.prediction.child.phase_hooks import TrainingWatch
    from hf_memkit.prediction.child.tracer import StorageTracer

    device_type = "cuda" if request.device == "cuda" else "cpu"
    tracer = StorageTracer(device_type, request.capability if device_type == "cuda" else None, work=request.work)
    watch = TrainingWatch(tracer)
    with (
        tempfile.TemporaryDirectory() as folder,
        shapes_from_values_are_unmodelled(),
        # The real tensors of a CPU are to compare with.
        nullcontext() if request.device == "real cpu" else FakeTensorMode(allow_non_fake_inputs=True),
        tracer,
    ):
        steps = STEPS if request.usual is None else STEPS + 1
        options = own_arguments(setup, folder, on_cpu=device_type == "cpu", save=request.save, steps=steps)
        arguments = build_arguments(setup, options, arguments_class(setup, trainer_class(setup)))
        model = build_fake_model(setup, trust_remote_code=request.trust_remote_code)
        rows = rows_for(request, setup, model)
        size = arguments.train_batch_size
        enough: Rows | Behind = rows(size, max(1024, size * STEPS * MICRO_BATCHES))
        if request.usual is not None:
            as_usual = replace(request, sequence_length=request.usual.sequence_length)
            usual = rows_for(as_usual, request.usual, model)
            enough = Behind(usual(size, size * STEPS * arguments.gradient_accumulation_steps), enough)
        trainer = made_trainer(request, setup, model, arguments, enough, watch)
        trainer.train()
        if request.evaluate:
            size = arguments.eval_batch_size
            evaluated = rows(size, size * request.evaluation_batches)
            trainer.evaluate(as_dataset(evaluated) if is_sft(setup) else evaluated)
        trace = tracer.finish(watch.phase)
        if watch.optimizer_steps != steps:
            raise RuntimeError(f"{watch.optimizer_steps} optimizer steps were made instead of {steps}")
        # A copy: what is freed from now on belongs to the end of this process.
        plain = trace.to_json()
        return Trace.from_json({name: list(each) if isinstance(each, list) else each for name, each in plain.items()})


def rows_for(request: TraceRequest, setup: Setup, model: Any) -> Callable[[int, int], Rows]:
    """Makes the data set of a batch size and a number of rows: of a padded batch the first row is the longest."""
    padded = request.padded if request.padded is not None else pads(setup, model)
    row = example(model, request.sequence_length, with_mask=padded)
    if "data.target_length" in setup:  # of text pairs
        row["labels"] = row["labels"][:1] * int(setup["data.target_length"])
    if is_sft(setup):
        enough = STEPS * MICRO_BATCHES + 1
        return lambda batch_size, count: sft_rows(setup, row, batch_size, min(count, enough * batch_size))
    shorter = shortened(model, row) if padded else None
    return lambda batch_size, count: Rows(row, count, shorter, batch_size)


def pretend_gpu(request: TraceRequest) -> None:
    """Replaces what asks for a GPU; nothing where torch has one."""
    if torch.cuda.is_available():
        return
    from hf_memkit.prediction.child.attention import install_cuda_attention

    one_gpu(request.capability, request.capacity_bytes)
    install_cuda_attention(request.capability)


def own_arguments(setup: Setup, folder: str, *, on_cpu: bool, save: bool = True, steps: int = STEPS) -> dict[str, Any]:
    """What of TrainingArguments is different in a traced training: it is short, and leaves nothing behind.

    A setup that saves does it after the last step. (Trainer's default is to save.) A quantised model is left out: its
    state dictionary packs values that fake tensors do not have (bitsandbytes: `QuantState.as_dict`).
    """
    saves = save and setup.get("arguments.save_strategy", "steps") != "no" and "model.quantization" not in setup
    accumulation = int(setup.get("arguments.gradient_accumulation_steps", 1))
    own: dict[str, Any] = {
        **SHORT_AND_QUIET,
        "output_dir": folder,
        "max_steps": steps,
        "save_steps": steps,
        "gradient_accumulation_steps": min(accumulation, MICRO_BATCHES),
        "save_strategy": "steps" if saves else "no",
        "train_sampling_strategy": "sequential",
        "hub_model_id": None,
        "use_cpu": on_cpu,
        **generation_config(setup),
        **prepared_rows(setup),
    }
    if on_cpu:
        own |= {"tf32": None, "fp16": False} if setup.get("arguments.fp16") else {"tf32": None}
    return own


def made_trainer(
    request: TraceRequest,
    setup: Setup,
    model: Any,
    arguments: Any,
    rows: Rows | Behind,
    watch: Any,
    evaluated: Rows | Behind | None = None,
) -> Any:
    """The setup's Trainer, which reads `rows`, calls `watch`, and evaluates `evaluated`."""
    from transformers import default_data_collator
    from transformers.trainer_callback import PrinterCallback

    options = trainer_options(setup, model=model, arguments=arguments, own={"callbacks": [watch]})
    # What the traced training reads is made up, and nothing of it is worth measuring or saying.
    own_collator = options.get("data_collator")
    options["data_collator"] = (
        _as_the_weights(default_data_collator, model) if own_collator is None else _with_values(own_collator)
    )
    kind = trainer_class(setup)
    # Nothing is computed of the predictions, but they are kept; an evaluation generates only where there is something.
    if request.metrics or options.get("compute_metrics") or generates(arguments, kind):
        options["compute_metrics"] = lambda prediction, compute_result=True: {}
    if is_sft(setup):
        del options["data_collator"]
        options["processing_class"] = tokenizer()
        if evaluated is not None:
            options["eval_dataset"] = as_dataset(evaluated)
        trainer = kind(model=model, args=arguments, train_dataset=as_dataset(rows), **options)
        after_making(setup, trainer)
        if request.device == "cuda":  # on a CPU, the host is the device
            trainer.data_collator = _with_values(trainer.data_collator)
    else:
        if request.device != "real cpu":
            answers_are_longest()
        trainer = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=evaluated, **options)
        if "data.task" in setup:  # as a recipe's run does it
            after_making(setup, trainer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _as_the_weights(collator: Any, model: Any) -> Any:
    """Images and sound in the type of 16-bit weights, as recipes give them: without autocast a convolution wants that.
    (`hf_memkit/components/image_batches.py`, `speech_batches.py`.)"""
    name, dtype = getattr(model, "main_input_name", None), getattr(model, "dtype", None)

    def collate(samples: Any) -> Any:
        batch = collator(samples)
        if name in batch and dtype is not None and dtype.itemsize == 2 and batch[name].is_floating_point():
            batch[name] = batch[name].to(dtype)
        return batch

    return collate


def _with_values(collator: Any) -> Any:
    """A part's collator, which looks at values: it gets real tensors, on the host."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    def collate(samples: Any) -> Any:
        with _disable_current_modes(), unset_fake_temporarily():
            return collator(samples)

    return collate
