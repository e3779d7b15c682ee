"""Lets torch's FSDP2 (`fully_shard`) run on fake tensors, as the first of several ranks.

FSDP2 shards, gathers and reduces as it is; only the communication does nothing (`other_ranks.py`). It resizes storages
in place and allocates on several CUDA streams, both of which the tracer records. The private names of torch that this
needs are in this module. Files that it names are torch 2.13's in distributed/fsdp/_fully_shard, or accelerate 1.15's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hf_memkit.common.errors import Unmodelled
from hf_memkit.common.terms import Category, Phase
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.tracer.work_recorder import active_recorder
from hf_memkit.prediction.traced_training import ULYSSES, Fsdp

TESTED_WITH: Final = ("2.11.0", "2.13.0")
"""The earliest and the latest torch whose FSDP2 is compared with real ranks (tests/prediction/test_fsdp.py)."""

_missing: list[str] = []
"""Why FSDP2 of the installed torch cannot be traced; empty: it can."""


def uses_fsdp(trainer: Any) -> bool:
    """Whether FSDP shards the model of a Trainer."""
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def fsdp_settings(trainer: Any) -> Fsdp | None:
    """The settings of a Trainer's FSDP; None without FSDP."""
    if not uses_fsdp(trainer):
        return None
    plugin = trainer.accelerator.state.fsdp_plugin
    return Fsdp(
        reshard_after_forward=bool(plugin.reshard_after_forward),
        cpu_offload=type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        activation_checkpointing=bool(plugin.activation_checkpointing),
    )


def is_sharded(trainer: Any) -> bool:
    """Whether ranks share the parameters of a Trainer's model: by FSDP, or since it was loaded, as DTensors."""
    return uses_fsdp(trainer) or any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters())


def parallel_sizes(trainer: Any) -> dict[str, int]:
    """The sizes above 1 of a Trainer's hybrid, context and tensor parallelism, by the names of their settings; empty
    for plain data parallelism."""
    names: tuple[str, ...] = ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size")
    source = getattr(trainer.accelerator, "parallelism_config", None)
    if is_sharded(trainer) and not uses_fsdp(trainer):
        names = ("dp_replicate_size", "fsdp_size", "tp_size")
        source = getattr(trainer.model.config, "distributed_config", None)
    sizes = {name: getattr(source, name, None) or 1 for name in names}
    return {name: size for name, size in sizes.items() if size > 1}


def refuse_in_plans(trainer: Any) -> None:
    """Raises Unmodelled for a Trainer whose step has parts that are not timed."""
    loaded = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    if getattr(loaded, "fsdp_cpu_offload", False):
        raise Unmodelled(
            "fsdp_cpu_offload=True in DistributedConfig: plans do not time it. Write cpu_offload: true in fsdp_config "
            "in its place, or use memkit predict"
        )


def unused_savings(trainer: Any) -> tuple[str, ...]:
    """Settings of sharded parameters that save memory and are not set, those that cost least time first."""
    if not is_sharded(trainer):
        return ()
    arguments = trainer.args
    plugin = trainer.accelerator.state.fsdp_plugin if uses_fsdp(trainer) else None
    savings = []
    if not arguments.gradient_checkpointing and not getattr(plugin, "activation_checkpointing", False):
        name = "activation_checkpointing"
        savings.append(f"{name if hasattr(arguments, name) else 'gradient_checkpointing'}: true")
    if plugin is not None and plugin.reshard_after_forward is False:
        savings.append("reshard_after_forward: true in fsdp_config")
    rows, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if rows > 1:
        parts = 2 if rows % 2 == 0 else rows
        smaller = f"per_device_train_batch_size: {rows // parts}, gradient_accumulation_steps: {parts * accumulation}"
        # Otherwise each rank keeps the whole gradient between micro-batches (transformers 5.23: trainer.py 1899).
        savings.append(
            f"{smaller} and accelerator_config: {{gradient_accumulation_kwargs: {{sync_each_batch: true}}}}"
        )
    if plugin is not None and type(plugin.cpu_offload).__name__ != "CPUOffloadPolicy":
        savings.append("cpu_offload: true in fsdp_config")
    return tuple(savings)


def ram_of_other_ranks(trainer: Any, *, loaded: bool) -> dict[Phase, int]:
    """Bytes of tensors in RAM of each rank but the first, in phases in which only the first has whole ones: it saves
    and loads full states, and with RAM-efficient loading the others leave theirs empty. Where a training resumes, each
    rank copies its states to RAM, and gets whole tensors one by one from the first (torch 2.13:
    distributed/checkpoint/state_dict.py, `_load_optim_state_dict`).

    Args:
        loaded: whether `from_pretrained` read the weights in the first rank only.
    """
    if not uses_fsdp(trainer):
        return {"save": 0} if is_sharded(trainer) else {}
    others: dict[Phase, int] = {"load": 0} if loaded else {}
    if "FULL" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type):
        states = [value for value in tree_leaves(dict(trainer.optimizer.state)) if isinstance(value, DTensor)]
        copies = sum(state.to_local().nbytes for state in states)
        others |= {"save": 0, "best_model": 0, "resume": copies + max((state.nbytes for state in states), default=0)}
    return others


def refuse_fsdp(trainer: Any) -> None:
    """Raises Unmodelled for a Trainer whose FSDP cannot be traced."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if getattr(plugin, "fsdp_version", 1) != 2:
        place, fix = "fsdp", "Write version: 2 in fsdp_config"
        if not trainer.args.fsdp:  # accelerate made the plugin (accelerate 1.15.0: utils/dataclasses.py 1831)
            given = os.environ.get("FSDP_VERSION")
            place = "ACCELERATE_USE_FSDP without FSDP_VERSION" if given is None else f"FSDP_VERSION={given}"
            fix = "Set FSDP_VERSION=2, or fsdp_version: 2 in accelerate's config"
        raise Unmodelled(f"{place}: FSDP version 1 is not predicted, and transformers removes it. {fix}")
    if _missing:
        raise Unmodelled(
            f"fsdp: torch {torch.__version__} lacks what the trace of FSDP2 needs ({_missing[0]}). Install torch "
            f"{TESTED_WITH[-1]}, or measure with memkit run"
        )


def refuse_parallelism(trainer: Any) -> None:
    """Raises Unmodelled for a Trainer that divides the work within a batch in a way that is not traced."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    ranks = getattr(parallelism, "sp_size", 1)
    if ranks > 1:
        raise Unmodelled(f"parallelism_config: sp_size={ranks}: {ULYSSES}")
    loaded = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    ranks = getattr(loaded, "pp_size", None) or 1
    if ranks > 1:
        raise Unmodelled(f"pp_size={ranks}: Trainer trains no pipeline. Write fsdp_size={ranks} in its place")
    ranks = getattr(loaded, "ep_size", None) or 1
    if ranks > 1:
        raise Unmodelled(
            f"ep_size={ranks}: expert parallelism is not predicted. Omit ep_size: fsdp_size and tp_size divide the "
            "experts, too"
        )
    if loaded is not None and getattr(trainer.model, "is_loaded_in_4bit", False):
        raise Unmodelled(
            "load_in_4bit with distributed_config: bitsandbytes has no weights that are sharded when loaded (DTensor)."
            " Omit distributed_config, and write fsdp: true with bnb_4bit_quant_storage"
        )
    engine = getattr(trainer.args, "memkit_engine", None) or {}
    ranks = (engine.get("tensor_parallel") or {}).get("autotp_size", 1)
    if ranks > 1:
        raise Unmodelled(
            f"tensor_parallel.autotp_size={ranks} in the DeepSpeed JSON: tensor parallelism is predicted without "
            f"DeepSpeed only. Omit it, or load the model with distributed_config=DistributedConfig(tp_size={ranks})"
        )


def uneven_heads(trainer: Any) -> str:
    """Why tensor parallelism fails: it divides attention by whole heads. Empty if the heads can be divided."""
    ranks = parallel_sizes(trainer).get("tp_size", 1)
    config = trainer.model.config.get_text_config() if ranks > 1 else None
    names = ("num_attention_heads", "num_key_value_heads")
    counts = {name: count for name in names if (count := getattr(config, name, None))}
    if all(count % ranks == 0 for count in counts.values()):
        return ""
    sizes = [size for size in range(1, ranks) if all(count % size == 0 for count in counts.values())]
    heads = " and ".join(f"{name}={count}" for name, count in counts.items())
    fix = f"Write a tp_size that does, such as {sizes[-1]}; the number of GPUs is tp_size × fsdp_size"
    return f"tp_size={ranks} does not divide the model's {heads}. {fix}"


def patch_fsdp(tracer: StorageTracer) -> None:
    """Patches FSDP2, DTensor and storages, so that `tracer` records what FSDP2 allocates. If the installed torch lacks
    a private name, `refuse_fsdp` names it."""
    try:
        _watch_resized_storages(tracer)
        _propagate_shapes_untraced()
        _set_categories(tracer)
        _count_pinned_shards(tracer)
        _skip_sharded_files()
        _broadcast_on_gpu(tracer)
    except (ImportError, AttributeError) as error:
        _missing.append(str(error))
        return
    # _fsdp_init.py, `_init_default_mesh`: without a GPU, the default mesh would be on the CPU.
    vars(torch._C)["_get_accelerator"] = lambda *args: torch.device(tracer.device_type)
    # accelerator.py, `_prepare_fsdp2`, finds the optimizer's parameters by their addresses, which are 0 for all fakes.
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata  # type: ignore[method-assign]


def _watch_resized_storages(tracer: StorageTracer) -> None:
    """Gathered parameters keep their storage, whose memory is freed and allocated again (_fsdp_param.py,
    `alloc_storage`, `free_storage`)."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if before != size:
            tracer.resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]


def _propagate_shapes_untraced() -> None:
    """DTensor computes the shape of a result with fake tensors of the whole size. They must not be in the trace."""
    from torch.distributed.tensor import _sharding_prop
    from torch.utils._python_dispatch import _disable_current_modes

    propagator: Any = _sharding_prop.ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return original(self, schema)

    propagator._propagate_tensor_meta_non_cached = propagate


def _set_categories(tracer: StorageTracer) -> None:
    """Counts gathered parameters and communicated copies as buffers, and gradients, whole or sharded, as gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def as_buffers(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer: Category = tracer.default
            tracer.default = "buffers"
            try:
                return function(*args, **kwargs)
            finally:
                tracer.default = outer

        return call

    group: Any = _fsdp_param_group
    group.foreach_all_gather = as_buffers(group.foreach_all_gather)
    group.foreach_all_gather_copy_out = as_buffers(group.foreach_all_gather_copy_out)
    reduce = as_buffers(group.foreach_reduce)

    def reduce_gradients(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduce(parameters, *args, **kwargs)
        tracer.label((parameter.sharded_param.grad for parameter in parameters), "gradients")
        for parameter in parameters:
            gradient = parameter.sharded_param.grad
            if tracer.host is not None and parameter.pin_memory and gradient is not None:
                tracer.host.pin(gradient._local_tensor)
        return result

    group.foreach_reduce = reduce_gradients
    parameter_class: Any = _fsdp_param.FSDPParam
    original = parameter_class.init_unsharded_param

    def init_unsharded_param(self: Any) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        original(self)
        if is_first and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(
                lambda parameter: tracer.label((parameter.grad,), "gradients")
            )

    parameter_class.init_unsharded_param = init_unsharded_param


def _count_pinned_shards(tracer: StorageTracer) -> None:
    """CPU offload keeps shards in page-locked memory."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    parameter_class: Any = _fsdp_param.FSDPParam
    original = parameter_class.reset_sharded_param

    def reset_sharded_param(self: Any) -> None:
        original(self)
        if tracer.host is not None and self.pin_memory:
            tracer.host.pin(self._sharded_param_data)

    parameter_class.reset_sharded_param = reset_sharded_param


def reshard(model: Any) -> None:
    """Frees the parameters of FSDP2 that an evaluation has left gathered. In a run a save does so before a load."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):  # an FSDPModule
            module.reshard()


def _skip_sharded_files() -> None:
    """SHARDED_STATE_DICT: makes the copies of shards that torch writes, and those that it reads into the shards that
    there are; nothing is written or read (torch 2.13: distributed/checkpoint/filesystem.py,
    `_write_files_from_queue`, `FileSystemReader.read_data`)."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.filesystem import _OverlappingCpuLoader

    def shards(state_dict: Any) -> list[Any]:
        return [leaf.to_local() for leaf in tree_leaves(state_dict) if isinstance(leaf, DTensor)]

    def save(state_dict: Any, **kwargs: Any) -> None:
        most = getattr(kwargs.get("storage_writer"), "per_thread_copy_ahead", 10_000_000)  # FileSystemWriter's default
        ahead: Any = _OverlappingCpuLoader(lambda shard: shard, inflight_threshhold=most)
        for shard in shards(state_dict):
            ahead.add(shard.nbytes, shard)
        for _ in ahead.values():
            pass

    def load(state_dict: Any, **kwargs: Any) -> None:
        for shard in shards(state_dict):
            read = torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
            shard.copy_(read)

    vars(checkpoint)["save"] = save
    vars(checkpoint)["load"] = load


def _broadcast_on_gpu(tracer: StorageTracer) -> None:
    """Whole tensors of a checkpoint go through the GPU, if the ranks have no gloo. The ranks of a trace seem to have
    every backend."""
    from accelerate.state import PartialState
    from torch.distributed import _state_dict_utils

    original = _state_dict_utils._broadcast_tensors
    only_gpu: Any = SimpleNamespace(_device_types=[torch.device(tracer.device_type)])

    def broadcast(whole: Any, states: Any, keys: Any, device: torch.device, group: Any = None) -> None:
        has_gloo = "gloo" in (PartialState().backend or "")
        original(whole, states, keys, device, group if has_gloo else only_gpu)

    vars(_state_dict_utils)["_broadcast_tensors"] = broadcast


def skip_waits() -> None:
    """For ranks that do not communicate: waiting for a collective returns the tensor that it wrote. Torch's rule for
    fake tensors makes another one."""
    from torch.distributed import _functional_collectives

    def wait_tensor(tensor: Any) -> Any:
        if (recorder := active_recorder()) is not None:
            recorder.wait_for_exchanges()
        return tensor

    vars(_functional_collectives)["wait_tensor"] = wait_tensor
