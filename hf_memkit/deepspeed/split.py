"""ZeRO's split of a model between processes, counted in elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.deepspeed.engine_terms import Term
from hf_memkit.setup.ledger import Row

_ROUNDING_SOURCE = (
    "torch: CachingHostAllocator, to powers of two; PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64 leaves larger "
    "blocks as they are (torch 2.13)"
)


@dataclass(frozen=True, slots=True)
class Split:
    """One process's share.

    Attributes:
        flat_groups: stages 1 and 2: elements of each parameter group's flat buffer, held by every process.
        shares: stage 3: elements of one process's share of each parameter, by parameter group.
    """

    processes: int  # total number of processes
    flat_groups: tuple[int, ...]
    flat_shares: tuple[int, ...]  # elements of one process's share of each flat buffer
    shares: tuple[tuple[int, ...], ...]

    @property
    def share(self) -> int:
        """Stage 3: elements of one process's share of all parameters."""
        return sum(sum(shares) for shares in self.shares)


def split(model: ModelFacts, processes: int) -> Split:
    """Split `model` between `processes`. Stages 1 and 2 flatten each parameter group and pad it to a multiple of 2 ×
    processes (deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 387, 441); stage 3 splits each parameter separately and
    pads it to a multiple of processes (runtime/zero/partition_parameters.py, `_aligned_size`)."""
    flat = tuple(aligned(sum(group), 2 * processes) for group in model.groups)
    return Split(
        processes=processes,
        flat_groups=flat,
        flat_shares=tuple(size // processes for size in flat),
        shares=tuple(tuple(-(-size // processes) for size in group) for group in model.groups),
    )


def with_adapters(model: ModelFacts, sizes: Sequence[int]) -> ModelFacts:
    """The trained parameters of a frozen `model` with adapters of these sizes. Trainer's optimizer decays all
    adapters: they are matrices, and none belongs to a norm."""
    return replace(
        model,
        parameters=sum(sizes),
        largest_parameter=max(sizes),
        sizes=tuple(sizes),
        decayed=(True,) * len(sizes),
        tied=0,
        linears=(),
        stacked=0,
    )


def sub_groups(parts: Split, sub_group_elements: int) -> list[list[tuple[int, int]]]:
    """Stage 3's sub-groups: (parameter group, index in it) of their parameters. A sub-group is closed once it has
    `sub_group_elements`, so it may exceed them by a parameter's share (deepspeed 0.19.8: runtime/zero/stage3.py 1210,
    `_create_fp16_sub_groups`)."""
    groups: list[list[tuple[int, int]]] = []
    for number, shares in enumerate(parts.shares):
        if sub_group_elements >= sum(shares):
            groups.append([(number, index) for index in range(len(shares))])
            continue
        current: list[tuple[int, int]] = []
        elements = 0
        for index, share in enumerate(shares):
            current.append((number, index))
            elements += share
            if elements >= sub_group_elements or index == len(shares) - 1:
                groups.append(current)
                current, elements = [], 0
    return groups


def aligned(size: int, multiple: int) -> int:
    """The next multiple of `multiple` from `size` on."""
    return -(-size // multiple) * multiple


def rounding_row(blocks: Iterable[int]) -> Row:
    """Rounding of these blocks by torch's pinned allocator to powers of two, unless `pinned_max_round_threshold_mb` is
    set (torch 2.13: aten/src/ATen/core/CachingHostAllocator.h 303). DeepSpeed locks its swap buffers without it."""
    wasted = sum((1 << (block - 1).bit_length()) - block for block in blocks if block > 0)
    return Term.PINNED_ROUNDING.row("pinned", wasted, _ROUNDING_SOURCE)
