"""Adafactor with stochastic rounding: transformers' numbers on fp32 weights, and on bf16 weights nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_memkit.components.stochastic_adafactor import Adafactor, round_stochastically
from tests.techniques.proving import proves

pytestmark = pytest.mark.bf16

SHAPES = ((8, 16), (7,), (3, 4, 5))


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def train(optimizer: Any, parameters: list[nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for one in parameters:
            one.grad = (torch.randn(one.shape) * 3).to(one.dtype)
        optimizer.step()


@proves("same-result", "adafactor-stochastic")
def test_on_fp32_weights_every_number_is_transformers_own() -> None:
    mine, theirs = weights(), weights()
    groups = [[{"params": each[:1], "weight_decay": 0.1}, {"params": each[1:]}] for each in (mine, theirs)]
    own = Adafactor(groups[0], lr=1e-2)
    reference = transformers.Adafactor(groups[1], lr=1e-2, scale_parameter=False, relative_step=False)
    for optimizer, parameters in ((own, mine), (reference, theirs)):
        torch.manual_seed(1)
        train(optimizer, parameters, 20)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_small_updates_add_up_and_to_nearest_they_are_lost() -> None:
    def moved(stochastic: bool) -> float:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = Adafactor([weight], lr=1e-4, bf16_stochastic_round=stochastic)
        torch.manual_seed(0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return float(1 - weight.detach().float().mean())

    assert moved(False) == 0.0
    assert moved(True) == pytest.approx(100 * 1e-4, rel=0.05)


def test_rounding_is_right_in_the_mean_and_exact_where_it_can_be() -> None:
    torch.manual_seed(0)
    values = torch.full((200_000,), 1 + 0.3 / 128)
    rounded = round_stochastically(values).float()
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.3, abs=0.01)
    exact = torch.tensor([0.0, -1.5, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(exact).float(), exact)
    assert round_stochastically(torch.tensor([float("nan")])).isnan().all()


def test_a_resume_goes_on_with_fp32_states() -> None:
    def run(interrupted: bool) -> list[Tensor]:
        parameters = weights(torch.bfloat16)
        optimizer = Adafactor(parameters, lr=1e-2)
        torch.manual_seed(1)
        train(optimizer, parameters, 5)
        if interrupted:
            saved = optimizer.state_dict()
            optimizer = Adafactor(parameters, lr=1e-2)
            optimizer.load_state_dict(saved)
            states = [value for state in optimizer.state.values() for value in state.values()]
            assert {value.dtype for value in states if isinstance(value, Tensor)} == {torch.float32}
        train(optimizer, parameters, 5)
        return [one.detach() for one in parameters]

    assert all(torch.equal(one, other) for one, other in zip(run(False), run(True), strict=True))
