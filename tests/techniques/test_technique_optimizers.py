"""Optimizers: the same losses where the algorithm is the same, and bytes counted in the real ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.optimizer_bytes import Measured, make_setup, make_trainer, measure
from hf_memkit.catalog.optimizers import OPTIMIZERS, Options, Shapes, States, find_optimizer
from hf_memkit.checks import Subject, check
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from hf_memkit.setup.techniques.setup_ledger import optimizer_of, state_source, states_of
from tests.techniques.cpu_allocations import peak_bytes
from tests.techniques.proving import proves

# 1013 words: the word embedding, 64 832 elements, divides by no block.
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 1013}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "vocab_size": 1013}  # fmt: skip
CHOSEN = [name for name, one in TECHNIQUES.items() if one.family == "optimizers"]
LOW_RANK = [name for name in CHOSEN if name.startswith(("galore", "apollo"))]


def state_bytes(optimizer: str, shapes: Shapes, **options: Any) -> States:
    return find_optimizer(optimizer).states.bytes_of(shapes, Options(**options))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AdaLomo puts its states on CUDA without asking; GaLore and bitsandbytes warn of what is meant here."""
    monkeypatch.setattr(Tensor, "cuda", lambda self, *args, **options: self)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def architecture(name: str) -> dict[str, Any]:
    return LLAMA if name in LOW_RANK else GPT2


def losses(name: str, *, put: dict[str, Any] | None = None, seed: int | None = None, **arguments: Any) -> list[float]:
    """Training losses of two epochs under a technique's own settings, with `put` over them.

    `seed` is given to APOLLO for every projection: it would take the parameter's place in its list, and the layer-wise
    form has a list a parameter.
    """
    setup = make_setup(name, architecture(name), "float32")
    for key, value in (put or {}).items():
        setup = setup.put(key, value, "for this test")
    trainer = make_trainer(setup, architecture(name), steps=8, learning_rate=1e-2, **arguments)
    for state in trainer.create_optimizer().state.values() if seed is not None else ():
        state["seed"] = seed
    trainer.train()
    actual = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(actual) == 8 and sum(actual[4:]) < sum(actual[:4]) - 0.1
    return actual


def test_the_table_has_all_of_trainers_names() -> None:
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} <= set(OPTIMIZERS)
    assert all(row.unpaged in OPTIMIZERS for row in OPTIMIZERS.values() if row.unpaged)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_technique_chooses_the_row_that_names_it(name: str) -> None:
    row = find_optimizer(optimizer_of(make_setup(name, architecture(name), "float32")))
    assert (row.technique, row.packages) == (name, TECHNIQUES[name].packages)


@pytest.mark.parametrize(
    ("name", "put"),
    [("adamw-fused", {}), ("adamw-foreach", {}), ("adamw-loop", {"optimizer.foreach": True})],
    ids=["fused", "the loop on a CPU", "foreach"],
)
@proves("same-result", "adamw-fused", "adamw-foreach", "adamw-loop")
def test_the_forms_of_adamw_are_one_algorithm(name: str, put: dict[str, bool]) -> None:
    """Within float32's rounding: the order of the operations differs."""
    assert losses(name, put=put) == pytest.approx(losses("adamw-loop"), rel=1e-5)


@proves("same-result", "paged-adamw-8bit")
def test_paging_changes_no_number() -> None:
    assert losses("paged-adamw-8bit") == losses("adamw-8bit")


@pytest.mark.slow
@proves("same-result", "galore-layerwise", "apollo-layerwise")
def test_a_layer_at_a_time_is_the_same_step() -> None:
    """Losses after none, one and two updates, without clipping, which the layer-wise forms cannot do.

    Later ones drift apart: directions in which a small model's gradient is next to nothing are rounding noise, and
    Adam makes steps of them as large as of any other. An update left out would show ten times as much.
    """
    whole = losses("galore", max_grad_norm=0.0)[:3]
    assert losses("galore-layerwise")[:3] == pytest.approx(whole, rel=3e-4)
    assert whole[0] - whole[2] > 10 * 3e-4
    whole = losses("apollo", max_grad_norm=0.0, seed=1)[:3]
    assert losses("apollo-layerwise")[:3] == pytest.approx(whole, rel=3e-4)


@pytest.mark.slow
@proves(
    "memory", "sgd-momentum", "adafactor", "adafactor-stochastic", "adamw-8bit", "adamw-8bit-stochastic",
    "adamw-4bit-stochastic", "lion-8bit",
    "lomo", "adalomo", "galore", "galore-layerwise", "apollo", "apollo-layerwise", "lars", "lamb",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in CHOSEN]
    + [(name, "float32") for name in ("adamw-fused", "adamw-8bit", "adamw-8bit-stochastic", "galore", "lomo")],
)
def test_the_formula_is_what_the_optimizer_holds(name: str, dtype: str) -> None:
    """Every tensor of the real optimizer after a step, to the byte; gradients at their most."""
    got: Measured = measure(make_setup(name, architecture(name), dtype), architecture(name))
    assert got.states == got.states_computed
    if name in ("lomo", "adalomo"):  # two at a time, at most the two largest
        assert got.gradients_computed / 2 < got.gradients <= got.gradients_computed
        assert got.gradients < got.parameters * 2
    else:
        assert got.gradients == got.gradients_computed


@pytest.mark.parametrize("bits", [8, 4])
def test_the_block_that_the_ledger_names_is_torchaos(bits: int) -> None:
    """Trainer gives its 4-bit AdamW blocks of 256, where torchao and the technique have 128."""
    trainers = Setup(preset="x").put("arguments.optim", f"adamw_torch_{bits}bit", "for this test")
    for setup in (make_setup(f"adamw-{bits}bit-stochastic", GPT2, "float32"), trainers):
        block = make_trainer(setup, GPT2).create_optimizer().block_size
        number = {8: "1", 4: "1/2"}[bits]
        assert state_source(setup).startswith(f"2 × ({number} + 4/{block}) bytes a parameter (torchao)")
        # A parameter of one block, above the least that is quantised: its states are.
        one = Shapes((), vectors=(4096 + block,))
        assert state_bytes(optimizer_of(setup), one).plain == 0
        assert (state_bytes(optimizer_of(setup), Shapes((), vectors=(4096 + 128,))).plain == 0) is (block == 128)


def test_adapters_are_what_is_counted() -> None:
    from hf_memkit.catalog.models import describe

    facts = describe("llama", architecture=LLAMA, use_hub=False)
    setup = Setup(preset="x").put("adapter.r", 4, "why").put("adapter.target_modules", "all-linear", "why")
    trained = sum(4 * (layer.inputs + layer.outputs) for layer in facts.linears if not layer.head)
    assert states_of(setup, facts).total == 8 * trained


@proves("memory", "adamw-fused", "adamw-foreach", "adamw-loop")
def test_foreach_holds_a_copy_of_the_parameters_and_the_others_do_not() -> None:
    def temporaries(**form: bool) -> int:
        parameters = [nn.Parameter(torch.randn(256, 256)) for _ in range(8)]
        for one in parameters:
            one.grad = torch.randn_like(one)
        return peak_bytes(torch.optim.AdamW(parameters, lr=1e-3, **form).step)

    whole = 8 * 256 * 256 * 4
    assert temporaries(foreach=True) >= whole
    assert temporaries(foreach=False) <= 3 * whole // 8 + 64  # three of one parameter, and single numbers
    assert temporaries(fused=True) < whole // 8 // 8


@pytest.mark.parametrize("name", CHOSEN)
def test_no_technique_breaks_a_rule_about_optimizers(name: str) -> None:
    dtype = "bfloat16" if name.endswith("stochastic") else "float32"
    setup = make_setup(name, architecture(name), dtype)
    from hf_memkit.catalog.models import describe

    facts = describe(architecture(name)["model_type"], architecture=architecture(name), use_hub=False)
    actual = check(replace(Subject.of_setup(setup), model=facts))
    # A word embedding larger than all the rest is the tiny model's, not the technique's.
    assert [one for one in actual if one.rule != "embeddings-stay-in-32-bits"] == []


@pytest.mark.parametrize(("name", "law"), [("lars", 8.0), ("lamb", 8.0**0.5)])
def test_large_batches_scale_the_learning_rate_as_their_papers_say(name: str, law: float) -> None:
    values = {"reference_batch_size": 32, "reference_learning_rate": 0.01}
    from dataclasses import replace

    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.setup.job import Job

    machine = Machine(None, ram_bytes=1, disk_free_bytes=1, disk_path="/", cpu_count=1)
    job = Job(None, machine, 16, 8, "/tmp", values, gpus=4, accumulation=4)
    setup = TECHNIQUES[name](Setup(preset=name, job=job))
    assert setup["arguments.learning_rate"] == pytest.approx(0.01 * law)
    assert setup["arguments.warmup_steps"] == pytest.approx(0.05 if name == "lars" else 8 / 320)
    plain = TECHNIQUES[name](Setup(preset=name, job=replace(job, values={})))
    assert "arguments.learning_rate" not in plain and plain["arguments.warmup_steps"] == 0.1


def test_a_rank_can_be_asked_for_and_is_a_quarter_of_the_width_otherwise() -> None:
    assert "rank=16," in make_setup("galore", LLAMA, "float32")["arguments.optim_args"]
    assert "rank=8," in make_setup("apollo", LLAMA, "float32", projection_rank=8)["arguments.optim_args"]


def test_our_lamb_and_lars_move_what_starts_at_zero() -> None:
    for name in ("lamb", "lars"):
        trainer = make_trainer(make_setup(name, GPT2, "float32"), GPT2, steps=3, learning_rate=1e-2)
        before = {key: one.detach().clone() for key, one in trainer.model.named_parameters()}
        trainer.train()
        assert not [key for key, one in trainer.model.named_parameters() if torch.equal(one, before[key])]
