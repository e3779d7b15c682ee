"""The rehearsal: the variant's own techniques on a small model, and a reason for everything left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_memkit.catalog.hardware import Machine, named_gpu
from hf_memkit.catalog.models import describe
from hf_memkit.common.units import MIB
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe
from hf_memkit.setup.request import Request
from tests.recipes.resolving import resolve


@pytest.mark.parametrize("variant", ["resident", "offload", "infinity", "lora"])
@pytest.mark.parametrize("card", ["16GB", "T4"])
def test_techniques_stay_and_everything_that_goes_is_named(
    recipe: Recipe, machine: Machine, variant: str, card: str
) -> None:
    target = machine if card == "16GB" else machine.with_gpu(named_gpu(card))
    resolved = resolve(recipe, target, Request(variant=variant), use_hub=False)
    rehearsed = rehearse(recipe, resolved)
    before, after = resolved, rehearsed.setup
    assert after.arguments["use_cpu"] is True
    for key in ("arguments.activation_checkpointing", "arguments.optim", "optimizer.class", "deepspeed.preset",
                "model.pad_vocabulary_to_multiple_of", "adapter.r"):  # fmt: skip
        assert after.get(key) == before.get(key)
    if "deepspeed.config" in before:
        old, new = before["deepspeed.config"], after["deepspeed.config"]
        assert new["zero_optimization"].keys() == old["zero_optimization"].keys()
        assert new["zero_optimization"]["stage"] == old["zero_optimization"]["stage"]
        assert new["zero_optimization"]["offload_optimizer"]["device"] in ("cpu", "nvme")
    widest_bytes = 4 * after["model.architecture"]["n_embd"] ** 2 * 2  # in bf16
    assert (widest_bytes > MIB) == (variant == "infinity"), "DeepSpeed swaps nothing smaller"
    named = {setting.key for setting in rehearsed.not_rehearsed}
    assert "environment.PYTORCH_ALLOC_CONF" in named and "environment.PYTORCH_ALLOC_CONF" not in after
    assert ("arguments.fp16" in named) == bool(before.get("arguments.fp16"))
    assert not after.arguments["fp16"]
    assert all(setting.reason for setting in rehearsed.not_rehearsed)


def test_the_user_s_request_stays(recipe: Recipe, machine: Machine) -> None:
    chosen = {"learning_rate": 0.5, "save_steps": 2, "per_device_train_batch_size": 2}
    resolved = resolve(recipe, machine, Request(variant="lora", max_steps=6, arguments=chosen), use_hub=False)
    rehearsed = rehearse(recipe, resolved)
    assert "arguments.per_device_train_batch_size" in {setting.key for setting in rehearsed.not_rehearsed}
    arguments = rehearsed.setup.arguments
    assert (arguments["learning_rate"], arguments["save_steps"], arguments["max_steps"]) == (0.5, 2, 6)


def test_another_architecture_shrinks_too(recipe: Recipe, machine: Machine, tmp_path: Path) -> None:
    """Heads, key-value heads, feed-forward width and token IDs go together, for every architecture."""
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8).save_pretrained(
        tmp_path
    )
    resolved = resolve(recipe, machine, Request(variant="lora", model=str(tmp_path)), use_hub=False)
    architecture = rehearse(recipe, resolved).setup["model.architecture"]
    assert architecture["model_type"] == "llama" and architecture["hidden_size"] == 128
    assert describe("none/such", architecture, use_hub=False).parameters < 20_000_000


def test_a_small_local_model_is_rehearsed_as_it_is(recipe: Recipe, machine: Machine, tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=64, vocab_size=300).save_pretrained(tmp_path)
    request = Request(variant="lora", model=str(tmp_path), sequence_length=32)
    resolved = resolve(recipe, replace(machine), request, use_hub=False)
    setup = rehearse(recipe, resolved).setup
    assert setup["model.origin"] == "local" and setup["model.architecture"]["n_layer"] == 1
    assert setup["data.sequence_length"] == 64


def test_settings_that_need_a_gpu_have_stand_ins(recipe: Recipe, machine: Machine) -> None:
    """What a setup for a GPU may hold, and what a CPU makes of it; each is named as not rehearsed."""
    resolved = resolve(recipe, machine, Request(variant="resident"), use_hub=False)
    setup = resolved
    for key, value in {
        "arguments.activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
        "arguments.optim": "paged_adamw_8bit",
        "arguments.tf32": True,
        "arguments.torch_compile": True,
        "arguments.torch_compile_mode": "max-autotune",
        "arguments.use_liger_kernel": True,
        "model.attn_implementation": "flash_attention_2",
        "trainer_parts.recompilation_guard": {},
    }.items():
        setup = setup.put(key, value, "for a GPU")
    rehearsed = rehearse(recipe, setup)
    after, named = rehearsed.setup, {setting.key for setting in rehearsed.not_rehearsed}
    assert after["arguments.optim"] == "adamw_bnb_8bit"
    assert after["model_parts.checkpoint_offload"] == {"pin_memory": False}
    assert after["arguments.activation_checkpointing"] is False
    for key in ("arguments.tf32", "arguments.torch_compile", "arguments.torch_compile_mode",
                "arguments.use_liger_kernel", "model.attn_implementation",
                "trainer_parts.recompilation_guard"):  # fmt: skip
        assert key not in after and key in named
    assert {"arguments.optim", "arguments.activation_checkpointing_kwargs"} <= named
