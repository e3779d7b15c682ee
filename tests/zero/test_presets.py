"""The shipped DeepSpeed JSON: the real DeepSpeed accepts it, and every buffer is a number."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hf_memkit import resources
from hf_memkit.errors import InputError
from hf_memkit.zero import ops
from hf_memkit.zero.presets import load

NAMES = resources.names("ds_configs")

# What Trainer fills in (transformers:src/transformers/integrations/deepspeed.py).
MAY_BE_AUTO = {
    "enabled",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
}


def autos(config: dict[str, Any]) -> list[str]:
    found = []
    for key, value in config.items():
        if value == "auto":
            found.append(key)
        elif isinstance(value, dict):
            found += autos(value)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_only_what_trainer_fills_is_auto_and_no_buffer_is_left_at_its_default(name: str) -> None:
    config = load(name)
    assert set(autos(config)) <= MAY_BE_AUTO
    assert config["zero_optimization"]["reduce_bucket_size"] < 500_000_000


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_s_own_schema_accepts_every_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import get_zero_config

    config = load(name)
    parsed = get_zero_config(copy.deepcopy(config))
    assert int(parsed.stage) == config["zero_optimization"]["stage"]
    wrong = copy.deepcopy(config)
    wrong["zero_optimization"]["reduce_bucket_sise"] = 1
    with pytest.raises(ValueError, match="reduce_bucket_sise"):
        get_zero_config(wrong)


def test_presets_are_plain_json() -> None:
    for name in NAMES:
        text = resources.find("ds_configs", name).read_text()
        assert json.dumps(json.loads(text), indent=2) + "\n" == text


def test_an_unknown_preset_gets_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'zero2-offload'"):
        load("zero2-ofload")


def test_the_operators_follow_from_the_config() -> None:
    assert ops.needed(load("zero2-offload"), cpu=False) == ("cpu_adam",)
    assert ops.needed(load("zero3-infinity"), cpu=False) == ("cpu_adam", "pin_memory", "async_io")
    assert ops.needed(load("zero2-offload"), cpu=True) == ("deepspeed_shm_comm", "cpu_adam")
    assert ops.needed({}, cpu=False) == ()


def test_operators_of_other_versions_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ops.extensions_folder(cpu=True)
    assert "deepspeed-" in folder.name and "torch-" in folder.name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    assert ops.extensions_folder(cpu=True) == folder
    assert ops.extensions_folder(cpu=False) != folder
