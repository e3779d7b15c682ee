"""Batch sizes and accumulation: the DeepSpeed config, and what silently changes Trainer's global batch or its mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.checks.rule import Match, Rules, deepspeed
from hf_memkit.checks.rules.trainer import DEFAULTS
from hf_memkit.checks.subject import ABSENT, Subject

_batch: Final = Rules(techniques=("global-batch",))
LOSS_NOT_SCALED: Final = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "musicgen",
    "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlm", "xlnet",
)  # fmt: skip
"""Types of causal models whose forward takes `num_items_in_batch` among its `**kwargs` and leaves it unread
(transformers 5.23.0: models/*/modeling_*.py; tests/checks/proofs_choices.py looks for them)."""

MEAN_OF_MEANS: Final = ("gemma3n", "gemma4", "gemma4_unified")
"""Types of causal models with `accepts_loss_kwargs = False` (transformers 5.23.0)."""


def _count(subject: Subject, key: str, argument: str) -> int | None:
    """The effective number: the config's, or Trainer's argument where it says "auto" or nothing; None if unknown."""
    value: Any = subject.at(key)
    if value in ("auto", ABSENT) and subject.arguments is not None:
        value = subject.argument(argument, DEFAULTS[argument])
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@deepspeed.error(
    why="without a batch size DeepSpeed fails with an assertion",
    fix='add "train_micro_batch_size_per_gpu": "auto"',
    source="deepspeed 0.19.8: runtime/config.py 648",
)
def batch_missing(subject: Subject) -> Iterator[Match]:
    if not subject.has("train_micro_batch_size_per_gpu") and not subject.has("train_batch_size"):
        yield Match("train_micro_batch_size_per_gpu")


@deepspeed.error(
    why="without this key accelerate uses 1, and Trainer's gradient_accumulation_steps has no effect",
    fix='add "gradient_accumulation_steps": "auto"',
    source="accelerate 1.15.0: utils/dataclasses.py 1274",
)
def accumulation_missing(subject: Subject) -> Iterator[Match]:
    asked = subject.argument("gradient_accumulation_steps", 1)
    if not subject.has("gradient_accumulation_steps") and (subject.arguments is None or asked != 1):
        yield Match("gradient_accumulation_steps", severity="hint" if subject.arguments is None else None)


@deepspeed.error(
    why="train_batch_size must equal micro-batch × accumulation × processes; DeepSpeed fails with an assertion",
    fix='write "auto"',
    source="deepspeed 0.19.8: runtime/config.py 602; transformers 5.23.0: integrations/deepspeed.py 140-155",
)
def batch_product(subject: Subject) -> Iterator[Match]:
    whole = subject.at("train_batch_size")
    processes = subject.processes
    if not isinstance(whole, int) or isinstance(whole, bool) or subject.on("auto_find_batch_size"):
        return
    micro = _count(subject, "train_micro_batch_size_per_gpu", "per_device_train_batch_size")
    accumulation = _count(subject, "gradient_accumulation_steps", "gradient_accumulation_steps")
    if micro is None or accumulation is None:
        return
    product = micro * accumulation * (processes or 1)
    matches = whole == product if processes else whole % product == 0  # divisible, if the processes are unknown
    if not matches:
        times = f"{micro} × {accumulation} × {processes or 'processes'}"
        yield Match("train_batch_size", whole, why=f"train_batch_size must be {times}; DeepSpeed fails otherwise")


@_batch.error(
    why="this model's forward accepts num_items_in_batch but ignores it, and Trainer does not divide the loss: loss "
    "and gradients are multiplied by the number of micro-batches",
    fix="set gradient_accumulation_steps to 1, or give Trainer a compute_loss_func that divides by num_items_in_batch",
    source="transformers 5.23.0: trainer.py 521-523, 2103-2111; models/bart/modeling_bart.py, BartForCausalLM",
)
def accumulation_multiplies_the_loss(subject: Subject) -> Iterator[Match]:
    unscaled = subject.model_type in LOSS_NOT_SCALED and not subject.argument("use_liger_kernel")
    if unscaled and subject.accumulation > 1:
        yield Match("gradient_accumulation_steps", argument=True)


@_batch.warning(
    why="this model does not accept num_items_in_batch: Trainer averages the means of the micro-batches, and tokens "
    "of short sequences weigh more than tokens of long ones",
    fix="set gradient_accumulation_steps to 1, pack the data into sequences of one length, or give Trainer a "
    "compute_loss_func that divides by num_items_in_batch",
    source="transformers 5.23.0: models/gemma3n/modeling_gemma3n.py, accepts_loss_kwargs; trainer.py 2110",
)
def accumulation_averages_means(subject: Subject) -> Iterator[Match]:
    # A recipe packs its text into blocks of one length; TRL does so with `packing`.
    packed = subject.on("packing") or subject.has_setting("data.source")
    if subject.accumulation > 1 and subject.model_type in MEAN_OF_MEANS and not packed:
        yield Match("gradient_accumulation_steps", argument=True)


@_batch.warning(
    why="BatchNorm layers normalise each micro-batch separately: loss and gradients differ from those of one large "
    "batch",
    fix="set gradient_accumulation_steps to 1, freeze the layers (eval mode), or use GroupNorm",
    source="torch 2.13.0: nn/modules/batchnorm.py 150-190",
)
def batch_norm_with_accumulation(subject: Subject) -> Iterator[Match]:
    if subject.model is not None and subject.model.batch_norms and subject.accumulation > 1:
        yield Match("gradient_accumulation_steps", argument=True)


@_batch.warning(
    why="after an out-of-memory error Trainer cuts the micro-batch to nine tenths and keeps the accumulation: the "
    "global batch and the steps of an epoch change",
    fix="set auto_find_batch_size to false, and per_device_train_batch_size to what fits",
    source="transformers 5.23.0: trainer.py 2687-2709; accelerate 1.15.0: utils/memory.py, find_executable_batch_size",
)
def batch_search_shrinks_the_batch(subject: Subject) -> Iterator[Match]:
    if subject.on("auto_find_batch_size") and not (subject.config and subject.zero.stage == 3):
        yield Match("auto_find_batch_size", True, argument=True)


@_batch.warning(
    why="split_batches divides per_device_train_batch_size among the processes",
    fix="delete split_batches, or multiply per_device_train_batch_size by the number of processes",
    source="transformers 5.23.0: training_args.py 1637; accelerate 1.15.0: data_loader.py, BatchSamplerShard",
)
def batch_split_among_processes(subject: Subject) -> Iterator[Match]:
    if _accelerator_config(subject).get("split_batches") is True and subject.processes != 1:
        yield Match("accelerator_config", argument=True)


@_batch.error(
    why="num_steps silently overrides gradient_accumulation_steps=1; with a larger value Trainer fails",
    fix="delete num_steps, and set gradient_accumulation_steps",
    source="transformers 5.23.0: trainer.py 811-824",
)
def accumulation_in_accelerator_config(subject: Subject) -> Iterator[Match]:
    section = _accelerator_config(subject).get("gradient_accumulation_kwargs")
    steps = section.get("num_steps") if isinstance(section, Mapping) else None
    if steps is not None and (steps != 1 or subject.accumulation > 1):
        yield Match("accelerator_config", argument=True)


def _accelerator_config(subject: Subject) -> Mapping[str, Any]:
    """The argument if it is a mapping, or JSON text of one; the content of a file is not read."""
    value = subject.argument("accelerator_config")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}
