"""What ZenFlow holds when its step runs in a process of its own (`overlap_step`).

Lan et al. 2025, arXiv 2505.12242. The tensors that both processes use lie in shared memory, /dev/shm. Lines are
those of deepspeed 0.19.8.
"""

from __future__ import annotations

from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.terms import Place
from hf_memkit.zero.settings import ZeroSettings
from hf_memkit.zero.terms import Term

__all__ = ["SHARED_BYTES", "zenflow_rows"]

_SOURCE = "deepspeed 0.19.8: runtime/zenflow/zenflow_utils.py"

SHARED_BYTES = 16
"""Bytes a parameter in /dev/shm: master weights, a stale copy, two buffers of gradients (zenflow_utils.py 157-164)."""


def zenflow_rows(settings: ZeroSettings, model: ModelFacts, share: int, *, gpus: int) -> list[Row]:
    """Rows of one card and of one machine with `gpus` processes, each with a share of `share` elements."""
    element, largest = settings.element_bytes, model.largest_parameter
    place: Place = "pinned" if settings.optimizer.pin_memory else "host"
    selected = int(2 * 4 * settings.zenflow_share * model.parameters)
    return [
        Term.SELECTED_MOMENTS.row(
            "device", selected, "deepspeed 0.19.8: ops/adam/zenflow_torch_adam.py: 8 bytes × topk_ratio"
        ),
        Term.SHARED_MASTER_WEIGHTS.row("host", gpus * 4 * share, f"{_SOURCE} 159"),
        Term.STALE_MASTER_WEIGHTS.row("host", gpus * 4 * share, f"{_SOURCE} 161"),
        Term.SHARED_GRADIENTS.row("host", gpus * 8 * share, f"{_SOURCE} 163"),
        Term.MOMENTS_TWICE.row("host", gpus * 16 * share, f"{_SOURCE} 125: in the step's process"),
        Term.STAGING.row(place, gpus * element * share, "deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 567"),
        Term.INCOMING_GRADIENT.row(
            place, gpus * element * largest, "deepspeed 0.19.8: runtime/zero/stage_1_and_2.py 653"
        ),
    ]
