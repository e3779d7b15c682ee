"""Proofs about activation checkpointing: a layer that is recomputed runs a second time, inside backward."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from trl import GRPOConfig, ModelConfig, ScriptArguments, SFTConfig

from hf_memkit.catalog import library_versions
from hf_memkit.checks.rules.checkpointing import UNSUPPORTED
from hf_memkit.checks.rules.scripts import TEXT_NAMES, TRL_NAMES
from hf_memkit.components import checkpoint_selective
from tests.checks import real
from tests.checks.plain import plain_proof
from tests.checks.real import checkpointed_by_fsdp, refused, rows
from tests.checks.registry import proof

_OFTEN = {"use_reentrant": False}
_LAYER = re.compile(r"\.layers?\.\d")


def arguments(**more: Any) -> TrainingArguments:
    """Arguments, written with today's names."""
    return real.arguments(None, **library_versions.to_installed_arguments(more))


def enable(network: Any, options: dict[str, Any]) -> None:
    """Switches checkpointing on, by the method of the installed version."""
    (getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable)(options)


def gpt2(layers: int = 4, dropout: float = 0.0, **config: Any) -> GPT2LMHeadModel:
    set_seed(0)
    shape = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    off = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, **shape, **off, **config))


@contextmanager
def runs_in_backward(network: nn.Module) -> Iterator[list[int]]:
    """How often each block of GPT-2 runs inside backward."""
    blocks = [module for module in network.modules() if isinstance(module, GPT2Block)]
    counts = [0] * len(blocks)

    def count(index: int) -> Any:
        def hook(*_: Any) -> None:
            counts[index] += torch._C._current_graph_task_id() != -1

        return hook

    handles = [block.ln_1.register_forward_pre_hook(count(index)) for index, block in enumerate(blocks)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def recomputed(network: nn.Module | None = None, **more: Any) -> list[int]:
    """How often each layer runs inside backward in one step of Trainer with these arguments."""
    network = network or gpt2()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = Trainer(model=network, args=arguments(**more), train_dataset=rows())
    with runs_in_backward(network) as counts:
        done.train()
    return counts


def gradients(network: nn.Module, **options: Any) -> dict[str, torch.Tensor | None]:
    """Gradients of one forward and backward pass from a fixed seed; with options of checkpointing, if any."""
    if options:
        enable(network, options)
    set_seed(1)
    network.zero_grad()
    network.train()
    tokens = torch.stack([row["input_ids"] for row in rows(2)])
    network(input_ids=tokens, labels=tokens).loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in network.named_parameters()}


@proof("checkpointing-two-names", fails="silent")
def two_names() -> None:
    if "activation_checkpointing" not in library_versions.to_installed_arguments({"activation_checkpointing": True}):
        return  # transformers below 5.23 has one name only
    assert recomputed(gradient_checkpointing=True, activation_checkpointing=False) == [0, 0, 0, 0]
    assert recomputed(gradient_checkpointing=True) == [1, 1, 1, 1]
    late = arguments()
    late.gradient_checkpointing = True  # the old name, after the arguments were made
    network = gpt2()
    with runs_in_backward(network) as counts:
        Trainer(model=network, args=late, train_dataset=rows()).train()
    assert counts == [0, 0, 0, 0]


@proof("checkpointing-options-without-switch", fails="silent")
def options_without_switch() -> None:
    assert recomputed(activation_checkpointing_kwargs=_OFTEN) == [0, 0, 0, 0]
    assert recomputed(activation_checkpointing=True, activation_checkpointing_kwargs=_OFTEN) == [1, 1, 1, 1]
    # With TRL the switch is on unless it is switched off, and a name of TRL's own tells its files from Trainer's.
    assert _switch(SFTConfig) and not _switch(TrainingArguments)
    trainer = {one.name for one in fields(TrainingArguments)}
    trl = {one.name for cls in (SFTConfig, GRPOConfig, ModelConfig, ScriptArguments) for one in fields(cls)}
    assert set(TRL_NAMES) <= trl - trainer and not set(TEXT_NAMES) & trainer


def _switch(cls: type) -> bool:
    """What the switch is where nothing sets it, under either of its names."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return any(one.default is True for one in fields(cls) if one.name in names)


@proof("checkpointing-reentrant-unset", fails="silent")
def reentrant_unset() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network = gpt2()
        network.transformer.wte.weight.requires_grad_(False)
        done = Trainer(
            model=network,
            args=arguments(
                activation_checkpointing=True, activation_checkpointing_kwargs={"preserve_rng_state": True}
            ),
            train_dataset=rows(),
        )
        done.train()
    assert any("use_reentrant parameter should be passed explicitly" in str(one.message) for one in caught)
    assert "CheckpointFunctionBackward" in _names(network, {"preserve_rng_state": True})
    assert "CheckpointFunctionBackward" not in _names(network, _OFTEN)


def _names(network: Any, options: dict[str, Any]) -> set[str]:
    """Names of the nodes of the graph."""
    enable(network, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = network(input_ids=rows(1)[0]["input_ids"][None], labels=rows(1)[0]["input_ids"][None]).loss
    result, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in result:
            result.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in result}


@proof("checkpointing-reentrant-inputs", fails="silent")
def reentrant_inputs() -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    pictures = [{"pixel_values": torch.rand(3, 8, 8), "labels": torch.tensor(1)} for _ in range(4)]
    result = {}
    for reentrant in (True, False):
        set_seed(0)
        network = ViTForImageClassification(ViTConfig(**shape, image_size=8, patch_size=4, num_labels=2))
        for parameter in network.vit.embeddings.parameters():
            parameter.requires_grad_(False)  # as whoever trains the upper part of a model does
        before = {name: value.clone() for name, value in network.state_dict().items()}
        options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Trainer(model=network, args=arguments(**options, max_grad_norm=0.0), train_dataset=pictures).train()
        result[reentrant] = {n for n, value in network.state_dict().items() if not torch.equal(value, before[n])}
    assert result[True] and not any(_LAYER.search(name) for name in result[True])
    assert any(_LAYER.search(name) for name in result[False])
    text = gpt2()  # its main input is input_ids, and transformers makes the reentrant form safe
    text.transformer.wte.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in text.state_dict().items()}
    again = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    Trainer(model=text, args=arguments(**again, max_grad_norm=0.0), train_dataset=rows()).train()
    changed = {name for name, value in text.state_dict().items() if not torch.equal(value, before[name])}
    assert any(name.startswith("transformer.h.0.") for name in changed)


@proof("checkpointing-masks-differ", fails="silent")
def masks_differ() -> None:
    network = gpt2(2, dropout=0.5)
    plain = gradients(network)
    same = gradients(network, use_reentrant=False)
    other = gradients(network, use_reentrant=False, preserve_rng_state=False)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(plain[name], same[name])
    assert not torch.allclose(plain[name], other[name], rtol=0.1)

    wrapped = "transformer.h.0._checkpoint_wrapped_module.mlp.c_fc.weight"
    dry, wet = (gradients(checkpointed_by_fsdp(gpt2(2, dropout=rate)))[wrapped] for rate in (0.0, 0.5))
    assert torch.allclose(gradients(gpt2(2))[name], dry)
    assert not torch.allclose(plain[name], wet, rtol=0.1)


@plain_proof("checkpointing-and-fsdp", fails="late")
def and_fsdp() -> None:
    both = arguments(activation_checkpointing=True)
    # accelerate makes its plugin on GPUs only; Trainer asks the plugin, wherever it comes from.
    Accelerator(cpu=True).state.fsdp_plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    refused("can't both be set to True", lambda: Trainer(model=gpt2(), args=both, train_dataset=rows()))


@proof("every-nth-of-few", fails="silent")
def every_nth_of_few() -> None:
    on = {"activation_checkpointing": True}
    assert recomputed(**on, activation_checkpointing_kwargs={**_OFTEN, "every_n_layers": 2}) == [1, 0, 1, 0]
    assert recomputed(**on, activation_checkpointing_kwargs={**_OFTEN, "every_n_layers": 4}) == [1, 0, 0, 0]
    refused(
        "ZeroDivisionError",
        lambda: recomputed(**on, activation_checkpointing_kwargs={**_OFTEN, "every_n_layers": 0}),
    )


@proof("checkpointing-part-overruled", fails="silent")
def part_overruled() -> None:
    network = gpt2()
    checkpoint_selective.install(network)
    func = network.transformer.h[0]._gradient_checkpointing_func
    recomputed(network, activation_checkpointing=True)
    assert network.transformer.h[0]._gradient_checkpointing_func is not func


@proof("checkpointing-function", fails="late")
def function() -> None:
    def contexts() -> Any:
        return torch.utils.checkpoint.noop_context_fn()

    made = arguments(activation_checkpointing=True, activation_checkpointing_kwargs={"context_fn": contexts})
    refused("is not JSON serializable", made.to_json_string)
    done = Trainer(model=gpt2(), args=made, train_dataset=rows())
    refused("Can't", lambda: done.save_model())


@proof("offload-without-accelerator", fails="late")
def offload_without_accelerator() -> None:
    options = {**_OFTEN, "offload": True}
    refused("accelerator", lambda: recomputed(activation_checkpointing=True, activation_checkpointing_kwargs=options))


@proof("checkpointing-unknown-option", fails="silent")
def unknown_option() -> None:
    on = {"activation_checkpointing": True}
    assert recomputed(**on, activation_checkpointing_kwargs={**_OFTEN, "every_n_layer": 2}) == [1, 1, 1, 1]
    refused(
        "Unexpected keyword arguments",
        lambda: recomputed(**on, activation_checkpointing_kwargs={"use_reentrant": True, "every_n_layer": 2}),
    )


@proof("cache-with-checkpointing", fails="silent")
def cache_with_checkpointing() -> None:
    network = gpt2()
    tokens = rows(1)[0]["input_ids"][None]
    network.train()
    assert network(tokens, use_cache=True).past_key_values is not None
    enable(network, _OFTEN)
    assert network(tokens, use_cache=True).past_key_values is None


@proof("checkpointing-unsupported-model", fails="late")
def unsupported_model() -> None:
    mapping = {CONFIG_MAPPING_NAMES[name]: network for name, network in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    for name in UNSUPPORTED:
        assert not getattr(transformers, mapping[CONFIG_MAPPING_NAMES[name]]).supports_gradient_checkpointing, name
    for name in ("gpt2", "llama", "opt", "gpt_neox", "qwen3"):
        assert getattr(transformers, mapping[CONFIG_MAPPING_NAMES[name]]).supports_gradient_checkpointing, name
    small = AutoModelForCausalLM.from_config(
        transformers.OpenAIGPTConfig(vocab_size=128, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    )
    done = Trainer(model=small, args=arguments(activation_checkpointing=True), train_dataset=rows())
    refused("checkpointing", done.train)


@proof("checkpointing-parts-compiled", fails="late")
def parts_compiled() -> None:
    tokens = rows(1)[0]["input_ids"][None]
    network = gpt2(1)
    network.config.use_cache = False
    checkpoint_selective.install(network.train())
    compiled = torch.compile(network, backend="eager")
    refused("checkpoint not implemented for", lambda: compiled(input_ids=tokens, labels=tokens).loss.backward())
    torch.compiler.reset()
