"""The rehearsal: a recipe's setup on a machine without a GPU. The same architecture, small, runs with the variant's
techniques, optimizer and engine for a few steps. Settings that no CPU runs are omitted and listed with reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.catalog.hardware import SLOW_BF16, bf16_slowdown
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.recipes.schema import Recipe
from hf_memkit.recipes.schema import Rehearsal as RehearsalSpec
from hf_memkit.recipes.tasks import find_task, task_of
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.on_cpu import unpin_optimizer, without_gpu
from hf_memkit.setup.setup import Setting, Setup
from hf_memkit.setup.techniques.batch import accumulation_for

_SMALL_ENOUGH: Final = 20_000_000
"""Maximum parameters of a local model that is rehearsed with its own weights."""

_SWAPPED: Final = {"hidden_size": 384, "num_attention_heads": 6}
"""Of a rehearsal that keeps weights on NVMe: DeepSpeed swaps no tensor below a mebibyte
(`hf_memkit.deepspeed.stage_3`), and the widest matrices of this model are above it."""

_CPU: Final = "this machine has no GPU"
_CHUNKS: Final = "rehearsal: four chunks a micro-batch"


def rehearse(recipe: Recipe, target: Setup, *, gpus: int | None = None) -> RecipeRun:
    """The rehearsal of a recipe's setup, in `gpus` processes on each machine; None: the target's number."""
    spec, job = recipe.rehearsal, target.resolved_for
    gpus = gpus or job.gpus
    setup = replace(target, ledger=Ledger(), problems=(), notes=())
    rehearsed = RecipeRun(recipe.name, target.preset, setup, target, gpus=gpus, nodes=job.nodes)
    model, task = job.model, find_task(recipe.task)
    assert model is not None  # a recipe names one
    if model.origin != "local" or model.parameters > _SMALL_ENOUGH:
        changes = dict(spec.model)
        swaps = setup.zero.get("offload_param", {}).get("device") == "nvme"
        if swaps and changes["hidden_size"] < _SWAPPED["hidden_size"]:
            changes |= _SWAPPED
        model = describe(
            model.name, recipe.model.architecture, use_hub=model.origin == "hub",
            changes=changes, auto_class=task.auto_class,
        )  # fmt: skip
    rehearsed = _small_model(rehearsed, spec, model, is_smaller=model is not job.model)
    rehearsed = _few_steps(rehearsed, spec)
    chunked = rehearsed.setup.get("model_parts.chunked_loss")
    if chunked is not None:  # several chunks of a small micro-batch, to rehearse their loop
        chunked["chunk_tokens"] = max(1, rehearsed.setup.sized_job.tokens // 4)
        rehearsed = _with_section(rehearsed, "model_parts", {"chunked_loss": (chunked, _CHUNKS)})
    rehearsed = _cpu_precision(rehearsed)
    setup, left_out = without_gpu(rehearsed.setup, rehearsal=True)
    if gpus != job.gpus:
        reason = f"rehearsed in {rehearsed.processes} processes"
        left_out = (*left_out, Setting("environment.WORLD_SIZE", job.processes, reason))
    setup = task.with_derived_settings(setup)
    rehearsed = replace(rehearsed, setup=setup, not_rehearsed=(*rehearsed.not_rehearsed, *left_out))
    if "deepspeed.config" not in setup:
        return rehearsed
    rehearsed = _cpu_deepspeed(rehearsed)
    # The engine's memory for the small model, by formula, to check this machine's disk and limits.
    ledger = zero_ledger(
        rehearsed.setup["deepspeed.config"], model, gpus=gpus, nodes=job.nodes,
        accumulation=setup.accumulation > 1, adapters=adapter_tensors(model, setup.section("adapter")),
    )  # fmt: skip
    return replace(rehearsed, setup=replace(rehearsed.setup, ledger=ledger))


def made_smaller(job: RecipeRun) -> list[tuple[str, int, int]]:
    """Sizes that the rehearsal `job` reduces: (name, the target's, the rehearsal's)."""
    target, setup = job.target, job.setup
    assert target is not None
    large, small = (architecture.get("model.architecture") or {} for architecture in (target, setup))
    sizes = [(name, large[name], small.get(name)) for name in large]
    for key in ("data.sequence_length", "arguments.max_steps"):
        sizes.append((key.partition(".")[2], target.get(key), setup.get(key)))
    batch = target.micro_batch_size * target.accumulation * job.target_processes
    small_batch = setup.micro_batch_size * setup.accumulation * job.processes
    sizes.append((f"{task_of(target).examples_are} a step", batch, small_batch))
    return [(name, a, b) for name, a, b in sizes if type(a) is int and type(b) is int and b < a]


def _with_section(rehearsed: RecipeRun, section: str, values: dict[str, tuple[Any, str]]) -> RecipeRun:
    return replace(rehearsed, setup=rehearsed.setup.put_all(section, values))


def _leave_out(rehearsed: RecipeRun, key: str, reason: str) -> RecipeRun:
    """Record that the target's setting of `key` is not rehearsed; the caller changes or drops it."""
    left_out = Setting(key, rehearsed.setup[key], reason)
    return replace(rehearsed, not_rehearsed=(*rehearsed.not_rehearsed, left_out))


def _small_model(rehearsed: RecipeRun, spec: RehearsalSpec, small: ModelFacts, *, is_smaller: bool) -> RecipeRun:
    """`is_smaller`: whether the rehearsal has a smaller model than the target."""
    if not is_smaller:
        length = min(spec.sequence_length, small.maximum_length or spec.sequence_length)
        return _with_section(rehearsed, "data", {"sequence_length": (length, "short, for a CPU")})
    parameters = f"the recipe's rehearsal: {small.parameters / 1e6:.1f} M parameters"
    model = {
        "origin": ("architecture", "a small model of the same architecture, with random weights"),
        "architecture": (dict(small.config), parameters),
    }
    data = {
        "sequence_length": (spec.sequence_length, "the recipe's rehearsal"),
        "vocabulary_size": (small.vocabulary, "the recipe's rehearsal"),
        "tokenizer": (None, f"trained on the data: a small model has a small vocabulary ({small.vocabulary})"),
    }
    return _with_section(_with_section(rehearsed, "model", model), "data", data)


def _few_steps(rehearsed: RecipeRun, spec: RehearsalSpec) -> RecipeRun:
    setup, processes = rehearsed.setup, rehearsed.processes
    # With more processes the micro-batch shrinks and the accumulation stays, so that it is rehearsed too; without
    # accumulation in the target there is none, because the engine then has no accumulators.
    accumulates = int(setup["arguments.gradient_accumulation_steps"]) > 1
    whole = spec.micro_batch_size if accumulates else spec.sequences_per_step
    accumulation = accumulation_for(spec.sequences_per_step, whole)
    micro_batch = max(1, whole // processes)
    processes_text = f" × {processes} processes" if processes > 1 else ""
    sequences = micro_batch * accumulation * processes
    batch = f"rehearsal: {micro_batch} × {accumulation}{processes_text} = {sequences} sequences a step"

    def unless_set(name: str, value: Any, reason: str) -> tuple[Any, str]:
        """The value, unless the user has set one."""
        by_user = {s.key: s.value for s in setup.settings if s.reason in ("--set", "asked for")}
        key = f"arguments.{name}"
        return (by_user[key], "asked for") if key in by_user else (value, reason)

    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "eval_steps")
    for key in [f"arguments.{name}" for name in sizes]:
        if any(s.key == key and s.reason == "--set" for s in setup.settings):
            rehearsed = _leave_out(rehearsed, key, "the rehearsal uses its own batch and steps")
    steps, why = unless_set("max_steps", spec.steps, "the recipe's rehearsal")
    why_rate = "the recipe's rehearsal: random weights learn from larger steps"
    arguments = {
        "use_cpu": (True, _CPU),
        "dataloader_pin_memory": (False, "page-locked memory is for copies to a GPU"),
        "per_device_train_batch_size": (micro_batch, batch),
        "gradient_accumulation_steps": (accumulation, batch),
        "per_device_eval_batch_size": (micro_batch, batch),
        "max_steps": (steps, why),
        "eval_steps": (steps, "at the last step"),
        "warmup_steps": unless_set("warmup_steps", max(1, round(0.05 * steps)), "5 % of the steps"),
        "learning_rate": unless_set("learning_rate", spec.learning_rate, why_rate),
        "save_strategy": unless_set("save_strategy", "steps", "checkpoints of a small model are small"),
        "save_steps": unless_set("save_steps", max(1, steps // 5), "about five checkpoints in the run"),
        "save_total_limit": unless_set("save_total_limit", 2, "older checkpoints are deleted"),
    }
    return _with_section(rehearsed, "arguments", arguments)


def _cpu_precision(rehearsed: RecipeRun) -> RecipeRun:
    """bf16 instead of fp16, and on a CPU without bf16 instructions its products in fp32. Tensors stay bf16."""
    if rehearsed.setup.get("arguments.fp16"):
        reason = "neither DeepSpeed nor accelerate runs fp16 on a CPU; rehearsed in bf16, without loss scaling"
        rehearsed = _leave_out(rehearsed, "arguments.fp16", reason)
        rehearsed = _with_section(rehearsed, "arguments", {"fp16": (False, reason), "bf16": (True, reason)})
        rehearsed = _with_section(rehearsed, "model", {"dtype": ("bfloat16", reason)})
    setup = rehearsed.setup
    bf16 = [key for key, value in (("model.dtype", "bfloat16"), ("arguments.bf16", True)) if setup.get(key) == value]
    slowdown = bf16_slowdown() if bf16 else 0.0
    if slowdown < SLOW_BF16:
        return rehearsed
    reason = (
        f"this CPU multiplies bf16 matrices {slowdown:.0f} times slower than fp32 (measured): tensors stay bf16, "
        f"products are computed in fp32 and rounded to bf16"
    )
    rehearsed = _leave_out(rehearsed, bf16[0], reason)
    return _with_section(rehearsed, "trainer_parts", {"fp32_products": ({}, reason)})


def _cpu_deepspeed(rehearsed: RecipeRun) -> RecipeRun:
    """The same preset with buffers for a small model, without settings that a CPU lacks."""
    config = rehearsed.setup["deepspeed.config"]
    zero = config["zero_optimization"]
    # DeepSpeed does not swap tensors below a mebibyte (deepspeed: runtime/swap_tensor, MIN_AIO_BYTES). The small
    # model's matrices have about that size, and these buffers just hold them.
    for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size"):
        if name in zero:
            zero[name] = 1_000_000
    if zero.get("offload_param", {}).get("device") == "nvme":
        # Most weights are below that size, and prefetching from NVMe would then stop DeepSpeed
        # (hf_memkit.deepspeed.sizing, `_prefetches_twice`).
        zero["stage3_prefetch_bucket_size"] = 0
        zero["offload_param"]["buffer_size"] = 1_000_000
    for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        if name in zero:
            zero[name] = 2_000_000
    if unpin_optimizer(config):
        pinned = Setting("deepspeed.config", {"offload_optimizer": {"pin_memory": True}}, "needs a CUDA driver")
        rehearsed = replace(rehearsed, not_rehearsed=(*rehearsed.not_rehearsed, pinned))
    rehearsed = replace(rehearsed, setup=rehearsed.setup.drop("deepspeed.sizes"))
    same = "the same keys, with buffers for the small model"
    rehearsed = _with_section(rehearsed, "deepspeed", {"config": (config, same)})
    return _with_section(rehearsed, "environment", {"DS_ACCELERATOR": ("cpu", _CPU)})
