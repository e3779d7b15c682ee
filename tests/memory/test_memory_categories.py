from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_memkit.memory import optimizer_chain, state_summary, walk
from hf_memkit.memory.categories import categories_at_peak

GIB = 2**30
CPU = torch.device("cpu")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()


def test_weights_gradients_and_states() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert walk(model, optimizer) == {"weights_host_bytes": 64 * 64 * 4}
    trained(model, optimizer)
    assert walk(model, optimizer) == {
        "weights_host_bytes": 64 * 64 * 4,
        "gradients_host_bytes": 64 * 64 * 4,
        "optimizer_host_bytes": 2 * 64 * 64 * 4 + 4,
    }
    assert set(walk(model, optimizer, CPU)) == {
        "weights_device_bytes", "gradients_device_bytes", "optimizer_device_bytes",
    }  # fmt: skip
    assert walk(model, optimizer, torch.device("cuda", 0)) == walk(model, optimizer)


def test_tied_weights_count_once_and_meta_not_at_all() -> None:
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    second.weight = first.weight
    view = nn.Module()
    view.rows = nn.Parameter(first.weight.data[:3])  # part of the same storage
    assert walk(nn.ModuleList([first, second, view])) == {"weights_host_bytes": 64 * 64 * 4}
    assert walk(nn.Linear(8, 8, device="meta")) == {}


def test_copies_that_only_the_optimizer_has() -> None:
    """As mixed-precision optimizers keep them."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    copy = nn.Parameter(model.weight.detach().float())
    assert walk(model, torch.optim.SGD([copy])) == {
        "weights_host_bytes": 64 * 64 * 2,
        "optimizer_host_bytes": 64 * 64 * 4,
    }


def test_quantized_states_count_by_their_inner_tensors() -> None:
    low_bit = pytest.importorskip("torchao.optim")
    model = nn.Linear(64, 128, bias=False)
    optimizer = low_bit.AdamW8bit(model.parameters())
    trained(model, optimizer)
    found = walk(model, optimizer)["optimizer_host_bytes"]
    assert 2 * 64 * 128 <= found < 3 * 64 * 128  # a byte a value, scales and tables
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


def test_never_more_than_the_peak_and_never_negative() -> None:
    walked = {"weights_device_bytes": 4 * GIB, "gradients_device_bytes": 4 * GIB, "optimizer_device_bytes": 8 * GIB}
    for peak in (0.0, 3.0, 5.0, 13.0, 16.0, 40.0):
        found = categories_at_peak(walked, peak)
        assert sum(found.values()) == pytest.approx(peak) and min(found.values()) >= 0
    assert categories_at_peak(walked, 20.0) == {"weights": 4, "optimizer": 8, "gradients": 4, "other": 4}


def test_what_does_not_live_yet_at_the_peak() -> None:
    walked = {"weights_device_bytes": 4 * GIB, "gradients_device_bytes": 4 * GIB, "optimizer_device_bytes": 8 * GIB}
    assert categories_at_peak(walked, 20.0, peak_phase="forward")["gradients"] == 0
    assert categories_at_peak(walked, 20.0, peak_phase="forward", micro_batches=2)["gradients"] == 4
    first = categories_at_peak(walked, 20.0, peak_phase="backward", optimizer_bytes_before=0)
    assert first == {"weights": 4, "optimizer": 0, "gradients": 4, "other": 12}
    assert categories_at_peak(walked, 20.0, peak_phase="optimizer", optimizer_bytes_before=0)["optimizer"] == 8
