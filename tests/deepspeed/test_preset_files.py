"""The shipped DeepSpeed JSON: the real DeepSpeed accepts it, every buffer is a number, and the index knows each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_memkit.common import resources
from hf_memkit.deepspeed import ops
from hf_memkit.deepspeed.presets import load, preset_index

NAMES = resources.names("ds_configs")
STAGED = [name for name in NAMES if load(name)["zero_optimization"]["stage"] > 0]  # 1-bit optimizers go with no ZeRO

# What Trainer fills in (transformers:src/transformers/integrations/deepspeed.py).
MAY_BE_AUTO = {
    "enabled", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
    "train_micro_batch_size_per_gpu", "lr", "betas", "eps", "weight_decay",
}  # fmt: skip


def autos(config: dict[str, Any]) -> list[str]:
    result = []
    for key, value in config.items():
        if value == "auto":
            result.append(key)
        elif isinstance(value, dict):
            result += autos(value)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_only_what_trainer_fills_is_auto(name: str) -> None:
    assert set(autos(load(name))) <= MAY_BE_AUTO


@pytest.mark.parametrize("name", STAGED)
def test_no_buffer_is_left_at_deepspeed_s_default(name: str) -> None:
    zero = load(name)["zero_optimization"]
    sized = {"reduce_bucket_size"}
    sized |= {"allgather_bucket_size"} if zero["stage"] < 3 else {"sub_group_size", "stage3_prefetch_bucket_size"}
    sized |= {"stage3_max_live_parameters", "stage3_max_reuse_distance"} if zero["stage"] == 3 else set()
    assert sized <= zero.keys()
    assert max(zero[key] for key in sized) <= 500_000_000 and zero["reduce_bucket_size"] <= 50_000_000


def test_presets_are_plain_json() -> None:
    for name in NAMES:
        text = resources.find("ds_configs", name).read_text()
        assert json.dumps(json.loads(text), indent=2) + "\n" == text


def test_the_index_has_every_preset_and_no_other() -> None:
    index = preset_index()
    assert sorted(index) == NAMES
    assert all(info.summary and info.audience and info.saves and info.costs for info in index.values())


def test_removed_optimizers_say_which_deepspeed_still_has_them() -> None:
    info = preset_index()["onebit-adam"]
    assert info.runs_on("0.19.6") and not info.runs_on("0.19.7") and not info.runs_on("0.20.0")
    assert preset_index()["zero3"].runs_on("0.19.8")


def test_the_operators_follow_from_the_config() -> None:
    assert ops.needed(load("zero2-offload"), cpu=False) == ("cpu_adam",)
    assert ops.needed(load("zero3-infinity"), cpu=False) == ("cpu_adam", "pin_memory", "async_io")
    assert ops.needed(load("zero2-offload"), cpu=True) == ("deepspeed_shm_comm", "cpu_adam")
    assert ops.needed(load("zero3-zeropp"), cpu=False) == ("quantizer",)
    assert ops.needed({}, cpu=False) == ()


def test_operators_of_other_versions_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ops.extensions_folder(cpu=True)
    assert "deepspeed-" in folder.name and "torch-" in folder.name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    assert ops.extensions_folder(cpu=True) == folder
    assert ops.extensions_folder(cpu=False) != folder
