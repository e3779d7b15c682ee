"""Recipe + machine + request → one setup, every choice with its reason.

`resolve` chooses the variant and makes the setup for the card in question. It loads no weights and changes nothing on
disk. Where there is no GPU, `hf_memkit.recipe.rehearse` makes the setup that runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DoesNotFitError, InputError, SettingError, did_you_mean
from hf_memkit.hardware import Machine, gpu_of_size
from hf_memkit.job import Job
from hf_memkit.models import ModelFacts, describe, longest_sequence, refuse_absent
from hf_memkit.presets import apply_preset
from hf_memkit.presets.compose import leave_out_impossible
from hf_memkit.presets.sharing import share_among_processes
from hf_memkit.presets.sizes import largest
from hf_memkit.recipe.output import default_output
from hf_memkit.recipe.schema import NO_CHECKPOINTING, Recipe, Variant
from hf_memkit.recipe.settings import CHECKPOINTS, model_and_data, refuse_ignored, refuse_out_of_place, saving
from hf_memkit.recipe.summing import summing_note
from hf_memkit.recipe.tasks import DEFAULT_TASK, find_task
from hf_memkit.request import Request, refuse_too_long
from hf_memkit.setup import Setup
from hf_memkit.technique import Family
from hf_memkit.techniques.batch import split_batch
from hf_memkit.units import format_size

__all__ = ["MULTIPLE", "longest_by_formula", "refuse_wrong", "resolve"]


MULTIPLE: Final = 1024
"""Tokens: a length that is solved for is a multiple of this. Finer steps would change nothing that matters, and tensor
cores like multiples of 64 elements (`presets/sizes.py`)."""

_OVERFLOW_IN_FP16: Final = ("t5", "mt5", "umt5", "longt5")
"""Model types that were trained in bf16 with activations above 65 504."""


def refuse_wrong(recipe: Recipe, request: Request) -> None:
    """Refuses what is wrong whatever the model and the machine: told at once, before either is looked at.

    Raises:
        InputError: the recipe has no such variant, there is no such model, or a sequence is longer than it allows.
        SettingError: settings that no recipe takes, or that contradict each other.
    """
    if request.variant not in (known := (*recipe.variants, "auto")):
        raise InputError(
            f"recipe {recipe.name!r} has no variant {request.variant!r}"
            f"{did_you_mean(request.variant, known)}; it has: {', '.join(known)}"
        )
    chosen = request.arguments
    if request.max_steps is not None and chosen.get("max_steps", request.max_steps) != request.max_steps:
        raise SettingError(f"--max-steps {request.max_steps} and --set max_steps={chosen['max_steps']} contradict")
    refuse_out_of_place(chosen)
    name, own = request.model or recipe.model.hub_id, request.model in (None, recipe.model.hub_id)
    longest = longest_sequence(recipe.model.architecture) if own else refuse_absent(name, known=False)
    if find_task(recipe.task).auto_class == "AutoModelForCausalLM":  # others read the length in their own way
        refuse_too_long(name, request.sequence_length, longest, "--sequence-length ")


def resolve(
    recipe: Recipe,
    machine: Machine,
    request: Request,
    *,
    use_hub: bool,
    checkpointing: str | None = None,
    tried: bool = False,
) -> Setup:
    """The recipe's setup for `machine`, or for the recipe's own card if the machine has none.

    An explicit variant is always resolved: what the machine lacks for it is in the setup's `problems`. With `auto` the
    first variant without problems is taken.

    Args:
        recipe, machine: what is resolved, and where it will run.
        request: what was asked for beyond the recipe.
        use_hub: whether the hub may be asked for the model's config.
        checkpointing: one of the variant's kinds of checkpointing; None: the first with which it fits by formula.
        tried: whether the variant is one of those that `auto` tries: what is meant for another one is no mistake.

    Raises:
        InputError: unknown variant or model, or a sequence that is longer than the model allows.
        SettingError: request that contradict each other, the batch or the variant.
        DoesNotFitError: `auto`, and no variant fits.
    """
    refuse_wrong(recipe, request)
    if machine.gpu is None:
        machine = machine.with_gpu(gpu_of_size(recipe.card))
    name = request.model or recipe.model.hub_id
    architecture = recipe.model.architecture if request.model in (None, recipe.model.hub_id) else None
    task = find_task(recipe.task)
    model = describe(name, architecture, use_hub=use_hub, auto_class=task.auto_class)
    length = task.sequence_length(request.sequence_length, recipe.sequence_length, model)
    refuse_too_long(name, length, model.maximum_length, "--sequence-length ")

    def build(variant: str) -> Setup:
        of_length = partial(_build, recipe, machine, request, model, variant, checkpointing=checkpointing, tried=tried)
        tokens, why = _length(recipe, machine, request, model, variant, length, of_length)
        return leave_out_impossible(
            variant, recipe.variants[variant].techniques, lambda left_out: of_length(tokens, why, left_out)
        )

    if request.variant != "auto":
        return replace(build(request.variant), why="asked for by name")
    rejected: list[tuple[str, str]] = []
    for variant in recipe.variants:
        setup = build(variant)
        if not setup.problems:
            return replace(setup, why=_why(setup, machine, bool(rejected)), rejected=tuple(rejected))
        rejected.append((variant, "; ".join(setup.problems)))
    reasons = "; ".join(f"{variant} {why}" for variant, why in rejected)
    raise DoesNotFitError(f"no variant of {recipe.name} fits this machine: {reasons}")


def _why(setup: Setup, machine: Machine, others_rejected: bool) -> str:
    gpu = machine.gpu
    assert gpu is not None
    parts = [
        f"{format_size(setup.ledger.total_bytes('device'))} of {format_size(gpu.usable_bytes)} on {gpu.name}",
        f"{format_size(setup.ledger.total_bytes('host', 'pinned'))} of {format_size(machine.ram_bytes)} of RAM",
    ]
    disk = setup.ledger.total_bytes("disk")
    if disk:
        parts.append(f"{format_size(disk)} of {format_size(machine.disk_free_bytes)} of disk")
    order = "the first variant within the card and RAM" if others_rejected else "the recipe's first choice"
    # For a model whose activations are in no formula (the same test as in `settings`) the sum is a lower bound.
    without = ", without activations, which are in none" if "model.class" in setup else ""
    sums = f"estimated by formula{without}"
    return f"{order} ({sums}: {', '.join(parts)})"


def _length(
    recipe: Recipe,
    machine: Machine,
    request: Request,
    model: ModelFacts,
    name: str,
    shortest: int,
    build: Callable[[int, str, Mapping[str, str]], Setup],
) -> tuple[int, str]:
    """(tokens in a sequence, why): given, or the longest that fits by formula where the variant asks for that."""
    if request.sequence_length:
        return shortest, "asked for"
    longest = model.maximum_length
    if recipe.variants[name].solve_for != "sequence" or longest is None:
        return shortest, "the recipe's"
    assert machine.gpu is not None

    def needed(tokens: int) -> int:
        return build(tokens, "tried", {}).ledger.total_bytes("device")

    length, fits = longest_by_formula(
        needed, shortest=shortest, longest=longest, usable_bytes=machine.gpu.usable_bytes
    )  # fmt: skip
    if not fits:
        return length, "the shortest that the recipe takes, and it does not fit by formula"
    most = "all that the model allows" if length == longest else "the longest that fits by formula"
    return length, f"{most}: a multiple of {MULTIPLE}"


def longest_by_formula(
    needed: Callable[[int], int], *, shortest: int, longest: int, usable_bytes: int
) -> tuple[int, bool]:
    """(the longest multiple of 1024 from `shortest` to `longest` that fits, or `shortest`; whether it fits).

    Args:
        needed: tokens → bytes on the card; more tokens never need less.
        shortest, longest: tokens.
        usable_bytes: what the card has.
    """
    multiples = range(-(-shortest // MULTIPLE) * MULTIPLE, longest + 1, MULTIPLE)
    return largest((shortest, *(tokens for tokens in multiples if tokens > shortest)),
                   lambda tokens: needed(tokens) <= usable_bytes)  # fmt: skip


def _build(
    recipe: Recipe, machine: Machine, request: Request, model: ModelFacts, name: str, sequence_length: int,
    why_length: str, left_out: Mapping[str, str], *, checkpointing: str | None, tried: bool,
) -> Setup:  # fmt: skip
    """The setup of one variant: preset, then model and data, then arguments, then what the user set."""
    variant = recipe.variants[name]
    chosen = request.arguments
    gpus = request.gpus or 1
    processes = gpus * request.nodes
    micro_batch, accumulation, batch_reason = split_batch(
        recipe.sequences_per_step, variant.micro_batch_size, processes, chosen
    )
    output = request.output or default_output(recipe.name, name)
    # A folder of the run's own: DeepSpeed's swap files have the same names in every job.
    nvme_path = str(Path(request.nvme_path) / Path(output).name if request.nvme_path else Path(output) / "nvme")
    job = Job(
        model, machine, micro_batch, sequence_length, nvme_path, variant.values, gpus, request.nodes, accumulation,
    )  # fmt: skip

    task = find_task(recipe.task)

    def with_own_optimizer(made: Setup) -> Setup:
        """The ledger counts the states of the optimizer that the user set, and the loss of the task's Trainer."""
        if recipe.task != DEFAULT_TASK:
            made = made.put("trainer.class", task.trainer_class, f"the Trainer for {task.name}")
        return made.put("arguments.optim", chosen["optim"], "--set") if "optim" in chosen else made

    made = _apply_variant(name, variant, job, left_out, with_own_optimizer, checkpointing=checkpointing)
    setup = share_among_processes(replace(made, request=request), job)
    refuse_ignored(setup, chosen)
    named = request.variant != "auto" and not tried
    if request.nvme_path and named and not setup.ledger.total_bytes("disk"):
        raise SettingError(f"--nvme-path: variant {name!r} puts nothing on disk; only infinity does")
    setup = model_and_data(setup, recipe, request, model, sequence_length, why_length)
    steps = request.max_steps or chosen.get("max_steps") or recipe.steps
    steps_reason = "asked for" if steps != recipe.steps else "the recipe's"
    save_steps, limit, save_reason = saving(setup, machine, model, int(steps))
    setup = setup.put_all(
        "arguments",
        {
            "output_dir": (output, "where checkpoints, records and the trained model go"),
            "per_device_train_batch_size": (micro_batch, batch_reason),
            "gradient_accumulation_steps": (accumulation, batch_reason),
            "per_device_eval_batch_size": (micro_batch, "evaluation then needs no more memory than training"),
            "prediction_loss_only": (True, "keeping the logits of an evaluation fills the card"),
            "max_steps": (steps, steps_reason),
            "lr_scheduler_type": ("cosine", "decays to zero over the run"),
            "eval_strategy": ("steps", "an evaluation at the end"),
            "eval_steps": (steps, "at the last step"),
            "eval_on_start": (True, "and one before, to see what training changed"),
            "logging_steps": (10, "each log reads the loss from the card, and waits for it"),
            "save_strategy": ("steps" if save_steps else "no", save_reason),
            "seed": (42, "same seed, same run"),
            "report_to": ("none", "records go to memkit's own file; --set report_to=tensorboard adds a dashboard"),
        },
    )
    setup = setup.put_all("arguments", task.arguments(recipe.data))
    usual: dict[str, tuple[Any, str]] = {
        "learning_rate": (variant.learning_rate, f"the recipe's for {name}"),
        "warmup_steps": (max(1, round(0.05 * int(steps))), "5 % of the steps, while the moments settle"),
        "weight_decay": (0.01, "AdamW's usual decay, not on biases and norms"),
        "max_grad_norm": (1.0, "Trainer's default: one bad batch cannot throw the weights far"),
    }
    # An optimizer that scales its learning rate by the batch, or that nothing can clip, has said so already.
    said = {key for key in usual if f"arguments.{key}" in setup}
    setup = setup.put_all("arguments", {key: value for key, value in usual.items() if key not in said})
    if save_steps:
        setup = setup.put("arguments.save_steps", save_steps, f"about {CHECKPOINTS} checkpoints in the run")
        setup = setup.put("arguments.save_total_limit", limit, "older checkpoints are deleted")
    setup = task.settled(setup)
    for key, value in chosen.items():
        setup = setup.put(f"arguments.{key}", value, "--set")
    if setup.get("arguments.fp16") and model.config.get("model_type") in _OVERFLOW_IN_FP16:
        setup = setup.with_problems(["would compute in fp16, where T5's activations overflow: it needs bf16"])
    note = summing_note(setup)
    return setup if note is None else setup.with_notes(note)


_CHECKPOINTING: Final[tuple[Family, ...]] = ("checkpointing",)


def _apply_variant(
    name: str,
    variant: Variant,
    job: Job,
    left_out: Mapping[str, str],
    change: Callable[[Setup], Setup] | None = None,
    *,
    checkpointing: str | None = None,
) -> Setup:
    """The variant's techniques, with the first of its kinds of checkpointing with which it fits the card, or the last.

    Args:
        name, variant: the variant.
        job: what it is for; its machine has a card.
        left_out: techniques that are left out, each with why.
        change: what is done to the setup after its techniques, before its ledger is computed.
        checkpointing: one of the variant's kinds, whether it fits or not; None: the first that fits by formula.
    """
    if not variant.checkpointing:
        return apply_preset(name, job, variant.techniques, left_out=left_out, change=change)
    if checkpointing is not None:
        return _with_checkpointing(name, variant, job, checkpointing, left_out, change)
    assert job.machine.gpu is not None
    limit, tried = job.machine.gpu.usable_bytes, []
    for choice in variant.checkpointing:
        setup = _with_checkpointing(name, variant, job, choice, left_out, change)
        needed = setup.ledger.total_bytes("device")
        tried.append(f"{choice} {format_size(needed)}")
        if needed <= limit:
            break
    which = (
        "the first of those listed that fits by formula" if needed <= limit else "with none of those listed it fits"
    )
    # Other models than causal language models have a class of their own, and no formula for their activations.
    bare = job.model is not None and job.model.model_class is not None
    without = " (which has no activations of such a model: a prediction may choose another)" if bare else ""
    return setup.with_notes(
        f"Activation checkpointing: {choice}, {which}{without}. On the card, by formula: {', '.join(tried)}, of "
        f"{format_size(limit)}."
    )


def _with_checkpointing(
    name: str,
    variant: Variant,
    job: Job,
    choice: str,
    left_out: Mapping[str, str],
    change: Callable[[Setup], Setup] | None,
) -> Setup:
    if choice == NO_CHECKPOINTING:
        return apply_preset(name, job, variant.techniques, without=_CHECKPOINTING, left_out=left_out, change=change)
    return apply_preset(name, job, [*variant.techniques, choice], left_out=left_out, change=change)
