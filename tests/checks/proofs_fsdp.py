"""Proofs about FSDP: the plugin that Trainer and the launcher really make, and what accelerate and Trainer do with it.

accelerate turns FSDP on for GPUs only: where Trainer is asked, its Accelerator gets the plugin by hand.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import apollo_torch
import bitsandbytes
import torch
import torchao.optim
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import (
    _find_final_norm,
    fsdp2_apply_ac,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model,
)
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy, StateDictType, fully_shard
from transformers import BartConfig, BartForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.optimization import Adafactor

from tests.checks.accelerate_launch import launched
from tests.checks.plain import plain_proof
from tests.checks.real import arguments, checkpointed_by_fsdp, files, model, reads, refused, rows

YAML: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2}
NO_SYNC = {"sync_module_states": "false"}
"""Version 1 would ask for a GPU."""


def plugin(fsdp: Any = True, **settings: Any) -> Any:
    """The plugin of Trainer's arguments."""
    made = TrainingArguments(output_dir="x", use_cpu=True, fsdp=fsdp, fsdp_config=settings)
    return FullyShardedDataParallelPlugin(**made.fsdp_plugin_args)


def environment(**settings: Any) -> dict[str, str]:
    return launched({**YAML, "fsdp_config": {f"fsdp_{name}": value for name, value in settings.items()}})


def launched_plugin(**settings: Any) -> Any:
    """The plugin that accelerate makes in the launcher's environment."""
    with mock.patch.dict(os.environ, environment(**settings)):
        return FullyShardedDataParallelPlugin()


def with_plugin(made: Any, **more: Any) -> Trainer:
    """A Trainer that has this plugin."""
    own = arguments(None, **more)
    Accelerator(cpu=True).state.fsdp_plugin = made
    return Trainer(model=model(), args=own, train_dataset=rows(), eval_dataset=rows(2))


@plain_proof("fsdp-wrong-value", fails="loud")
def wrong_value() -> None:
    refused("is only available with FSDP1", lambda: plugin("hybrid_shard auto_wrap"))
    refused("is only available with FSDP1", lambda: plugin("FULL_SHARD"))
    for words in ("full_shard,auto_wrap", "true", "full_shrad"):
        refused("Unknown `fsdp` option", lambda it=words: plugin(it))
    refused("must be one of", lambda: plugin(auto_wrap_policy="transformer_based_wrap"))
    refused("TypeError", lambda: plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params="100"))
    refused("must be an integer", lambda: plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1e8))
    refused("KeyError: 'TRUE'", lambda: plugin(version=1, reshard_after_forward=True))
    refused("KeyError: 'HYBRID'", lambda: launched_plugin(sharding_strategy="HYBRID"))
    refused("Invalid auto wrap policy", lambda: launched_plugin(version=2, auto_wrap_policy="AUTO"))
    refused("KeyError: 'PRE'", lambda: launched_plugin(version=2, backward_prefetch="PRE"))
    refused("invalid literal for int", lambda: launched_plugin(version="2.0"))
    refused("requires `activation_checkpointing=True`",
            lambda: launched_plugin(version=2, activation_checkpointing_offload=True))  # fmt: skip
    refused("requires `fsdp_version=2`", lambda: launched_plugin(
        version=1, activation_checkpointing=True, activation_checkpointing_offload=True))  # fmt: skip
    for made in (plugin, lambda **settings: launched_plugin(version=2, **settings)):
        refused("does not support LOCAL_STATE_DICT", lambda it=made: it(state_dict_type="LOCAL_STATE_DICT"))
        refused("KeyError: 'FULL'", lambda it=made: it(state_dict_type="FULL"))
        refused("invalid truth value full_shard", lambda it=made: it(reshard_after_forward="FULL_SHARD"))
        refused("invalid truth value none", lambda it=made: it(activation_checkpointing=None))
        assert it_is_full(made(state_dict_type="full_state_dict"))
    assert isinstance(plugin(cpu_offload="false").cpu_offload, CPUOffloadPolicy)
    assert launched_plugin(version=2, auto_wrap_policy="transformer_based_wrap").auto_wrap_policy is not None
    plugin(["full_shard", "offload", "auto_wrap"], version="2")
    for off in ({"sync_module_states": False}, {"sync_module_states": None, "cpu_ram_efficient_loading": True}):
        refused("set `--fsdp_sync_module_states` to `True`", lambda it=off: environment(version=2, **it))
    environment(version=2, sync_module_states=False, cpu_ram_efficient_loading=False)


def it_is_full(made: Any) -> bool:
    return bool(made.state_dict_type == StateDictType.FULL_STATE_DICT)


@plain_proof("fsdp-key-unread", fails="silent")
def key_unread() -> None:
    unread = {
        "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST", "use_orig_params": False,
        "sharding_strategy": "SHARD_GRAD_OP", "limit_all_gathers": False,
    }  # fmt: skip
    for made, plain in (
        (plugin(**unread), plugin()),
        (launched_plugin(version=2, **unread), launched_plugin(version=2)),
        (plugin(offload_params=True, activation_checkpointing=True, activation_checkpointing_offload=True,
                ignored_modules="x", mixed_precision_policy="bf16", cpu_ofload=True, strategy="SHARD_GRAD_OP"),
         plugin(activation_checkpointing=True)),
        (plugin(min_num_params=100), plugin()),
        (launched_plugin(version=2, limit_all_gathers=False, mixed_precision_policy="bf16"),
         launched_plugin(version=2)),
    ):  # fmt: skip
        assert vars(made) == vars(plain) | {"cpu_offload": made.cpu_offload}
        assert type(made.cpu_offload) is type(plain.cpu_offload)
    # A variable in the environment reaches the plugin beside Trainer's arguments.
    with mock.patch.dict(os.environ, FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD="true", FSDP_IGNORED_MODULES="x"):
        made = plugin(activation_checkpointing=True)
        assert made.activation_checkpointing_offload and made.ignored_modules == "x"

    first = {"cpu_ram_efficient_loading": False, "sync_module_states": False}
    assert launched_plugin(backward_prefetch_policy="BACKWARD_PRE", **first).backward_prefetch is None
    assert launched_plugin(backward_prefetch="BACKWARD_PRE", **first).backward_prefetch is not None
    # accelerator.py: "sharding_strategy": fsdp_plugin.sharding_strategy or fsdp_plugin.reshard_after_forward
    assert reads(Accelerator.prepare_model, "fsdp_plugin.sharding_strategy or fsdp_plugin.reshard_after_forward") == 1
    full = ShardingStrategy.FULL_SHARD
    assert plugin("hybrid_shard", version=1, **NO_SYNC).sharding_strategy is full
    assert plugin(version=1, reshard_after_forward="shard_grad_op", **NO_SYNC).sharding_strategy is full
    assert launched_plugin(reshard_after_forward="SHARD_GRAD_OP", **first).sharding_strategy is full
    assert launched_plugin(sharding_strategy="SHARD_GRAD_OP", **first).sharding_strategy is not full

    yaml = {"state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": False, "auto_wrap_policy": "NO_WRAP"}
    yaml |= {"version": 1, "activation_checkpointing": True, "offload_params": True}
    with mock.patch.dict(os.environ, environment(**yaml)):
        made = plugin()
    assert made.fsdp_version == 2 and it_is_full(made) and made.auto_wrap_policy and made.reshard_after_forward
    assert isinstance(made.cpu_offload, CPUOffloadPolicy)
    assert made.activation_checkpointing, "what Trainer's fsdp_config lacks, the plugin takes from the launcher"


@plain_proof("fsdp-config-without-fsdp", fails="silent")
def config_without_fsdp() -> None:
    for off in (None, "", False):
        made = TrainingArguments(output_dir="x", use_cpu=True, fsdp=off, fsdp_config={"cpu_offload": True})
        assert made.fsdp_plugin_args is None


@plain_proof("fsdp-unwrapped", fails="silent")
def unwrapped() -> None:
    network = model()
    for made in (plugin(auto_wrap_policy="NO_WRAP"), plugin(auto_wrap_policy="SIZE_BASED_WRAP"),
                 launched_plugin(version=2),
                 launched_plugin(version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=0)):  # fmt: skip
        made.set_auto_wrap_policy(network)
        assert fsdp2_prepare_auto_wrap_policy(made, network) is None
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=made))
        refused("'NoneType' object is not callable", lambda it=accelerator: fsdp2_apply_ac(it, network))
    for made in (plugin(), launched_plugin(version=2, auto_wrap_policy="SIZE_BASED_WRAP")):
        made.set_auto_wrap_policy(network)
        assert fsdp2_prepare_auto_wrap_policy(made, network) is not None


@plain_proof("fsdp-wrap-class", fails="late")
def wrap_class() -> None:
    network = model()
    wrapped = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    for made in (plugin(transformer_layer_cls_to_wrap=["LlamaDecoderLayer"]),
                 plugin(transformer_layer_cls_to_wrap=[]),
                 launched_plugin(**wrapped, transformer_layer_cls_to_wrap=[]),
                 launched_plugin(**wrapped, transformer_layer_cls_to_wrap="Own,GPT2Block"),
                 launched_plugin(**wrapped, transformer_layer_cls_to_wrap="GPT2Block, GPT2MLP"),
                 launched_plugin(**wrapped, transformer_layer_cls_to_wrap=["GPT2Block"])):  # fmt: skip
        refused("Could not find the transformer layer class", lambda it=made: it.set_auto_wrap_policy(network))
    plugin(transformer_layer_cls_to_wrap="GPT2Block,GPT2MLP").set_auto_wrap_policy(network)
    shape = BartConfig(d_model=16, decoder_layers=1, encoder_layers=1, vocab_size=16, decoder_ffn_dim=16,
                       decoder_attention_heads=2, encoder_attention_heads=2)  # fmt: skip
    refused("BartEncoderLayer in the model", lambda: plugin().set_auto_wrap_policy(BartForCausalLM(shape)))
    # A model for which transformers names no layers: nothing is wrapped.
    network._no_split_modules = []
    made = plugin()
    made.set_auto_wrap_policy(network)
    policy = fsdp2_prepare_auto_wrap_policy(made, network)
    assert policy is not None and not any(policy(module) for module in network.modules())


@plain_proof("fsdp-saves-no-weights", fails="silent")
def saves_no_weights() -> None:
    default = launched_plugin(version=2)
    assert default.state_dict_type == StateDictType.SHARDED_STATE_DICT and it_is_full(plugin())
    for made, count in ((default, 0), (plugin(state_dict_type="SHARDED_STATE_DICT"), 0), (plugin(), 1)):
        folder = Path(tempfile.mkdtemp())
        trainer = with_plugin(made)
        trainer.save_model(str(folder))
        assert len([path for path in files(folder) if path.suffix == ".safetensors"]) == count
    sharded = plugin(state_dict_type="SHARDED_STATE_DICT")
    refused("not compatible with FSDP state dict type", lambda: with_plugin(sharded, save_only_model=True))
    # What best-model-without-states reports for FSDP.
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 500}
    refused("can't be used with `save_only_model`", lambda: with_plugin(plugin(), save_only_model=True, **best))
    with_plugin(plugin(), save_only_model=True)
    default.set_state_dict_type("FULL_STATE_DICT")
    assert it_is_full(default)


@plain_proof("fsdp-saves-empty-adapter", fails="silent")
def saves_empty_adapter() -> None:
    def saved(network: Any, weights: Any) -> int:
        folder = Path(tempfile.mkdtemp())
        network.save_pretrained(folder, state_dict=weights)
        return (folder / "adapter_model.safetensors").stat().st_size

    network = get_peft_model(model(), LoraConfig(target_modules=["c_attn"]))
    assert saved(network, network.state_dict()) > 10_000
    network = checkpointed_by_fsdp(network)
    for weights in (network.state_dict(), None):  # of a whole model, and of shards
        assert saved(network, weights) == 40


@contextlib.contextmanager
def one_rank() -> Iterator[Any]:
    """The mesh of a process group of one rank."""
    began = not distributed.is_initialized()
    if began:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        if began:
            distributed.destroy_process_group()


@plain_proof("fsdp-liger-adapters", fails="late")
def liger_with_adapters() -> None:
    # As in all models with Liger's loss, the attribute of the inner model is `model`, which PEFT's wrapper has, too.
    network = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=8,
                                           num_attention_heads=2))  # fmt: skip
    assert _find_final_norm(network) is not None
    assert _find_final_norm(get_peft_model(network, LoraConfig(target_modules=["q_proj"]))) is None
    alone = torch.nn.Linear(8, 8)
    with one_rank() as mesh:
        fully_shard([alone], mesh=mesh)
        refused("got mixed torch.Tensor and DTensor", lambda: torch.ones(1, 8) @ alone.weight.t())


@plain_proof("fsdp-for-tpus", fails="late")
def for_tpus() -> None:
    for xla in (True, "true"):
        own = arguments(None, fsdp=True, fsdp_config={"xla": xla})
        trainer = Trainer(model=model(), args=own, train_dataset=rows())
        refused("No module named 'torch_xla'", trainer.train)


@plain_proof("fsdp-whole-4bit", fails="silent")
def whole_4bit() -> None:
    def is_sharded(storage: torch.dtype) -> bool:
        network = torch.nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_storage=storage).to("cpu"))
        made = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator: Any = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=made), mixed_precision="no", is_main_process=True, device="cpu",
            torch_device_mesh={("whole",): mesh}, parallelism_config=SimpleNamespace(fsdp_dim_names=["whole"]),
        )  # fmt: skip
        network[0].weight.requires_grad = False
        (weight,) = fsdp2_prepare_model(accelerator, network).parameters()
        return hasattr(weight, "device_mesh")

    with one_rank() as mesh:
        assert is_sharded(torch.bfloat16)
        assert not is_sharded(torch.uint8)


@plain_proof("fsdp-optimizer", fails="late")
def optimizers_without_dtensors() -> None:
    with one_rank() as mesh:

        def step(optimizer: Any, group: dict[str, Any] | None = None, **options: Any) -> None:
            network = torch.nn.Linear(128, 128)
            fully_shard(network, mesh=mesh)
            chosen = optimizer([{"params": list(network.parameters()), **(group or {})}], lr=1e-3, **options)
            network(torch.ones(1, 128)).sum().backward()
            chosen.step()

        refused("got mixed torch.Tensor and DTensor", lambda: step(bitsandbytes.optim.AdamW8bit))
        refused("got mixed torch.Tensor and DTensor", lambda: step(bitsandbytes.optim.PagedLion8bit))
        refused("does not have a sharding strategy", lambda: step(bitsandbytes.optim.PagedAdamW32bit))
        refused(
            "got mixed torch.Tensor and DTensor",
            lambda: step(Adafactor, scale_parameter=False, relative_step=False),
        )
        low_rank = {"rank": 4, "update_proj_gap": 1, "scale": 1, "proj_type": "std", "proj": "random"}
        low_rank["scale_type"] = "channel"
        refused("got mixed torch.Tensor and DTensor", lambda: step(apollo_torch.APOLLOAdamW, low_rank))
        step(torchao.optim.AdamW8bit)


@plain_proof("fsdp-deprecated", fails="unshown")
def deprecated() -> None:
    assert reads(TrainingArguments._apply_legacy_fsdp_to_config, "Passing `fsdp` as a") == 2
    assert reads(TrainingArguments._process_fsdp_args, "= 1`) is deprecated") == 1
    assert environment()["FSDP_VERSION"] == "1"
