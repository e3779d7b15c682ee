"""What the loss takes at its peak, on the CPU's own allocator: over all logits, and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_memkit.components import chunked_loss_sum as summed
from hf_memkit.components.chunked_loss import install
from hf_memkit.setup import Setup
from hf_memkit.techniques.activation_bytes import (
    PEAK_BYTES,
    chunk_tokens_for,
    chunked_loss_bytes,
    full_loss_bytes,
    liger_loss_bytes,
    loss_bytes,
)
from tests.techniques.cpu_allocations import peak_bytes
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import batch, causal_model

LENGTH, WIDTH, CHUNK = 64, 32, 64
NUMBERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


def peak(rows: int, vocabulary: int, numbers: str = "fp32", engine: str = "") -> int:
    """Of a forward and a backward pass, the gradients included."""
    model = causal_model(vocab_size=vocabulary, n_layer=1, n_positions=LENGTH, n_embd=WIDTH, n_head=2).to(
        NUMBERS[numbers]
    )
    if engine:
        install(model, chunk_tokens=CHUNK, engine=engine, self_check=False)
    inputs = batch(rows, LENGTH, vocabulary=vocabulary)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=numbers == "autocast"):
            loss = model(**inputs).loss
        loss.backward()
        model.zero_grad()

    return peak_bytes(step)


def slopes(**how: Any) -> tuple[float, float]:
    """(bytes that one more token takes, bytes of those that grow with the vocabulary, by word)."""
    tokens = 8 * LENGTH
    small, large = ((peak(16, words, **how) - peak(8, words, **how)) / tokens for words in (4096, 8192))
    return small, (large - small) / 4096


@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_all_logits_take_twelve_bytes_each(numbers: str) -> None:
    _, by_word = slopes(numbers=numbers)
    assert by_word == pytest.approx(PEAK_BYTES, rel=0.01)


@proves("memory", "chunked-loss")
@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_chunks_take_no_more_for_more_tokens(numbers: str) -> None:
    by_token, by_word = slopes(numbers=numbers, engine="loop")
    assert abs(by_word) < 0.01
    assert by_token < 5 * 1024  # the one layer's activations of a token, and nothing of the vocabulary
    chunk = 4096 * (peak(8, 8192, numbers, "loop") - peak(8, 4096, numbers, "loop")) / 4096
    weight = 2 if numbers == "bf16" else 4
    expected = chunked_loss_bytes(8 * LENGTH, 4096, WIDTH, weight_bytes=weight, chunk_tokens=CHUNK)
    assert chunk == pytest.approx(expected, rel=0.1)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch before 2.13")
def test_torchs_own_form_makes_no_logits_either() -> None:
    _, by_word = slopes(engine="torch")
    assert abs(by_word) < 0.01
    # One buffer of logits, where the loop's autograd has three, and both gradients from forward on.
    assert peak(16, 8192, engine="torch") < peak(16, 8192, engine="loop") < peak(16, 8192) / 5


def test_formulas() -> None:
    assert chunk_tokens_for(50257) == 1024  # 4 × 1024 × 50257 is 196 MiB
    assert chunk_tokens_for(151936) == 256 and chunk_tokens_for(256000) == 256 and chunk_tokens_for(10**9) == 1
    for vocabulary in (97, 50257, 128256, 151936, 256000):
        assert summed.chunk_tokens_for(vocabulary) == chunk_tokens_for(vocabulary)
        assert 4 * vocabulary * chunk_tokens_for(vocabulary) <= 2**28
    # GPT-2 XL, 16 sequences of 1024 tokens: all logits, and one chunk of 1024 with the 16-bit gradient.
    assert full_loss_bytes(16384, 50257) == 12 * 16384 * 50257
    assert chunked_loss_bytes(16384, 50257, 1600, weight_bytes=2) == 12 * 1024 * 50257 + 2 * 50257 * 1600
    assert liger_loss_bytes(16384, 50257, 1600, weight_bytes=2) == 2 * (512 * 50257 + 16384 * 1600 + 50257 * 1600)


def test_the_setup_says_how_the_loss_is_computed() -> None:
    job = gpt2_job()
    setup = Setup("x", job=job).put("model.dtype", "bfloat16", "for the test")
    assert job.model is not None
    words, width = job.model.vocabulary, job.model.width
    assert loss_bytes(setup, job.model)[0] == full_loss_bytes(job.tokens, words)
    chunked = setup.put("model_parts.chunked_loss", {"chunk_tokens": 128}, "for the test")
    assert loss_bytes(chunked, job.model)[0] == chunked_loss_bytes(
        job.tokens, words, width, weight_bytes=2, chunk_tokens=128
    )
    fused = setup.put("arguments.use_liger_kernel", True, "for the test")
    assert loss_bytes(fused, job.model)[0] == liger_loss_bytes(job.tokens, words, width, weight_bytes=2)
