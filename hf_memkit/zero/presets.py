"""The DeepSpeed presets as they stand in `ds_configs/`: plain JSON that works as it is."""

from __future__ import annotations

import json
from typing import Any

from hf_memkit import resources

__all__ = ["load"]


def load(name: str) -> dict[str, Any]:
    """The DeepSpeed preset `name`.

    Raises:
        InputError: there is no such preset.
    """
    config: dict[str, Any] = json.loads(resources.find("ds_configs", name).read_text(encoding="utf-8"))
    return config
