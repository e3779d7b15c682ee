"""The optimizer's states in a checkpoint: read as data, so that a checkpoint of somebody else's runs no code."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from hf_memkit.common.errors import RunError
from hf_memkit.deepspeed.nvme_resume import _saved_states


class RunsCode:
    def __init__(self, left_behind: Path) -> None:
        self.left_behind = left_behind

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.left_behind),)


def saved(folder: Path, **more: Any) -> dict[str, Any]:
    """What is read of a checkpoint that holds what DeepSpeed writes (`stage3.py`, `_rigid_state_dict`), and `more`."""
    (folder / "latest").write_text("global_step2")
    states = {
        "zero_stage": ZeroStageEnum.weights,
        "optimizer_state_dict": {
            "state": {0: {"step": 2.0, "exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": 1e-3}],
        },
        "fp32_flat_groups": [torch.nn.Parameter(torch.ones(3))],
        **more,
    }
    torch.save({"optimizer_state_dict": states, "ds_config": {"a": [1]}, "ds_version": "0.19.8"}, folder / "states.pt")
    return _saved_states(SimpleNamespace(_get_zero_ckpt_name=lambda *_: str(folder / "states.pt")), folder)


@pytest.mark.parametrize("scaler", [LossScaler(2.0), DynamicLossScaler(4.0, 2.0, 10, 1.0, 2, True, False)])
def test_files_that_deepspeed_writes(scaler: Any, tmp_path: Path) -> None:
    states = saved(tmp_path, loss_scaler=scaler)
    assert states["loss_scaler"].cur_scale == scaler.cur_scale and states["zero_stage"] is ZeroStageEnum.weights
    assert torch.equal(states["fp32_flat_groups"][0], torch.ones(3))


def test_arguments_that_would_run_code(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"states\.pt: .*mkdir") as refused:
        saved(tmp_path, extra=RunsCode(tmp_path / "ran"))
    assert "\n" not in str(refused.value) and not (tmp_path / "ran").exists()
