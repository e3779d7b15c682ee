"""What DeepSpeed 0.19.8 knows of its config and none of its classes says: sections that it reads key by key, bounds,
parameters of optimizers, and the names that it removed or that people get wrong."""

from __future__ import annotations

from typing import Final

from hf_memkit.checks.keys import FREE, Key, choice, number, switch, text, whole

__all__ = [
    "BOUNDS",
    "CASE_MATTERS",
    "OPTIMIZER_PARAMS",
    "REMOVED",
    "REMOVED_OPTIMIZERS",
    "RENAMED",
    "TORCH_OPTIMIZERS",
    "TORCH_SCHEDULERS",
    "UNTYPED",
]

_SECTION: Final = Key("section")
_DTYPE: Final = choice("fp16", "bf16", "fp32", "float16", "bfloat16", "float32", "half", "float", optional=True)

UNTYPED: Final[dict[str, dict[str, Key]]] = {
    # runtime/config.py 485-590
    "": {
        "train_batch_size": whole(1),
        "train_micro_batch_size_per_gpu": whole(1),
        "gradient_accumulation_steps": whole(1),
        "managed_gradient_accumulation": switch(),
        "gradient_clipping": number(),
        "steps_per_print": Key("number", above=0, optional=True),
        "dump_state": switch(),
        "disable_python_gc": switch(),
        "disable_allgather": switch(),
        "communication_data_type": choice("fp16", "bf16", "fp32", optional=True),
        "seq_parallel_communication_data_type": choice("fp16", "bf16", "fp32", optional=True),
        "prescale_gradients": switch(),
        "gradient_predivide_factor": Key("number", above=0),
        "gradient_allreduce_op": choice("mean", "sum"),
        "zero_allow_untested_optimizer": switch(),
        "zero_force_ds_cpu_optimizer": switch(),
        "wall_clock_breakdown": switch(),
        "memory_breakdown": switch(),
        "vocabulary_size": whole(1, optional=True),
        "dataloader_drop_last": switch(),
        "log_level": text(),
        "use_data_before_expert_parallelism": switch(),
        "sequence_parallel_size": whole(1),
        "datastates_ckpt": FREE,
        "allgather_size": whole(),
        **dict.fromkeys(
            (
                "zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler", "aio",
                "activation_checkpointing", "data_types", "checkpoint", "flops_profiler", "comms_logger",
                "tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "pipeline", "data_efficiency",
                "hybrid_engine", "weight_quantization", "compile", "timers", "tensor_parallel", "expert_parallel",
                "inference", "msamp",
            ),
            _SECTION,
        ),
    },
    # runtime/config.py 179-205, 288-314, 325-337, 556-570
    "torch_autocast": {
        "enabled": switch(), "dtype": _DTYPE, "lower_precision_safe_modules": Key("list", optional=True),
    },
    "optimizer": {"type": text(), "params": _SECTION, "legacy_fusion": switch()},
    "scheduler": {"type": text(), "params": _SECTION},
    "data_types": {
        "grad_accum_dtype": _DTYPE, "param_dtype": _DTYPE, "buffer_dtype": _DTYPE, "keep_in_fp32_modules": FREE,
    },
    # runtime/config.py 545-555, runtime/model_checkpointing/config.py 60
    "checkpoint": {
        "tag_validation": choice("warn", "ignore", "fail"), "load_universal": switch(),
        "use_node_local_storage": switch(), "parallel_write": _SECTION, "checkpoint_serialization": switch(),
        "writer": Key("section", optional=True),
    },
    # profiling/config.py 29-50
    "flops_profiler": {
        "enabled": switch(), "recompute_fwd_factor": number(), "profile_step": whole(),
        "module_depth": Key("whole", least=-1), "top_modules": whole(1), "detailed": switch(),
        "output_file": text(optional=True),
    },
    # utils/config.py 27
    "timers": {"throughput": _SECTION},
}  # fmt: skip
"""Section → its keys, all in deepspeed 0.19.8. Unknown ones are ignored there."""

BOUNDS: Final[dict[str, Key]] = {
    "zero_optimization.stage3_module_granularity_threshold": whole(),
    # None is the default; lists and one name are both taken (runtime/zero/leaf_module_config.py 21)
    "zero_optimization.leaf_module": Key("section", optional=True),
    **{f"zero_optimization.leaf_module.{name}": FREE for name in ("classes", "names", "name_suffixes")},
    # runtime/zenflow/zenflow_config.py 12-80
    "zero_optimization.zenflow.select_strategy": choice("auto", "step", "epoch"),
    "zero_optimization.zenflow.select_interval": whole(1),
    "zero_optimization.zenflow.update_interval": whole(1),
    "zero_optimization.zenflow.full_warm_up_rounds": whole(),
    "zero_optimization.zenflow.steps_per_epoch": whole(optional=True),
    # runtime/precision_config.py 101
    "fp16.loss_scale": number(),
    "fp16.initial_scale_power": whole(),
    "fp16.loss_scale_window": whole(1),
    "fp16.hysteresis": whole(),
    "fp16.min_loss_scale": whole(1),
    "compile.free_activation_threshold": whole(),
    # runtime/swap_tensor/aio_config.py 20-43
    "aio.block_size": whole(1),
    "aio.queue_depth": whole(1),
    "aio.intra_op_parallelism": whole(1),
    "activation_checkpointing.number_checkpoints": whole(1, optional=True),
}
"""Keys of which DeepSpeed's class says less than DeepSpeed can work with."""

TORCH_OPTIMIZERS: Final = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""deepspeed 0.19.8: runtime/engine.py 1986, any class of torch.optim by its exact name."""

REMOVED_OPTIMIZERS: Final = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""In deepspeed up to 0.19.6: runtime/fp16/onebit/."""

CASE_MATTERS: Final = (*TORCH_OPTIMIZERS, *REMOVED_OPTIMIZERS)


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
