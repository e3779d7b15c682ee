"""Traces a few optimizer steps with the script's Trainer when it calls `train()`, then evaluations and saves.

Tests run the same steps with real tensors on a CPU for comparison.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DefaultFlowCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint, has_length

from hf_memkit.catalog.library_versions import CALLBACKS_OF_LIBRARIES, is_on
from hf_memkit.common.errors import Unmodelled
from hf_memkit.measuring.memory.holdings import attached_tensors
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.gpu import fsdp
from hf_memkit.prediction.child.gpu.compiler import compilation
from hf_memkit.prediction.child.gpu.compiler_patches import compiled_modules
from hf_memkit.prediction.child.gpu.fake_gpu import swap_tensor
from hf_memkit.prediction.child.libraries.deepspeed_engine import apply_engine_dtype
from hf_memkit.prediction.child.libraries.pretrained import is_loaded_by_first_rank
from hf_memkit.prediction.child.libraries.quantised import notes_on_8_bits
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.trainer_kinds.generation import generates, generation_notes
from hf_memkit.prediction.child.trainer_kinds.online import (
    before_step,
    learns_from_answers,
    mixes_answers,
    patch_rewards,
)
from hf_memkit.prediction.child.trainer_kinds.preference import reference_loaders, trace_reference
from hf_memkit.prediction.child.training.below_train import calls_not_run, notes_on_calls
from hf_memkit.prediction.child.training.describe_training import describe_training
from hf_memkit.prediction.child.training.evaluations import Evaluations, is_enabled, largest_batch, trainers_evaluation
from hf_memkit.prediction.child.training.phase_hooks import TrainingWatch
from hf_memkit.prediction.child.training.plan_facts import made_by_trainer, plan_facts
from hf_memkit.prediction.child.training.traced_batches import Batches, Loader, is_traced, traced_tensor
from hf_memkit.prediction.child.training.traced_steps import FLASH, STEPS, ChosenSteps, chosen_steps
from hf_memkit.prediction.child.user_code import calling_line
from hf_memkit.prediction.traced_training import COMPILED, TracedStep, TracedTraining
from hf_memkit.setup.script_overrides import overrides_optimizer

MICRO_BATCHES: Final = 2
"""From the second micro-batch on there are gradients during forward; later ones are like the second."""

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
"""Fields of TrainingArguments for every traced training: short, and without lasting files."""

_OPTIONAL_S: Final = 20.0  # time limit for an evaluation that does not affect the verdict

_CONTEXT_BYTES: Final = 2**30  # upper bound of a process's memory outside its tensors


def traced_training(
    trainer: Any,
    train: Callable[[Any], Any],
    tracer: StorageTracer,
    fake: contextlib.AbstractContextManager[Any],
    evaluations: Evaluations,
    *,
    worst: bool = True,
    for_plan: bool = False,
) -> TracedTraining:
    """Trains two steps with `trainer`, and changes it for that. Raises Unmodelled if the training cannot be traced.

    Args:
        train: the original `Trainer.train`.
        tracer: active within `fake`.
        fake: context in which tensors are fake (or real, for comparison).
        worst: trace the worst and a typical batch; False: the first batches of the script's loader.
        for_plan: collect facts for a plan, too.
    """
    _refuse(trainer, tracer.device_type)
    _enter_launchers_precision(trainer.args)
    if for_plan:
        fsdp.refuse_in_plans(trainer)
    if tracer.recorder is not None:
        tracer.recorder.with_streams = fsdp.is_sharded(trainer)
    plan = plan_facts(trainer) if for_plan else None
    training = describe_training(trainer)
    notes = [*_omissions(trainer), *generation_notes(trainer), *patch_rewards(trainer)]

    accumulation = int(trainer.args.gradient_accumulation_steps)
    if not learns_from_answers(trainer):
        accumulation = min(accumulation, MICRO_BATCHES)
    chosen = chosen_steps(trainer, accumulation, worst=worst, on_gpu=tracer.device_type == "cuda")
    rows, length = chosen.size()
    if plan is not None:
        plan = chosen.added_to(plan)
    notes += [*chosen.notes(), *_too_long(trainer.model, chosen.worst, length)]

    not_run = calls_not_run(trainer)
    notes += notes_on_calls(not_run, trainer.model)
    requested = evaluations.requested(trainer, not_run)
    reference = [largest_batch(loader, worst=worst) for loader in reference_loaders(trainer)]
    made_up_at: dict[str, None] = {}  # lines of the user's code that read made-up values, in order

    def note_line() -> None:
        if line := calling_line():
            made_up_at[line] = None

    tracer.made_up = note_line
    steps = _TracedSteps(trainer, chosen, accumulation, tracer)
    with tempfile.TemporaryDirectory() as folder:
        original = _shorten(trainer, folder, accumulation, len(chosen.steps), saves_at=chosen.required)
        watch = TrainingWatch(tracer, lambda: trainer.model_wrapped)
        watch.watch_parts(trainer)
        notes += _remove_callbacks(trainer, watch)
        with fake:
            tracer.adopt(_weights(on_host=tracer.device_type == "cpu" or fsdp.uses_fsdp(trainer)))
            if is_traced() and requested and generates(trainer.args, type(trainer)) and trainer.compute_metrics:
                notes.append("evaluations generate: every answer is counted at its maximum length")
            dtype = apply_engine_dtype(trainer)
            if reference:
                trace_reference(trainer, Loader(reference, trainer.args, dtype), tracer)

            has_optimizer = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
            steps.run(train, dtype)
            if plan is not None and not has_optimizer and training.engine is None and overrides_optimizer(trainer):
                plan = replace(plan, own_optimizer=not made_by_trainer(trainer))

            steps_end = len(tracer.trace.events)
            trainer.is_in_train = True  # so that *_full_eval casts nothing
            for call in requested:
                evaluations.trace(call, dtype)
            tracer.end_phase(watch.phase)
            evaluation_notes = list(evaluations.notes)
            compiled = compilation()
            optional = None
            if not requested and tracer.recorder is None and has_length(trainer.eval_dataset):
                optional = _trace_optional_evaluation(trainer, evaluations, dtype, tracer, watch)
            watch.end()
            del trainer.get_train_dataloader
            if training.engine is None and training.sharded == fsdp.uses_fsdp(trainer):
                _trace_loading(trainer, original, tracer)
            trace = tracer.finish(tracer.trace.marks[-1][1])
        for name, value in original.items():
            object.__setattr__(trainer.args, name, value)
        trainer.is_in_train = False

    notes += [
        f"{line} asks for a tensor's value (.item(), a comparison): assumed to be 1; check your code there"
        for line in made_up_at
    ]
    if compiled_modules or compilation() is not None:
        notes.append(f"{COMPILED} {torch.__version__}: another version may need more or less memory")
    notes += [*notes_on_8_bits(trainer.model), *evaluation_notes]
    if watch.optimizer_steps < chosen.required:
        raise Unmodelled(
            f"train() made {watch.optimizer_steps} optimizer steps instead of {chosen.required}: a method that "
            f"overrides Trainer's ends it early. Omit that method, or measure with memkit run"
        )
    host = tracer.host.used() if tracer.host is not None else None
    if host is not None and optional is not None:
        host.tensor_bytes.pop("evaluate", None)
    if host is not None:
        loaded = is_loaded_by_first_rank(base_model(trainer.model))
        host = replace(host, of_other_ranks=fsdp.ram_of_other_ranks(trainer, loaded=loaded))
    return replace(
        training,
        trace=trace,
        steps=steps.traced(),
        steps_end=steps_end,
        optional=optional,
        compilation=compiled,
        rows=rows,
        sequence_length=length,
        batches=chosen.shapes,
        host=host,
        notes=tuple(notes),
        plan=plan,
    )


class _TracedSteps:
    """Trains the chosen steps, and records which events and calls belong to each."""

    def __init__(self, trainer: Any, chosen: ChosenSteps, accumulation: int, tracer: StorageTracer) -> None:
        self._trainer = trainer
        self._chosen = chosen
        self._accumulation = accumulation
        self._tracer = tracer
        self._random_answers = mixes_answers(trainer)
        self._bounds: list[tuple[int, int]] = []  # (event, call) at which each step begins, and the last one ends

    def run(self, train: Callable[[Any], Any], dtype: torch.dtype | None) -> None:
        """Calls `train` with a loader of the chosen batches. `dtype`: of the batches, if an engine casts them."""
        trainer, steps = self._trainer, self._chosen.steps
        batches = [batch for step in steps for batch in step.batches]
        trainer.get_train_dataloader = lambda: Loader(batches, trainer.args, dtype, self._before_batch)
        attention = getattr(getattr(base_model(trainer.model), "config", None), "_attn_implementation", None)
        try:
            train(trainer)
            self._add_bound()
        except Exception:  # _EnoughTraced, or a change that this model cannot be trained with
            if len(self._bounds) <= self._chosen.required:
                raise
        if steps[-1].flash:
            base_model(trainer.model).set_attn_implementation(attention)

    def traced(self) -> tuple[TracedStep, ...]:
        """The steps that were traced to their end."""
        spans = zip(self._chosen.steps, itertools.pairwise(self._bounds), strict=False)
        return tuple(TracedStep(step.kind, *zip(begin, end, strict=True)) for step, (begin, end) in spans)

    def _before_batch(self, number: int) -> None:
        if number % self._accumulation:
            return
        self._add_bound()
        index = number // self._accumulation
        step = self._chosen.steps[index]
        if index == self._chosen.required and self._leaves_room():
            raise _EnoughTraced
        if step.flash:
            base_model(self._trainer.model).set_attn_implementation(FLASH)
        before_step(self._trainer, own_answers=step.own_answers if self._random_answers else None)

    def _add_bound(self) -> None:
        recorder = self._tracer.recorder
        calls = len(recorder.work.calls) if recorder is not None else 0
        self._bounds.append((len(self._tracer.trace.events), calls))

    def _leaves_room(self) -> bool:
        """Whether half of the GPU is free at the peak, so that smaller batches are irrelevant."""
        if self._tracer.device_type != "cuda":
            return False
        available = int(torch.cuda.get_device_properties(0).total_memory) - _CONTEXT_BYTES
        return self._tracer.live_bytes()[1] < available / 2


def _trace_optional_evaluation(
    trainer: Any, evaluations: Evaluations, dtype: torch.dtype | None, tracer: StorageTracer, watch: TrainingWatch
) -> tuple[int, int] | None:
    """Traces an evaluation that nobody requests; returns its events, or None if it fails or takes too long."""
    first = len(tracer.trace.events)
    with contextlib.suppress(Exception), tracer.limited(_OPTIONAL_S):
        evaluations.trace(trainers_evaluation(trainer), dtype)
        tracer.end_phase(watch.phase)
        return first, len(tracer.trace.events)
    return None


class _EnoughTraced(Exception):
    """Ends a traced training whose remaining steps are not needed."""


def _refuse(trainer: Any, device_type: str) -> None:
    """Raises Unmodelled if the training cannot be traced, or does not run on the device."""
    arguments = trainer.args
    if arguments.device.type != device_type:
        fix = "unset ACCELERATE_USE_CPU" if is_on(os.environ.get("ACCELERATE_USE_CPU")) else "omit use_cpu"
        raise Unmodelled(f"this training runs on the {arguments.device.type.upper()}; {fix}")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) < 1:
            raise Unmodelled(f"{name}={getattr(arguments, name)}: no training; give 1 or more")
    fsdp.refuse_parallelism(trainer)
    if fsdp.uses_fsdp(trainer):
        fsdp.refuse_fsdp(trainer)


def _enter_launchers_precision(arguments: Any) -> None:
    """Enters the precision of `accelerate launch` in arguments that name none, because Trainer computes with it then
    (transformers 5.23.0: training_args.py, `mixed_precision`). Raises Unmodelled where that is not known."""
    precision = getattr(arguments, "mixed_precision", "no")
    if precision == "no" or getattr(arguments, precision, False):
        return
    if arguments.deepspeed or precision not in ("bf16", "fp16"):
        raise Unmodelled(f"ACCELERATE_MIXED_PRECISION={precision}: unset it, and set bf16 or fp16 in the arguments")
    object.__setattr__(arguments, precision, True)


def _omissions(trainer: Any) -> Iterator[str]:
    """Sentences about parts of the training that the trace omits or changes."""
    arguments, model = trainer.args, base_model(trainer.model)
    loads = arguments.resume_from_checkpoint or arguments.load_best_model_at_end
    if loads and fsdp.is_sharded(trainer) and not fsdp.uses_fsdp(trainer):
        yield "a model that was sharded when loaded: resume_from_checkpoint and load_best_model_at_end are not traced"
    elif given := arguments.resume_from_checkpoint:
        missing = f"; {given} does not exist here" if isinstance(given, str) and not Path(given).exists() else ""
        yield f"resume_from_checkpoint: not read; a checkpoint of the traced training is used instead{missing}"
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention in ("flash_attention_2", "flash_attention_3"):
        try:
            version("flash_attn")
        except PackageNotFoundError:
            yield f"{attention}: predicted as with the flash-attn package, which is not installed here"


def _too_long(model: Any, batches: Batches, length: int | None) -> Iterator[str]:
    """A note if rows have more tokens than the model has positions, which shapes do not show."""
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    if length is None or text_config is None or any("position_ids" in batch for batch in batches):
        return
    longest = getattr(text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < length:
        yield (
            f"rows of {length:,} tokens are longer than the model's {longest:,} positions: a run may stop there; "
            "truncate them where they are tokenised (max_length)"
        )


def _shorten(trainer: Any, folder: str, accumulation: int, steps: int, *, saves_at: int) -> dict[str, Any]:
    """Sets the arguments for a few steps that write only to a temporary folder; returns the original arguments."""
    arguments = trainer.args
    plain = {
        **SHORT_AND_QUIET,
        "output_dir": folder,
        "max_steps": steps,
        "save_steps": saves_at,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps" if is_enabled(arguments.save_strategy) else "no",
        "logging_first_step": False,
        "restore_callback_states_from_checkpoint": False,
    }
    before = {name: getattr(arguments, name) for name in plain if hasattr(arguments, name)}
    for name in before:
        object.__setattr__(arguments, name, plain[name])
    return before


def _remove_callbacks(trainer: Any, *added: TrainerCallback) -> list[str]:
    """Keeps only Trainer's flow callback and adds memkit's; returns notes on the user's that could change memory."""
    notes = []
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.__module__.startswith(CALLBACKS_OF_LIBRARIES):
            continue
        events = [name for name in dir(TrainerCallback) if name.startswith("on_")]
        overridden = [name for name in events if getattr(kind, name, None) is not getattr(TrainerCallback, name)]
        if overridden:
            notes.append(f"callback {kind.__name__} is not called ({', '.join(overridden)})")
    trainer.callback_handler.callbacks = [DefaultFlowCallback(), *added]
    return notes


def _weights(*, on_host: bool) -> list[torch.Tensor]:
    """All parameters with their scales, and buffers, of all modules. Real ones on the host become tensors of the
    traced training: buffers, and parameters if they are `on_host` where it begins."""
    tensors: list[torch.Tensor] = []
    for module in [obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.Module)]:
        for name, buffer in module._buffers.items():
            if buffer is not None and type(buffer) is torch.Tensor and is_traced():
                module._buffers[name] = traced_tensor(buffer)
        for parameter in module._parameters.values():
            if type(parameter) is torch.nn.Parameter and is_traced() and on_host:
                swap_tensor(parameter, torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype))
        parameters = [weight for weight in module._parameters.values() if weight is not None]
        scales = [scale for parameter in parameters for scale in attached_tensors(parameter)]
        tensors += [*parameters, *scales, *(buffer for buffer in module._buffers.values() if buffer is not None)]
    return tensors


def _trace_loading(trainer: Any, arguments: dict[str, Any], tracer: StorageTracer) -> None:
    """Traces loading a checkpoint, when a training is resumed or keeps its best model, by transformers' own code, from
    the checkpoint of the traced training (transformers 5.23.0: trainer.py, `_inner_training_loop`)."""
    if not arguments["resume_from_checkpoint"] and not arguments["load_best_model_at_end"]:
        return
    for name in ("_load_from_checkpoint", "_load_best_model"):  # components/resuming.py reads names in real files
        vars(trainer).pop(name, None)
    folder = trainer.args.output_dir
    if get_last_checkpoint(folder) is None:
        trainer._save_checkpoint(trainer.model, trial=None)
        tracer.end_phase("save")
    checkpoint = get_last_checkpoint(folder)
    fsdp.reshard(trainer.model)
    if arguments["resume_from_checkpoint"]:
        _trace_resuming(trainer, checkpoint, tracer)
    if arguments["load_best_model_at_end"]:
        trainer.state.best_model_checkpoint = checkpoint
        trainer._load_best_model()
        tracer.end_phase("best_model")


def _trace_resuming(trainer: Any, checkpoint: Any, tracer: StorageTracer) -> None:
    if fsdp.uses_fsdp(trainer):  # loads into the model and the optimizer that are sharded already
        trainer.optimizer.state.clear()
        tracer.end_phase(tracer.trace.marks[-1][1])
        trainer._load_from_checkpoint(checkpoint, trainer.model_wrapped)
    else:
        trainer.accelerator.free_memory()
        trainer.optimizer = trainer.lr_scheduler = trainer.callback_handler.optimizer = None
        trainer.callback_handler.lr_scheduler = None
        tracer.end_phase(tracer.trace.marks[-1][1])
        trainer._load_from_checkpoint(checkpoint)
        trainer.create_optimizer_and_scheduler(num_training_steps=trainer.args.max_steps)
        trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    trainer._load_optimizer_and_scheduler(checkpoint)
    tracer.end_phase("resume")
