"""What ZeRO-Infinity keeps on disk, and the page-locked buffers between disk and RAM.

Lines are those of deepspeed 0.19.8: runtime/swap_tensor.
"""

from __future__ import annotations

from typing import Final

from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.terms import Place
from hf_memkit.zero.settings import ZeroSettings
from hf_memkit.zero.split import Split, aligned, sub_groups
from hf_memkit.zero.terms import Term

__all__ = ["SWAP_BUFFERS", "is_swapped", "swapped_parameter_rows", "swapped_state_rows"]

SWAP_BUFFERS: Final = (Term.OPTIMIZER_SWAP_BUFFERS, Term.PARAMETER_SWAP_BUFFERS, Term.PARAMETER_WRITE_BACK_BUFFER)
"""Terms of the page-locked buffers that DeepSpeed locks itself, with mlock (csrc/pin_memory/page_alloc.cpp)."""

_SOURCE = "deepspeed 0.19.8: runtime/swap_tensor"
_SMALLEST_BYTES: Final = 1 << 20  # MIN_AIO_BYTES, utils.py
_ALIGNED_BYTES: Final = 1024  # AIO_ALIGNED_BYTES, utils.py


def is_swapped(settings: ZeroSettings, size_bytes: int) -> bool:
    """Whether something of this size goes to disk: smaller things stay in RAM."""
    return size_bytes >= max(_SMALLEST_BYTES, settings.aio_block_bytes)


def _aligned(settings: ZeroSettings, elements: int, element_bytes: int) -> int:
    """Bytes of a swapped tensor (`_io_aligned_numel`)."""
    return element_bytes * aligned(elements, _ALIGNED_BYTES * settings.aio_parallelism // element_bytes)


def swapped_parameter_rows(
    settings: ZeroSettings,
    model: ModelFacts,
    parts: Split,
    frozen: ModelFacts | None,
    frozen_parts: Split | None,
    *,
    gpus: int,
) -> list[Row]:
    """Rows of `offload_param` on NVMe, of one machine. `model` is what is trained."""
    element, offload = settings.element_bytes, settings.parameters
    kept = min(offload.max_in_cpu, parts.share)
    sizes = [share for shares in parts.shares for share in shares]
    tied = -(-model.tied // parts.processes)
    others = [share for shares in frozen_parts.shares for share in shares] if frozen_parts is not None else []
    others += [-(-frozen.tied // parts.processes)] if frozen is not None else []
    written = [size for size in (*sizes, tied, *others) if is_swapped(settings, element * size)]
    on_disk = sum(_aligned(settings, size, element) for size in written)
    small = sum(element * size for size in sizes if not is_swapped(settings, element * size))
    buffers = offload.buffer_count * _aligned(settings, offload.buffer_elements, element)
    # The write-back buffer has room for whole parameters, not for their shares.
    groups = sub_groups(parts, settings.sub_group_elements)
    largest = max(groups, key=lambda group: sum(parts.shares[g][i] for g, i in group))
    write_back = sum(_aligned(settings, model.groups[g][i], element) for g, i in largest)
    small_place: Place = "pinned" if offload.pin_memory else "host"
    return [
        Term.WEIGHTS_IN_RAM.row(
            "pinned", gpus * element * kept, "deepspeed 0.19.8: runtime/zero/stage3.py 899: max_in_cpu"
        ),
        Term.SMALL_WEIGHTS.row(small_place, gpus * small, f"{_SOURCE}/utils.py: below 1 MiB"),
        Term.PARAMETER_SWAP_BUFFERS.row(
            "pinned", gpus * buffers, f"{_SOURCE}/partitioned_param_swapper.py 122: buffer_count × buffer_size"
        ),
        Term.PARAMETER_WRITE_BACK_BUFFER.row(
            "pinned",
            gpus * write_back if kept < parts.share else 0,
            f"{_SOURCE}/partitioned_param_swapper.py 393: the largest sub-group's whole parameters",
        ),
        Term.WEIGHTS.row(
            "disk",
            gpus * on_disk,
            f"{_SOURCE}/partitioned_param_swapper.py; tied ones twice, because they are split before they are tied",
        ),
    ]


def swapped_state_rows(settings: ZeroSettings, parts: Split, *, gpus: int) -> list[Row]:
    """Rows of `offload_optimizer` on NVMe, of one machine: the sub-groups that are large enough for the disk."""
    master, moments = settings.master_bytes, 2 * settings.moment_bytes
    by_group = [[parts.shares[g][i] for g, i in group] for group in sub_groups(parts, settings.sub_group_elements)]
    swapped = [group for group in by_group if is_swapped(settings, master * sum(group))]
    buffers = settings.optimizer.buffer_count * _aligned(settings, max(map(sum, by_group)), master)
    states = sum(_aligned(settings, sum(group), master) * (master + moments) // master for group in swapped)
    gradients = [share for group in swapped for share in group]
    small = sum(share for share in gradients if not is_swapped(settings, master * share))
    # Without a conversion they are parts of the flat gradient partition.
    copied = small if settings.accumulator_bytes != master else 0
    return [
        Term.OPTIMIZER_SWAP_BUFFERS.row(
            "pinned", gpus * buffers, f"{_SOURCE}/utils.py 192: buffer_count × the largest sub-group × {master} bytes"
        ),
        Term.SMALL_GRADIENTS.row(
            "host", gpus * master * copied, f"{_SOURCE}/optimizer_utils.py: below 1 MiB a parameter", "backward"
        ),
        Term.STATES.row("disk", gpus * states, f"{_SOURCE}/optimizer_utils.py"),
        Term.GRADIENTS.row("disk", gpus * master * (sum(gradients) - small), f"{_SOURCE}/optimizer_utils.py 104"),
    ]
