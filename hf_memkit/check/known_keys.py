"""Every key that DeepSpeed 0.19.8 knows, by section. tests/check compares this with the installed DeepSpeed."""

from __future__ import annotations

from typing import Final

from hf_memkit.check.keys import FREE, Key, Section, choice, number, switch, text, whole

__all__ = ["SECTIONS"]

_SECTION = Key("section")
_DTYPE = choice("fp16", "bf16", "fp32", "float16", "bfloat16", "float32", "half", "float", optional=True)

_MONITOR = {"enabled": switch(), "output_path": text(), "job_name": text()}

SECTIONS: Final[dict[str, Section]] = {
    "": Section(
        {
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
        }
        | dict.fromkeys(
            (
                "zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler", "aio",
                "activation_checkpointing", "data_types", "checkpoint", "flops_profiler", "comms_logger",
                "tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "pipeline", "data_efficiency",
                "hybrid_engine",
                "weight_quantization", "compile", "timers", "tensor_parallel", "expert_parallel", "inference", "msamp",
            ),
            _SECTION,
        ),
        strict=False,
        source="deepspeed 0.19.8: runtime/config.py 485-590",
    ),
    "zero_optimization": Section(
        {
            "stage": whole(0, most=3),
            "contiguous_gradients": switch(),
            "reduce_scatter": switch(),
            "reduce_bucket_size": Key("whole", above=0),
            "use_multi_rank_bucket_allreduce": switch(),
            "allgather_partitions": switch(),
            "allgather_bucket_size": whole(),
            "overlap_comm": switch(optional=True),
            "compute_grad_norm": switch(),
            "load_from_fp32_weights": switch(),
            "elastic_checkpoint": switch(),
            "offload_param": Key("section", optional=True),
            "offload_optimizer": Key("section", optional=True),
            "zenflow": Key("section", optional=True),
            "sub_group_size": whole(),
            "cpu_offload": switch(optional=True),
            "cpu_offload_param": switch(optional=True),
            "cpu_offload_use_pin_memory": switch(optional=True),
            "stage3_prefetch_bucket_size": whole(),
            "stage3_param_persistence_threshold": whole(),
            "stage3_model_persistence_threshold": whole(),
            "stage3_max_live_parameters": whole(),
            "stage3_max_reuse_distance": whole(),
            "stage3_gather_16bit_weights_on_model_save": switch(),
            "stage3_gather_fp16_weights_on_model_save": switch(),
            "stage3_module_granularity_threshold": whole(),
            "stage3_use_all_reduce_for_fetch_params": switch(),
            "stage3_allgather_sequential": switch(),
            "ignore_unused_parameters": switch(),
            "legacy_stage1": switch(),
            "round_robin_gradients": switch(),
            "parameter_alignment": switch(),
            "zero_hpz_partition_size": whole(),
            "zero_quantized_weights": switch(),
            "zero_quantized_nontrainable_weights": switch(),
            "zero_quantized_gradients": switch(),
            "memory_efficient_linear": switch(),
            "pipeline_loading_checkpoint": switch(),
            "override_module_apply": switch(),
            "log_trace_cache_warnings": switch(),
            "enable_sanity_checks": switch(),
            "save_muon_momentum_buffer_in_memory": switch(),
            "leaf_module": Key("section", optional=True),
        },
        strict=True,
        source="deepspeed 0.19.8: runtime/zero/config.py 83-380",
    ),
    "zero_optimization.offload_optimizer": Section(
        {
            "device": choice("none", "cpu", "nvme"),
            "nvme_path": text(optional=True),
            "buffer_count": whole(),
            "pin_memory": switch(),
            "pipeline_read": switch(),
            "pipeline_write": switch(),
            "fast_init": switch(),
            "ratio": number(most=1),
            "super_offload": switch(),
            "cpuadam_cores_perc": number(most=1),
        },
        strict=True,
        source="deepspeed 0.19.8: runtime/zero/offload_config.py 55-115",
    ),
    "zero_optimization.offload_param": Section(
        {
            "device": choice("none", "cpu", "nvme"),
            "nvme_path": text(optional=True),
            "buffer_count": whole(),
            "buffer_size": whole(),
            "max_in_cpu": whole(),
            "pin_memory": switch(),
        },
        strict=True,
        source="deepspeed 0.19.8: runtime/zero/offload_config.py 21-53",
    ),
    "zero_optimization.zenflow": Section(
        {
            "topk_ratio": Key("number", above=0, below=1),
            "select_strategy": choice("auto", "step", "epoch"),
            "select_interval": whole(1),
            "update_interval": whole(1),
            "overlap_step": switch(),
            "offload": switch(),
            "auto_ratio": number(most=1),
            "full_warm_up_rounds": whole(),
            "pt_reserved_cores_perc": number(most=1),
            "steps_per_epoch": whole(optional=True),
        },
        strict=True,
        source="deepspeed 0.19.8: runtime/zenflow/zenflow_config.py 12-80",
    ),
    "zero_optimization.leaf_module": Section(
        {"classes": FREE, "names": FREE, "name_suffixes": FREE},
        strict=True,
        source="deepspeed 0.19.8: runtime/zero/leaf_module_config.py 21",
    ),
    "bf16": Section(
        {
            "enabled": switch(),
            "immediate_grad_update": switch(),
            "check_grad_overflow": switch(),
            "bf16_master_weights_and_grads": switch(),
            "bf16_optimizer_states": switch(),
        },
        strict=True,
        source="deepspeed 0.19.8: runtime/precision_config.py 41",
    ),
    "fp16": Section(
        {
            "enabled": switch(),
            "auto_cast": switch(),
            "loss_scale": number(),
            "initial_scale_power": whole(),
            "loss_scale_window": whole(1),
            "hysteresis": whole(),
            "consecutive_hysteresis": switch(),
            "min_loss_scale": whole(1),
            "fp16_master_weights_and_grads": switch(),
        },
        strict=True,
        source="deepspeed 0.19.8: runtime/precision_config.py 101",
    ),
    "torch_autocast": Section(
        {"enabled": switch(), "dtype": _DTYPE, "lower_precision_safe_modules": Key("list", optional=True)},
        strict=False,
        source="deepspeed 0.19.8: runtime/config.py 179-205",
    ),
    "aio": Section(
        {
            "block_size": whole(1),
            "queue_depth": whole(1),
            "intra_op_parallelism": whole(1),
            "single_submit": switch(),
            "overlap_events": switch(),
            "use_gds": switch(),
        },
        strict=False,
        source="deepspeed 0.19.8: runtime/swap_tensor/aio_config.py 20-43",
    ),
    "activation_checkpointing": Section(
        {
            "partition_activations": switch(),
            "number_checkpoints": whole(1, optional=True),
            "contiguous_memory_optimization": switch(),
            "synchronize_checkpoint_boundary": switch(),
            "profile": switch(),
            "cpu_checkpointing": switch(),
        },
        strict=False,
        source="deepspeed 0.19.8: runtime/activation_checkpointing/config.py 76-98",
    ),
    "optimizer": Section(
        {"type": text(), "params": _SECTION, "legacy_fusion": switch()},
        strict=False,
        source="deepspeed 0.19.8: runtime/config.py 288-314",
    ),
    "scheduler": Section(
        {"type": text(), "params": _SECTION},
        strict=False,
        source="deepspeed 0.19.8: runtime/config.py 325-337",
    ),
    "data_types": Section(
        {
            "grad_accum_dtype": _DTYPE,
            "param_dtype": _DTYPE,
            "buffer_dtype": _DTYPE,
            "keep_in_fp32_modules": FREE,
        },
        strict=False,
        source="deepspeed 0.19.8: runtime/config.py 556-570",
    ),
    "checkpoint": Section(
        {
            "tag_validation": choice("warn", "ignore", "fail"),
            "load_universal": switch(),
            "use_node_local_storage": switch(),
            "parallel_write": _SECTION,
            "checkpoint_serialization": switch(),
            "writer": Key("section", optional=True),
        },
        strict=False,
        source="deepspeed 0.19.8: runtime/config.py 545-555, runtime/model_checkpointing/config.py 60",
    ),
    "flops_profiler": Section(
        {
            "enabled": switch(),
            "recompute_fwd_factor": number(),
            "profile_step": whole(),
            "module_depth": Key("whole", least=-1),
            "top_modules": whole(1),
            "detailed": switch(),
            "output_file": text(optional=True),
        },
        strict=False,
        source="deepspeed 0.19.8: profiling/config.py 29-50",
    ),
    "comms_logger": Section(
        {"enabled": switch(), "prof_all": switch(), "prof_ops": Key("list"), "verbose": switch(), "debug": switch()},
        strict=True,
        source="deepspeed 0.19.8: comm/config.py 10",
    ),
    "tensorboard": Section(_MONITOR, strict=True, source="deepspeed 0.19.8: monitor/config.py 17"),
    "csv_monitor": Section(_MONITOR, strict=True, source="deepspeed 0.19.8: monitor/config.py 53"),
    "wandb": Section(
        {"enabled": switch(), "group": text(optional=True), "team": text(optional=True), "project": text()},
        strict=True,
        source="deepspeed 0.19.8: monitor/config.py 35",
    ),
    "timers": Section({"throughput": _SECTION}, strict=False, source="deepspeed 0.19.8: utils/config.py 27"),
    "timers.throughput": Section(
        {"enabled": switch(), "synchronized": switch()}, strict=True, source="deepspeed 0.19.8: utils/config.py 35"
    ),
    "compile": Section(
        {
            "free_activation_threshold": whole(),
            "passes": Key("list", optional=True),
        }
        | {
            name: switch()
            for name in (
                "deepcompile", "autoep_non_moe", "free_activation", "offload_activation",
                "offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory",
                "debug_log",
                "offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
                "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors",
            )
        },
        strict=True,
        source="deepspeed 0.19.8: compile/config.py 12-80",
    ),
}  # fmt: skip
"""Sections whose keys are checked, by dotted path. What stands in another one is not looked at."""
