"""Proofs about optimizer states and rounding, on a CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn

from tests.checks.optimizer_jobs import forget_overrides, llama, model, same_weights, trained, trainer, weights
from tests.checks.registry import proof
from tests.techniques.tiny_models import causal_model


@proof("stochastic-rounding-missing", fails="silent")
def stochastic_rounding_missing() -> None:
    for name in ("adamw_torch_fused", "adamw_bnb_8bit", "adafactor"):
        net = model().bfloat16()
        before = weights(net)
        trained(net, optim=name, learning_rate=1e-5, max_steps=5)
        large = before.abs() > 0.01  # 1e-5 is less than half of what bf16 can tell from 0.01
        assert (weights(net)[large] == before[large]).float().mean() > 0.99, name


@proof("stochastic-rounding-ignored", fails="silent")
def stochastic_rounding_ignored() -> None:
    on, off = ({"optim_args": f"bf16_stochastic_round={value}"} for value in (True, False))
    assert same_weights(model, on, off, optim="adamw_torch_8bit")
    assert not same_weights(lambda: model().bfloat16(), on, off, optim="adamw_torch_8bit")


@proof("second-moment-in-bf16", fails="silent")
def second_moment_in_bf16() -> None:
    states = trained(model().bfloat16(), optim="adamw_torch_8bit").optimizer.state
    small = {state["exp_avg_sq"].dtype for one, state in states.items() if one.numel() < 4096}
    assert small == {torch.bfloat16}
    assert torch.tensor(1.0, dtype=torch.bfloat16) * 0.999 == 1.0, "beta2 would now be seen"


@proof("embedding-not-quantised", fails="silent")
def embedding_not_quantised() -> None:
    net = causal_model("gpt2", vocab_size=257, n_embd=36)  # 9252 elements: above the least, and no multiple of 256
    states = trained(net, optim="adamw_torch_8bit").optimizer.state
    assert type(states[net.transformer.wte.weight]["exp_avg"]) is Tensor


@proof("adapters-too-small-for-8-bit", fails="silent")
def adapters_too_small() -> None:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    states = trained(net, optim="adamw_bnb_8bit").optimizer.state
    assert {state["state1"].dtype for state in states.values()} == {torch.float32}


@proof("embeddings-stay-in-32-bits", fails="silent")
def embeddings_stay() -> None:
    net = model()
    states = trained(net, optim="adamw_bnb_8bit").optimizer.state
    assert net.transformer.wte.weight.numel() > 4096
    assert states[net.transformer.wte.weight]["state1"].dtype is torch.float32
    assert states[net.transformer.h[0].attn.c_attn.weight]["state1"].dtype is torch.uint8


@proof("paged-without-cuda", fails="silent")
def paged_without_cuda() -> None:
    done = trainer(optim="paged_adamw_8bit")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        done.train()
    assert any("Paged optimizers are not supported on CPU" in str(one.message) for one in shown)


def _unmoved(cls: type, **options: Any) -> set[str]:
    net = model()
    before = {name: one.detach().clone() for name, one in net.named_parameters()}
    trained(net, own=(cls, {"lr": 0.1, **options}), max_steps=3)
    return {name for name, one in net.named_parameters() if torch.equal(one, before[name])}


@proof("zero-parameters-frozen", fails="silent")
def zero_parameters_frozen() -> None:
    biases = {name for name, one in model().named_parameters() if not one.any()}
    assert biases and all(name.endswith("bias") for name in biases)
    assert _unmoved(bitsandbytes.optim.LAMB) == biases == _unmoved(bitsandbytes.optim.LARS, momentum=0.9)


@proof("trust-ratio-missing", fails="silent")
def trust_ratio_missing() -> None:
    forget_overrides()
    results = []
    for most in (0.02, 1e-6):
        one = nn.Parameter(torch.arange(8192.0))
        made = bitsandbytes.optim.LARS8bit([one], lr=0.1, momentum=0.9, max_unorm=most)
        one.grad = torch.ones_like(one)
        made.step()
        results.append(one.detach().clone())
    assert torch.equal(*results) and not torch.equal(results[0], torch.arange(8192.0))
    source = Path(bitsandbytes.__file__).parent / "backends" / "cuda" / "ops.py"
    table = source.read_text().split("str2optimizer8bit_blockwise = {")[1].split("\n}\n")[0]
    assert '"adam"' in table and '"lamb"' not in table and '"lars"' not in table
