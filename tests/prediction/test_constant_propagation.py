"""Values of fake tensors are computed from known values only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.tracer.tracer import StorageTracer


@pytest.fixture
def tracer() -> Iterator[StorageTracer]:
    tracer = StorageTracer("cpu")
    with FakeTensorMode(), tracer:
        yield tracer
    del tracer


def test_a_mask_of_ones_has_no_padding(tracer: StorageTracer) -> None:
    mask = torch.tensor([[1] * 64] * 3)
    assert mask.bool().all() and mask.sum(-1).tolist() == [64, 64, 64]
    assert not (mask[:, -1] == 0).any()
    shorter = torch.cat([mask, torch.zeros_like(mask)], dim=1)
    assert not shorter.bool().all() and shorter.sum() == 192
    assert not tracer.items


def test_rates_and_labels_have_their_values(tracer: StorageTracer) -> None:
    assert torch.linspace(0, 0.3, 4).tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    labels = torch.full((2, 5), 7)
    assert labels.max() < 8 and not labels.max() >= 8 and torch.arange(9)[4] == 4
    labels.masked_fill_(labels == 7, -100)
    assert (labels == -100).all()
    assert not tracer.items


def test_a_known_mask_decides_shapes(tracer: StorageTracer) -> None:
    hidden = torch.empty(2, 3, 16)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert hidden[mask].shape == (3, 16)
    assert mask.nonzero().shape == (3, 2)
    assert hidden.masked_select(mask.unsqueeze(-1)).shape == (48,)
    assert torch.unique_consecutive(torch.tensor([4, 4, 4])).shape == (1,)


def test_what_follows_from_weights_or_chance_is_not_known(tracer: StorageTracer) -> None:
    weight = torch.empty(4, 4)
    for asked in (weight, torch.rand(4, 4)):
        with pytest.raises(Unmodelled, match="nonzero"):
            (asked > 0).nonzero()
        with pytest.raises(Unmodelled, match="index"):
            weight[asked > 0]
    assert not tracer.items
    assert not torch.isnan(weight).any(), "nothing overflows"
    assert not torch.rand([]) < 0.1, "no layer is left out"
    assert sum(tracer.items.values()) == 2


def test_what_is_written_to_is_known_no_longer(tracer: StorageTracer) -> None:
    values = torch.zeros(4, dtype=torch.int64)
    view = values[:2]
    assert view.sum() == 0 and not tracer.items
    values[0] = torch.empty(4).argmax()
    assert values.sum() == 1 and sum(tracer.items.values()) == 1, "made up"
    with pytest.raises(Unmodelled):
        view.nonzero()
    written = torch.zeros(4)
    torch.mul(torch.empty(4), 2, out=written)
    with pytest.raises(Unmodelled):
        written.nonzero()


def test_values_are_followed_without_being_recorded(tracer: StorageTracer) -> None:
    before = len(tracer.trace.sizes_bytes)
    ones = torch.ones(32, dtype=torch.int64)
    total = ones + ones
    assert total[0] == 2
    made = tracer.trace.sizes_bytes[before:]
    assert made[:2] == [256, 256] and max(made) == 256, "two tensors and the answer"
