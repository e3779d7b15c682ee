"""What happens when a script calls `train()`: a few optimizer steps are traced with the Trainer that it made, then
what its arguments ask for besides.

In: the user's Trainer, ready to train. Out: a trace, and what the training is, as plain data. The same steps are made
with real tensors on a CPU, to compare with.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import memory
from transformers import DefaultFlowCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint, has_length

from hf_memkit.compat import is_on
from hf_memkit.errors import Unmodelled
from hf_memkit.memory.holdings import carried_by
from hf_memkit.prediction.child.batch_shapes import shape_of, told_apart
from hf_memkit.prediction.child.batches import (
    chosen_batches,
    first_batches,
    is_much_larger,
    longest_row,
    without_padding,
)
from hf_memkit.prediction.child.below_train import calls_not_run, notes_on_calls
from hf_memkit.prediction.child.cuda_questions import memory_fraction
from hf_memkit.prediction.child.evaluations import Evaluations, is_asked_for, largest_batch, own_evaluation
from hf_memkit.prediction.child.fake_gpu import become
from hf_memkit.prediction.child.generation import generates
from hf_memkit.prediction.child.inputs import base_model
from hf_memkit.prediction.child.phase_hooks import TrainingWatch
from hf_memkit.prediction.child.plan_facts import (
    made_by_trainer,
    needs_padding,
    overrides_optimizer,
    plan_facts,
    refused_by_trl,
)
from hf_memkit.prediction.child.quantised import notes_on_8_bits
from hf_memkit.prediction.child.script_engine import about_engine, as_the_engine_has_it
from hf_memkit.prediction.child.traced_batches import Batches, Loader, is_traced, made_here, on_host
from hf_memkit.prediction.child.tracer import StorageTracer
from hf_memkit.prediction.child.trl_trainers import (
    about_vllm,
    answers_are_made_up,
    draws_whose_answers,
    reference_loaders,
)
from hf_memkit.prediction.child.users_code import line_that_asks

STEPS: Final = 2
"""Optimizer states exist from the end of the first step on: the second step has them all along."""

MICRO_BATCHES: Final = 2
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

_FLASH: Final = "flash_attention_2"

_UNASKED_S: Final = 20.0
"""For an evaluation that decides nothing."""

_CONTEXT_BYTES: Final = 2**30
"""More than a process holds beside its tensors."""

_LIBRARIES: Final = ("transformers.", "accelerate.", "trl.", "peft.", "hf_memkit.")

Found = dict[str, Any]


def traced_training(
    trainer: Any,
    train: Callable[[Any], Any],
    tracer: StorageTracer,
    fake: Callable[[], contextlib.AbstractContextManager[Any]],
    evaluations: Evaluations,
    *,
    worst: bool = True,
) -> Found:
    """Trains two steps with `trainer`, which is changed for that.

    Args:
        trainer: as the script made it.
        train: `Trainer.train` itself.
        tracer: records what is made; active within `fake`.
        fake: the context in which tensors are fake (or, to compare with, real).
        evaluations: of the script.
        worst: whether the worst and a usual batch are traced; False: the first that the script's own loader gives.

    Returns:
        `{"trace", "about"}`. `about["steps"]` has of each traced step `(kind, first event, one past the last)`;
        `about["work_steps"]`, where work is recorded, the same in calls; `about["unasked"]` the events of an
        evaluation for which neither arguments nor the script ask.

    Raises:
        Unmodelled: something of it cannot be traced.
    """
    arguments = trainer.args
    _refuse(trainer, tracer.device_type)
    about = _about(trainer)
    notes: list[str] = about["notes"]
    online = hasattr(trainer, "_buffered_inputs")  # TRL's trainers that learn from the model's own answers
    accumulation = about["accumulation"] if online else min(about["accumulation"], MICRO_BATCHES)
    notes += answers_are_made_up(trainer)
    drawn = draws_whose_answers(trainer)
    steps = _steps(trainer, accumulation, about, worst=worst, on_gpu=tracer.device_type == "cuda")
    needed = 1 + max(number for number, step in enumerate(steps) if step.kind == "worst")
    batches = [batch for step in steps for batch in step.batches]
    worst_batches = [batch for step in steps if step.kind == "worst" for batch in step.batches]
    about |= _sizes(worst_batches)
    about["tokens"] = {step.kind: _tokens(step.batches) for step in steps}
    notes += _too_long(trainer.model, worst_batches, about["sequence_length"])
    not_run = calls_not_run(trainer)
    notes += notes_on_calls(not_run, trainer.model)
    evaluated = evaluations.asked(trainer, not_run)
    reference = [largest_batch(loader, worst=worst) for loader in reference_loaders(trainer)]
    asked: dict[str, None] = {}
    tracer.made_up = lambda: asked.update({place: None for place in (line_that_asks(),) if place})
    with tempfile.TemporaryDirectory() as folder:
        as_it_was = _shorten(trainer, folder, accumulation, len(steps), saves_at=needed)
        watch = TrainingWatch(tracer)
        watch.watch_parts(trainer)
        notes += _callbacks(trainer, watch)
        with fake():
            tracer.adopt(_weights(tracer.device_type), "weights")
            if is_traced() and evaluated and generates(arguments, type(trainer)) and trainer.compute_metrics:
                notes.append("evaluations generate: every answer is counted at its maximum length")
            dtype = as_the_engine_has_it(trainer)
            if reference:
                _reference_passes(trainer, Loader(reference, arguments, dtype), tracer)
            events = tracer.trace.events
            calls = tracer.recorder.work.calls if tracer.recorder is not None else []
            bounds: list[tuple[int, int]] = []  # of the steps: events, calls

            def before(number: int) -> None:
                if number % accumulation == 0:
                    bounds.append((len(events), len(calls)))
                    if number == needed * accumulation and _surely_fits(tracer):
                        raise _Enough
                    if steps[number // accumulation].flash:
                        base_model(trainer.model).set_attn_implementation(_FLASH)
                    if drawn:
                        trainer.lmbda = float(steps[number // accumulation].own_answers)
                    if online:  # answers are generated in every step, also where they last for several
                        trainer._buffered_inputs = None

            trainer.get_train_dataloader = lambda: Loader(batches, trainer.args, dtype, before)
            attention = getattr(getattr(base_model(trainer.model), "config", None), "_attn_implementation", None)
            given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
            try:
                train(trainer)
                bounds.append((len(events), len(calls)))
            except Exception:  # enough; or a change that this model cannot be trained with, such as another batch size
                if len(bounds) <= needed:
                    raise
            if not given and about["deepspeed"] is None and overrides_optimizer(trainer):
                about["plan"]["own_optimizer"] = not made_by_trainer(trainer)
            if steps[-1].flash:
                base_model(trainer.model).set_attn_implementation(attention)
            about["steps_end"] = len(events)
            trainer.is_in_train = True  # then *_full_eval casts nothing
            for call in evaluated:
                evaluations.trace(call, dtype)
            tracer.ended(watch.phase)
            evaluation_notes = evaluations.take_notes()
            if not evaluated and tracer.recorder is None and has_length(trainer.eval_dataset):
                began = len(events)
                with (
                    contextlib.suppress(Exception),
                    tracer.limited(_UNASKED_S),
                ):  # one that fails decides nothing either
                    evaluations.trace(own_evaluation(trainer), dtype)
                    tracer.ended(watch.phase)
                    about["unasked"] = (began, len(events))
            watch.end()
            del trainer.get_train_dataloader
            if about["deepspeed"] is None:
                _read_back(trainer, as_it_was, tracer)
            trace = tracer.finish(tracer.trace.marks[-1][1])
        if tracer.host is not None:
            about["host"] = tracer.host.to_json()
            if "unasked" in about:
                about["host"]["tensors"].pop("evaluate", None)
        for name, value in as_it_was.items():
            object.__setattr__(arguments, name, value)
        trainer.is_in_train = False
    notes += [
        f"{place} asks for a tensor's value (.item(), a comparison): assumed to be 1; check your code there"
        for place in asked
    ]
    notes += [*notes_on_8_bits(trainer.model), *evaluation_notes]
    if watch.optimizer_steps < needed:
        raise Unmodelled(
            f"train() made {watch.optimizer_steps} optimizer steps instead of {needed}: a method that overrides "
            f"Trainer's ends it early. Omit that method, or measure with memkit run"
        )
    spans = list(zip(steps, itertools.pairwise(bounds), strict=False))
    about["steps"] = [(step.kind, begin[0], end[0]) for step, (begin, end) in spans]
    if tracer.recorder is not None:
        about["work_steps"] = [(step.kind, begin[1], end[1]) for step, (begin, end) in spans]
    return {"trace": trace.to_json(), "about": about}


class _Enough(Exception):
    """What is traced from here on is not needed."""


def _surely_fits(tracer: StorageTracer) -> bool:
    """Whether the tensors so far leave so much of the GPU that nobody asks what would need less."""
    if tracer.device_type != "cuda":
        return False
    left = int(torch.cuda.get_device_properties(0).total_memory) - _CONTEXT_BYTES
    return tracer.live_bytes()[1] < left / 2


def _refuse(trainer: Any, device_type: str) -> None:
    """
    Raises:
        Unmodelled: what cannot be traced, or is no training on the device.
    """
    arguments = trainer.args
    if arguments.device.type != device_type:
        asked = "unset ACCELERATE_USE_CPU" if is_on(os.environ.get("ACCELERATE_USE_CPU")) else "omit use_cpu"
        raise Unmodelled(f"this training runs on the {arguments.device.type.upper()}; {asked}")
    precision = getattr(arguments, "mixed_precision", "no")
    if precision != "no" and not getattr(arguments, precision, False):
        instead = f"{precision}=True" if hasattr(arguments, precision) else "bf16=True or fp16=True"
        raise Unmodelled(
            f"ACCELERATE_MIXED_PRECISION={precision}: sets a precision that the arguments leave out (accelerate "
            f"launch: mixed_precision). Give the script {instead}, too, or unset it"
        )
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) < 1:
            raise Unmodelled(f"{name}={getattr(arguments, name)}: no training; give 1 or more")
    if arguments.torch_compile:
        raise Unmodelled(
            "torch_compile: a compiled model keeps what its compiler decides, which no trace shows; omit it, or "
            "measure with memkit run"
        )
    if getattr(trainer, "is_fsdp_enabled", False):
        raise Unmodelled("fsdp: FSDP is not modelled; omit it, or use a DeepSpeed JSON (memkit ds list)")


def _without_padding(trainer: Any, longest: int | None) -> str:
    """What to type so that rows lie behind one another, without padding; empty where that would not train. `longest`:
    tokens of the longest row. TRL refuses `padding_free` beside `max_length`, and cuts no rows without it (trl 1.16.0:
    sft_trainer.py, `SFTTrainer.__init__`)."""
    if needs_padding(trainer):
        return ""
    arguments, flash = trainer.args, f'attn_implementation="{_FLASH}"'
    if not hasattr(arguments, "padding_free"):
        return f"data_collator=DataCollatorWithFlattening() and {flash}"
    if refused_by_trl(trainer):
        return ""
    cut_at = None if getattr(arguments, "packing", False) else getattr(arguments, "max_length", None)
    if cut_at is None:
        return f"padding_free=True and {flash}"
    if (longest or 0) < cut_at or getattr(trainer, "_skip_prepare_dataset", False):
        return f"padding_free=True, max_length=None and {flash}"
    return f"padding_free=True, max_length=None, rows cut to {cut_at:,} tokens where they are tokenised, and {flash}"


def _about(trainer: Any) -> Found:
    """What is trained, for the one who reads the prediction."""
    arguments, model = trainer.args, trainer.model
    base = base_model(model)
    counted = {id(each): each for each in model.parameters()}.values()
    notes = [*_left_out(arguments, base)]
    if getattr(arguments, "predict_with_generate", False):
        if not generates(arguments, type(trainer)):
            notes.append("predict_with_generate has no effect: only Seq2SeqTrainer generates")
        elif trainer.compute_metrics is None:
            notes.append("predict_with_generate has no effect: evaluations without compute_metrics compute the loss")
    return {
        "memory_fraction": memory_fraction(),
        "environment": {name: each for name, each in os.environ.items() if name.endswith("ALLOC_CONF")},
        "deepspeed": about_engine(trainer),
        "vllm": about_vllm(trainer),
        "trainer": type(trainer).__name__,
        "model": type(base).__name__,
        "model_name": str(getattr(getattr(base, "config", None), "_name_or_path", "") or ""),
        "parameters": sum(map(_numbers, counted)),
        "trainable_parameters": sum(_numbers(each) for each in counted if each.requires_grad),
        "micro_batch_size": int(arguments.per_device_train_batch_size),
        "batches_tried": _batches_tried(trainer),
        "accumulation": int(arguments.gradient_accumulation_steps),
        "optimizer": str(getattr(arguments.optim, "value", arguments.optim)),
        "plan": plan_facts(trainer),
        "notes": notes,
    }


def _batches_tried(trainer: Any) -> list[int]:
    """Those that `auto_find_batch_size` would try, one after the other, each after an out-of-memory error: accelerate
    itself says which."""
    if not trainer.args.auto_find_batch_size:
        return []
    found: list[int] = []

    def attempt(batch_size: int) -> None:
        found.append(batch_size)
        raise RuntimeError("CUDA out of memory.")

    clear, memory.clear_device_cache = memory.clear_device_cache, lambda **_: None  # it looks for garbage each time
    try:
        with contextlib.suppress(RuntimeError):
            memory.find_executable_batch_size(attempt, starting_batch_size=trainer._train_batch_size)()
    finally:
        memory.clear_device_cache = clear
    return found


def _left_out(arguments: Any, model: Any) -> Iterator[str]:
    """What the training asks for and the trace does not show, a sentence each."""
    if given := arguments.resume_from_checkpoint:
        missing = f"; {given} does not exist here" if isinstance(given, str) and not Path(given).exists() else ""
        yield f"resume_from_checkpoint: not read; a checkpoint of the traced training is used instead{missing}"
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention in ("flash_attention_2", "flash_attention_3") and not _is_installed("flash_attn"):
        yield f"{attention}: predicted as with the flash-attn package, which is not installed here"


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _numbers(parameter: torch.Tensor) -> int:
    """Elements of a parameter; bitsandbytes packs two of 4 bits in a byte."""
    packed = 2 * parameter.element_size() if hasattr(parameter, "quant_type") else 1
    return packed * parameter.numel()


def _reference_passes(trainer: Any, batches: Any, tracer: StorageTracer) -> None:
    """TRL computes log-probabilities of all rows before it trains (1.16: dpo_trainer.py, kto_trainer.py)."""
    tracer.ended("load")
    tracer.default, before = "activations", tracer.default
    for batch in batches:
        trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    tracer.default = before
    tracer.ended("log_probabilities")


def _sizes(batches: Batches) -> Found:
    ids = [each["input_ids"] for each in batches if isinstance(each, Mapping) and "input_ids" in each]
    shapes = [tuple(each.shape) for each in ids if isinstance(each, torch.Tensor)]
    largest = max((shape for shape in shapes if len(shape) > 1), key=math.prod, default=(None, None))
    return {"rows": largest[0], "sequence_length": largest[-1]}


def _tokens(batches: Batches) -> float | None:
    """Of a micro-batch, padding left out, on average; None: it is none of tokens."""
    found = []
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor) and isinstance(ids, torch.Tensor) and mask.shape == ids.shape:
            found.append(int(mask.sum()))
        elif isinstance(ids, torch.Tensor):
            found.append(ids.numel())
    return sum(found) / len(found) if found else None


def _too_long(model: Any, batches: Batches, length: int | None) -> Iterator[str]:
    """Shapes do not show that a row has more tokens than the model has positions."""
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    if length is None or text_config is None or any("position_ids" in each for each in batches):
        return
    longest = getattr(text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < length:
        yield (
            f"rows of {length:,} tokens are longer than the model's {longest:,} positions: a run may stop there; "
            "truncate them where they are tokenised (max_length)"
        )


# ---- batches ----


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step to trace.

    Attributes:
        kind: `"usual"`, `"worst"`, or what the user would change for it.
        batches: one a micro-batch.
        flash: whether the model computes it with flash attention, whatever it has.
        own_answers: where chance decides (`draws_whose_answers`), whether it trains on the model's own answers.
    """

    kind: str
    batches: Batches
    flash: bool = False
    own_answers: bool = True


def _steps(trainer: Any, accumulation: int, about: Found, *, worst: bool, on_gpu: bool) -> list[Step]:
    """What to trace: two steps of usual batches, then the worst, then what would need less; the worst alone where all
    batches are alike. `on_gpu`: whether there is flash attention. Writes down the batches in `about`."""
    loader = on_host(trainer.get_train_dataloader())
    if not worst:
        batches = first_batches(loader, STEPS * accumulation)
        return [Step("worst", batches[at : at + accumulation]) for at in range(0, len(batches), accumulation)]
    chosen = chosen_batches(loader)
    longest = longest_row(chosen.worst)
    about["batches"] = {"worst": shape_of(chosen.worst)}
    about["rows_digest"], about["mean"] = chosen.digest, chosen.mean
    about["plan"] |= {
        "rows_digest": chosen.digest, "padding": chosen.padding, "longest_row": longest,
    }  # fmt: skip
    about["notes"].append(f"traced: {chosen.said}")
    if chosen.unreadable is not None:
        row, why = chosen.unreadable
        about["notes"].append(f"row {row:,} of the training data cannot be read ({why}): a run stops there")

    def steps_of(kind: str, *batches: Any, flash: bool = False) -> list[Step]:
        filled = list(itertools.islice(itertools.cycle(batches), max(len(batches), accumulation)))
        parts = [filled[at : at + accumulation] for at in range(0, len(filled), accumulation)]
        return [Step(kind, [*part, *part][:accumulation], flash) for part in parts]

    found = steps_of("worst", chosen.worst, *chosen.others)
    of_data = [replace(step, own_answers=False) for step in found] if draws_whose_answers(trainer) else []
    if chosen.usual is None or not is_much_larger(chosen.worst, chosen.usual):
        return [*found, *of_data, *found * (STEPS - 1)]
    shapes = told_apart([chosen.worst, chosen.usual, chosen.high])
    about["batches"] |= {
        **dict(zip(("worst", "usual", "high"), shapes, strict=True)),
        "grouping": chosen.shuffled and about["batches"]["worst"].endswith(" tokens"),
    }
    steps = [*steps_of("usual", chosen.usual) * STEPS, *of_data, *found]
    if chosen.half is not None and chosen.rows == about["micro_batch_size"]:  # else the argument does not decide it
        half = about["micro_batch_size"] // 2
        label = f"per_device_train_batch_size={half} and gradient_accumulation_steps={2 * about['accumulation']}"
        steps += steps_of(label, chosen.half)
    if chosen.cut is not None:
        steps += steps_of(f"rows of at most {chosen.cut[1]:,} tokens", chosen.cut[0])
    change = _without_padding(trainer, longest) if on_gpu else ""
    if change and (behind := without_padding(chosen.worst)) is not None:
        steps += steps_of(change, behind, flash=True)
    return steps


# ---- the user's Trainer, shortened ----


def _shorten(trainer: Any, folder: str, accumulation: int, steps: int, *, saves_at: int) -> Found:
    """A few steps, no logs, no dashboards, no pushes, nothing written but to a folder that goes away. The arguments as
    they were."""
    arguments = trainer.args
    plain = {
        **SHORT_AND_QUIET,
        "output_dir": folder,
        "max_steps": steps,
        "save_steps": saves_at,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps" if is_asked_for(arguments.save_strategy) else "no",
        "logging_first_step": False,
        "restore_callback_states_from_checkpoint": False,
    }
    before = {name: getattr(arguments, name) for name in plain if hasattr(arguments, name)}
    for name in before:
        object.__setattr__(arguments, name, plain[name])
    return before


def _callbacks(trainer: Any, *own: TrainerCallback) -> list[str]:
    """Leaves Trainer's own flow and memkit's callbacks; says which of the user's could have changed the figures."""
    notes = []
    for each in trainer.callback_handler.callbacks:
        kind = type(each)
        if kind.__module__.startswith(_LIBRARIES):
            continue
        events = [name for name in dir(TrainerCallback) if name.startswith("on_")]
        overridden = [name for name in events if getattr(kind, name, None) is not getattr(TrainerCallback, name)]
        if overridden:
            notes.append(f"callback {kind.__name__} is not called ({', '.join(overridden)})")
    trainer.callback_handler.callbacks = [DefaultFlowCallback(), *own]
    return notes


def _weights(device_type: str) -> list[torch.Tensor]:
    """Parameters with their scales, and buffers, of all modules that there are, teachers and reference models too.
    What is real, on the host, becomes part of the traced training: buffers, and where that is on the host parameters
    too."""
    found: list[torch.Tensor] = []
    for module in [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]:
        for name, buffer in module._buffers.items():
            if buffer is not None and type(buffer) is torch.Tensor and is_traced():
                module._buffers[name] = made_here(buffer)
        for parameter in module._parameters.values():
            if type(parameter) is torch.nn.Parameter and is_traced() and device_type == "cpu":
                become(parameter, torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype))
        parameters = [each for each in module._parameters.values() if each is not None]
        scales = [each for parameter in parameters for each in carried_by(parameter)]
        found += [*parameters, *scales, *(each for each in module._buffers.values() if each is not None)]
    return found


def _read_back(trainer: Any, asked: Found, tracer: StorageTracer) -> None:
    """A checkpoint is read as a training does that is resumed, or keeps its best model: by transformers itself, from
    what the traced training has saved (transformers 5.23.0: trainer.py, `_inner_training_loop`)."""
    if not asked["resume_from_checkpoint"] and not asked["load_best_model_at_end"]:
        return
    folder = trainer.args.output_dir
    if get_last_checkpoint(folder) is None:
        trainer._save_checkpoint(trainer.model, trial=None)
        tracer.ended("save")
    checkpoint = get_last_checkpoint(folder)
    if asked["resume_from_checkpoint"]:
        trainer.accelerator.free_memory()
        trainer.optimizer = trainer.lr_scheduler = trainer.callback_handler.optimizer = None
        trainer.callback_handler.lr_scheduler = None
        tracer.ended(tracer.trace.marks[-1][1])
        trainer._load_from_checkpoint(checkpoint)
        trainer.create_optimizer_and_scheduler(num_training_steps=trainer.args.max_steps)
        trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
        trainer._load_optimizer_and_scheduler(checkpoint)
        tracer.ended("resume")
    if asked["load_best_model_at_end"]:
        trainer.state.best_model_checkpoint = checkpoint
        trainer._load_best_model()
        tracer.ended("best_model")
