"""bitsandbytes' LARS and LAMB, which also train parameters that start at zero.

Both scale a parameter's update by the parameter's norm: `min(1, max_unorm × ‖w‖ / ‖update‖)` (bitsandbytes 0.50.2:
backends/cpu/ops.py 324-340, backends/default/ops.py 459-468). A bias starts at zero, so that its norm scales every
update to zero. The papers' code uses a ratio of 1 if a norm is zero (You et al. 2017, arXiv 1708.03888; You et al.
2019, arXiv 1904.00962). Here only parameters of two or more dimensions have one. The states are fp32: bitsandbytes'
8-bit forms compute no ratio on a CPU (backends/cpu/ops.py 507-543) and fail on CUDA (backends/cuda/ops.py 1025-1056).
"""

from __future__ import annotations

from typing import Any

from bitsandbytes import optim


class _NoRatioForVectors:
    """Mixin: no trust ratio for parameters with fewer than two dimensions."""

    param_groups: list[dict[str, Any]]

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        if self.param_groups[gindex]["params"][pindex].dim() < 2:
            config["max_unorm"] = 0.0
        return config


class LAMB(_NoRatioForVectors, optim.LAMB32bit):  # type: ignore[misc]
    """Adam whose step, for each matrix, is as long as the matrix's norm times the learning rate, or shorter."""


class LARS(_NoRatioForVectors, optim.LARS32bit):  # type: ignore[misc]
    """SGD with momentum whose step, for each matrix, is at most `max_unorm` × its norm × the learning rate."""
