"""Fused activation functions, and what each implementation of attention keeps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.components.fused_gelu import install
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.activation_functions import COMPOSED
from hf_memkit.setup.techniques.registry import find_technique
from tests.techniques.cpu_allocations import saved_bytes
from tests.techniques.jobs import MACHINE, gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import batch, causal_model

HEADS, LENGTH = 4, 48

# ---- activation functions


@pytest.mark.parametrize("name", sorted(COMPOSED))
def test_each_composed_function_is_the_fused_one(name: str) -> None:
    holder = torch.nn.ModuleDict({"act": ACT2FN[name]})
    fused = copy.deepcopy(holder)
    install(fused)
    assert type(fused["act"]) is not type(holder["act"])
    for scale in (0.1, 1.0, 10.0):
        value = scale * torch.randn(1000, generator=torch.Generator().manual_seed(0))
        own, other = value.clone().requires_grad_(), value.clone().requires_grad_()
        expected, actual = holder["act"](own), fused["act"](other)
        # A few units in the last place: the same function, with its operations in another order.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * scale)
        expected.sum().backward()
        actual.sum().backward()
        torch.testing.assert_close(other.grad, own.grad, rtol=1e-5, atol=2e-6)


@proves("same-result", "fused-gelu")
def test_a_training_with_the_fused_function() -> None:
    losses = []
    for part in (False, True):
        model = causal_model()
        if part:
            install(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(4):
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][-1] < losses[0][0]


@proves("memory", "fused-gelu")
def test_it_keeps_its_input_only() -> None:
    def kept(module: Any, value: torch.Tensor) -> int:
        return saved_bytes(lambda: module(value)) // (value.numel() * value.element_size())

    value = torch.randn(64, 64, requires_grad=True)
    assert kept(ACT2FN["gelu_new"], value) >= 4
    fused = torch.nn.ModuleDict({"act": ACT2FN["gelu_new"]})
    install(fused)
    assert kept(fused["act"], value) == 1
    # In a model: what is spared is that many tensors of the feed-forward layer, in each layer.
    inputs = batch()
    model, with_part = causal_model(), causal_model()
    install(with_part)
    spared = saved_bytes(lambda: model(**inputs).loss) - saved_bytes(lambda: with_part(**inputs).loss)
    hidden = 4 * inputs["input_ids"].numel() * 4 * 32  # fp32 × tokens × width of the feed-forward layer
    assert spared == 2 * hidden * (kept(ACT2FN["gelu_new"], value) - 1)


def test_put_back() -> None:
    model = causal_model().eval()
    own = model.transformer.h[0].mlp.act
    undo = install(model)
    assert model.transformer.h[0].mlp.act is not own and not model.transformer.h[0].mlp.act.training
    undo()
    assert model.transformer.h[0].mlp.act is own
    with pytest.raises(ValueError, match="fused-gelu"):
        install(causal_model("llama"))


# ---- attention


def losses(implementation: str, model_type: str) -> tuple[float, torch.Tensor]:
    model = causal_model(model_type, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    inputs = batch(2, LENGTH)
    inputs["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    inputs["attention_mask"][0, -7:] = 0
    inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), model.get_input_embeddings().weight.grad


@proves("same-result", "sdpa-attention", "eager-attention")
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_the_same_attention_either_way(model_type: str) -> None:
    (eager, eager_gradient), (sdpa, sdpa_gradient) = losses("eager", model_type), losses("sdpa", model_type)
    assert sdpa == pytest.approx(eager, abs=1e-5)
    torch.testing.assert_close(sdpa_gradient, eager_gradient, rtol=0, atol=1e-5)


def scores_kept(model: Any) -> int:
    """Bytes of tensors with a row and a column for each token that autograd keeps."""
    return saved_bytes(
        lambda: model(**batch(2, LENGTH)).loss,
        lambda tensor: tensor.dim() >= 3 and tensor.shape[-2:] == (LENGTH, LENGTH) and tensor.shape[-3] > 1,
    )


@proves("memory", "sdpa-attention", "eager-attention")
@pytest.mark.parametrize(("model_type", "dtype", "size"), [("gpt2", torch.float32, 4), ("llama", torch.bfloat16, 2)])
def test_eager_keeps_the_scores_and_sdpa_none(model_type: str, dtype: torch.dtype, size: int) -> None:
    eager = causal_model(model_type, attn_implementation="eager").to(dtype)
    # Llama takes the softmax in fp32, and keeps that beside what it is cast to.
    each = size if model_type == "gpt2" or size == 4 else 4 + size
    assert scores_kept(eager) == each * 2 * HEADS * LENGTH**2 * 2
    assert scores_kept(causal_model(model_type, attn_implementation="sdpa").to(dtype)) == 0


def test_masks_are_said_where_sdpa_was_named() -> None:
    job = gpt2_job("gpt2-xl", sequence_length=1024)
    sdpa = find_technique("sdpa-attention")(Setup("x", job=job))
    assert sdpa["model.attn_implementation"] == "sdpa"
    assert not sdpa.notes, "a preset that merely has it says nothing of masks"
    named = find_technique("sdpa-attention")(Setup("lean+sdpa-attention", job=job))
    assert any("padding mask" in note for note in named.notes)


def test_settings() -> None:
    fused = find_technique("fused-gelu")(Setup("x", job=gpt2_job()))
    assert fused["model_parts.fused_gelu"] == {} and "gelu_new" in fused.settings[0].reason
    chunked = find_technique("chunked-loss")
    values = {"chunk_tokens": 64, "label_smoothing": 0.1}
    for job, expected in (
        (gpt2_job(None), {}), (gpt2_job(), {"chunk_tokens": 1024}), (gpt2_job(values=values), values),
    ):  # fmt: skip
        assert chunked(Setup("x", job=job))["model_parts.chunked_loss"] == expected


def test_flash_attention_asks_for_the_gpu() -> None:
    flash = find_technique("flash-attention")
    assert flash(Setup("x", job=gpt2_job())).problems == ()
    old = replace(gpt2_job(), machine=MACHINE.with_gpu(named_gpu("T4")))
    assert "T4" in flash(Setup("x", job=old)).problems[0]
