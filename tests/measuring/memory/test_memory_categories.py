from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_memkit.measuring.memory.holdings import walk
from hf_memkit.measuring.memory.optimizer_state import optimizer_chain, state_summary

CPU = torch.device("cpu")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()


def test_weights_gradients_and_states() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert walk(model, optimizer) == {("weights", "host"): 64 * 64 * 4}
    trained(model, optimizer)
    assert walk(model, optimizer) == {
        ("weights", "host"): 64 * 64 * 4,
        ("gradients", "host"): 64 * 64 * 4,
        ("optimizer", "host"): 2 * 64 * 64 * 4 + 4,
    }
    assert set(walk(model, optimizer, CPU)) == {
        ("weights", "device"), ("gradients", "device"), ("optimizer", "device"),
    }  # fmt: skip
    assert walk(model, optimizer, torch.device("cuda", 0)) == walk(model, optimizer)


def test_tied_weights_count_once_and_meta_not_at_all() -> None:
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    second.weight = first.weight
    view = nn.Module()
    view.rows = nn.Parameter(first.weight.data[:3])  # part of the same storage
    assert walk(nn.ModuleList([first, second, view])) == {("weights", "host"): 64 * 64 * 4}
    assert walk(nn.Linear(8, 8, device="meta")) == {}


def test_copies_that_only_the_optimizer_has() -> None:
    """As mixed-precision optimizers keep them."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    copy = nn.Parameter(model.weight.detach().float())
    assert walk(model, torch.optim.SGD([copy])) == {
        ("weights", "host"): 64 * 64 * 2,
        ("optimizer", "host"): 64 * 64 * 4,
    }


@pytest.mark.slow
def test_quantized_states_count_by_their_inner_tensors() -> None:
    low_bit = pytest.importorskip("torchao.optim")
    model = nn.Linear(64, 128, bias=False)
    optimizer = low_bit.AdamW8bit(model.parameters())
    trained(model, optimizer)
    size = walk(model, optimizer)[("optimizer", "host")]
    assert 2 * 64 * 128 <= size < 3 * 64 * 128  # a byte a value, scales and tables
    summary = state_summary(optimizer)
    assert summary["exp_avg"] == {"OptimState8bit": 1} and summary["exp_avg_sq"] == {"OptimState8bit": 1}


def test_wrappers_are_looked_through() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters())
    trained(model, inner)
    outer = Wrapper(Wrapper(inner))
    assert optimizer_chain(outer) == ["Wrapper", "Wrapper", "AdamW"]
    assert walk(model, outer) == walk(model, inner)
    assert state_summary(outer) == {"step": {"float32": 2}, "exp_avg": {"float32": 2}, "exp_avg_sq": {"float32": 2}}
    circle = Wrapper(None)
    circle.optimizer = circle
    assert optimizer_chain(circle) == ["Wrapper"] and optimizer_chain(None) == [] and state_summary(None) == {}
