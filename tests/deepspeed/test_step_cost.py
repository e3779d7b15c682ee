"""What a step takes beside its computation, against sums done by hand; tests/engine compares the bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.fsdp import UNIT, fsdp_traffic, unit_passes
from hf_memkit.catalog.gpu_rates import Figure, GpuRates
from hf_memkit.catalog.host_rates import GivenHost, HostRates, assumed_host, measured_host
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.range import Range
from hf_memkit.deepspeed.presets import load
from hf_memkit.deepspeed.traffic import ADAM, StepTraffic, ddp_traffic, last_bucket, zero_traffic
from hf_memkit.deepspeed.transfer_time import (
    CostRow,
    StepCost,
    TracedSeconds,
    collective_seconds,
    engine_hooks,
    step_cost,
)

N = 1_557_611_200
GPU = GpuRates({}, {}, Figure(2000, ""), Figure(1700, ""), Figure(25, "PCIe"), Figure(300, "NVLink"), Figure(108, ""))
HOST = HostRates(32, Figure(100, "RAM"), Figure(10, "core"), Figure(4, "read"), Figure(2, "write"))
TRACED = TracedSeconds(forward_s=0.3, backward_s=0.6, optimizer_s=0.04)


def bf16(name: str, **zero: Any) -> dict[str, Any]:
    config = load(name)
    config["bf16"] = {"enabled": True}
    config["zero_optimization"].update(zero)
    return config


def of(cost: StepCost, name: str) -> CostRow:
    (cost_row,) = (row for row in cost.rows if row.name == name)
    return cost_row


def zero_cost(config: dict[str, Any], model: ModelFacts, *, gpus: int = 1, accumulation: int = 1) -> StepCost:
    traffic = zero_traffic(config, model, gpus=gpus, accumulation=accumulation)
    assert traffic is not None
    return step_cost(traffic, TRACED, GPU, HOST)


def test_one_gpu_with_everything_on_it_costs_its_optimizer(model: ModelFacts) -> None:
    for cost in (
        step_cost(StepTraffic(), TRACED, GPU, HOST),
        zero_cost(bf16("zero2"), model),
        zero_cost(bf16("zero3"), model),
    ):
        assert [row.name for row in cost.rows] == ["optimizer on the GPU"]
        assert cost.exposed == Range(0.04, 0.04, 0.04)


def test_ddp_hides_behind_the_last_backward_alone(model: ModelFacts) -> None:
    """On 8 GPUs a ring sends 7/4 of the gradients; over PCIe they take longer than half of one backward."""
    traffic = ddp_traffic(model, gpus=8, gradient_bytes=4)
    fast = of(step_cost(traffic, TRACED, GPU, HOST), "all-reduce of gradients")
    assert fast.moved_bytes == pytest.approx(7 * N)
    assert fast.total.middle == pytest.approx(7 * N / 1e9 / (300 * 0.78))
    embedding = 7 * 50257 * 1600
    passes = 8 * N / 1e9 / 1700
    last = embedding / 1e9 / (300 * 0.88)
    assert fast.exposed.low == pytest.approx(last + passes), "the embedding's gradient is the last"
    slow = of(step_cost(traffic, TRACED, replace(GPU, nvlink_gb_per_s=None), HOST), "all-reduce of gradients")
    assert slow.exposed.high == pytest.approx(7 * N / 1e9 / (25 * 0.3) - 0.6 * 0.5 + 5 * passes)


def test_the_last_bucket_is_what_is_left_of_the_first_modules(model: ModelFacts) -> None:
    few = replace(model, sizes=(5, 3, 4, 2))
    assert last_bucket(few, 14) == 14
    assert last_bucket(few, 8) == 5 + 3, "after 2 + 4"
    assert last_bucket(few, 6) == last_bucket(few, 1) == 5
    assert last_bucket(model, 5 * 10**8) == 50257 * 1600, "three of 16 layers, then the embedding"


def test_stage_2_reduces_in_every_micro_batch_and_stage_1_in_the_last(model: ModelFacts) -> None:
    first = zero_cost(bf16("zero1", overlap_comm=False), model, gpus=2, accumulation=4)
    second = zero_cost(bf16("zero2", overlap_comm=False), model, gpus=2, accumulation=4)
    name = "all-reduce of gradients"
    assert of(first, name).moved_bytes == 2 * N
    assert of(second, name).moved_bytes == 4 * 2 * N
    assert of(second, "all-gather of weights").moved_bytes == pytest.approx(N, rel=1e-6), "half of each GPU's copy"
    assert of(second, name).exposed.low > of(second, name).total.low, "without overlap_comm nothing is hidden"
    hidden = of(zero_cost(bf16("zero2", overlap_comm=True, reduce_bucket_size=10**7), model, gpus=2), name)
    assert hidden.exposed.low < 0.4 * hidden.total.low
    assert of(second, "optimizer on the GPU").exposed.middle == 0.02, "each steps with half"


def test_stage_3_gathers_again_what_is_not_soon_used_again(model: ModelFacts) -> None:
    def gathered(recomputes: bool = False, **zero: Any) -> float:
        traffic = zero_traffic(bf16("zero3", **zero), model, gpus=2, recomputes=recomputes)
        assert traffic is not None
        return sum(row.moved_bytes for row in traffic.rows if "all-gather" in row.name)

    assert gathered(stage3_max_reuse_distance=0) == pytest.approx(2 * N + model.tied, rel=2e-3)
    some = 2 * N + model.tied
    assert gathered(stage3_max_reuse_distance=10**9) == pytest.approx(some - 5e8, rel=2e-3)
    assert gathered(recomputes=True, stage3_max_reuse_distance=9 * 10**8) == pytest.approx(some - 3e8, rel=2e-3)
    assert gathered(stage3_max_reuse_distance=10**11) == pytest.approx(N, rel=2e-3)


def offloaded(pin_memory: bool = True, overlap_comm: bool = False) -> dict[str, Any]:
    config = bf16("zero2-offload", overlap_comm=overlap_comm)
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = pin_memory
    return config


def test_an_offloaded_optimizer_is_bound_by_ram_and_pcie(model: ModelFacts) -> None:
    """Adam reads and writes 28 bytes a parameter; all GPUs of a machine share its RAM, and have PCIe each."""
    cost = zero_cost(offloaded(), model, accumulation=2)
    assert of(cost, "Adam on the host").total.low == pytest.approx(28 * N / 1e11, rel=1e-6)
    assert of(cost, "gradients to RAM").total.low == pytest.approx(4 * N / 25e9, rel=1e-6)
    assert of(cost, "gradients accumulated in RAM").moved_bytes == pytest.approx(3 * 2 * N, rel=1e-6)
    assert of(cost, "weights to the GPU").moved_bytes == pytest.approx(2 * N, rel=1e-6)
    assert of(cost, "optimizer on the GPU").exposed.middle == 0
    two = zero_cost(offloaded(), model, gpus=2)
    assert of(two, "Adam on the host").total.low == pytest.approx(28 * N / 1e11, rel=1e-6)
    assert of(two, "gradients to RAM").total.low == pytest.approx(2 * N / 25e9, rel=1e-6)
    assert "gradients accumulated in RAM" not in [row.name for row in two.rows]
    assert of(zero_cost(offloaded(overlap_comm=True), model), "gradients to RAM").exposed.low == 0
    pageable = zero_cost(offloaded(pin_memory=False, overlap_comm=True), model)
    assert of(pageable, "gradients to RAM").exposed == of(pageable, "gradients to RAM").total
    assert of(pageable, "gradients to RAM").total.low == pytest.approx(4 * N / 12.5e9, rel=1e-6)


def test_parameters_in_ram_come_over_pcie_for_forward_and_backward(model: ModelFacts) -> None:
    cost = zero_cost(bf16("zero3-offload", stage3_max_reuse_distance=0), model, gpus=2, accumulation=3)
    for phase, fetched in ("forward", N + model.tied), ("backward", N):
        assert of(cost, f"weights to the GPU, {phase}").moved_bytes == pytest.approx(3 * fetched, rel=2e-3), (
            "half each"
        )
        assert of(cost, f"all-gather of weights, {phase}").moved_bytes == pytest.approx(3 * fetched, rel=2e-3)


def test_transfers_over_one_link_share_what_hides_them(model: ModelFacts) -> None:
    """Four micro-batches of 0.6 s: what is moved in each leaves the last of them little for the final gradients."""
    config = bf16("zero3-offload-optimizer", stage3_max_reuse_distance=0)
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    cost = zero_cost(config, model, accumulation=4)
    each, last = of(cost, "gradients accumulated in RAM"), of(cost, "gradients to RAM")
    assert each.exposed.low == last.exposed.low == 0
    in_one = each.total.high / 4
    assert in_one == pytest.approx(4 * N / 1e9 / (25 * 0.7), rel=1e-6)
    assert each.exposed.high == pytest.approx(4 * (in_one - 0.6 * 0.5), rel=1e-6)
    assert last.exposed.high == pytest.approx(last.total.high), "nothing is left"
    assert last.exposed.middle == pytest.approx(last.total.middle - (0.9 * 0.6 - each.total.middle / 4))


def test_pipelining_hides_the_disk_behind_the_step(model: ModelFacts) -> None:
    def offload(**pipeline: bool) -> StepCost:
        config = bf16("zero3-infinity")
        config["zero_optimization"]["offload_optimizer"].update(pipeline)
        return zero_cost(config, model)

    serial = offload(pipeline_read=False, pipeline_write=False)
    read, write = of(serial, "optimizer states from disk"), of(serial, "optimizer states to disk")
    assert read.exposed.low == read.total.low == pytest.approx(16 * N / 4e9, rel=1e-2)
    assert write.exposed.low == write.total.low == pytest.approx(12 * N / 2e9, rel=1e-2)
    both = offload(pipeline_read=True, pipeline_write=True)
    total = sum(of(both, name).exposed.low for name in (read.name, write.name, "Adam on the host"))
    assert total == pytest.approx(write.total.low), "the slowest of the three"


def test_the_same_computation_hides_a_read_and_the_copy_after_it(model: ModelFacts) -> None:
    """Would notice: weights from the disk and their copies to the GPU that are each hidden by all of the forward."""
    cost = zero_cost(bf16("zero3-infinity", stage3_max_reuse_distance=0), model)
    copied, read = of(cost, "weights to the GPU, forward"), of(cost, "weights from disk, forward")
    hidden = copied.total.low - copied.exposed.low + read.total.low - read.exposed.low
    assert hidden == pytest.approx(TRACED.forward_s)


def test_a_part_of_the_optimizer_may_stay_on_the_gpu(model: ModelFacts) -> None:
    """`ratio` counts whole sub-groups: of two, the weights that decay and those that don't, half is nearly all."""
    for size, share in (10**12, 1.0), (10**8, 0.5):
        config = bf16("zero3-offload-optimizer", sub_group_size=size)
        config["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
        cost = zero_cost(config, model)
        assert of(cost, "optimizer on the GPU").exposed.middle == pytest.approx(0.04 * share, rel=0.1)
        assert of(cost, "Adam on the host").moved_bytes == pytest.approx(28 * N * (1 - share), rel=0.1, abs=1e8)


def test_without_a_formula_there_is_no_time(model: ModelFacts) -> None:
    for added in ({"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}, {"zenflow": {"topk_ratio": 0.1}}):
        assert zero_traffic(bf16("zero3", **added), model, gpus=2) is None


def test_fsdp_reduces_in_the_last_micro_batch_and_gathers_once_more_to_recompute(model: ModelFacts) -> None:
    plain = fsdp_traffic(model, gpus=2, accumulation=3, element_bytes=2)
    assert [row.moved_bytes for row in plain.rows] == [3 * N, 3 * N, N]
    again = fsdp_traffic(model, gpus=2, accumulation=3, element_bytes=2, reentrant=True)
    assert [row.moved_bytes for row in again.rows] == [3 * N, 6 * N, N]


def test_each_pass_of_an_fsdp_unit_costs_its_hooks(model: ModelFacts) -> None:
    """Would find hooks counted once a step instead of once a pass, and adapters' own units forgotten: 96 small
    all-gathers took a fifth of a published step on two GPUs."""
    units = model.layers + 1
    for accumulation, reentrant, passes in ((1, False, 2), (1, True, 3), (4, True, 12)):
        assert unit_passes(units, accumulation=accumulation, reentrant=reentrant) == passes * units
    more = unit_passes(units + 96, accumulation=1, reentrant=False)
    assert UNIT.times(more).middle == pytest.approx(2 * (units + 96) * 0.25e-3)


def test_stage_3_on_several_gpus_waits_for_its_hooks() -> None:
    """Would find hooks of one GPU's engine, or of stage 2, added to a step that hides them; and frozen tensors counted
    where no hook is on them."""
    assert engine_hooks(3, 290).alone == engine_hooks(2, 290, gpus=8).alone == (0, 0, 0)
    assert engine_hooks(3, 290, gpus=8).beside == (0, 0, 0)
    assert engine_hooks(3, 290, gpus=8).alone == engine_hooks(3, 290).beside
    assert engine_hooks(3, 10, 90).beside[1] == pytest.approx(100 * 250e-6)
    assert engine_hooks(2, 10, 90).beside[1] == pytest.approx(10 * 50e-6)


def test_a_host_is_measured_or_given() -> None:
    here = measured_host()
    assert here.ram_gb_per_s.measured and here.ram_gb_per_s.value >= here.core_gb_per_s.value > 0
    assert not here.nvme_read_gb_per_s.measured, "nobody read the disk"
    given = GivenHost(cores=8, ram_gb_per_s=90).overridden_on(here)
    assert (given.cores, given.ram_gb_per_s.value) == (8, 90) and given.core_gb_per_s == here.core_gb_per_s
    assert "given" in given.describe_cpu() and "measured" in here.describe_cpu()
    assert "assumed" in assumed_host(16).describe_cpu()


def test_a_disk_is_known_if_both_of_its_rates_are() -> None:
    """Would notice: a write that is priced as on somebody else's disk; a measurement in a given rate's place."""
    host = assumed_host(16)
    half = GivenHost(nvme_read_gb_per_s=7).overridden_on(host)
    measured = half.with_disk(5, 2, "measured here")
    assert not host.knows_disk and not half.knows_disk and measured.knows_disk
    assert (measured.nvme_read_gb_per_s.value, measured.nvme_write_gb_per_s.value) == (7, 2)


def test_adam_on_the_host_is_as_fast_as_its_cores(model: ModelFacts) -> None:
    traffic = zero_traffic(offloaded(), model, gpus=1, accumulation=1)
    assert traffic is not None
    cost = step_cost(traffic, TRACED, GPU, replace(HOST, cores=2))
    assert of(cost, "Adam on the host").total.low == pytest.approx(28 * N / 20e9, rel=1e-6), "two cores of 10 GB/s"


def test_a_collective_is_a_ring_at_the_rate_of_its_slowest_link() -> None:
    """NVLink within a machine; between machines the cards of the group's GPUs, as in NVIDIA's servers or as given."""
    sent = 10e9
    options = {"ranks": 8, "on_node": 8, "node_gpus": 8}
    both = collective_seconds(sent, GPU, HOST, **options)
    assert both.in_memory.middle == pytest.approx(2 * 10 / 1700), "it is read and written"
    within = both.on_links
    assert within.middle == pytest.approx(10 / (300 * 0.78), rel=0.01)
    assert within.low < within.middle < within.high
    options["ranks"] = 16
    between = collective_seconds(sent, GPU, HOST, **options).on_links
    assert between.middle == pytest.approx(10 / (8 * 25 * 0.75), rel=0.01), "eight cards of 200 Gbit/s"
    slow = replace(HOST, network_gb_per_s=Figure(10, "given"))
    assert collective_seconds(sent, GPU, slow, **options).on_links.middle == pytest.approx(10 / (10 * 0.75), rel=0.01)

    # Replicas of hybrid sharding: each of eight groups has one GPU on a machine, and an eighth of its cards.
    replicas = collective_seconds(sent, GPU, slow, ranks=2, on_node=1, node_gpus=8).on_links
    assert replicas.middle == pytest.approx(10 / (10 / 8 * 0.75), rel=0.01)


def test_a_small_collective_takes_its_latency() -> None:
    """A step of the ring for each other rank, and twice as many for an all-reduce."""

    def seconds(ranks: int, *, is_all_reduce: bool = False) -> float:
        options = {"ranks": ranks, "on_node": ranks, "node_gpus": 8, "is_all_reduce": is_all_reduce}
        return collective_seconds(4, GPU, HOST, **options).on_links.middle

    assert seconds(8) - seconds(2) == pytest.approx(6 * 0.47e-6, rel=0.01)
    assert seconds(8, is_all_reduce=True) - seconds(8) == pytest.approx(7 * 0.47e-6, rel=0.01)


def test_several_machines_share_the_work_and_exchange_over_the_network(model: ModelFacts) -> None:
    """Two machines of four GPUs: gradients of eight, over cards of 200 Gbit/s each, or over what the user gives."""
    eight, two = (ddp_traffic(model, gpus=8 // n, nodes=n, gradient_bytes=4) for n in (1, 2))
    assert (two.gpus, two.nodes) == (8, 2) and two.rows == eight.rows
    name = "all-reduce of gradients"
    assert of(step_cost(two, TRACED, GPU, HOST), name).total.middle == pytest.approx(7 * N / 1e9 / (4 * 25 * 0.75))
    slow = replace(HOST, network_gb_per_s=Figure(10, "given"))
    assert of(step_cost(two, TRACED, GPU, slow), name).total.middle == pytest.approx(7 * N / 1e9 / (10 * 0.75))

    config = bf16("zero2-offload")
    one, both = (zero_traffic(config, model, gpus=4, nodes=n) for n in (1, 2))
    assert one is not None and both is not None
    adam = [next(row.moved_bytes for row in traffic.rows if row.name == ADAM) for traffic in (one, both)]
    assert adam[1] == pytest.approx(adam[0] / 2, rel=1e-3), "each machine steps its half"
    assert both.on_gpu == pytest.approx(one.on_gpu, abs=1e-3)


def test_swapping_on_several_machines_has_no_time(model: ModelFacts) -> None:
    swapping = bf16("zero3-infinity")
    assert zero_traffic(swapping, model, gpus=4) is not None
    assert zero_traffic(swapping, model, gpus=4, nodes=2) is None
