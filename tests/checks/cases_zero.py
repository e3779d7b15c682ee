"""Cases of the rules about ZeRO, offloading, memory, saving and arguments: see `cases.py`."""

from __future__ import annotations

from hf_memkit.checks import Subject
from hf_memkit.common.units import GIB
from tests.checks.case import (
    BEYOND_SHARED,
    CPU,
    LARGE,
    LEAN,
    MACHINE,
    NVME,
    NVME_PARAM,
    OLD_GPU,
    ON_CPU,
    OPTIMIZER,
    PARAM,
    SMALL,
    ZENFLOW,
    ZERO,
    Case,
    machine,
    of,
)
from tests.checks.configs import ADAMW, GONE
from tests.conftest import ROOT

QUANTIZED = f"{ZERO}.zero_quantized_gradients"
OVERLAPPED = {**ZENFLOW, f"{ZERO}.zenflow": {"update_interval": 4, "overlap_step": True}}

CASES: dict[str, list[Case]] = {
    "wrong-stage": [
        Case(f"{ZERO}.sub_group_size", of(2, {f"{ZERO}.sub_group_size": 1}), of(3)),
        Case(f"{ZERO}.round_robin_gradients", of(3, {f"{ZERO}.round_robin_gradients": True}),
             of(2, {f"{ZERO}.round_robin_gradients": True})),
    ],
    "gradient-norm-off": [
        Case(f"{ZERO}.compute_grad_norm", of(2, {f"{ZERO}.compute_grad_norm": False}),
             of(2, {f"{ZERO}.compute_grad_norm": False}, arguments={"max_grad_norm": 0.0})),
        Case(f"{ZERO}.compute_grad_norm", of(3, {f"{ZERO}.compute_grad_norm": False}), of(3)),
    ],
    "contiguous-forced": [
        Case(f"{ZERO}.contiguous_gradients", of(2, {**CPU, f"{ZERO}.contiguous_gradients": False}),
             of(2, {f"{ZERO}.contiguous_gradients": False})),
    ],
    "legacy-stage-1": [Case(f"{ZERO}.legacy_stage1", of(1, {f"{ZERO}.legacy_stage1": True}), of(1))],
    "elastic-checkpoint": [
        Case(f"{ZERO}.elastic_checkpoint", of(3, {f"{ZERO}.elastic_checkpoint": True}),
             of(2, {f"{ZERO}.elastic_checkpoint": True})),
    ],
    "gather-bucket-odd": [
        Case(f"{ZERO}.allgather_bucket_size", of(2, {f"{ZERO}.allgather_bucket_size": 20001}),
             of(2, {f"{ZERO}.allgather_bucket_size": 20000})),
    ],
    "sum-at-stage-3": [
        Case("gradient_allreduce_op", of(3, {"gradient_allreduce_op": "sum"}),
             of(2, {"gradient_allreduce_op": "sum"})),
    ],
    "quantized-without-gpu": [
        Case(f"{ZERO}.zero_quantized_weights", of(3, {f"{ZERO}.zero_quantized_weights": True}, machine=ON_CPU),
             of(3, {f"{ZERO}.zero_quantized_weights": True}, machine=MACHINE)),
    ],
    "quantized-gradients-bf16": [
        Case(QUANTIZED, of(3, {QUANTIZED: True, "bf16.enabled": True}),
             of(3, {QUANTIZED: True, "fp16.enabled": True})),
        Case(QUANTIZED, of(3, {QUANTIZED: True}, arguments={"bf16": True}), of(3, {QUANTIZED: True}, arguments=None)),
        Case(QUANTIZED, of(3, {QUANTIZED: True}),
             of(3, {QUANTIZED: True, "communication_data_type": "fp16"}, arguments={"bf16": True})),
    ],
    "secondary-partition-size": [
        Case(f"{ZERO}.zero_hpz_partition_size", of(3, {f"{ZERO}.zero_hpz_partition_size": 4}, gpus=6),
             of(3, {f"{ZERO}.zero_hpz_partition_size": 4}, gpus=8)),
    ],
    "nvme-below-stage-3": [Case(f"{OPTIMIZER}.device", of(2, NVME), of(3, NVME))],
    "param-offload-below-stage-3": [
        Case(f"{PARAM}.device", of(2, {PARAM: {"device": "cpu"}}), of(3, {PARAM: {"device": "cpu"}})),
    ],
    "offload-at-stage-0": [Case(f"{OPTIMIZER}.device", of(0, CPU), of(1, CPU))],
    "offload-without-device": [
        Case(f"{OPTIMIZER}.device", of(2, {OPTIMIZER: {"pin_memory": True}}), of(2, CPU)),
    ],
    "nvme-key-without-nvme": [
        Case(f"{OPTIMIZER}.pipeline_read", of(3, {OPTIMIZER: {"device": "cpu", "pipeline_read": True}}),
             of(3, NVME)),
    ],
    "ratio-refused": [
        Case(f"{OPTIMIZER}.ratio", of(2, {OPTIMIZER: {"device": "cpu", "ratio": 0.5}}),
             of(2, {OPTIMIZER: {"device": "cpu", "ratio": 1.0}})),
    ],
    "ratio-no-effect": [
        Case(f"{OPTIMIZER}.ratio", of(3, {OPTIMIZER: {"device": "cpu", "ratio": 0.9}}, model=SMALL),
             of(3, {OPTIMIZER: {"device": "cpu", "ratio": 0.5}, f"{ZERO}.sub_group_size": 1_000_000}, model=SMALL)),
        Case(f"{OPTIMIZER}.ratio",
             of(3, {OPTIMIZER: {"device": "cpu", "ratio": 0.9}, f"{ZERO}.sub_group_size": GONE}),
             of(3, {OPTIMIZER: {"device": "cpu", "ratio": 0.5}, f"{ZERO}.sub_group_size": GONE})),
    ],
    "super-offload-unsupported": [
        Case(f"{OPTIMIZER}.super_offload", of(2, {OPTIMIZER: {"device": "cpu", "super_offload": True}}),
             of(3, {OPTIMIZER: {"device": "cpu", "super_offload": True}}, machine=MACHINE)),
    ],
    "cores-without-super-offload": [
        Case(f"{OPTIMIZER}.cpuadam_cores_perc", of(3, {OPTIMIZER: {"device": "cpu", "cpuadam_cores_perc": 0.5}}),
             of(3, CPU)),
    ],
    "zenflow-without-offload": [
        Case(f"{ZERO}.zenflow", of(2, {f"{ZERO}.zenflow": {"update_interval": 4}, "optimizer": ADAMW}),
             of(2, ZENFLOW)),
    ],
    "zenflow-without-optimizer": [
        Case("optimizer", of(2, {**CPU, f"{ZERO}.zenflow": {"update_interval": 4}}), of(2, ZENFLOW)),
    ],
    "zenflow-accumulation": [
        Case("gradient_accumulation_steps", of(2, ZENFLOW, arguments={"gradient_accumulation_steps": 4}),
             of(2, ZENFLOW)),
    ],
    "zenflow-interval": [
        Case(f"{ZERO}.zenflow.select_interval", of(2, {**ZENFLOW, f"{ZERO}.zenflow": {"select_interval": 4}}),
             of(2, ZENFLOW)),
    ],
    "zenflow-offload-without-overlap": [
        Case(f"{ZERO}.overlap_comm", of(2, {**ZENFLOW, f"{ZERO}.zenflow.offload": True}),
             of(2, {**ZENFLOW, f"{ZERO}.zenflow.offload": True, f"{ZERO}.overlap_comm": True})),
    ],
    "zenflow-shared-memory": [
        Case(f"{ZERO}.zenflow.overlap_step", of(2, OVERLAPPED, model=BEYOND_SHARED, here=True),
             of(2, OVERLAPPED, model=BEYOND_SHARED)),
        Case(f"{ZERO}.zenflow.overlap_step", of(2, OVERLAPPED, model=BEYOND_SHARED, here=True),
             of(2, ZENFLOW, model=BEYOND_SHARED, here=True)),
        Case(f"{ZERO}.zenflow.overlap_step", of(2, OVERLAPPED, model=BEYOND_SHARED, here=True),
             of(2, OVERLAPPED, model=BEYOND_SHARED, here=True, nodes=1000)),
    ],
    "fp16-and-bf16": [
        Case("fp16.enabled", of(2, {"fp16.enabled": True, "bf16.enabled": True}), of(2, {"bf16.enabled": True})),
    ],
    "fp16-without-gpu": [
        Case("fp16.enabled", of(2, {"fp16.enabled": True}, machine=ON_CPU), of(2, {"fp16.enabled": True},
             machine=MACHINE)),
    ],
    "bf16-emulated": [
        Case("bf16.enabled", of(2, {"bf16.enabled": True}, machine=OLD_GPU), of(2, {"bf16.enabled": True},
             machine=MACHINE)),
    ],
    "fp32-accumulation": [
        Case("data_types.grad_accum_dtype", of(1, {"data_types": {"grad_accum_dtype": "fp32"}, "bf16.enabled": True}),
             of(1, {"data_types": {"grad_accum_dtype": "bf16"}, "bf16.enabled": True})),
    ],
    "lean-states-without-master": [
        Case("bf16.bf16_optimizer_states", of(2, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
             of(2, LEAN)),
    ],
    "lean-master-without-offload": [
        Case("bf16.bf16_master_weights_and_grads",
             of(2, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}), of(2, LEAN)),
    ],
    "lean-offload-without-optimizer": [
        Case("bf16.bf16_optimizer_states", of(2, {**LEAN, **CPU}), of(2, {**LEAN, **CPU, "optimizer": ADAMW})),
    ],
    "lean-states-without-zero": [Case("bf16.bf16_master_weights_and_grads", of(0, LEAN), of(1, LEAN))],
    "lean-states-without-bf16": [
        Case("bf16.bf16_master_weights_and_grads", of(2, {"bf16": {**LEAN["bf16"], "enabled": False}}), of(2, LEAN)),
    ],
    "parameter-type": [
        Case("data_types.param_dtype", of(2, {"data_types": {"param_dtype": "bf16"}}),
             of(2, {"data_types": {"param_dtype": "bf16"}, "bf16.enabled": True})),
    ],
    "activation-section-unread": [
        Case("activation_checkpointing", of(2, {"activation_checkpointing": {"cpu_checkpointing": True}}),
             of(2, {"activation_checkpointing": {"cpu_checkpointing": False}})),
    ],
    "contiguous-activations": [
        Case("activation_checkpointing.contiguous_memory_optimization",
             of(2, {"activation_checkpointing": {"contiguous_memory_optimization": True}}),
             of(2, {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True,
                                                 "number_checkpoints": 2}})),
    ],
    "bucket-default": [
        Case(f"{ZERO}.reduce_bucket_size", of(2, {f"{ZERO}.reduce_bucket_size": GONE}),
             of(0, {f"{ZERO}.reduce_bucket_size": GONE})),
    ],
    "bucket-against-card": [
        Case(f"{ZERO}.reduce_bucket_size",
             of(2, {f"{ZERO}.reduce_bucket_size": 500_000_000, f"{ZERO}.overlap_comm": True}, machine=MACHINE),
             of(2, {f"{ZERO}.reduce_bucket_size": 50_000_000, f"{ZERO}.overlap_comm": True}, machine=MACHINE)),
    ],
    "sub-group-default": [Case(f"{ZERO}.sub_group_size", of(3, {**NVME, f"{ZERO}.sub_group_size": GONE}),
             of(3, NVME))],
    "buffer-too-small": [
        Case(f"{PARAM}.buffer_size", of(3, {PARAM: {**NVME_PARAM[PARAM], "buffer_size": 1_999_999}}, model=SMALL),
             of(3, NVME_PARAM, model=SMALL)),
        Case(f"{PARAM}.buffer_size", of(3, {PARAM: {**NVME_PARAM[PARAM], "buffer_size": 999_999}}, model=SMALL,
             gpus=2), of(3, {PARAM: {**NVME_PARAM[PARAM], "buffer_size": 1_000_000}}, model=SMALL, gpus=2)),
    ],
    "parameters-stay-in-ram": [
        Case(f"{PARAM}.max_in_cpu", of(3, {PARAM: {"device": "nvme", "nvme_path": "/data"}}, model=SMALL),
             of(3, NVME_PARAM, model=SMALL)),
    ],
    "nvme-path-missing": [Case(f"{OPTIMIZER}.nvme_path", of(3, {OPTIMIZER: {"device": "nvme"}}), of(3, NVME))],
    "nvme-path-unusable": [
        Case(f"{OPTIMIZER}.nvme_path",
             of(3, {OPTIMIZER: {"device": "nvme", "nvme_path": "/no/such/folder"}}, here=True),
             of(3, {OPTIMIZER: {"device": "nvme", "nvme_path": "/no/such/folder"}})),
        Case(f"{OPTIMIZER}.nvme_path", of(3, {OPTIMIZER: {"device": "nvme", "nvme_path": __file__}}, here=True),
             of(3, {OPTIMIZER: {"device": "nvme", "nvme_path": "/tmp"}}, here=True)),
    ],
    "aio-without-nvme": [
        Case("aio", of(2, {"aio": {"block_size": 1048576}}), of(3, {**NVME, "aio": {"block_size": 1048576}})),
    ],
    "gds-without-gpu": [
        Case("aio.use_gds", of(3, {**NVME, "aio": {"use_gds": True}}, machine=ON_CPU),
             of(3, {**NVME, "aio": {"use_gds": True}}, machine=MACHINE)),
    ],
    "buffers-too-few": [
        Case(f"{OPTIMIZER}.buffer_count", of(3, {OPTIMIZER: {**NVME[OPTIMIZER], "buffer_count": 3}}),
             of(3, NVME)),
    ],
    "pipelined-buffers-too-few": [
        Case(f"{OPTIMIZER}.buffer_count",
             of(3, {OPTIMIZER: {**NVME[OPTIMIZER], "pipeline_read": True, "pipeline_write": True}}),
             of(3, {OPTIMIZER: {**NVME[OPTIMIZER], "pipeline_read": True, "buffer_count": 8}})),
    ],
    "fast-init-no-effect": [
        Case(f"{OPTIMIZER}.fast_init", of(3, {OPTIMIZER: {**NVME[OPTIMIZER], "fast_init": True}}),
             of(3, {OPTIMIZER: {**NVME[OPTIMIZER], "fast_init": True}, **NVME_PARAM})),
    ],
    "card-too-small": [Case(f"{ZERO}.stage", of(2, model=LARGE, machine=MACHINE),
             of(2, model=SMALL, machine=MACHINE))],
    "ram-too-small": [
        Case(f"{OPTIMIZER}.device", of(2, CPU, model=LARGE, machine=MACHINE), of(2, CPU, model=LARGE,
             machine=machine(ram_bytes=400 * GIB))),
    ],
    "memlock-too-small": [
        Case(f"{PARAM}.buffer_count",
             of(3, {**NVME, **NVME_PARAM}, model=SMALL, machine=machine(memlock_bytes=8 << 20)),
             of(3, {**NVME, **NVME_PARAM}, model=SMALL, machine=MACHINE)),
    ],
    "disk-too-small": [
        Case(f"{OPTIMIZER}.nvme_path", of(3, {**NVME, **NVME_PARAM}, model=LARGE,
             machine=machine(disk_free_bytes=20 * GIB)),
             of(3, {**NVME, **NVME_PARAM}, model=SMALL, machine=machine(disk_free_bytes=20 * GIB))),
    ],
    "no-weights-saved": [
        Case(f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
             of(3, {f"{ZERO}.stage3_gather_16bit_weights_on_model_save": GONE}), of(3)),
    ],
    "best-model-without-states": [
        Case("save_only_model", of(2, arguments={"save_only_model": True, "load_best_model_at_end": True}),
             of(2, arguments={"save_only_model": True})),
    ],
    "evaluation-only": [
        Case("do_train", of(2, arguments={"do_train": False, "do_eval": True}),
             of(3, arguments={"do_train": False, "do_eval": True})),
    ],
    "gather-from-nvme-on-cpu": [
        Case(f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
             of(3, NVME_PARAM, arguments={"use_cpu": True}, arguments_file="args.yaml"),
             of(3, NVME_PARAM, arguments_file="args.yaml")),
    ],
    "resume-from-nvme": [
        Case("resume_from_checkpoint", of(3, NVME, arguments={"resume_from_checkpoint": "out/checkpoint-2"}),
             of(3, CPU, arguments={"resume_from_checkpoint": "out/checkpoint-2"})),
    ],
    "config-not-found": [
        Case("deepspeed", Subject(arguments={"deepspeed": "nowhere/ds.json"}),
             Subject(arguments={"deepspeed": __file__})),
    ],
    "deepspeed-config-in-yaml": [
        Case("deepspeed", Subject(arguments={"deepspeed": str(ROOT / "recipes" / "gpt2-on-16gb.yaml")}),
             Subject(arguments={"deepspeed": str(ROOT / "ds_configs" / "zero2.json")})),
    ],
    "batch-search-at-stage-3": [
        Case("auto_find_batch_size", of(3, arguments={"auto_find_batch_size": True}),
             of(2, arguments={"auto_find_batch_size": True})),
    ],
    "fsdp-and-deepspeed": [Case("fsdp", of(2, arguments={"fsdp": "full_shard"}), of(2, arguments={"fsdp": ""}))],
    "local-rank-ignored": [
        Case("local_rank", Subject(arguments={"local_rank": 0}), Subject(arguments={"local_rank": -1})),
    ],
    "text-for-number": [
        Case("learning_rate", Subject(arguments={"learning_rate": "1e-4"}, arguments_file="args.yaml"),
             Subject(arguments={"learning_rate": 1e-4, "optim": "adamw_torch"}, arguments_file="args.yaml")),
        Case("learning_rate",
             Subject(arguments={"learning_rate": "1e-4", "temperature": 2.0}, arguments_file="args.yaml"),
             Subject(arguments={"learning_rate": "1e-4", "dataset_text_field": "text"}, arguments_file="args.yaml")),
    ],
    "text-for-truth": [
        Case("bf16", Subject(arguments={"bf16": "false"}, arguments_file="args.json"),
             Subject(arguments={"bf16": False, "optim": "adamw_torch"}, arguments_file="args.json")),
        Case("tf32", Subject(arguments={"tf32": "no"}, arguments_file="args.json"),
             Subject(arguments={"tf32": None, "save_strategy": "no"}, arguments_file="args.json")),
    ],
}  # fmt: skip
