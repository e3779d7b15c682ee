"""Cases of the rules about keys, values, Trainer and optimizers: see `cases.py`."""

from __future__ import annotations

import math

from hf_memkit.checks import Subject
from tests.checks.case import CPU, NVME, OPTIMIZER, ZERO, Case, of
from tests.checks.configs import ADAMW, GONE

CASES: dict[str, list[Case]] = {
    "removed-key": [
        Case("elasticity", of(2, {"elasticity": {"enabled": True}}), of(2)),
        Case(f"{ZERO}.mics_shard_size", of(3, {f"{ZERO}.mics_shard_size": 8}), of(3)),
    ],
    "rejected-key": [
        Case(f"{ZERO}.overlap_com", of(2, {f"{ZERO}.overlap_com": True}), of(2, {f"{ZERO}.overlap_comm": True})),
        Case("bf16.enable", of(2, {"bf16.enable": True}), of(2)),
        Case("optimizer.params.learning_rate", of(2, {"optimizer": {**ADAMW, "params": {"learning_rate": 1e-4}}}),
             of(2, {"optimizer": ADAMW})),
    ],
    "unknown-key": [
        Case("gradient_cliping", of(2, {"gradient_cliping": 1.0}), of(2)),
        Case("aio.queue_dept", of(3, {**NVME, "aio": {"queue_dept": 8}}),
             of(3, {**NVME, "aio": {"queue_depth": 8}})),
        Case("activation_checkpointing.partition_activation",
             of(2, {"activation_checkpointing": {"partition_activation": True}}), of(2, {"_comment": "mine"})),
    ],
    "renamed-key": [Case("aio.thread_count", of(3, {**NVME, "aio": {"thread_count": 2}}), of(3, NVME))],
    "misplaced-key": [
        Case(f"{ZERO}.aio", of(3, {**NVME, f"{ZERO}.aio": {"block_size": 1048576}}), of(3, NVME)),
        Case("stage3_max_live_parameters", of(3, {"stage3_max_live_parameters": 1}), of(3)),
        Case("bf16.loss_scale", of(2, {"bf16": {"enabled": True, "loss_scale": 0}}), of(2)),
        Case(f"{OPTIMIZER}.buffer_size", of(3, {OPTIMIZER: {**NVME[OPTIMIZER], "buffer_size": 1}}), of(3, NVME)),
    ],
    "deprecated-key": [
        Case(f"{ZERO}.cpu_offload", of(2, {f"{ZERO}.cpu_offload": True}), of(2, CPU)),
        Case("bfloat16", of(2, {"bf16": GONE, "bfloat16": {"enabled": True}}), of(2)),
    ],
    "duplicate-key": [Case(f"{ZERO}.stage", of(2, duplicates=(f"{ZERO}.stage",)), of(2)),
                      Case("bf16", Subject(arguments={"bf16": True}, duplicate_arguments=("bf16",)),
                           Subject(arguments={"bf16": True}))],
    "auto-not-filled": [
        Case(f"{ZERO}.allgather_bucket_size", of(2, {f"{ZERO}.allgather_bucket_size": "auto"}),
             of(2, {f"{ZERO}.reduce_bucket_size": "auto"})),
        Case(f"{ZERO}.stage", of(2, {f"{ZERO}.stage": "auto"}), of(2)),
    ],
    "wrong-type": [
        Case(f"{ZERO}.reduce_bucket_size", of(2, {f"{ZERO}.reduce_bucket_size": "5e8"}),
             of(2, {f"{ZERO}.reduce_bucket_size": 5e7})),
        Case(f"{ZERO}.overlap_comm", of(2, {f"{ZERO}.overlap_comm": "true"}),
             of(2, {f"{ZERO}.overlap_comm": None})),
        Case("gradient_clipping", of(2, {"gradient_clipping": "1.0"}), of(2, {"steps_per_print": math.inf})),
        Case("memory_breakdown", of(2, {"memory_breakdown": {"enabled": False}}),
             of(2, {"activation_checkpointing": {"number_checkpoints": False}})),
        Case(f"{ZERO}.offload_optimizer", of(2, {OPTIMIZER: "cpu"}), of(2, {OPTIMIZER: None})),
    ],
    "out-of-range": [
        Case(f"{ZERO}.stage", of(2, {f"{ZERO}.stage": 4}), of(3)),
        Case(f"{ZERO}.reduce_bucket_size", of(2, {f"{ZERO}.reduce_bucket_size": 0}), of(2)),
        Case(f"{OPTIMIZER}.device", of(2, {OPTIMIZER: {"device": "gpu"}}), of(2, CPU)),
    ],
    "unknown-optimizer": [
        Case("optimizer.type", of(2, {"optimizer": {"type": "AdamWW"}}), of(2, {"optimizer": {"type": "RMSprop"}})),
    ],
    "unknown-scheduler": [
        Case("scheduler.type", of(2, {"scheduler": {"type": "WarmUpLR"}}), of(2, {"scheduler": {"type": "StepLR"}})),
    ],
    "trainer-mismatch": [
        Case("gradient_accumulation_steps", of(2, {"gradient_accumulation_steps": 1},
             arguments={"gradient_accumulation_steps": 4}), of(2, {"gradient_accumulation_steps": 1})),
        Case("bf16.enabled", of(2, {"bf16.enabled": True}), of(2, {"bf16.enabled": True}, arguments={"bf16": True})),
        Case("optimizer.params.betas", of(2, {"optimizer": {**ADAMW, "params": {"betas": [0.9, 0.95]}}}),
             of(2, {"optimizer": {**ADAMW, "params": {"betas": [0.9, 0.999]}}})),
    ],
    "schedule-mismatch": [
        Case("scheduler.params.total_num_steps",
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
                arguments={"max_steps": 8}),
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})),
        Case("scheduler.params.warmup_num_steps",
             of(2, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}),
             of(2, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}})),
        Case("scheduler.params.total_num_steps",
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}}},
                arguments={"num_train_epochs": 3}),
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 8}}},
                arguments={"max_steps": 8})),
        Case("scheduler.params.warmup_num_steps",
             of(2, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}},
                arguments={"warmup_steps": 0.1}),
             of(2, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
                arguments={"warmup_steps": 0.1, "max_steps": 95})),
    ],
    "learning-rate-missing": [
        Case("optimizer.params.lr", of(2, {"optimizer": {"type": "AdamW"}}), of(2, {"optimizer": ADAMW})),
        Case("optimizer.params.lr", of(2, {"optimizer": {"type": "Adam", "params": {"eps": 1e-8}}}, arguments=None),
             of(2, {"optimizer": {"type": "AdamW"},
                    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}})),
    ],
    "optimizer-params-missing": [
        Case("optimizer.params.weight_decay",
             of(2, {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, arguments={"weight_decay": 0.1}),
             of(2, {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, arguments={"weight_decay": 0.0})),
        Case("optimizer.params.betas", of(2, {"optimizer": {"type": "AdamW"}}, arguments={"adam_beta2": 0.95}),
             of(2, {"optimizer": ADAMW}, arguments={"adam_beta2": 0.95})),
        Case("optimizer.params.eps", of(2, {"optimizer": {"type": "Adam"}}, arguments={"adam_epsilon": 1e-6}),
             of(2, {"optimizer": {"type": "SGD"}}, arguments={"adam_epsilon": 1e-6})),
    ],
    "scheduler-params-missing": [
        Case("scheduler.params.total_num_steps",
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}}),
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})),
        Case("scheduler.params.cycle_max_lr",
             of(2, {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}}),
             of(2, {"scheduler": {"type": "WarmupLR"}})),
    ],
    "hard-coded": [
        Case("scheduler.params.total_num_steps",
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 900}}}, arguments=None),
             of(2, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, arguments=None)),
        Case("gradient_accumulation_steps", of(2, {"gradient_accumulation_steps": 1}, arguments=None),
             of(2, arguments=None)),
        Case("fp16.enabled", of(2, {"fp16.enabled": True}, arguments=None), of(2, {"fp16.enabled": False},
             arguments=None)),
    ],
    "clipping-missing": [
        Case("gradient_clipping", of(2, {"gradient_clipping": GONE}, arguments={"max_grad_norm": 0.3}), of(2)),
    ],
    "scheduler-twice": [
        Case("scheduler.type", of(2, {"scheduler": {"type": "WarmupLR"}}, arguments={"lr_scheduler_type": "cosine"}),
             of(2, {"scheduler": {"type": "WarmupDecayLR"}}, arguments={"lr_scheduler_type": "linear"})),
    ],
    "zero-section-missing": [Case(ZERO, of(2, {ZERO: GONE}), of(0))],
    "batch-missing": [
        Case("train_micro_batch_size_per_gpu",
             of(2, {"train_batch_size": GONE, "train_micro_batch_size_per_gpu": GONE}), of(2)),
    ],
    "accumulation-missing": [
        Case("gradient_accumulation_steps", of(2, {"gradient_accumulation_steps": GONE},
             arguments={"gradient_accumulation_steps": 2}), of(2, {"gradient_accumulation_steps": GONE})),
    ],
    "batch-product": [
        Case("train_batch_size",
             of(2, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": GONE,
                    "gradient_accumulation_steps": GONE},
                arguments={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}),
             of(2, {"train_batch_size": 32}, arguments={"per_device_train_batch_size": 2,
                                                        "gradient_accumulation_steps": 8})),
        Case("train_batch_size", of(2, {"train_batch_size": 30}, arguments={"per_device_train_batch_size": 4}, gpus=2),
             of(2, {"train_batch_size": 8}, arguments={"per_device_train_batch_size": 4}, gpus=2)),
    ],
    "optimizer-replaced": [
        Case("optim", of(2, CPU, arguments={"optim": "adamw_bnb_8bit"}), of(2, CPU)),
        Case("optim", of(2, CPU, arguments={"optim": "adafactor"}), of(2, arguments={"optim": "adafactor"})),
        Case("optim", of(2, CPU, arguments={"optim": "adagrad"}),
             of(2, {**CPU, "zero_force_ds_cpu_optimizer": False}, arguments={"optim": "adagrad"})),
    ],
    "optimizer-twice": [
        Case("optim", of(2, {"optimizer": ADAMW}, arguments={"optim": "adamw_bnb_8bit"}),
             of(2, {"optimizer": ADAMW}, arguments={"optim": "adamw_torch"})),
    ],
    "removed-optimizer": [
        Case("optimizer.type", of(0, {"optimizer": {"type": "OneBitAdam"}}, deepspeed="0.19.8"),
             of(0, {"optimizer": {"type": "OneBitAdam"}}, deepspeed="0.19.6")),
    ],
    "clipping-in-optimizer": [
        Case("optimizer.params.max_grad_norm", of(2, {"optimizer": {**ADAMW, "params": {"max_grad_norm": 1.0}}}),
             of(2, {"optimizer": ADAMW})),
    ],
    "states-key-without-offload": [
        Case("optimizer.params.fp32_optimizer_states",
             of(2, {"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}),
             of(2, {**CPU, "optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}})),
    ],
}  # fmt: skip
