"""The ledger of any DeepSpeed JSON: bytes on GPU, host, pinned host and disk, a row a term.

The formulas were read from deepspeed 0.19.8, with the lines in each row, and are compared in tests/engine with the
tensors and files of the live engine. They hold for Adam, with every parameter trained, or adapters on frozen weights.
Activations, the loss and the processes are not included: they do not depend on DeepSpeed (`hf_memkit.setup.job`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.deepspeed.split import with_adapters
from hf_memkit.deepspeed.stage_3 import stage_3_rows
from hf_memkit.deepspeed.stages_1_2 import stage_1_2_rows
from hf_memkit.setup.ledger import Ledger


def zero_ledger(
    config: Mapping[str, Any],
    model: ModelFacts,
    *,
    gpus: int = 1,
    nodes: int = 1,
    accumulation: bool = True,
    adapters: Sequence[int] = (),
    linear_elements: int | None = None,
) -> Ledger:
    """Memory of DeepSpeed with `config`, for training all of `model` or adapters on it.

    Args:
        config: a DeepSpeed JSON. "auto" in `bf16.enabled` or `fp16.enabled` counts as 16 bit.
        gpus: processes on each machine, one GPU each.
        accumulation: whether gradients of several micro-batches are accumulated.
        adapters: elements of each adapter parameter; the model is then frozen. Empty: the model is trained.
        linear_elements: elements of weights that linear layers keep from forward to backward, without
            `memory_efficient_linear`; None: those of all known linear layers of the model.
    """
    settings = ZeroSettings.from_config(config, model.width)
    trained = with_adapters(model, adapters) if adapters else model
    frozen = model if adapters else None
    if settings.stage == 3:
        linear = sum(layer.elements for layer in model.linears if not layer.head)
        rows = stage_3_rows(
            settings, trained, frozen, gpus=gpus, processes=gpus * nodes,
            linear_elements=linear if linear_elements is None else linear_elements,
        )  # fmt: skip
    else:
        rows = stage_1_2_rows(settings, trained, frozen, gpus=gpus, processes=gpus * nodes, accumulation=accumulation)
    return Ledger(tuple(row for row in rows if row.size_bytes))
