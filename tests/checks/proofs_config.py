"""Proofs that need DeepSpeed's config classes only."""

from __future__ import annotations

import logging
import tempfile
from math import inf
from pathlib import Path
from typing import Any

from accelerate import DeepSpeedPlugin

from hf_memkit.checks.deepspeed_keys import REMOVED
from tests.checks.case import CPU, ZERO
from tests.checks.configs import GONE, ds
from tests.checks.real import arguments, parse, refusals, refused, train, trainer
from tests.checks.registry import proof

refusals(
    "late", lambda stage, changes: parse(ds(stage, changes)),
    ("rejected-key", "Extra inputs are not permitted", 2, {f"{ZERO}.overlap_com": True}),
    ("rejected-key", "Extra inputs are not permitted", 2, {"bf16.enable": True}),
    ("out-of-range", "stage", 4, {}),
    ("out-of-range", "greater than 0", 2, {f"{ZERO}.reduce_bucket_size": 0}),
    ("out-of-range", "has to be greater than 0", 2, {"train_micro_batch_size_per_gpu": -1}),
    ("out-of-range", "less than or equal to 1", 3, {f"{ZERO}.offload_optimizer": {"ratio": 1.5}}),
    ("fp16-and-bf16", "cannot be simultaneously enabled", 2, {"bf16.enabled": True, "fp16.enabled": True}),
    ("ratio-refused", "Partial offloading only supported for ZeRO Stage 3", 2,
     {f"{ZERO}.offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    ("lean-states-without-master", "requires bf16_master_weights_and_grads", 2,
     {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
    ("lean-states-without-zero", "only supported with ZeRO Stage 1, 2, or 3", 0,
     {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    ("sum-at-stage-3", "not supported with ZeRO stage 3", 3, {"gradient_allreduce_op": "sum"}),
    ("batch-missing", "needs to be provided", 2, {"train_batch_size": GONE, "train_micro_batch_size_per_gpu": GONE}),
    ("batch-product", "train_batch_size is not equal", 2,
     {"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}),
    ("gds-without-gpu", "GDS currently only supported for CUDA", 3, {"aio": {"use_gds": True}}),
)  # fmt: skip


@proof("removed-key", fails="late")
def removed_key() -> None:
    for path in REMOVED:
        refused("DeepSpeedConfigError", lambda path=path: parse(ds(2, {path: {"enabled": False}})))
    # DeepSpeed reads its config when the engine is built: Trainer is there by then, and so is the model.
    made = trainer(ds(2, {next(iter(REMOVED)): {"enabled": False}}))
    refused("DeepSpeedConfigError", made.train)


@proof("unknown-key", fails="silent")
def unknown_key() -> None:
    read = vars(parse(ds(2, {"gradient_cliping": 0.5, "gradient_clipping": GONE, "aio": {"queue_dept": 4}})))
    assert read["gradient_clipping"] == 1.0 and read["aio_config"]["queue_depth"] == 8


@proof("renamed-key", fails="silent")
def renamed_key() -> None:
    assert "thread_count" not in parse(ds(3, {"aio": {"thread_count": 4}})).aio_config
    activations = {"activation_checkpointing": {"partitioned_activations": True}}
    assert parse(ds(3, activations)).activation_checkpointing_config.partition_activations is False


@proof("misplaced-key", fails="silent")
def misplaced_key() -> None:
    refused("Extra inputs are not permitted", lambda: parse(ds(3, {f"{ZERO}.aio": {"block_size": 1048576}})))
    refused("Extra inputs are not permitted", lambda: parse(ds(2, {"bf16": {"enabled": True, "loss_scale": 0}})))
    assert parse(ds(3, {"stage3_max_live_parameters": 7})).zero_config.max_live_parameters == 1_000_000_000


@proof("deprecated-key", fails="silent")
def deprecated_key() -> None:
    assert parse(ds(2, {f"{ZERO}.cpu_offload": True})).zero_config.offload_optimizer.device == "cpu"
    zero = parse(ds(2, {f"{ZERO}.cpu_offload_use_pin_memory": True, **CPU, f"{ZERO}.stage": 2})).zero_config
    assert zero.offload_optimizer.pin_memory is True  # the default: the old key could not have set it
    off = parse(ds(2, {f"{ZERO}.cpu_offload_use_pin_memory": False, **CPU})).zero_config
    assert off.offload_optimizer.pin_memory is True


@proof("duplicate-key", fails="silent")
def duplicate_key() -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import HfArgumentParser, TrainingArguments

    path = Path(tempfile.mkdtemp()) / "ds.json"
    path.write_text('{"train_batch_size": 1, "zero_optimization": {"stage": 1, "stage": 2}}')
    assert HfDeepSpeedConfig(str(path)).get_value("zero_optimization.stage") == 2
    refused("Duplicate keys", lambda: DeepSpeedConfig(str(path)))
    twice = path.with_name("args.yaml")
    twice.write_text("output_dir: x\nmax_steps: 1\nmax_steps: 2\n")
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(twice))
    assert args.max_steps == 2


@proof("wrong-type", fails="late")
def wrong_type() -> None:
    refused("reduce_bucket_size", lambda: parse(ds(2, {f"{ZERO}.reduce_bucket_size": "5e8"})))
    refused("overlap_comm", lambda: parse(ds(2, {f"{ZERO}.overlap_comm": "yes please"})))
    # Where no class checks it, the text goes through, and meets a comparison later.
    assert parse(ds(2, {"gradient_clipping": "1.0"})).gradient_clipping == "1.0"
    assert parse(ds(2, {"memory_breakdown": {"enabled": False}})).memory_breakdown, "which counts as true"
    # accelerate overwrites this one, and nothing checks or uses what stands in this section.
    assert DeepSpeedPlugin(hf_ds_config=ds(2, {"steps_per_print": "auto"})).deepspeed_config["steps_per_print"] == inf
    parse(ds(2, {"activation_checkpointing": {"number_checkpoints": False}}))


@proof("elastic-checkpoint", fails="silent")
def elastic_checkpoint() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    from deepspeed.utils import logger

    logger.addHandler(handler)
    level, logger.level = logger.level, logging.WARNING
    try:
        parse(ds(3, {f"{ZERO}.elastic_checkpoint": True}))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any("no longer supported" in line for line in messages)


@proof("offload-without-device", fails="silent")
def offload_without_device() -> None:
    assert (
        parse(ds(2, {f"{ZERO}.offload_optimizer": {"pin_memory": True}})).zero_config.offload_optimizer.device
        == "none"
    )


@proof("bucket-default", fails="unshown")
def bucket_default() -> None:
    assert parse(ds(1, {f"{ZERO}.reduce_bucket_size": GONE})).zero_config.reduce_bucket_size == 500_000_000


@proof("sub-group-default", fails="unshown")
def sub_group_default() -> None:
    zero = parse(ds(3, {f"{ZERO}.sub_group_size": GONE})).zero_config
    assert zero.sub_group_size == 1_000_000_000


@proof("removed-optimizer", fails="late")
def removed_optimizer() -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert not any("onebit" in name or "zeroone" in name for name in DEEPSPEED_OPTIMIZERS)
    section = {"optimizer": {"type": "OneBitAdam", "params": {"lr": "auto"}}}
    refused("OneBitAdam", lambda: train(ds(2, section)))


@proof("contiguous-activations", fails="late")
def contiguous_activations() -> None:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    configure: Any = checkpointing.configure
    refused("only available with partitioned activations", lambda: configure(None, contiguous_checkpointing=True))
    refused(
        "Must specify the number of layers",
        lambda: configure(None, contiguous_checkpointing=True, partition_activations=True),
    )
    checkpointing.reset()
    configure(None, partition_activations=False, contiguous_checkpointing=False)


@proof("secondary-partition-size", fails="late")
def secondary_partition_size() -> None:
    from deepspeed.utils import groups

    groups._ensure_divisibility(8, 4)
    refused("not divisible", lambda: groups._ensure_divisibility(6, 4))


@proof("config-not-found", fails="loud")
def config_not_found() -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    refused("Expected a string path to an existing deepspeed config", lambda: HfDeepSpeedConfig("nowhere/ds.json"))
    refused("FileNotFoundError", lambda: arguments(None, fsdp=True, fsdp_config="nowhere/fsdp.json"))


@proof("local-rank-ignored", fails="silent")
def local_rank_ignored() -> None:
    from tests.checks.real import arguments

    assert arguments(None, local_rank=3).local_process_index == 0
