"""The table of GPUs' rates: complete, dense, plausible, sourced; and which row a GPU's name selects."""

from __future__ import annotations

import dataclasses

import pytest

from hf_memkit.catalog.gpu_rates import RATES, VARIANTS, rates_of
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.catalog.host_rates import assumed_host
from hf_memkit.catalog.rates import Figure, GpuRates

ALL = {**RATES, **VARIANTS}

PER_CLOCK = {
    "Pascal": {"float32": 128, "float16": 256},
    "Volta": {"float32": 128, "float16": 1024},
    "Turing": {"float32": 128, "float16": 1024, "int8": 2048},
    "Turing GeForce": {"float32": 128, "float16": 512, "int8": 2048},
    "A100": {"float32": 128, "tf32": 1024, "bfloat16": 2048, "float16": 2048, "int8": 4096},
    "Ampere, Ada": {"float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024, "int8": 2048},
    "GeForce": {"float32": 256, "tf32": 256, "bfloat16": 512, "float16": 512, "int8": 2048},
    "A10G": {"float32": 256, "tf32": 256, "bfloat16": 512, "float16": 512, "int8": 1024},
    "Blackwell": {"float32": 256, "tf32": 4096, "bfloat16": 8192, "float16": 8192, "int8": 16384},
    "Hopper": {"float32": 256, "tf32": 2048, "bfloat16": 4096, "float16": 4096, "int8": 8192},
}
"""Dense operations (a multiplication and an addition are two) per SM and clock, 16-bit types with fp32 accumulation.
Pascal: GP100 white paper, table 1. Volta: GV100 white paper, 8 tensor cores of 64 FMA. Turing: TU102 white paper, the
same rate; its GeForce GPUs accumulate in fp32 at half of it. A100: GA100 white paper, 4 tensor cores of 256 FMA.
"Ampere, Ada": GA102 white paper, 4 of 128 FMA, and Ada white paper, the same for dense products; their GeForce GPUs,
and Blackwell's, at half for fp32 accumulation and TF32. Hopper: GH100 white paper, twice the A100. Blackwell: B200
data sheet, twice that. A10G: its sheet's 70 TFLOPS are the GeForce rate."""

CLOCKS = {
    "Turing": {"T4": 1.590},
    "Pascal": {"P100": 1.303},
    "Volta": {"V100 16GB": 1.530, "V100 32GB": 1.530, "V100 PCIe": 1.380},
    "Turing GeForce": {"RTX 2080 Ti": 1.545},
    "GeForce": {"RTX 3060": 1.777, "RTX 3080": 1.710, "RTX 3090": 1.695, "RTX 3090 Ti": 1.860,
        "RTX 4060 Ti 16GB": 2.535, "RTX 4070": 2.475, "RTX 4080": 2.505, "RTX 4090": 2.520, "RTX 5080": 2.617,
        "RTX 5090": 2.407},
    "Ampere, Ada": {"RTX A4000": 1.560, "RTX A5000": 1.695, "RTX A6000": 1.800, "RTX 6000 Ada": 2.505,
        "RTX PRO 6000": 2.617, "A10": 1.695, "A40": 1.740, "L4": 2.040, "L40S": 2.520},
    "A10G": {"A10G": 1.710},
    "A100": {"A100 40GB": 1.410, "A100 80GB": 1.410, "A100 40GB PCIe": 1.410, "A100 80GB PCIe": 1.410},
    "Hopper": {"H100 80GB": 1.830, "H100 PCIe": 1.620, "H200": 1.830},
    "Blackwell": {"B200": 1.965},
}  # fmt: skip
"""Architecture and boost clock, GHz. By karpathy/llm.c@0e69e3a llmc/mfu.h: V100 SXM2, RTX 3060 to 4090, RTX A4000 to
A6000, RTX 6000 Ada, A100, H100. By the pages that the rows name: T4, V100 PCIe, RTX 5080 and 5090, A10, A40, L4, B200.
Unchecked: P100, RTX 2080 Ti, RTX PRO 6000, A10G, L40S; there the test only shows that the figures fit one another."""

TOLERANCE = 0.1
"""Data sheets of Hopper take another clock for fp32 (1.98 and 1.755 GHz) than for tensor cores."""


def not_dense(name: str, rates: GpuRates) -> list[str]:
    """The types whose rate is not what the architecture computes per clock without sparsity."""
    architecture, gigahertz = next((key, clocks[name]) for key, clocks in CLOCKS.items() if name in clocks)
    per_clock = PER_CLOCK[architecture]
    wrong = [dtype for dtype in rates.dense_tflops if dtype not in per_clock]
    for dtype, figure in rates.dense_tflops.items():
        expected = rates.multiprocessors.value * per_clock.get(dtype, 0) * gigahertz / 1000
        if abs(figure.value - expected) > TOLERANCE * expected:
            wrong.append(dtype)
    return wrong


def with_rate(rates: GpuRates, dtype: str, value: float) -> GpuRates:
    return dataclasses.replace(rates, dense_tflops={**rates.dense_tflops, dtype: Figure(value, "headline")})


def test_rates_are_of_gpus() -> None:
    """A row under a name that no GPU has would never be read."""
    assert list(RATES) == list(KNOWN_GPUS)
    assert [name for name in KNOWN_GPUS if rates_of(name) is not RATES[name]] == []


@pytest.mark.parametrize("name", list(ALL))
def test_rates_are_dense(name: str) -> None:
    """A headline figure with sparsity, or with fp16 accumulation, would promise half of the time."""
    assert not_dense(name, ALL[name]) == []


@pytest.mark.parametrize(
    ("name", "dtype", "headline"),
    [
        ("H100 80GB", "bfloat16", 1979),
        ("L40S", "bfloat16", 733),
        ("B200", "bfloat16", 4500),
        ("A100 80GB", "tf32", 312),
        ("RTX 3090", "bfloat16", 142),
        ("RTX 4090", "float16", 330.3),
    ],
)
def test_headlines_are_refused(name: str, dtype: str, headline: float) -> None:
    """The figures at the head of data sheets, each twice the rate of dense products with fp32 accumulation."""
    assert not_dense(name, with_rate(ALL[name], dtype, headline)) == [dtype]


@pytest.mark.parametrize("name", list(ALL))
def test_nothing_is_faster_than_the_data_sheet_says(name: str) -> None:
    """GeForce GPUs alone hold clocks above the boost clock of their sheet; a measurement above that is no product."""
    rates = ALL[name]
    headroom = 1.15 if name in CLOCKS["GeForce"] | CLOCKS["Turing GeForce"] else 1.0
    assert set(rates.achievable_tflops) == set(rates.dense_tflops)
    for dtype, dense in rates.dense_tflops.items():
        assert 0.3 * dense.value < rates.achievable_tflops[dtype].value <= headroom * dense.value, dtype
    assert 0.6 * rates.memory_gb_per_s.value < rates.achievable_memory_gb_per_s.value < rates.memory_gb_per_s.value


@pytest.mark.parametrize("name", list(ALL))
def test_units_are_those_of_the_fields(name: str) -> None:
    """TB/s instead of GB/s, both directions of a link, bits or a count of cores would be far off."""
    rates = ALL[name]
    assert 200 < rates.memory_gb_per_s.value < 9000
    assert 5 < rates.pcie_gb_per_s.value < 64
    generation, lanes = rates.pcie_gb_per_s.source.removeprefix("PCIe ").split(":")[0].split(".0 x")
    specified = {3: 15.75, 4: 31.5, 5: 63.0}[int(generation)] * int(lanes) / 16
    assert 0.75 * specified < rates.pcie_gb_per_s.value < specified
    assert rates.nvlink_gb_per_s is None or rates.nvlink_gb_per_s.value in {150, 300, 450, 900}
    assert 20 < rates.multiprocessors.value < 200


@pytest.mark.parametrize("name", list(KNOWN_GPUS))
def test_types_are_those_of_the_capability(name: str) -> None:
    """Before compute capability 8.0 there are no units for bf16 and TF32: a rate for them would be wrong by ten."""
    assert ({"bfloat16", "tf32"} <= set(RATES[name].dense_tflops)) == (KNOWN_GPUS[name].capability >= 8)
    assert ("bfloat16" in RATES[name].dense_tflops) == ("tf32" in RATES[name].dense_tflops)


@pytest.mark.parametrize("name", list(ALL))
def test_every_figure_has_a_source(name: str) -> None:
    rates = ALL[name]
    figures = [getattr(rates, field.name) for field in dataclasses.fields(rates)]
    figures += [*rates.dense_tflops.values(), *rates.achievable_tflops.values()]
    sources = [figure.source for figure in figures if isinstance(figure, Figure)]
    assert len(sources) > 6
    assert all(len(source) > 8 for source in sources)
    assert not any(figure.measured for figure in rates.dense_tflops.values())


@pytest.mark.parametrize(
    ("reported", "row"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
    ],
)
def test_a_reported_name_selects_its_variant(reported: str, row: str) -> None:
    """With the rates of the module an A100 PCIe would be promised 7 % too much, an H100 PCIe 60 %."""
    assert rates_of(reported) is ALL[row]


@pytest.mark.parametrize("name", ["V100 16GB PCIe", "V100 32GB PCIe", "A100 40GB PCIe", "a100-80gb pcie", "H100 PCIe"])
def test_a_named_pcie_gpu_has_its_own_rates(name: str) -> None:
    """Would notice: `--gpu "A100 80GB PCIe"` that is promised the speed of the module."""
    gpu = named_gpu(name)
    assert rates_of(gpu.name) in VARIANTS.values() and gpu.capability == named_gpu(gpu.name[:-5]).capability


@pytest.mark.parametrize(
    "unknown",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "Quadro RTX 6000", "NVIDIA A100", "A100 64GB"],
)
def test_other_gpus_have_no_rates(unknown: str) -> None:
    """A laptop's GPU has the name and half of the power; of two rows that may be meant neither is."""
    assert rates_of(unknown) is None


@pytest.mark.parametrize(("name", "sister"), [("V100 32GB", "V100 16GB"), ("A100 40GB", "A100 80GB")])
def test_a_rate_of_a_related_gpu_is_not_called_measured(name: str, sister: str) -> None:
    """A reader would take a borrowed figure for evidence about this GPU."""
    borrowed, own = RATES[name].achievable_tflops, RATES[sister].achievable_tflops
    assert {dtype: figure.value for dtype, figure in borrowed.items()} == {k: v.value for k, v in own.items()}
    assert any(figure.measured for figure in own.values())
    assert not any(figure.measured for figure in borrowed.values())


def test_a_server_is_recognized_by_its_cores() -> None:
    """With a desktop's RAM the CPU optimizer of a server would be promised three times its time."""
    desktop, server = (assumed_host(cores).ram_gb_per_s for cores in (8, 48))
    assert assumed_host(32).ram_gb_per_s == desktop
    assert desktop.value < server.value
    assert all(1 < figure.value < 200 and len(figure.source) > 8 for figure in (desktop, server))
