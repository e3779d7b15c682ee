"""One variant of a recipe, with one kind of checkpointing, on one machine → its setup, every choice with its reason.
Loads no weights and changes nothing on disk. `hf_memkit.recipes.variant_search` selects the variant and the kind;
without a GPU `hf_memkit.recipes.rehearse` makes the setup that runs instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.fp16_overflow import overflow_in_fp16
from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.errors import SettingError
from hf_memkit.presets import apply_preset
from hf_memkit.presets.compose import leave_out_impossible
from hf_memkit.presets.sharing import share_among_processes
from hf_memkit.recipes.schema import NO_CHECKPOINTING, Recipe
from hf_memkit.recipes.settings import CHECKPOINTS, model_and_data, refuse_ignored, saving, summing_note
from hf_memkit.recipes.tasks import DEFAULT_TASK, find_task
from hf_memkit.run.folder import default_output
from hf_memkit.setup.job import Job
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.batch import split_batch
from hf_memkit.setup.techniques.registry import Family

MULTIPLE: Final = 1024
"""A computed length is a multiple of these tokens. Smaller steps would change little, and tensor cores prefer
multiples of 64 elements (`presets/sizes.py`)."""


@dataclass(frozen=True)
class VariantJob:
    """Input for one setup of a recipe.

    Attributes:
        machine: has a GPU.
        shortest: tokens in a sequence: requested, or the recipe's.
        checkpointing: one of the variant's kinds; empty if it lists none.
        length: tokens in a sequence to try, if the longest that fits is wanted.
    """

    recipe: Recipe
    request: Request
    machine: Machine
    model: ModelFacts
    shortest: int
    variant: str = ""
    checkpointing: str = ""
    length: int | None = None

    @property
    def solves(self) -> bool:
        """Whether the sequence is made as long as fits."""
        return self.recipe.variants[self.variant].solve_for == "sequence" and not self.request.sequence_length

    def setup(self) -> Setup:
        """The setup; its `problems` list what the machine lacks."""
        return leave_out_impossible(self.variant, self.recipe.variants[self.variant].techniques, self._build)

    def _build(self, left_out: Mapping[str, str]) -> Setup:
        """Preset, then model and data, then arguments, then the user's own."""
        sequence_length = self.length or self.shortest
        why_length = "asked for" if self.request.sequence_length or self.length else "the recipe's"
        recipe, request = self.recipe, self.request
        model, name = self.model, self.variant
        variant, chosen = recipe.variants[name], request.arguments
        gpus = request.gpus or 1
        micro_batch, accumulation, batch_reason = split_batch(
            recipe.sequences_per_step, variant.micro_batch_size, gpus * request.nodes, chosen
        )
        output = request.output or default_output(recipe.name, name)
        # A separate folder for each run: DeepSpeed's swap files have the same names in every job.
        nvme_path = str(Path(request.nvme_path) / Path(output).name if request.nvme_path else Path(output) / "nvme")
        job = Job(model, self.machine, micro_batch, sequence_length, nvme_path, variant.values, gpus)
        job = replace(job, nodes=request.nodes, accumulation=accumulation)
        task = find_task(recipe.task)
        techniques = list(variant.techniques)
        without: tuple[Family, ...] = ()
        if self.checkpointing == NO_CHECKPOINTING:
            without = ("checkpointing",)
        elif self.checkpointing:
            techniques.append(self.checkpointing)

        def with_own_optimizer(setup: Setup) -> Setup:
            """The user's optimizer and the task's Trainer, so that the ledger counts its states and loss."""
            if recipe.task != DEFAULT_TASK:
                setup = setup.put("trainer.class", task.trainer_class, f"the Trainer for {task.name}")
            return setup.put("arguments.optim", chosen["optim"], "--set") if "optim" in chosen else setup

        setup = apply_preset(name, job, techniques, without=without, left_out=left_out, change=with_own_optimizer)
        setup = share_among_processes(replace(setup, request=request), job)
        refuse_ignored(setup, chosen)
        if request.nvme_path and request.variant != "auto" and not setup.ledger.total_bytes("disk"):
            instead = f", or replace --variant {name} with --variant infinity" if "infinity" in recipe.variants else ""
            raise SettingError(f"--nvme-path: variant {name!r} does not use the disk. Remove --nvme-path{instead}")

        setup = model_and_data(setup, recipe, request, model, sequence_length, why_length)
        steps = request.max_steps or chosen.get("max_steps") or recipe.steps
        steps_reason = "asked for" if steps != recipe.steps else "the recipe's"
        save_steps, limit, save_reason = saving(setup, self.machine, model, int(steps))
        arguments = {
            "output_dir": (output, "where checkpoints, records and the trained model go"),
            "per_device_train_batch_size": (micro_batch, batch_reason),
            "gradient_accumulation_steps": (accumulation, batch_reason),
            "per_device_eval_batch_size": (micro_batch, "evaluation then needs no more memory than training"),
            "prediction_loss_only": (True, "keeping the logits of an evaluation fills the GPU"),
            "max_steps": (steps, steps_reason),
            "lr_scheduler_type": ("cosine", "decays to zero over the run"),
            "eval_strategy": ("steps", "an evaluation at the end"),
            "eval_steps": (steps, "at the last step"),
            "eval_on_start": (True, "and one before, to see what training changed"),
            "logging_steps": (10, "each log reads the loss from the GPU, and waits for it"),
            "save_strategy": ("steps" if save_steps else "no", save_reason),
            "seed": (42, "same seed, same run"),
            "report_to": ("none", "records go to memkit's own file; --set report_to=tensorboard adds a dashboard"),
        }
        setup = setup.put_all("arguments", arguments)
        setup = setup.put_all("arguments", task.arguments(recipe.data))
        defaults: dict[str, tuple[Any, str]] = {
            "learning_rate": (variant.learning_rate, f"the recipe's for {name}"),
            "warmup_steps": (max(1, round(0.05 * int(steps))), "5 % of the steps, while the moments settle"),
            "weight_decay": (0.01, "AdamW's default decay, not on biases and norms"),
            "max_grad_norm": (1.0, "Trainer's default: it limits what one bad batch changes"),
        }
        # Optimizers that scale their learning rate by the batch, or cannot be clipped, have set theirs already.
        unset = {key: value for key, value in defaults.items() if f"arguments.{key}" not in setup}
        setup = setup.put_all("arguments", unset)
        if save_steps:
            setup = setup.put("arguments.save_steps", save_steps, f"about {CHECKPOINTS} checkpoints in the run")
            setup = setup.put("arguments.save_total_limit", limit, "older checkpoints are deleted")
        setup = task.with_derived_settings(setup)
        for key, value in chosen.items():
            setup = setup.put(f"arguments.{key}", value, "--set")
        if setup.get("arguments.fp16") and overflow_in_fp16(model.config.get("model_type")):
            setup = setup.with_problems(
                ["would compute in fp16, where T5's activations overflow; it needs a GPU with bf16"]
            )
        note = summing_note(setup)
        return setup if note is None else setup.with_notes(note)


def needs_less(recipe: Recipe, setup: Setup) -> tuple[str, ...]:
    """Options of this recipe that need less memory than `setup`, ready to type."""
    batch, length = setup.micro_batch_size, setup.sequence_length
    options = [f"--set per_device_train_batch_size={batch // 2}"] if batch > 1 else []
    if find_task(recipe.task).takes_length and length >= 4:
        options.append(f"--sequence-length {length // 2}")
    variants = list(recipe.variants)
    return (*options, *(f"--variant {name}" for name in variants[variants.index(setup.preset) + 1 :]))
