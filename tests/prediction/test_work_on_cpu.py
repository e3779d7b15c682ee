"""What a training on fake CPU tensors is said to compute: attention and loss have FLOPs there, too."""

from __future__ import annotations

from collections import Counter

import pytest

from hf_memkit.prediction.setup_as_script import SetupTraining
from hf_memkit.prediction.trace.work import Operation, Work
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.setup import Setup
from tests.prediction.cases import traced, without_saving

WORDS, WIDTH, LENGTH, BATCH, LAYERS = 4096, 64, 32, 4, 2


def work(worker: Worker, **settings: object) -> Work:
    setup = Setup("compared")
    for key, value in {
        "model.name": "llama",
        "model.origin": "architecture",
        "model.architecture": {
            "model_type": "llama", "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 96,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
            "tie_word_embeddings": False,
        },
        "model.class": "LlamaForCausalLM",
        "arguments.per_device_train_batch_size": BATCH,
        **settings,
    }.items():  # fmt: skip
        setup = setup.put(key, value, "compared")
    trace = traced(worker, SetupTraining(without_saving(setup), LENGTH), device="cpu", for_plan=True)
    assert trace.work is not None
    return trace.work


def step(found: Work) -> Counter[Operation]:
    begin, end = found.steps()[-1]
    return Counter(found.operations[call] for call in found.calls[begin:end])


@pytest.mark.slow
def test_attention_has_its_flops(worker: Worker) -> None:
    """Defect: a CPU's kernel that costs its bytes alone."""
    calls = step(work(worker))
    attention = {each: count for each, count in calls.items() if "scaled_dot_product" in each.name}
    assert all(each.kind == "attention" for each in attention)
    forward = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH // 2  # two products, half of the scores: it is causal
    assert sorted(each.flops for each in attention) == [forward, 5 * forward // 2]
    assert set(attention.values()) == {LAYERS}


def test_chunked_loss_computes_as_many_products(worker: Worker) -> None:
    """`linear_cross_entropy` is one operation to the dispatcher, and its products were not seen: a third of a step."""
    pytest.importorskip("torch.nn.modules.linear_cross_entropy", reason="torch 2.13")

    def flops(calls: Counter[Operation]) -> int:
        return sum(count * each.flops for each, count in calls.items() if each.kind == "matmul")

    plain = step(work(worker))
    chunked = step(work(worker, **{"model_parts.chunked_loss": {"chunk_tokens": 24}}))
    assert any("linear_cross_entropy" in each.name for each in chunked)
    assert not [each for each in chunked if each.kind == "unknown"]
    assert flops(chunked) == flops(plain)
    chunks = [each for each in chunked if each.name.endswith("(product)") and each.shape[2] == WORDS]
    assert sorted(each.shape[1] * chunked[each] for each in chunks) == [8, 120], "five chunks of 24, and 8 tokens"
