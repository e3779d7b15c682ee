"""The ledger's formulas, against sums done by hand; tests/engine compares them with the live engine."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.presets import load
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.setup.ledger import Ledger

N = 1_557_611_200


def of(ledger: Ledger, place: str, *terms: str) -> int:
    matching = [row for row in ledger.rows if row.place == place and row.term in terms]
    assert {row.term for row in matching} == set(terms)
    return sum(row.size_bytes for row in matching)


def changed(name: str, **zero: Any) -> dict[str, Any]:
    config = load(name)
    config["zero_optimization"].update(zero)
    return config


def test_stages_split_what_they_are_named_for(model: ModelFacts) -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: 2 + 2 + 12 bytes a parameter."""
    for gpus in (1, 8):
        first = zero_ledger(load("zero1"), model, gpus=gpus)
        second = zero_ledger(load("zero2"), model, gpus=gpus)
        third = zero_ledger(load("zero3"), model, gpus=gpus)
        states = ("master weights", "moments")
        for ledger in (first, second, third):
            assert of(ledger, "device", *states) == pytest.approx(12 * N / gpus, rel=1e-4)
        assert of(first, "device", "gradients") == of(first, "device", "weights, flat") == 2 * N
        partition = of(second, "device", "gradient partition")
        assert 2 * N <= gpus * partition < 2 * (N + 2 * gpus * model.largest_parameter), "whole parameters"
        assert of(third, "device", "weight partition") == pytest.approx(2 * N / gpus, rel=1e-4)


def test_auto_is_what_trainer_writes_in_its_place(model: ModelFacts) -> None:
    """ "auto" buckets of a model of width 1600 have 1600 × 1600 elements, and not DeepSpeed's default of 5e8."""
    ledger = zero_ledger(changed("zero2", reduce_bucket_size="auto", overlap_comm=False), model)
    assert of(ledger, "device", "gradient buckets") == 2 * 1600 * 1600
    third = changed("zero3", stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto")
    from_default, filled = ZeroSettings.from_config(third), ZeroSettings.from_config(third, 1600)
    assert (filled.prefetch_elements, filled.persistent_elements) == (2_304_000, 16_000)
    assert (from_default.prefetch_elements, from_default.persistent_elements) == (50_000_000, 100_000)


def test_page_locked_blocks_round_up_to_powers_of_two(model: ModelFacts) -> None:
    pinned = zero_ledger(changed("zero2-offload", offload_optimizer={"device": "cpu", "pin_memory": True}), model)
    exact = zero_ledger(load("zero2-offload"), model)
    rounding = of(pinned, "pinned", "rounding of page-locked blocks")
    assert rounding > 4 * GB_8 - 4 * N  # the master weights alone: 5.8 GiB in a block of 8
    assert pinned.total_bytes("host", "pinned") == exact.total_bytes("host") + rounding


GB_8 = 2 * 2**30


def test_nvme_buffers_follow_the_sub_group(model: ModelFacts) -> None:
    default = load("zero3-infinity")
    del default["zero_optimization"]["sub_group_size"]
    # The default of 1e9 elements, and one parameter on top of it.
    assert of(zero_ledger(default, model), "pinned", "optimizer swap buffers") == pytest.approx(16e9, rel=0.05)
    shipped = zero_ledger(load("zero3-infinity"), model)
    assert of(shipped, "pinned", "optimizer swap buffers") < 16 * (100_000_000 + model.largest_parameter)
    tied = 2 * 80_411_200  # the output layer is the word embedding, and both are written
    assert shipped.total_bytes("disk") == pytest.approx(18 * N + tied, rel=0.002)


def test_a_sub_group_on_disk_is_not_in_ram_too(model: ModelFacts) -> None:
    """Its fp32 states decide (300 000 elements: 1.1 MiB), not its 16-bit weights; less than a sub-group is left."""
    ledger = zero_ledger(changed("zero3-infinity-optimizer", sub_group_size=300_000), model)
    in_ram = sum(row.size_bytes for row in ledger.rows if (row.place, row.category) == ("host", "optimizer"))
    assert in_ram < 12 * 2**18


def test_processes_own_what_their_share_touches(model: ModelFacts) -> None:
    """Two parameters of four elements, cut just between them: each process accumulates one."""
    ledger = zero_ledger(load("zero2-offload"), model, gpus=2, adapters=(4, 4))
    assert of(ledger, "host", "16-bit accumulators") == 2 * (4 + 4)


def test_the_norm_is_of_the_largest_piece_that_a_process_owns(model: ModelFacts) -> None:
    """12 elements between two processes: of 8 and 4, six and two of the first are theirs. One process owns all."""
    for gpus, piece in ((1, 8), (2, 6), (3, 4)):
        ledger = zero_ledger(load("zero2-offload"), model, gpus=gpus, adapters=(8, 4))
        assert of(ledger, "device", "gradient in fp64, for its norm") == 8 * piece


def test_gradients_are_flattened_before_they_are_reduced(model: ModelFacts) -> None:
    assert not any("flattened to be" in row.term for row in zero_ledger(load("zero2"), model).rows)
    for adapters, elements in (((30_000_000,) * 3, 50_000_000), ((80_000_000,), 80_000_000), ((4, 4), 8)):
        ledger = zero_ledger(load("zero2"), model, gpus=2, adapters=adapters)
        assert of(ledger, "device", "gradient bucket, flattened to be reduced") == 2 * elements


def test_later_micro_batches_have_a_partition_of_their_own(model: ModelFacts) -> None:
    """It has the type of the reduced gradients; accumulators of another type are added to at once."""
    partition, again = "gradient partition", "gradient partition of a later micro-batch"
    ledger = zero_ledger(load("zero2"), model, gpus=8)
    assert of(ledger, "device", partition) == of(ledger, "device", again)
    for other in (
        zero_ledger(load("zero2"), model, gpus=8, accumulation=False),
        zero_ledger({**load("zero2"), "data_types": {"grad_accum_dtype": "fp32"}}, model, gpus=8),
    ):
        assert again not in {row.term for row in other.rows}


def test_the_gradient_partition_has_room_for_whole_parameters(model: ModelFacts) -> None:
    """Of 12 elements each process owns six; both own some of the first eight, and the second owns the other four."""
    ledger = zero_ledger(load("zero2"), model, gpus=2, adapters=(8, 4))
    assert of(ledger, "device", "gradient partition") == 2 * 12
    flat = zero_ledger({**load("zero2"), "data_types": {"grad_accum_dtype": "fp32"}}, model, gpus=2, adapters=(8, 4))
    assert of(flat, "device", "gradient partition") == 4 * 6


def test_flat_groups_are_padded_to_twice_the_processes(model: ModelFacts) -> None:
    ledger = zero_ledger(load("zero1"), model, gpus=4, adapters=(9,))
    assert of(ledger, "device", "weights, flat") == 2 * 16


def test_linear_layers_of_torch_hold_what_stage_3_gathers(model: ModelFacts) -> None:
    """Would find `memory_efficient_linear: false` passed over, which keeps the whole model on each GPU from forward to
    backward: Llama-3-8B on eight GPUs took 13 GiB more than was predicted. The first part asks torch."""
    weight, data = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(1, 2, 4, requires_grad=True)
    gathered = weakref.ref(weight.data.untyped_storage())
    held = torch.nn.functional.linear(data, weight)
    weight.data = torch.empty(0)
    assert gathered() is not None, "what autograd saved is a view of it"
    del held
    assert gathered() is None
    term = "gathered weights that linear layers hold"
    off = changed("zero3", memory_efficient_linear=False)
    of_layers = sum(each.elements for each in model.linears if not each.head)
    assert of(zero_ledger(off, model, gpus=8), "device", term) == 2 * of_layers > N
    assert of(zero_ledger(off, model, gpus=8, linear_elements=1000), "device", term) == 2000
    for ledger in (zero_ledger(load("zero3"), model, gpus=8), zero_ledger(off, model)):  # one GPU gathers nothing
        assert term not in {row.term for row in ledger.rows}


def test_nvme_below_stage_3_is_the_cpu(model: ModelFacts) -> None:
    config = changed("zero2-offload", offload_optimizer={"device": "nvme", "nvme_path": "/x", "pin_memory": False})
    ledger = zero_ledger(config, model)
    assert ledger.total_bytes("disk") == 0 and ledger.total_bytes("host") > 18 * N


def test_all_processes_of_a_machine_share_its_ram(model: ModelFacts) -> None:
    one = zero_ledger(load("zero3-offload"), model, gpus=1).total_bytes("host")
    eight = zero_ledger(load("zero3-offload"), model, gpus=8).total_bytes("host")
    two_machines = zero_ledger(load("zero3-offload"), model, gpus=8, nodes=2).total_bytes("host")
    assert eight == pytest.approx(one, rel=1e-3)
    assert two_machines == pytest.approx((one + 2 * N) / 2, rel=1e-3), "rank 0 alone gathers 2 bytes to save"


def test_rank_0_gathers_what_it_saves(model: ModelFacts) -> None:
    """Would notice: a host that runs out of memory at the first checkpoint, the frozen weights of adapters, which are
    not gathered, and a row where nothing is."""
    term = "weights of the whole model, for the save"
    assert of(zero_ledger(load("zero3"), model, gpus=8), "host", term) == 2 * N
    assert of(zero_ledger(load("zero3"), model, adapters=[1000, 500]), "host", term) == 2 * 1500
    for other in (changed("zero3", stage3_gather_16bit_weights_on_model_save=False), load("zero2")):
        assert term not in {row.term for row in zero_ledger(other, model).rows}


def test_the_step_s_memory_is_not_added_to_that_of_backward(model: ModelFacts) -> None:
    ledger = zero_ledger(load("zero2"), model)
    always = sum(row.size_bytes for row in ledger.rows if row.phase is None)
    step = sum(row.size_bytes for row in ledger.rows if row.phase == "optimizer")
    assert ledger.total_bytes("device") == always + step and ledger.peak_phase("device") == "optimizer"
    assert ledger.total_bytes("device") < sum(row.size_bytes for row in ledger.rows)


def in_fp32(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "bf16": {"enabled": False}, "fp16": {"enabled": False}}


def test_gradients_are_copied_for_the_step_only_where_their_type_changes(model: ModelFacts) -> None:
    copy = "gradients in the master's type"
    assert of(zero_ledger(load("zero2"), model), "device", copy) == pytest.approx(4 * N, rel=1e-3)
    for config in (load("zero2-lean"), in_fp32(load("zero2")), in_fp32(load("zero3"))):
        assert not [row for row in zero_ledger(config, model).rows if row.term == copy]


def test_in_fp32_without_zero_the_optimizer_steps_on_the_weights(model: ModelFacts) -> None:
    ledger = zero_ledger(in_fp32(changed("zero1", stage=0)), model)
    assert ledger.total_bytes("device") == pytest.approx(16 * N, rel=1e-3)


def test_a_copy_in_each_machine_is_split_between_the_processes_there_are(model: ModelFacts) -> None:
    config = load("zero3-zeropp")  # zero_hpz_partition_size: 8
    assert of(zero_ledger(config, model, gpus=4), "device", "secondary partition") == 2 * N // 4
    assert of(zero_ledger(config, model, gpus=8, nodes=2), "device", "secondary partition") == 2 * N // 8


def test_other_spellings_that_deepspeed_takes(model: ModelFacts) -> None:
    plain, other = load("zero3"), load("zero3")
    other["bfloat16"] = other.pop("bf16")
    del other["fp16"]
    zero = other["zero_optimization"]
    zero["max_live_parameters"] = zero.pop("stage3_max_live_parameters")
    assert zero_ledger(other, model, gpus=2).rows == zero_ledger(plain, model, gpus=2).rows
    totals = {
        zero_ledger({**plain, "data_types": {"grad_accum_dtype": name}}, model, gpus=2).total_bytes("device")
        for name in ("fp32", "float32", "float", "torch.float32")
    }
    assert len(totals) == 1 and totals != {zero_ledger(plain, model, gpus=2).total_bytes("device")}


def test_offload_moves_twenty_bytes_a_parameter_with_accumulation_and_eighteen_without(model: ModelFacts) -> None:
    config = load("zero2-offload")
    largest = 2 * model.largest_parameter
    for accumulation, expected in ((True, 20), (False, 18)):
        ledger = zero_ledger(config, model, accumulation=accumulation)
        assert ledger.total_bytes("host") == pytest.approx(expected * N + largest, rel=1e-6)
        assert ledger.total_bytes("pinned") == 0
    assert zero_ledger(load("zero3-offload-optimizer"), model).total_bytes("host") == pytest.approx(
        14 * N, rel=1e-6
    ), "12 between the steps, and 2 more while rank 0 gathers what it saves"


def test_fused_buffers_are_of_constant_size_and_double_with_overlap(model: ModelFacts) -> None:
    small = describe("gpt2", use_hub=False, use_built_in=True)
    for facts in (small, model):
        assert of(zero_ledger(load("zero2"), facts), "device", "gradient buckets") == 2 * 2 * 50_000_000
        single = zero_ledger(changed("zero2", overlap_comm=False), facts)
        assert of(single, "device", "gradient buckets") == 2 * 50_000_000
    left_out = load("zero2")
    del left_out["zero_optimization"]["reduce_bucket_size"]
    assert of(zero_ledger(left_out, small), "device", "gradient buckets") == 2 * 2 * 500_000_000


def test_lean_states_take_six_bytes_a_parameter(model: ModelFacts) -> None:
    lean = zero_ledger(load("zero2-lean"), model)
    assert of(lean, "device", "master weights", "moments") == pytest.approx(6 * N, rel=1e-6)
