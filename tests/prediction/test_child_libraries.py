"""Every optimizer of the pack, quantised weights, and other library code outside torch's dispatcher, traced on fake
CUDA tensors: the bytes are those of the formulas, which are proven on the real libraries elsewhere
(tests/techniques/test_technique_optimizers.py, test_technique_adapters.py).

All cases are forked from one process that has loaded torch and transformers once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_memkit import preset
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.common.terms import CATEGORIES, Category, Phase
from hf_memkit.prediction.setup_as_script import SetupJob
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.setup_ledger import (
    adapter_parameters,
    dequantised_bytes,
    quantised_bytes,
    states_of,
    step_temporary_bytes,
)
from tests.prediction import cases

pytestmark = pytest.mark.tracing

LENGTH = 32
BATCH = 2
VOCABULARY = 1001
WIDTH = 192
"""Wide enough that linear layers have more than the 100 000 elements from which bitsandbytes pages states."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import GPT2Config, LlamaConfig

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    configs = {
        "gpt2": GPT2Config(
            n_layer=2, n_embd=WIDTH, n_head=4, n_positions=64, architectures=["GPT2LMHeadModel"], **sizes
        ),
        "llama": LlamaConfig(
            num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=320, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"], **sizes,
        ),
    }  # fmt: skip
    folders = {}
    for name, config in configs.items():
        folders[name] = tmp_path_factory.mktemp(name)
        config.save_pretrained(folders[name])
    return folders


def setup_of(folder: Path, names: str, *, batch: int = BATCH, **options: Any) -> Setup:
    return preset(
        names, model=str(folder), gpu_memory="16GB", ram="64GB", use_hub=False, sequence_length=LENGTH,
        global_batch_size=batch, arguments={"per_device_train_batch_size": batch}, **options,
    )  # fmt: skip


def traced(worker: Worker, setup: Setup, **options: Any) -> Trace:
    return cases.traced(worker, SetupJob(setup, LENGTH), **options)


def facts_of(folder: Path) -> ModelFacts:
    return describe(str(folder), use_hub=False)


def alive(trace: Trace, category: Category, end: int | None = None) -> list[int]:
    """Requested sizes of the storages that are live after the events before `end`."""
    numbers: set[int] = set()
    for event in trace.events[:end]:
        numbers.add(event) if event > 0 else numbers.discard(-event)
    wanted = CATEGORIES.index(category)
    return [trace.sizes_bytes[number - 1] for number in numbers if trace.category_of[number - 1] == wanted]


def most(trace: Trace, category: Category, phase: Phase) -> int:
    """Most live bytes of a category in a phase."""
    wanted, live, highest = CATEGORIES.index(category), 0, 0
    for start, end, name in trace.spans():
        for event in trace.events[start:end]:
            number = abs(event) - 1
            if trace.category_of[number] == wanted:
                live += trace.sizes_bytes[number] * (1 if event > 0 else -1)
            if name == phase:
                highest = max(highest, live)
    return highest


_PLAIN = ["adamw-foreach", "adamw-loop", "sgd-momentum", "adafactor", "lomo", "adalomo", "lars", "lamb"]
_ROUNDED = ["pure-bf16+adafactor-stochastic"]
_BITSANDBYTES = ["adamw-8bit", "lion-8bit"]
_TORCHAO = ["adamw-8bit-stochastic", "adamw-4bit-stochastic", "pure-bf16+adamw-8bit-stochastic"]
_LOW_RANK = ["galore", "galore-layerwise", "apollo", "apollo-layerwise"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        *(("gpt2", name) for name in ("adamw-fused", *_PLAIN, *_ROUNDED, *_BITSANDBYTES, *_TORCHAO)),
        *(("llama", name) for name in _LOW_RANK),
    ],
)
def test_optimizer_states_have_the_bytes_of_their_formula(
    worker: Worker, models: dict[str, Path], model: str, names: str
) -> None:
    setup = setup_of(models[model], names)
    trace = traced(worker, setup)
    held = sum(alive(trace, "optimizer"))
    expected = states_of(setup, facts_of(models[model])).total
    parameters = 2 * 12 + 4 if model == "gpt2" else 2 * 9 + 3
    groups, matrices, projected = 2, 2 * 4 + 2, 2 * 7
    shorter = [min(one.inputs, one.outputs) for one in facts_of(models[model]).linears if not one.head]
    # GaLore's projector is a view of the first singular vectors, and holds the memory of all of them; the formula
    # counts what it views (galore_torch 1.0: galore_projector.py, `get_orthogonal_matrix`, fp32 weights).
    rank = 48
    all_vectors = sum(4 * short * (short - rank) for short in shorter)
    beside = {
        "adamw-fused": 4 * parameters,  # how many steps were made
        "adafactor": 4 * parameters,  # the root mean square of the weights
        "adamw-8bit": 2 * 1024,  # tables that all states share
        "lion-8bit": 1024,
        "lars": 4 * matrices,  # norms of the updates
        "lamb": 4 * matrices,
        **dict.fromkeys(("galore", "galore-layerwise"), all_vectors),
        **dict.fromkeys(_TORCHAO, 4 * groups),  # learning rates
        **dict.fromkeys(("apollo", "apollo-layerwise"), 4 * projected),  # norms of the scaled gradients
    }
    assert held - expected == beside.get(names, 0)


def test_the_foreach_form_makes_a_copy_of_all_parameters(worker: Worker, models: dict[str, Path]) -> None:
    """On a GPU it is torch.optim's default."""
    setup = setup_of(models["gpt2"], "adamw-foreach")
    trace = traced(worker, setup)
    temporary = most(trace, "optimizer", "optimizer") - sum(alive(trace, "optimizer"))
    expected = step_temporary_bytes(setup, facts_of(models["gpt2"]))
    assert 0.99 * expected < temporary < expected, "weights and biases, with and without decay, one after the other"
    assert "aten._foreach_norm.Scalar (scratch)" in trace.operations, "norms of all gradients are one operation"
    loop = traced(worker, setup_of(models["gpt2"], "adamw-loop"))
    assert most(loop, "optimizer", "optimizer") - sum(alive(loop, "optimizer")) < expected


def test_paged_states_are_the_hosts(worker: Worker, models: dict[str, Path]) -> None:
    setup = setup_of(models["gpt2"], "paged-adamw-8bit")
    trace = traced(worker, setup)
    facts = facts_of(models["gpt2"])
    large = [size for size in facts.sizes if size >= 100_000]
    tables = [VOCABULARY * WIDTH]
    paged = sum(2 * size for size in large if size not in tables) + 2 * 4 * sum(tables)
    assert paged > 0
    assert sum(alive(trace, "optimizer")) == states_of(setup, facts).total - paged + 2 * 1024


def test_offloaded_optimizer_leaves_the_gpu(worker: Worker, models: dict[str, Path]) -> None:
    setup = setup_of(models["gpt2"], "cpu-offload-optimizer")
    trace = traced(worker, setup)
    small = [size for size in facts_of(models["gpt2"]).sizes if size < 4096]
    assert sum(alive(trace, "optimizer")) == sum(2 * 4 * size + 4 for size in small)


def test_adapters_and_frozen_weights(worker: Worker, models: dict[str, Path]) -> None:
    setup = setup_of(models["llama"], "half-weights-frozen+lora")
    trace = traced(worker, setup)
    facts = facts_of(models["llama"])
    adapters = adapter_parameters(facts, setup.section("adapter"))
    rotary = 2 * 4 * WIDTH // 4 // 2  # frequencies in fp32, and the copy of them that transformers keeps
    assert sum(alive(trace, "weights")) == 2 * facts.parameters + 4 * adapters + rotary


@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_quantised_weights(worker: Worker, models: dict[str, Path], model: str) -> None:
    setup = setup_of(models[model], "half-weights-frozen+qlora")
    trace = traced(worker, setup)
    facts = facts_of(models[model])
    quantised = quantised_bytes(facts, setup["model.quantization"])
    adapters = adapter_parameters(facts, setup.section("adapter"))
    rotary = 2 * 4 * WIDTH // 4 // 2 if model == "llama" else 0
    assert sum(alive(trace, "weights")) == quantised.total + 4 * adapters + rotary
    # Backward makes each weight whole again, and none stays.
    whole = dequantised_bytes(facts, setup["model.quantization"])
    made = [
        trace.sizes_bytes[number]
        for number, operation in enumerate(trace.operation_of)
        if "dequantize_4bit" in trace.operations[operation]
    ]
    assert max(made) == whole


@pytest.mark.slow
def test_weights_in_8_bits(worker: Worker, models: dict[str, Path]) -> None:
    """Would notice: weights that stay in 16 bits, or scales that are left behind when the model moves to the GPU."""
    setup = setup_of(models["llama"], "half-weights-frozen+qlora")
    setup = setup.put("model.quantization", {"load_in_8bit": True}, "test")
    trace, facts = traced(worker, setup), facts_of(models["llama"])
    quantised, adapters = (
        quantised_bytes(facts, {"load_in_8bit": True}),
        adapter_parameters(facts, setup.section("adapter")),
    )
    end = next(end for end, phase in trace.marks if phase == "load")
    assert sum(alive(trace, "weights", end)) == quantised.total + 4 * adapters + 2 * 4 * WIDTH // 4 // 2


@pytest.mark.slow
def test_whole_and_chunked_loss(worker: Worker, models: dict[str, Path]) -> None:
    batch, chunk = 8, 64
    tokens = batch * LENGTH
    whole = traced(worker, setup_of(models["llama"], "adamw-fused", batch=batch))
    slack = 64 * tokens  # a few numbers a token: labels, masks, losses
    assert 0 <= most(whole, "loss", "backward") - 12 * tokens * VOCABULARY < slack
    setup = setup_of(models["llama"], "adamw-fused+chunked-loss", batch=batch, values={"chunk_tokens": chunk})
    looped = setup.put("model_parts.chunked_loss", {"chunk_tokens": chunk, "engine": "loop"}, "has a formula")
    trace = traced(worker, looped)
    gradient = 4 * VOCABULARY * WIDTH
    expected = 12 * chunk * VOCABULARY + gradient
    found = most(trace, "loss", "backward")
    # The output embedding's gradient is summed into what is then the parameter's own.
    assert expected - gradient <= found < expected + 4 * VOCABULARY * WIDTH + slack + 4 * tokens * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("names", ["adamw-fused+chunked-loss", "bf16-autocast+adamw-fused+liger"])
def test_ligers_kernels_never_make_all_logits(worker: Worker, models: dict[str, Path], names: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    batch = 8
    values = {"chunk_tokens": 64} if "chunked" in names else None
    trace = traced(worker, setup_of(models["llama"], names, batch=batch, values=values))
    logits = batch * LENGTH * VOCABULARY * 4
    assert max(trace.sizes_bytes[:]) < max(logits, 32 * 2**20)
    loss = CATEGORIES.index("loss")
    sizes = [size for size, category in zip(trace.sizes_bytes, trace.category_of, strict=True) if category == loss]
    assert max(sizes) < logits
    liger = [name for name in trace.operations if "log_softmax" in name]
    assert not liger


@pytest.mark.slow
def test_checkpointing_keeps_less_in_each_form(worker: Worker, models: dict[str, Path]) -> None:
    forms = ("", "+selective-checkpointing", "+activation-checkpointing", "+offloaded-checkpointing")
    kept = []
    for form in forms:
        setup = setup_of(models["gpt2"], f"adamw-fused{form}")
        kept.append(most(traced(worker, setup), "activations", "forward"))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["length-grouped", "pad-to-multiple", "packing"])
def test_rows_that_are_padded_or_packed_need_masks(worker: Worker, models: dict[str, Path], name: str) -> None:
    plain, other = (
        traced(worker, setup_of(models["llama"], names)) for names in ("adamw-fused", f"{name}+adamw-fused")
    )
    mask = BATCH * LENGTH * LENGTH  # who sees whom, a byte each; and the same as numbers that attention adds
    for size in (mask, 4 * mask):
        assert other.sizes_bytes.count(size) >= plain.sizes_bytes.count(size) + 2, "in each step"
    assert sum(alive(other, "weights")) == sum(alive(plain, "weights"))
    assert sum(alive(other, "optimizer")) == sum(alive(plain, "optimizer"))
    assert other.peak().size_bytes > plain.peak().size_bytes


def test_optimizers_here_are_all_of_the_pack() -> None:
    from hf_memkit.setup.techniques.registry import TECHNIQUES

    here = {
        *_PLAIN,
        *_ROUNDED,
        *_BITSANDBYTES,
        *_TORCHAO,
        *_LOW_RANK,
        "adamw-fused",
        "paged-adamw-8bit",
        "cpu-offload-optimizer",
    }
    of_the_pack = {one.name for one in TECHNIQUES.values() if one.slot == "optimizers" and "zero" not in one.name}
    assert of_the_pack <= {name.rpartition("+")[2] for name in here}


@pytest.mark.slow
def test_tf32_changes_no_byte(worker: Worker, models: dict[str, Path]) -> None:
    plain, tf32 = (traced(worker, setup_of(models["llama"], names)) for names in ("adamw-fused", "tf32+adamw-fused"))
    assert tf32 == plain
