"""What generating during an evaluation holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["cache_bytes", "cache_bytes_of"]


def cache_bytes(
    *, batch: int, beams: int, tokens: int, layers: int, heads: int, head_width: int, bytes_per_number: int = 2
) -> int:
    """Bytes of the keys and values that generation keeps, at its last token.

    2 × bytes × batch × beams × tokens × layers × heads × head_width: each beam has a cache of its own (transformers
    5.23.0: generation/utils.py, `expand_size=generation_config.num_beams`). Reordering beams copies one layer's share
    on top.

    Args:
        batch: samples at once (`per_device_eval_batch_size`).
        beams: `generation_num_beams`.
        tokens: of prompt and answer together.
        layers, heads, head_width: of keys and values (grouped-query models have fewer of those heads).
        bytes_per_number: of the model's dtype.
    """
    return 2 * bytes_per_number * batch * beams * tokens * layers * heads * head_width


def cache_bytes_of(
    config: Mapping[str, Any],
    *,
    batch: int,
    beams: int,
    tokens: int,
    layers: int,
    width: int,
    bytes_per_number: int = 2,
) -> int:
    """`cache_bytes` by a model's config values; without head counts in them all of `width` is kept."""
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    shared = int(config.get("num_key_value_heads") or heads)
    head_width = int(config.get("head_dim") or width // heads)
    return cache_bytes(
        batch=batch,
        beams=beams,
        tokens=tokens,
        layers=layers,
        heads=shared,
        head_width=head_width,
        bytes_per_number=bytes_per_number,
    )
