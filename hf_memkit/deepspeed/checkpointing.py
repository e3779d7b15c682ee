"""ZeRO-R's activation checkpointing for transformers models, through `deepspeed.checkpointing`.

With Trainer nothing reads the section `activation_checkpointing` of DeepSpeed's JSON: it takes effect only in models
that call `deepspeed.checkpointing.checkpoint`. Here a transformers model's layers are made to call it.

Plain checkpointing keeps the input of each layer on each GPU (Rajbhandari et al. 2020, arXiv 1910.02054, 6.1). ZeRO-R
costs an all-gather or a copy a layer, and the reentrant form of checkpointing. Not for encoder-decoder models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bound
from typing import TYPE_CHECKING, Any

from hf_memkit.common.errors import RunError, SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def zero_r_checkpointing(
    model: PreTrainedModel,
    *,
    partition: bool = False,
    contiguous: bool = False,
    cpu: bool = False,
    tensor_parallel: Any = None,
) -> Callable[[], None]:
    """Let DeepSpeed keep the checkpoints of this model's layers; returns a function that undoes it.

    Activation checkpointing must be on: call this in a callback's `on_train_begin`, or after
    `model.gradient_checkpointing_enable()`, with DeepSpeed's process group initialized. The setting applies to the
    whole process.

    Args:
        model: the model whose layers are checkpointed.
        partition: each tensor-parallel rank keeps its share of a checkpoint (the paper's P_a).
        contiguous: checkpoints are copied to permanent buffers, against fragmentation (M_D); needs `partition`.
        cpu: checkpoints are kept in RAM (P_a+cpu).
        tensor_parallel: object with the tensor-parallel group, such as `engine.mpu` under AutoTP.

    Raises:
        SettingError: this saves nothing here, or does not work here; names the switch that does.
    """
    import deepspeed
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    if not layers:
        raise SettingError(
            "activation checkpointing is off. Set activation_checkpointing=True in TrainingArguments, and call this "
            "after training has started"
        )
    _refuse_useless_switches(partition=partition, contiguous=contiguous, cpu=cpu, tensor_parallel=tensor_parallel)
    deepspeed.checkpointing.configure(
        tensor_parallel,
        partition_activations=partition,
        contiguous_checkpointing=contiguous,
        num_checkpoints=len(layers),
        checkpoint_in_cpu=cpu,
    )
    functions = [layer._gradient_checkpointing_func for layer in layers]
    for layer in layers:
        layer._gradient_checkpointing_func = bound(_checkpoint, deepspeed.checkpointing.checkpoint)

    def undo() -> None:
        for layer, function in zip(layers, functions, strict=True):
            layer._gradient_checkpointing_func = function
        deepspeed.checkpointing.reset()
        deepspeed.checkpointing.configure(None)

    return undo


def _refuse_useless_switches(*, partition: bool, contiguous: bool, cpu: bool, tensor_parallel: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    if not (partition or contiguous or cpu):
        raise SettingError(
            "ZeRO-R checkpointing needs partition, contiguous or cpu; without them activation_checkpointing=True in "
            "TrainingArguments does the same"
        )
    ranks = 1 if tensor_parallel is None else int(tensor_parallel.get_tensor_model_parallel_world_size())
    if partition and ranks == 1:
        raise SettingError(
            "partition=True splits checkpoints between tensor-parallel ranks, and this job has none: it would save "
            'nothing. Set activation_checkpointing_kwargs={"offload": True} in TrainingArguments to keep them in RAM'
        )
    if contiguous and not partition:
        raise SettingError("contiguous=True: DeepSpeed supports it only with partition=True. Set both")
    if cpu and not partition and get_accelerator().device_name() == "cpu":
        raise SettingError(
            "cpu=True keeps checkpoints in RAM; on a CPU they already are, and DeepSpeed fails. Omit it on this "
            "machine"
        )


def _checkpoint(checkpoint: Callable[..., Any], layer: bound[Any], hidden: Any, *others: Any) -> Any:
    """Checkpoint a layer with the hidden state as its only argument. DeepSpeed treats every floating-point argument as
    an activation, and would split and empty masks and position embeddings too."""
    import torch

    for other in (*others, *layer.keywords.values()):
        if isinstance(other, torch.Tensor) and other.requires_grad:
            raise RunError(
                "ZeRO-R checkpointing: a layer gets a second input that needs gradients (an encoder's output), which "
                "the reentrant form of checkpointing cannot do; use activation_checkpointing=True alone"
            )
    if not hidden.requires_grad and torch.is_grad_enabled():
        # Frozen embeddings: without an input that needs gradients the reentrant form computes none at all.
        hidden = hidden.detach().requires_grad_()
    return checkpoint(lambda inner: layer(inner, *others), hidden)
