"""Proofs that need a DeepSpeed engine: stages, precision, ZenFlow, activation checkpointing, buffers."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import torch

from hf_memkit.checks.rules.stages import _STAGE_1_2_ONLY, _STAGE_3_ONLY
from hf_memkit.deepspeed.stages_1_2 import SHARED_BYTES
from tests.checks.case import CPU, LEAN, ZERO
from tests.checks.configs import ADAMW, ds
from tests.checks.real import optimizers, parse, reads, refusals, refused, train
from tests.checks.registry import proof

_ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 1}
_CPU_ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


def _zenflow(**more: Any) -> dict[str, Any]:
    return {**CPU, f"{ZERO}.zenflow": {**_ZENFLOW, **more}, "optimizer": _CPU_ADAM}


refusals(
    "late", lambda stage, changes: train(ds(stage, changes)),
    ("legacy-stage-1", "deprecated version of ZeRO Stage 1", 1, {f"{ZERO}.legacy_stage1": True}),
    ("gather-bucket-odd", "must be a multiple of nccl_start_alignment_factor", 2,
     {f"{ZERO}.allgather_bucket_size": 20001}),
    ("quantized-without-gpu", "not been implemented on CPU", 3, {f"{ZERO}.zero_quantized_weights": True}),
    ("parameter-type", "conflicts with the enabled precision mode", 2, {"data_types": {"param_dtype": "bf16"}}),
    ("zenflow-without-offload", "Zenflow must be used with cpu offload", 2,
     {f"{ZERO}.zenflow": {"update_interval": 2}, "optimizer": ADAMW}),
    ("zenflow-without-optimizer", "TypeError", 2, {**CPU, f"{ZERO}.zenflow": _ZENFLOW}),
    ("zenflow-offload-without-overlap", "should be used with overlap_comm", 2, _zenflow(offload=True)),
    ("zenflow-interval", "would be overwritten", 2, _zenflow(select_interval=4)),
    ("zenflow-interval", "select_interval must be a number", 2, _zenflow(select_strategy="step")),
    ("zenflow-interval", "must be greater or equal", 2, _zenflow(select_strategy="step", select_interval=1)),
)  # fmt: skip
# The argument fp16 is refused on a CPU; the ones for evaluation make Trainer agree with the config.
refusals(
    "late", lambda changes, argument: train(ds(2, changes), **{argument: True}),
    ("fp16-without-gpu", "fp16 is not supported on your device", {"fp16.enabled": True}, "fp16_full_eval"),
    ("lean-master-without-offload", "Master weights feature requires",
     {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_full_eval"),
)  # fmt: skip


@proof("wrong-stage", fails="silent")
def wrong_stage() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12

    names = {
        "stage3_module_granularity_threshold": "zero_module_granularity_threshold",
        "stage3_gather_16bit_weights_on_model_save": "gather_16bit",
        "zero_quantized_gradients": "all2all_process_group",
    }
    for name in _STAGE_3_ONLY:
        assert reads(Stage12, names.get(name, name.removeprefix("stage3_"))) == 0, name
    for name in _STAGE_1_2_ONLY:
        assert name not in inspect.signature(Stage3.__init__).parameters, name
    ignored = {f"{ZERO}.stage3_max_live_parameters": 1, f"{ZERO}.sub_group_size": 1}
    assert optimizers(train(ds(2, ignored)))[0] == "DeepSpeedZeroOptimizer"


@proof("gradient-norm-off", fails="late")
def gradient_norm_off() -> None:
    off = {f"{ZERO}.compute_grad_norm": False}
    refused("supported only with ZeRO Stage 1 or 2", lambda: parse(ds(3, off)))
    refused("requires gradient_clipping=0", lambda: train(ds(2, off)))
    refused("does not support optimizer offload", lambda: train(ds(2, {**off, **CPU}), max_grad_norm=0.0))
    train(ds(2, off), max_grad_norm=0.0)


@proof("contiguous-forced", fails="silent")
def contiguous_forced() -> None:
    done = train(ds(2, {**CPU, f"{ZERO}.contiguous_gradients": False}))
    assert done.model_wrapped.optimizer.contiguous_gradients is True


@proof("quantized-gradients-bf16", fails="unshown")
def quantized_gradients_bf16() -> None:
    """The kernel is CUDA's: its source has one type of input, and nothing on the way asks for the type or converts."""
    import deepspeed
    from deepspeed.runtime.comm import coalesced_collectives

    source = (Path(deepspeed.__file__).parent / "ops/csrc/quantization/pt_binding.cpp").read_text()
    kernel = source.split(" ds_swizzle_quant(", 1)[1].split("\n}\n", 1)[0]
    assert "(__half*)input_vals.data_ptr()" in kernel
    assert not re.search("scalar_type|TORCH_CHECK|input_vals.to", kernel)
    caller = inspect.getsource(coalesced_collectives).split("def all_to_all_quant_reduce", 1)[1].split("\ndef ", 1)[0]
    assert "swizzle_quant(tensor," in caller and not re.search(r"\.to\(|\.half\(|dtype", caller)
    engine = train(ds(3, {"bf16.enabled": True}), bf16_full_eval=True).model_wrapped
    assert engine.communication_data_type is torch.bfloat16
    assert engine.optimizer.dtype is torch.bfloat16  # so that nothing is converted before the call


@proof("fp32-accumulation", fails="silent")
def fp32_accumulation() -> None:
    bf16 = {"bf16.enabled": True, "data_types": {"grad_accum_dtype": "fp32"}}
    assert optimizers(train(ds(1, bf16), bf16_full_eval=True))[0] == "BF16_Optimizer"
    refused("unsupported mix", lambda: train(ds(0, bf16), bf16_full_eval=True))
    engine = train(ds(3, bf16), bf16_full_eval=True).model_wrapped
    assert engine.optimizer.grad_partitions_flat_buffer.dtype is torch.float32


@proof("lean-offload-without-optimizer", fails="late")
def lean_offload_without_optimizer() -> None:
    refused("fp32_optimizer_states=False", lambda: train(ds(2, {**LEAN, **CPU}), bf16_full_eval=True))
    done = train(ds(2, {**LEAN, **CPU, "optimizer": _CPU_ADAM}), bf16_full_eval=True)
    states = done.model_wrapped.basic_optimizer.state.values()
    assert all(state["exp_avg"].dtype is torch.bfloat16 for state in states)


@proof("lean-states-without-bf16", fails="silent")
def lean_states_without_bf16() -> None:
    lean = {"bf16": {**LEAN["bf16"], "enabled": False}}
    done = train(ds(2, lean))
    engine = done.model_wrapped
    assert next(engine.module.parameters()).dtype is torch.float32
    assert engine.optimizer.single_partition_of_fp32_groups[0].dtype is torch.bfloat16


@proof("activation-section-unread", fails="silent")
def activation_section_unread() -> None:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    section = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    train(ds(2, section))
    assert checkpointing.PARTITION_ACTIVATIONS is False and checkpointing.CPU_CHECKPOINT is False


@proof("states-key-without-offload", fails="silent")
def states_key_without_offload() -> None:
    section = {**ADAMW, "params": {**ADAMW["params"], "fp32_optimizer_states": False}}
    engine = train(ds(2, {"optimizer": section})).model_wrapped
    assert all(state["exp_avg"].dtype is torch.float32 for state in engine.basic_optimizer.state.values())


@proof("bucket-against-card", fails="unshown")
def bucket_against_card() -> None:
    """The buffers have the size that the config says, and there are two with overlap_comm."""
    for overlap, expected in ((False, 1), (True, 2)):
        engine = train(ds(2, {f"{ZERO}.overlap_comm": overlap, f"{ZERO}.reduce_bucket_size": 12346})).model_wrapped
        seen: list[list[int]] = []
        engine.optimizer.ipg_buckets[torch.float32].buffer.clear()
        engine.optimizer.setup_buckets()
        seen.append([buffer.numel() for buffer in engine.optimizer.ipg_buckets[torch.float32].buffer])
        assert seen == [[12346] * expected], seen


@proof("zenflow-accumulation", fails="silent")
def zenflow_accumulation() -> None:
    assert train(ds(2, _zenflow())).model_wrapped.gradient_accumulation_steps() == 2


@proof("zenflow-shared-memory", fails="unshown")
def zenflow_shared_memory() -> None:
    from deepspeed.runtime.zenflow.zenflow_utils import start_optimizer_process

    source = inspect.getsource(start_optimizer_process)
    shared = re.findall(r"(\S+)\.data\.share_memory_\(\)", source)
    assert shared == ["param", "param.stale_param", "param.overlap_grad[0]", "param.overlap_grad[1]"]
    cores = os.sched_getaffinity(0)
    try:
        optimizer = train(ds(2, _zenflow(overlap_step=True)), max_steps=4).model_wrapped.optimizer
    finally:
        os.sched_setaffinity(0, cores)  # ZenFlow leaves this process a part of them
    for part in optimizer.single_partition_of_fp32_groups:
        held = [part.data, part.stale_param.data, *(buffer.data for buffer in part.overlap_grad)]
        assert all(tensor.is_shared() for tensor in held)
        assert sum(tensor.nbytes for tensor in held) == SHARED_BYTES * part.numel()
    assert "/dev/shm/torch_" in Path("/proc/self/maps").read_text()
    optimizer.process.terminate()
