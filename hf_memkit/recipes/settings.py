"""Settings of a recipe's setup other than its techniques: model, data, saving, the error of accumulating in bf16; and
refusal of requests that are wrong, belong to the variant, or would be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.catalog.hardware import Machine, described_gpu
from hf_memkit.catalog.models import ModelFacts, longest_sequence, refuse_absent
from hf_memkit.common.errors import InputError, SettingError, did_you_mean
from hf_memkit.common.resources import documentation
from hf_memkit.common.units import GIB, format_size, parse_size
from hf_memkit.presets import PRESETS
from hf_memkit.recipes.schema import Recipe
from hf_memkit.recipes.tasks import DEFAULT_TASK, find_task
from hf_memkit.setup.own_arguments import wrong_counts
from hf_memkit.setup.request import Request, refuse_too_long
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.batch import split_batch

CHECKPOINTS = 5
"""Approximate number of checkpoints in a run."""


def check_data(recipe: Recipe, source: str) -> None:
    """Read the data of `--data` as a run would. Raises DataError with place, mistake and expected value."""
    from hf_memkit.recipes.export import files

    task, data = find_task(recipe.task), recipe.data
    values = {
        "source": source, "task": task.name, "hub_id": data.hub_id, "hub_config": data.hub_config,
        "text_column": data.text_column, "columns": {**task.columns, **data.columns},
    }  # fmt: skip
    setup = Setup("data").put_all("data", {key: (value, "to be read") for key, value in values.items()})
    files.check_data(task, setup)


def model_and_data(
    setup: Setup, recipe: Recipe, request: Request, model: ModelFacts, sequence_length: int, why: str
) -> Setup:
    origin = {
        "local": "a local folder",
        "hub": "the hub, or its cache",
        "architecture": "NOT REACHABLE: built from the recipe's config values, with RANDOM weights",
    }[model.origin]
    setup = setup.put("model.name", model.name, "asked for" if request.model else "the recipe's")
    setup = setup.put("model.origin", model.origin, origin)
    config, config_reason = dict(model.config), "the model's config values"
    if model.origin == "architecture":
        config, config_reason = dict(recipe.model.architecture), "the recipe's config values"
    setup = setup.put("model.architecture", config, config_reason)
    data, task = recipe.data, find_task(recipe.task)
    if model.model_class is not None:
        setup = setup.put("model.class", model.model_class, f"the model of a {task.name} recipe")
        setup = setup.put("model.auto_class", task.auto_class, "makes it from its config")
    if recipe.task != DEFAULT_TASK:
        setup = setup.put("data.task", task.name, "the recipe's")
        setup = setup.put("trainer.class", task.trainer_class, f"the Trainer for {task.name}")
        setup = setup.put("trainer.arguments_class", task.arguments_class, "its arguments")
        setup = setup.put("data.columns", {**task.columns, **data.columns}, "role → column")
        setup = setup.put("data.hub_split", data.hub_split, "of the default data set")
        setup = setup.put_all("data", task.data_settings(data))
        setup = setup.put_all("model_parts", task.model_parts)
    default = f"{data.hub_id}:{data.hub_config}" if data.hub_config else data.hub_id
    default_rows = "the text of Python's own help" if recipe.task == DEFAULT_TASK else "examples made up here"
    why_rows = f"the default: {default} if the hub can be reached, otherwise {default_rows}"
    values = {
        "source": (request.data, "asked for") if request.data else (None, why_rows),
        "hub_id": (data.hub_id, "the recipe's default data set"),
        "hub_config": (data.hub_config, "the recipe's default data set"),
        "text_column": (data.text_column, "the column that holds the text"),
        "sequence_length": (sequence_length, why),
        "held_out": (data.held_out, "share of the examples that is kept for evaluation"),
        "evaluated_blocks": (data.evaluated_blocks, "at most so many are held out: an evaluation stays short"),
        "vocabulary_size": (model.vocabulary, "the model's: a tokenizer trained here has at most so many tokens"),
        "tokenizer": (model.name, "the model's own if it can be loaded, otherwise trained on the data"),
    }
    return setup.put_all("data", values)


def saving(setup: Setup, machine: Machine, model: ModelFacts, steps: int) -> tuple[int, int, str]:
    """(steps between checkpoints, or 0 for none; number kept; reason)."""
    one_bytes = int(PRESETS[setup.preset].checkpoint_bytes_per_parameter * model.parameters)
    free = machine.output_free_bytes
    if free is None:
        free = machine.disk_free_bytes - setup.ledger.total_bytes("disk")
    # Trainer writes the new checkpoint before it deletes the oldest, so one more than the limit exists at times.
    limit = 2 if free >= 3 * one_bytes else 1
    if free < 2 * one_bytes:
        left = f"{max(0.0, free / GIB):.1f} GiB of disk are left"
        return 0, 0, f"off: a checkpoint takes {format_size(one_bytes)}, and {left}"
    size = f"a checkpoint takes {format_size(one_bytes)} by formula" if one_bytes > GIB else "checkpoints are small"
    return max(1, steps // CHECKPOINTS), limit, f"a stopped run can continue; {size}"


ELSEWHERE: Final = {
    "output_dir": "use --output",
    "deepspeed": "the variant sets it; choose another with --variant",
    "resume_from_checkpoint": "use --resume",
    "use_cpu": "memkit uses the GPU where there is one, and rehearses where there is none",
    "hub_token": "memkit writes settings to files; set the variable HF_TOKEN instead, which the script reads",
    "do_train": "a recipe always trains",
    "do_eval": "a recipe evaluates at its end; to evaluate during training: --set eval_steps=N",
}
"""Fields that another option or the variant sets → what to do."""


_SET_BY_VARIANT = {"activation_checkpointing", "activation_checkpointing_kwargs", "bf16", "fp16"}


def refuse_wrong(recipe: Recipe, request: Request) -> None:
    """Refuse a request that is wrong on any machine, before torch is imported or a process starts."""
    described_gpu(request.gpu, request.gpu_memory)
    if request.ram:
        parse_size(request.ram, "--ram")
    if request.variant not in (known := (*recipe.variants, "auto")):
        near = did_you_mean(request.variant, known)
        raise InputError(
            f"recipe {recipe.name!r} has no variant {request.variant!r}{near}; it has: {', '.join(known)}"
        )
    chosen = request.arguments
    if request.max_steps is not None and chosen.get("max_steps", request.max_steps) != request.max_steps:
        both = f"--max-steps {request.max_steps} and --set max_steps={chosen['max_steps']}"
        raise SettingError(f"{both}: the same setting. Give one of them")
    problems = [f"--set {line}" for line in wrong_counts(chosen, "max_steps")]
    computed = "the variant sets it, and its memory is computed for that value. Choose another --variant"
    problems += [f"--set {name}: {computed}" for name in sorted(_SET_BY_VARIANT & chosen.keys())]
    if "num_train_epochs" in chosen:
        problems.append("--set num_train_epochs: no effect, because a recipe counts steps. Write --max-steps N")
    if chosen.get("save_only_model") is True and chosen.get("save_strategy") != "no":
        why = "no run could continue from such checkpoints, which lack the optimizer's states. Omit it"
        problems.append(f"--set save_only_model=true: {why}, or add --set save_strategy=no")
    if problems:
        raise SettingError("\n".join(problems))
    name, own = request.model or recipe.model.hub_id, request.model in (None, recipe.model.hub_id)
    longest = longest_sequence(recipe.model.architecture) if own else refuse_absent(name, known=False)
    if find_task(recipe.task).auto_class == "AutoModelForCausalLM":  # others define the length differently
        refuse_too_long(name, request.sequence_length, longest, "--sequence-length ")
    gpus = request.gpus or 1
    if gpus >= recipe.gpus:  # a rehearsal in fewer processes imitates the recipe's number
        split_batch(recipe.sequences_per_step, 1, gpus * request.nodes, chosen)


def refuse_ignored(setup: Setup, chosen: Mapping[str, Any]) -> None:
    """Refuse settings that the setup's variant would silently ignore or change."""
    if "optim" not in chosen:
        return
    if "optimizer.class" in setup:
        own = f"variant {setup.preset!r} has its own optimizer, {setup['optimizer.class'].split(':')[1]}"
        raise SettingError(f"--set optim={chosen['optim']}: no effect: {own}. Choose another --variant")
    if "deepspeed.config" in setup and not str(chosen["optim"]).startswith("adamw_torch"):
        why = "the variant's memory was computed with AdamW's states, split between the GPUs"
        if "offload_optimizer" in setup["deepspeed.config"]["zero_optimization"]:
            why = "accelerate silently replaces an offloaded optimizer with DeepSpeedCPUAdam"
        works = f"variant {setup.preset!r} works with adamw_torch only"
        raise SettingError(f"--set optim={chosen['optim']}: {why}; {works}")


BF16_SUM_ERROR: Final[Mapping[int, tuple[float, float]]] = {
    2: (0.001748, 0.006886),
    4: (0.002555, 0.006837),
    8: (0.003431, 0.006571),
    16: (0.004564, 0.006488),
    32: (0.006232, 0.006290),
}
"""Micro-batches a step → (relative error of summing their gradients in bf16, and of bf16 arithmetic itself). Measured:
benchmarks/results/bf16_accumulation.json; a test compares them."""


def summing_note(setup: Setup) -> str | None:
    """Note for a setup that sums micro-gradients in bf16, or None. DeepSpeed has separate accumulators, and adapters
    keep fp32 gradients."""
    count = int(setup.get("arguments.gradient_accumulation_steps", 1))
    if count == 1 or setup.get("model.dtype") != "bfloat16":
        return None
    if "deepspeed.config" in setup or setup.section("adapter"):
        return None
    measured = [number for number in BF16_SUM_ERROR if number >= count]
    cost = ""
    if measured:
        summing, arithmetic = (f"{100 * share:.2f} %" for share in BF16_SUM_ERROR[min(measured)])
        cost = (
            f": an error of {summing} of the gradient's norm, measured with {min(measured)} on a small GPT-2, in "
            f"addition to {arithmetic} by bf16 arithmetic itself"
        )
    return (
        f"The gradients of the {count} micro-batches of a step are summed in bf16{cost} "
        f"({documentation('techniques/precision.md')}). A larger micro-batch needs fewer sums."
    )
