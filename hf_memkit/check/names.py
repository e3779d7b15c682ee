"""Optimizers and schedulers that DeepSpeed 0.19.8 knows, and the names that it removed or that people get wrong."""

from __future__ import annotations

from typing import Final

from hf_memkit.check.keys import Key, choice, number, switch, whole

__all__ = [
    "CASE_MATTERS",
    "DEEPSPEED_OPTIMIZERS",
    "OPTIMIZERS",
    "OPTIMIZER_PARAMS",
    "REMOVED",
    "REMOVED_OPTIMIZERS",
    "RENAMED",
    "SCHEDULERS",
    "TORCH_OPTIMIZERS",
    "TORCH_SCHEDULERS",
]

DEEPSPEED_OPTIMIZERS: Final = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
"""deepspeed 0.19.8: runtime/config.py 57-60. Upper or lower case."""

TORCH_OPTIMIZERS: Final = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""deepspeed 0.19.8: runtime/engine.py 1986, any class of torch.optim by its exact name."""

REMOVED_OPTIMIZERS: Final = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""In deepspeed up to 0.19.6: runtime/fp16/onebit/."""

OPTIMIZERS: Final = (*DEEPSPEED_OPTIMIZERS, *TORCH_OPTIMIZERS, *REMOVED_OPTIMIZERS)

CASE_MATTERS: Final = (*TORCH_OPTIMIZERS, *REMOVED_OPTIMIZERS)

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULERS: Final[dict[str, tuple[str, ...]]] = {
    "LRRangeTest": (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
        "last_batch_iteration",
    ),
    "OneCycle": (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
    ),
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": (
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
        "last_batch_iteration",
    ),
}  # fmt: skip
"""Scheduler → its parameters (deepspeed 0.19.8: runtime/lr_schedules.py 352, 483, 725, 814, 865)."""

TORCH_SCHEDULERS: Final = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
    "SequentialLR", "StepLR",
)  # fmt: skip
"""deepspeed 0.19.8: runtime/engine.py 1929, any class of torch.optim.lr_scheduler by its exact name."""

_ADAM: Final = {
    "lr": number(), "betas": Key("list"), "eps": number(), "weight_decay": number(), "bias_correction": switch(),
    "amsgrad": switch(), "torch_adam": switch(), "adam_w_mode": switch(), "fp32_optimizer_states": switch(),
    "foreach": switch(optional=True), "set_grad_none": switch(),
}  # fmt: skip
_ONEBIT: Final = {
    "lr": number(), "betas": Key("list"), "eps": number(), "weight_decay": number(), "bias_correction": switch(),
    "amsgrad": switch(), "eps_inside_sqrt": switch(), "max_grad_norm": number(), "cuda_aware": switch(),
    "comm_backend_name": choice("nccl", "mpi", "hccl", "compressed"), "freeze_step": whole(),
}  # fmt: skip
OPTIMIZER_PARAMS: Final = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "onebitadam": _ONEBIT,
    "onebitlamb": _ONEBIT
    | {name: number() for name in ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min")}
    | {"factor_threshold": number()},
}
"""Parameters of the optimizers whose classes take a fixed list (deepspeed 0.19.8: ops/adam/; 0.19.6:
runtime/fp16/onebit/)."""

REMOVED: Final[dict[str, str]] = {
    "nebula": "checkpoints go to local disk",
    "compression_training": "the model would train uncompressed",
    "amp": "use bf16 or fp16",
    "quantize_training": "the model would train unquantized",
    "sparse_gradients": "gradients of embeddings are reduced dense",
    "eigenvalue": "it was part of quantize_training",
    "sparse_attention": "choose the attention of the model instead",
    "elasticity": "set the batch sizes",
    "graph_harvesting": "there is no successor",
    "curriculum_learning": "it is data_efficiency.data_sampling.curriculum_learning now",
    "progressive_layer_drop": "there is no successor",
    "zero_optimization.mics_shard_size": "MiCS is gone; zero_hpz_partition_size is the nearest",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone",
    "zero_optimization.zeropp_loco_param": "zero_quantized_gradients works without it",
}
"""Keys that DeepSpeed removed and refuses (deepspeed 0.19.8: runtime/config.py 67-130) → what to know."""

RENAMED: Final[dict[str, str]] = {
    "aio.thread_count": "intra_op_parallelism",
    "activation_checkpointing.partitioned_activations": "partition_activations",
    "activation_checkpointing.num_checkpoints": "number_checkpoints",
    "activation_checkpointing.checkpoint_in_cpu": "cpu_checkpointing",
    "activation_checkpointing.contiguous_checkpointing": "contiguous_memory_optimization",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
}
"""Wrong names that people use → the name in the same section. The first is what aio's key was called before; the
second stands in DeepSpeed's own comment (runtime/activation_checkpointing/config.py 17)."""
