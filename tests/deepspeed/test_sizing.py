"""Sizing: what a preset becomes for a model and a machine, and that every result passes its own check."""

from __future__ import annotations

import copy
import functools
from functools import cache
from typing import Any

import pytest

from hf_memkit.catalog.architectures import ARCHITECTURES
from hf_memkit.catalog.hardware import Machine, gpu_of_size, named_gpu
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.aio import AioMeasurement
from hf_memkit.deepspeed.presets import preset_index
from hf_memkit.deepspeed.sizing import Sized, size_preset
from tests.fewer import one_each

NOT_THE_CONFIG = ("bf16-emulated",)  # bf16 on a T4 is the arguments' mistake
KNOWN_GPUS = ("T4", "RTX 4090", "RTX 4060 Ti 16GB", "A100 40GB", "A100 80GB", "H100 80GB")


@cache
def facts(name: str) -> ModelFacts:
    return describe(name, ARCHITECTURES[name].config, use_hub=False)


def machine(gib: float = 64, card: str = "16GB", memlock: int | None = None) -> Machine:
    gpu = named_gpu(card) if card in KNOWN_GPUS else gpu_of_size(card)
    return Machine(gpu, int(gib * GIB), 4000 * GIB, "/data", 8, memlock_bytes=memlock)


def sized(name: str, model: str = "openai-community/gpt2-xl", **options: Any) -> Sized:
    on = options.pop("machine", None) or machine()
    return size_preset(name, facts(model), on, **options)


def test_the_swap_buffer_holds_the_largest_share_and_no_more() -> None:
    for gpus in (1, 3, 8):
        zero = sized("zero3-infinity", "meta-llama/Llama-3.1-8B", gpus=gpus).config["zero_optimization"]
        share = -(-525_336_576 // gpus)
        assert share <= zero["offload_param"]["buffer_size"] < share + 1024


def test_the_sub_group_holds_the_largest_share() -> None:
    zero = sized("zero3-infinity", "meta-llama/Llama-3.1-8B", machine=machine(512)).config["zero_optimization"]
    assert zero["sub_group_size"] == 525_336_576
    assert sized("zero3-infinity").config["zero_optimization"]["sub_group_size"] == 100_000_000


def test_tiles_shrink_where_ram_cannot_hold_their_buffers() -> None:
    roomy = sized("zero3-infinity-optimizer", machine=machine(64)).config["zero_optimization"]["sub_group_size"]
    tight = sized("zero3-infinity-optimizer", machine=machine(7)).config["zero_optimization"]["sub_group_size"]
    assert 80_411_200 <= tight < roomy


def test_states_are_page_locked_only_where_the_rounded_blocks_fit() -> None:
    def pinned(gib: float) -> bool:
        config = sized("zero2-offload", machine=machine(gib)).config
        return bool(config["zero_optimization"]["offload_optimizer"]["pin_memory"])

    assert pinned(64) and not pinned(36)
    zenflow = sized("zero2-zenflow", machine=machine(512)).config["zero_optimization"]
    assert zenflow["offload_optimizer"]["pin_memory"] is False  # its states move to shared memory


def test_buckets_stay_constant_but_for_small_gpus_and_small_models() -> None:
    def bucket(model: str, card: str) -> int:
        return int(sized("zero2", model, machine=machine(64, card)).config["zero_optimization"]["reduce_bucket_size"])

    assert bucket("openai-community/gpt2-xl", "A100 80GB") == bucket("Qwen/Qwen3-32B", "H100 80GB") == 50_000_000
    assert bucket("openai-community/gpt2-xl", "8GB") < 50_000_000
    assert bucket("openai-community/gpt2-xl", "1GB") == 5_000_000


def test_live_parameters_hold_the_largest_twice() -> None:
    zero = sized("zero3", "meta-llama/Llama-3.1-8B", gpus=8).config["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == 2 * 525_336_576


def test_nothing_is_prefetched_where_deepspeed_would_read_it_twice() -> None:
    def prefetch(gpus: int) -> int:
        zero = sized("zero3-infinity", "openai-community/gpt2-xl", gpus=gpus, machine=machine(4000)).config[
            "zero_optimization"
        ]
        return int(zero["stage3_prefetch_bucket_size"])

    assert prefetch(1) > 0
    assert prefetch(64) == 0  # a rank's shares are below 1 MiB, but the embedding's


def test_a_low_limit_for_locked_memory_is_reported() -> None:
    low = sized("zero3-infinity", machine=machine(64, memlock=8 << 20))
    assert any("mlock" in note and "8 MiB" in note for note in low.notes)
    enough = machine(256, memlock=4 << 30)  # the limit is one process's: 2.5 GiB each, for any number of them
    assert not sized("zero3-infinity", machine=enough, gpus=8).notes
    assert not sized("zero3-infinity", machine=machine(64, memlock=None)).notes


def test_paths_copies_per_machine_and_measured_values_go_in() -> None:
    measured = AioMeasurement({"queue_depth": 64}, 3.0, 2.0, 1 << 28, 9, "the fastest of 9")
    result = sized("zero3-infinity", nvme_path="/fast", aio=measured)
    config = result.config
    assert "reads 3.00 GB/s" in result.notes[0]
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == "/fast"
    assert config["aio"]["queue_depth"] == 64
    assert sized("zero3-zeropp", gpus=4, nodes=4).config["zero_optimization"]["zero_hpz_partition_size"] == 4


def value_at(config: Any, path: str) -> Any:
    return functools.reduce(lambda node, part: node[part], path.split("."), config)


@pytest.mark.slow
@pytest.mark.parametrize("card", one_each(KNOWN_GPUS))
def test_every_preset_sized_for_any_model_passes_its_check_and_deepspeed_s_parser(
    card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """35 models × 6 GPUs × every preset."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import get_zero_config

    from hf_memkit.checks import Subject, check

    big = Machine(named_gpu(card), 8000 * GIB, 10_000 * GIB, "/data", 8)
    for number, model in enumerate(ARCHITECTURES):
        for name, info in preset_index().items():
            gpus = max(info.gpus, 1 + number % 2)
            result = sized(name, model, machine=big, gpus=gpus, nvme_path="/data")
            config = result.config
            assert all(value_at(config, each.key) == each.value and each.reason for each in result.choices)
            get_zero_config(copy.deepcopy(config))
            # The GPU may be too small for a model of 70 billion parameters: that is what the ledger is for.
            release = "0.19.6" if info.deepspeed else "0.19.8"
            arguments = {
                "bf16": big.gpu.bf16 or name == "zero2-lean",
                "fp16": not big.gpu.bf16 and name != "zero2-lean",
            }
            subject = Subject(config, arguments, facts(model), big, gpus, deepspeed=release)
            problems = [
                problem for problem in check(subject) if problem.rule not in ("card-too-small", *NOT_THE_CONFIG)
            ]
            assert problems == [], f"{name} for {model} on {card}"
