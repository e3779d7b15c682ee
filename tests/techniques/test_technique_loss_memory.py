"""What the loss takes at its peak, on the CPU's own allocator: over all logits, and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_memkit.components import chunked_loss_sum as summed
from hf_memkit.components.chunked_loss import install
from hf_memkit.setup.techniques.loss import chunk_tokens_for
from tests.fewer import first
from tests.techniques.cpu_allocations import peak_bytes
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


@pytest.mark.parametrize("numbers", first(list(NUMBERS)))
def test_all_logits_take_twelve_bytes_each(numbers: str) -> None:
    _, by_word = slopes(numbers=numbers)
    assert by_word == pytest.approx(12, rel=0.01)


@proves("memory", "chunked-loss")
@pytest.mark.parametrize("numbers", first(list(NUMBERS)))
def test_chunks_take_no_more_for_more_tokens(numbers: str) -> None:
    by_token, by_word = slopes(numbers=numbers, engine="loop")
    assert abs(by_word) < 0.01
    assert by_token < 5 * 1024  # the one layer's activations of a token, and nothing of the vocabulary
    chunk = 4096 * (peak(8, 8192, numbers, "loop") - peak(8, 4096, numbers, "loop")) / 4096
    weight = 2 if numbers == "bf16" else 4
    expected = 12 * CHUNK * 4096 + weight * 4096 * WIDTH  # one chunk's logits, the output embedding's gradient
    assert chunk == pytest.approx(expected, rel=0.1)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch before 2.13")
def test_torchs_own_form_makes_no_logits_either() -> None:
    _, by_word = slopes(engine="torch")
    assert abs(by_word) < 0.01
    # One buffer of logits, where the loop's autograd has three, and both gradients from forward on.
    assert peak(16, 8192, engine="torch") < peak(16, 8192, engine="loop") < peak(16, 8192) / 5


def test_the_size_of_a_chunk() -> None:
    assert chunk_tokens_for(50257) == 1024  # 4 × 1024 × 50257 is 196 MiB
    assert chunk_tokens_for(151936) == 256 and chunk_tokens_for(256000) == 256 and chunk_tokens_for(10**9) == 1
    for vocabulary in (97, 50257, 128256, 151936, 256000):
        assert summed.chunk_tokens_for(vocabulary) == chunk_tokens_for(vocabulary)
        assert 4 * vocabulary * chunk_tokens_for(vocabulary) <= 2**28
