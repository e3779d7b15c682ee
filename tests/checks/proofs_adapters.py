"""Proofs of the rules on adapters and quantised weights: the real PEFT, bitsandbytes and Trainer, on a CPU."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.checks.real import arguments, refused, rows
from tests.checks.registry import proof

_SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 32,
}  # fmt: skip
_TOKENS = torch.arange(16)[None]


def _llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **_SHAPE))


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=128, bos_token_id=0, eos_token_id=0))


def _adapted(model: PreTrainedModel, **fields: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": 4, **fields}
        return get_peft_model(model, LoraConfig(**wanted))


def _quantised(model: PreTrainedModel, **fields: Any) -> Any:
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    wanted = BitsAndBytesConfig(**{"load_in_4bit": True, **fields})
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=wanted, dtype=torch.bfloat16)


def _trainer(model: Any, **more: Any) -> Trainer:
    unset_hf_deepspeed_config()
    return Trainer(model=model, args=arguments(None, **more), train_dataset=rows())


@proof("adapter-target-missing", fails="silent")
def adapter_target_missing() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        model = _adapted(_llama(), target_modules=["q_proj", "c_attn"])
    assert not [w for w in shown if "c_attn" in str(w.message)]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("q_proj.lora_" in name for name in trained)
    refused("Target modules", lambda: _adapted(_llama(), target_modules=["c_attn"]))


@proof("adapter-copies-module", fails="silent")
def adapter_copies_module() -> None:
    for tied in (False, True):
        plain, model = _llama(tied), _adapted(_llama(tied), modules_to_save=["lm_head"])
        copies = [p for name, p in model.named_parameters() if "lm_head" in name and p.requires_grad]
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad) - copies[0].numel()
        extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
        assert len(copies) == 1 and extra - adapters == copies[0].numel() == 128 * 64
        _trainer(model, learning_rate=1e-2).train()
        assert not torch.equal(copies[0], model.get_input_embeddings().weight), "trained apart, also where tied"
    half = _adapted(_llama().bfloat16(), modules_to_save=["lm_head"])
    assert {p.dtype for name, p in half.named_parameters() if "modules_to_save" in name} == {torch.bfloat16}


@proof("adapter-saves-embedding", fails="silent")
def adapter_saves_embedding() -> None:
    sizes = []
    for padded in (False, True):
        folder, out = tempfile.mkdtemp(), Path(tempfile.mkdtemp())
        _gpt2().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        if padded:
            model.resize_token_embeddings(pad_to_multiple_of=96)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _adapted(model).save_pretrained(out)
        sizes.append((out / "adapter_model.safetensors").stat().st_size)
    assert sizes[1] > sizes[0] + 4 * 192 * 64


@proof("adapter-searches-graph", fails="silent")
def adapter_searches_graph() -> None:
    for model, searches in ((_llama(), False), (_adapted(_llama()), True)):
        accelerator = _trainer(model, activation_checkpointing=True).accelerator
        assert accelerator.ddp_handler.find_unused_parameters is searches


@proof("adapter-on-head-unread", fails="silent")
def adapter_on_head_unread() -> None:
    import liger_kernel.transformers.model.llama as liger

    model = _adapted(_llama(), target_modules=["q_proj", "lm_head"]).base_model.model
    given: dict[str, Any] = {}
    with mock.patch.object(liger, "LigerForCausalLMLoss", lambda **options: given.update(options) or torch.zeros(())):
        liger.lce_maybe_trainable_lm_head(model, torch.zeros(1, 4, 64), 64, torch.zeros(1, 4).long(), None)
    assert given["lm_head_weight"] is model.lm_head.base_layer.weight and "default" in model.lm_head.lora_A


@proof("quantised-without-adapters", fails="late")
def quantised_without_adapters() -> None:
    refused("You cannot perform fine-tuning on purely quantized models", lambda: _trainer(_quantised(_llama())))
    assert _trainer(_adapted(_quantised(_llama()))).train().global_step == 1


@proof("quantised-to-fp4", fails="silent")
def quantised_to_fp4() -> None:
    import bitsandbytes.functional as bnb

    model = _quantised(_llama())
    assert model.model.layers[0].mlp.up_proj.weight.quant_state.quant_type == "fp4"
    weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    errors = []
    for kind in ("nf4", "fp4"):
        codes, state = bnb.quantize_4bit(weights, quant_type=kind)
        errors.append(float((bnb.dequantize_4bit(codes, state) - weights).norm()))
    assert errors[1] > 1.3 * errors[0]


class _Products(TorchDispatchMode):
    """Notes the type that 4-bit products get their inputs in."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "gemm_4bit" in str(function) or ("dequantize_4bit" in str(function) and len(args) > 4):
            self.types.add(args[0].dtype if "gemm" in str(function) else args[-1])
        return function(*args, **(kwargs or {}))


@proof("quantised-computes-in-fp32", fails="silent")
def quantised_computes_in_fp32() -> None:
    for given, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        model = _adapted(_quantised(_llama(), bnb_4bit_compute_dtype=given))
        with torch.autocast("cpu", torch.bfloat16), _Products() as seen:
            model(_TOKENS, labels=_TOKENS)
        assert seen.types == {expected}, (given, seen.types)


@proof("quantised-once", fails="unshown")
def quantised_once() -> None:
    import bitsandbytes.functional as bnb

    def held(nested: bool) -> float:
        """Bits of scales a weight, without the tables, which every layer has once."""
        _, state = bnb.quantize_4bit(torch.randn(1024, 1024), compress_statistics=nested, quant_type="nf4")
        return 8 * (state.absmax.nbytes + (state.state2.absmax.nbytes if nested else 0)) / 2**20

    assert held(False) == 0.5 and held(True) == 0.125 + 32 / (64 * 256)


@proof("quantised-head", fails="silent")
def quantised_head() -> None:
    assert type(_quantised(_llama()).lm_head).__name__ == "Linear"
    assert type(_quantised(_llama(), llm_int8_skip_modules=["q_proj"]).lm_head).__name__ == "Linear4bit"
    tied = _quantised(_llama(tied=True), llm_int8_skip_modules=["q_proj"])
    refused("AssertionError", lambda: tied(_TOKENS))


@proof("experts-not-quantised", fails="silent")
def experts_not_quantised() -> None:
    model = _quantised(MixtralForCausalLM(MixtralConfig(num_local_experts=2, **_SHAPE)))
    types = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters() if "experts" in name}
    assert types == {"gate_up_proj": torch.bfloat16, "down_proj": torch.bfloat16}
    assert model.model.layers[0].self_attn.q_proj.weight.dtype is torch.uint8
