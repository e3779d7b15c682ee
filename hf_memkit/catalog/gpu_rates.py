"""Rates of named GPUs: achievable rates by dtype, memory bandwidth, PCIe, NVLink; each figure with its source.

*Achievable* is the measured rate of a large product or a large copy. Without a published measurement it is the data
sheet's dense figure (without sparsity) times the share that the same generation reaches, and the source says that.

NVIDIA's documents were read at second hand: the page follows "by", and "unchecked" means that none was found.

Products are measured at 8192 x 8192 x 8192 if the report gives sizes, else at the best of its sizes, and the source
says that. Short products do not reach a GPU's power limit: an L4, 72 W, shows 71 TFLOPS at 2048 and 59 at 8192.
GeForce GPUs hold clocks above the boost clock of their data sheet, so that products exceed its figure by up to 12 %.
16-bit products accumulate in fp32, as in PyTorch, which halves the headline rate of GeForce GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from hf_memkit.catalog.rates import Figure, GpuRates

_BOOK: Final = "stas00/ml-engineering@744d01e compute/accelerator/README.md"
_MAMF: Final = f"{_BOOK}, MAMF"  # the best of many shapes
_LLM_C: Final = "karpathy/llm.c@0e69e3a llmc/mfu.h"
_MM: Final = "zzc0721/torch-performance-test-data"  # 30 torch.mm of square matrices, TF32 off for float32
_DEVICES: Final = "chsasank/device-benchmarks@7ccc883 README.md"  # largest product 6888; copies of up to 0.38 GB
_NEUSIGHT: Final = (  # each way round; torch 2.1, TF32 off
    "sitar-lab/NeuSight@6945927 scripts/asplos/data/dataset/test/linear.csv, median of the 67 with no side below 4096"
)
_STREAM: Final = "RRZE-HPC/gpu-benches@1038c5d gpu-stream"  # kernel "scale" (one load, one store), full occupancy

_SIXTEEN_BITS: Final = ("bfloat16", "float16")


def _dense(*, sixteen: float | None = None, **tflops: float) -> dict[str, float]:
    """Dense rates by dtype. `sixteen`: of bfloat16 and float16, equal on every GPU that has both."""
    return tflops if sixteen is None else tflops | dict.fromkeys(_SIXTEEN_BITS, sixteen)


def _measured(source: str, **tflops: float) -> dict[str, Figure]:
    return {dtype: Figure(value, source, measured=True) for dtype, value in tflops.items()}


def _as_on(source: str, **figures: float) -> dict[str, Figure]:
    """Rates of another GPU with the same chip, or shares of a related GPU's dense rates; `source` names it."""
    return {dtype: Figure(value, source) for dtype, value in figures.items()}


def _borrowed(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Rates of a related GPU: measured, but not on this one."""
    return {dtype: replace(figure, measured=False) for dtype, figure in figures.items()}


def _pcie(generation: int, lanes: int = 16) -> Figure:
    """Rate of page-locked copies on one GPU of this generation with 16 lanes, in proportion to the lanes."""
    value, source = {
        3: (12.35, "RRZE-HPC/gpu-benches@1038c5d README.md, cuda-memcpy, on a V100 PCIe"),
        4: (25.1, "NVIDIA/nvbandwidth#42, on an A100 SXM4"),
        5: (55.4, "stas00/ml-engineering@744d01e network/README.md, nvbandwidth, on an H200"),
    }[generation]
    return Figure(value * lanes / 16, f"PCIe {generation}.0 x{lanes}: {source}")


_copies = partial(Figure, measured=True)
"""Measured rate of large copies, in GB/s."""


def _rates(
    sheet: str,
    multiprocessors: int,
    dense: Mapping[str, float],
    memory: float,
    *,
    achieved: Mapping[str, Figure] | None = None,
    shares: Mapping[str, Figure] | None = None,
    copies: Figure | None = None,
    copies_share: Figure | None = None,
    pcie: Figure,
    nvlink: float | None = None,
) -> GpuRates:
    """One GPU. Achieved rate of each dtype: measured, else a related GPU's share, else the 16-bit share."""
    achieved_tflops = dict(achieved or {})
    for dtype, share in (shares or {}).items():
        achieved_tflops[dtype] = _share_of(dense[dtype], share, "dense rate")
    sixteen = next(dtype for dtype in _SIXTEEN_BITS if dtype in achieved_tflops)
    sixteen_share = Figure(
        min(1, achieved_tflops[sixteen].value / dense[sixteen]), f"as {sixteen}: {achieved_tflops[sixteen].source}"
    )
    if copies is None:
        assert copies_share is not None
        copies = _share_of(memory, copies_share, "bandwidth")
    for dtype in dense.keys() - achieved_tflops.keys():
        achieved_tflops[dtype] = _share_of(dense[dtype], sixteen_share, "dense rate")
    return GpuRates(
        dense_tflops={dtype: Figure(value, sheet) for dtype, value in dense.items()},
        achievable_tflops={dtype: achieved_tflops[dtype] for dtype in dense},
        memory_gb_per_s=Figure(memory, sheet),
        achievable_memory_gb_per_s=copies,
        pcie_gb_per_s=pcie,
        nvlink_gb_per_s=None if nvlink is None else Figure(nvlink, sheet),
        multiprocessors=Figure(multiprocessors, sheet),
    )


def _share_of(value: float, share: Figure, quantity: str) -> Figure:
    return Figure(round(value * share.value, 1), f"{share.value:.3f} of the {quantity}, {share.source}")


# Shares of relatives, where a GPU itself has no published measurement.
_4070_TI_SUPER: Final = _as_on(
    f"as an RTX 4070 Ti SUPER reaches ({_MM}#70)",
    float32=31.21 / 44.1,
    tf32=44.98 / 44.1,
    bfloat16=91.00 / 88.2,
    float16=90.73 / 88.2,
)
_A6000: Final = _as_on(
    f"as an RTX A6000 reaches ({_MM}#46, best of five sizes)",
    float32=23.92 / 38.7,
    bfloat16=123.34 / 154.8,
    float16=120.49 / 154.8,
)
_A40_COPIES: Final = Figure(653 / 696, f"as an A40 reaches ({_STREAM}/a40.txt)")
_L40S_SHARES: Final = _as_on(
    f"as an L40S reaches ({_MM}#43, best of five sizes)",
    float32=46.88 / 91.6,
    bfloat16=269.15 / 362,
    float16=264.02 / 362,
)
_L40_COPIES: Final = Figure(776 / 864, f"as an L40 reaches ({_STREAM}/l40.txt)")
_A100_SXM: Final = (
    _measured(f"{_MAMF}: A100 SXM", bfloat16=271.2)
    | _measured(f"{_MM}@9d82827 database.md: A100 SXM4 80GB, best of five sizes", float32=19.18, float16=258.74)
    | _measured("mli/transformers-benchmarks README.md: A100 80GB", tf32=116)
)
_H100_SXM: Final = (
    _measured(f"{_MM}#79", float32=51.81, tf32=372.05, float16=736.19)
    | _measured(f"{_MAMF}: H100 SXM", bfloat16=794.5)
    | _as_on(f"{_MAMF}: FP8 of an H100 SXM, whose dense rate is the same", int8=1402.6)
)
_GA102: Final = f"NVIDIA Ampere GA102 white paper v2, SMs, clocks and 16-bit rates by {_LLM_C}; int8 unchecked"
_ADA: Final = f"NVIDIA Ada white paper v2, SMs, clocks and 16-bit rates by {_LLM_C}; int8 unchecked"
_LIKE_3090: Final = Figure(831 / 936, f"as an RTX 3090 reaches ({_DEVICES})")
_A100_SHEET: Final = f"NVIDIA A100 data sheet, by {_BOOK}"
_H100_SHEET: Final = f"NVIDIA H100 data sheet, half of the figures with sparsity, by {_BOOK}"
_A100_DENSE: Final = _dense(float32=19.5, tf32=156, sixteen=312, int8=624)
_H100_DENSE: Final = _dense(float32=67, tf32=494.7, sixteen=989.4, int8=1979)
_V100: Final = _rates(
    f"NVIDIA V100 data sheet, SXM2, by {_LLM_C} and sysrqmts.com", 80, _dense(float32=15.7, float16=125), 900,
    achieved=_measured(f"{_MM}#140: V100-SXM2-16GB", float32=14.38, float16=97.36),
    copies=Figure(809, f"{_STREAM}/v100.txt: a V100 PCIe 16GB, which has the same memory"), pcie=_pcie(3), nvlink=150,
)  # fmt: skip


RATES: Final[Mapping[str, GpuRates]] = {
    "T4": _rates(
        "NVIDIA T4 data sheet, by hmc-tech.com and sysrqmts.com", 40, _dense(float32=8.1, float16=65, int8=130), 320,
        achieved=_measured("forums.developer.nvidia.com/t/264462: held at 70 W; 25 in " + _DEVICES, float16=24)
        | _measured(_DEVICES, float32=4),
        copies=_copies(240, _DEVICES), pcie=_pcie(3),
    ),
    "P100": _rates(
        "NVIDIA Tesla P100 PCIe data sheet (unchecked; sysrqmts.com has 9.5 and 19.0 at a higher clock)",
        56, _dense(float32=9.3, float16=18.7), 732,
        achieved=_measured(f"{_MM}#174: float16 with fp32 accumulation", float32=8.63, float16=7.72),
        copies=_copies(443.8, "mpicbg-scicomp/gearshifft#82, bandwidthTest with 32 MiB, so rather low"),
        pcie=Figure(12.15, "PCIe 3.0 x16: mpicbg-scicomp/gearshifft#82, bandwidthTest", measured=True),
    ),
    "V100 16GB": _V100,
    "V100 32GB": replace(_V100, achievable_tflops=_borrowed(_V100.achievable_tflops)),
    "RTX 2080 Ti": _rates(
        "NVIDIA Turing white paper, reference GPU, float16 with fp32 accumulation (unchecked)",
        68, _dense(float32=13.4, float16=53.8, int8=215.2), 616,
        achieved=_measured(f"{_MM}#181", float32=11.52, float16=49.61),
        copies_share=Figure(297.7 / 336, "as an RTX 2060 reaches (alpaka-group/alpaka#1874, BabelStream copy)"),
        pcie=Figure(13.1, "PCIe 3.0 x16: usadellab/Helixer#22, bandwidthTest", measured=True),
    ),
    "RTX 3060": _rates(
        _GA102, 28, _dense(float32=12.7, tf32=12.7, sixteen=25.5, int8=101.9), 360,
        achieved=_measured(f"{_MM}#131", float32=8.16, tf32=12.39, bfloat16=25.42, float16=24.75),
        copies=_copies(330, _DEVICES), pcie=_pcie(4),
    ),
    "RTX 3080": _rates(
        _GA102, 68, _dense(float32=29.8, tf32=29.8, sixteen=59.5, int8=238), 760,
        achieved=_measured(f"{_MM}#114: 10 GB", float32=20.97, tf32=31.85, bfloat16=63.56, float16=63.94),
        copies_share=_LIKE_3090, pcie=_pcie(4),
    ),
    "RTX 3090": _rates(
        _GA102, 82, _dense(float32=35.6, tf32=35.6, sixteen=71, int8=284), 936,
        achieved=_measured(f"{_MM}#42, best of five sizes", float32=24.79, bfloat16=76.58, float16=75.48),
        copies=_copies(831, _DEVICES), pcie=_pcie(4),
    ),
    "RTX 3090 Ti": _rates(
        "the GA102's rates for 84 SMs and a boost clock of 1.86 GHz; 21 Gbit/s on 384 bits (unchecked)",
        84, _dense(float32=40, tf32=40, sixteen=80, int8=320), 1008,
        shares=_as_on("as an RTX 3090 reaches", float32=24.79 / 35.6, bfloat16=1, float16=1),
        copies_share=_LIKE_3090, pcie=_pcie(4),
    ),
    "RTX 4060 Ti 16GB": _rates(
        _ADA, 34, _dense(float32=22.1, tf32=22.1, sixteen=44.1, int8=176.5), 288,
        achieved=_measured(f"{_MM}#130", float32=11.90, tf32=21.20, bfloat16=43.60, float16=42.30),
        copies=_copies(234, _DEVICES), pcie=_pcie(4, lanes=8),
    ),
    "RTX 4070": _rates(
        _ADA, 46, _dense(float32=29.1, tf32=29.1, sixteen=58.3, int8=233.2), 504,
        shares=_4070_TI_SUPER,
        copies_share=Figure(411 / 504, f"as an RTX 4070 SUPER reaches, which has the same memory ({_DEVICES})"),
        pcie=_pcie(4),
    ),
    "RTX 4080": _rates(
        _ADA, 76, _dense(float32=48.7, tf32=48.7, sixteen=97.5, int8=389.9), 717,
        shares=_4070_TI_SUPER,
        copies_share=Figure(602 / 672, f"as an RTX 4070 Ti SUPER reaches ({_DEVICES})"), pcie=_pcie(4),
    ),
    "RTX 4090": _rates(
        _ADA, 128, _dense(float32=82.6, tf32=82.6, sixteen=165.2, int8=660.6), 1008,
        achieved=_measured(f"{_MM}#78", float32=53.41, tf32=85.65, bfloat16=160.17, float16=155.50),
        copies=_copies(912, _DEVICES), pcie=Figure(26.3, "PCIe 4.0 x16: NVIDIA/nvbandwidth#15", measured=True),
    ),
    "RTX 5080": _rates(
        "NVIDIA RTX Blackwell white paper, SMs and clock by sipoch.com; rates per SM as the RTX 5090's (unchecked)",
        84, _dense(float32=56.3, tf32=56.3, sixteen=112.6, int8=450.2), 960,
        achieved=_measured(f"{_MM}#104", float32=33.09, tf32=50.68, bfloat16=102.89, float16=102.20),
        copies_share=Figure(762 / 896, f"as an RTX 5070 Ti reaches ({_DEVICES})"), pcie=_pcie(5),
    ),
    "RTX 5090": _rates(
        "NVIDIA RTX Blackwell white paper, by pocketmags.com: 16 bits 1/4 of its 838 (kekzl/imp#606); int8 unchecked",
        170, _dense(float32=104.8, tf32=104.8, sixteen=209.5, int8=838), 1792,
        achieved=_measured(f"{_MM}#124", float32=66.91, tf32=114.19, bfloat16=234.66, float16=223.98),
        copies=_copies(1573, "NVIDIA/cccl#9881, BabelStream with 2^28 elements"),
        pcie=Figure(56.3, "PCIe 5.0 x16: tinygrad/open-gpu-kernel-modules#29, nvbandwidth", measured=True),
    ),
    "RTX A4000": _rates(
        f"NVIDIA RTX A4000 data sheet, half of the figures with sparsity, by ecer.com and {_LLM_C}",
        48, _dense(float32=19.2, tf32=38.3, sixteen=76.7, int8=153.4), 448,
        achieved=_measured(f"{_MM}#97", float32=11.90, tf32=30.25, bfloat16=56.10, float16=60.89),
        copies_share=_A40_COPIES, pcie=_pcie(4),
    ),
    "RTX A5000": _rates(
        f"NVIDIA RTX A5000 data sheet, half of the figures with sparsity (unchecked; SMs and clock by {_LLM_C})",
        64, _dense(float32=27.8, tf32=55.6, sixteen=111.1, int8=222.2), 768,
        shares=_A6000,
        copies_share=_A40_COPIES, pcie=_pcie(4),
    ),
    "RTX A6000": _rates(
        "NVIDIA RTX A6000 data sheet, by llmperf.net and sysrqmts.com",
        84, _dense(float32=38.7, tf32=77.4, sixteen=154.8, int8=309.7), 768,
        achieved=_measured(f"{_MM}#46, best of five sizes", float32=23.92, bfloat16=123.34, float16=120.49),
        copies_share=_A40_COPIES, pcie=_pcie(4),
    ),
    "RTX 6000 Ada": _rates(
        f"NVIDIA RTX 6000 Ada data sheet, half of the figures with sparsity (unchecked; SMs and clock by {_LLM_C})",
        142, _dense(float32=91.1, tf32=182.1, sixteen=364.2, int8=728.5), 960,
        shares=_L40S_SHARES,
        copies_share=_L40_COPIES, pcie=_pcie(4),
    ),
    "RTX PRO 6000": _rates(
        "NVIDIA RTX PRO Blackwell white paper, Workstation Edition (unchecked; SMs by NVIDIA/cudnn-frontend#1164)",
        188, _dense(float32=126, tf32=251.9, sixteen=503.8, int8=1007.6), 1792,
        achieved=_measured(f"{_MM}#160", float32=69.74, tf32=183.51, bfloat16=350.31, float16=331.78),
        copies_share=Figure(1573 / 1792, "as an RTX 5090 reaches, which has the same memory (NVIDIA/cccl#9881)"),
        pcie=_pcie(5),
    ),
    "A10": _rates(
        "NVIDIA A10 data sheet, SMs, clock, float32 and memory by sysrqmts.com; the rest unchecked",
        72, _dense(float32=31.2, tf32=62.5, sixteen=125, int8=250), 600,
        achieved=_measured(f"{_DEVICES}: 150 W", float32=14, bfloat16=56, float16=54),
        copies=_copies(469, _DEVICES), pcie=_pcie(4),
    ),
    "A10G": _rates(
        "NVIDIA A10G data sheet, half of the figures with sparsity (unchecked)",
        80, _dense(float32=35, tf32=35, sixteen=70, int8=140), 600,
        achieved=_measured(f"{_MM}#126", float32=23.23, tf32=34.13, bfloat16=66.59, float16=65.67),
        copies_share=Figure(469 / 600, f"as an A10 reaches, which has the same memory ({_DEVICES})"), pcie=_pcie(4),
    ),
    "A40": _rates(
        "NVIDIA A40 data sheet, by ecer.com and hmc-tech.com",
        84, _dense(float32=37.4, tf32=74.8, sixteen=149.7, int8=299.3), 696,
        achieved=_measured(f"{_MM}#185", float32=23.73, tf32=59.52, bfloat16=110.64, float16=108.47),
        copies=_copies(653, f"{_STREAM}/a40.txt"), pcie=_pcie(4),
    ),
    "L4": _rates(
        "NVIDIA L4 data sheet, half of the figures with sparsity, by torch _inductor device_info.py; SMs by float32",
        58, _dense(float32=30.3, tf32=60, sixteen=121, int8=242), 300,
        achieved=_measured(f"{_MM}#120: held at 72 W", float32=10.66, tf32=25.69, bfloat16=59.40, float16=53.80),
        copies=_copies(235, _DEVICES), pcie=_pcie(4),
    ),
    "L40S": _rates(
        f"NVIDIA L40S data sheet, half of the figures with sparsity, by {_BOOK}; SMs unchecked",
        142, _dense(float32=91.6, tf32=183, sixteen=362, int8=733), 864,
        achieved=_measured(f"{_MM}#43, best of five sizes", float32=46.88, bfloat16=269.15, float16=264.02),
        copies_share=_L40_COPIES, pcie=_pcie(4),
    ),
    "A100 40GB": _rates(
        _A100_SHEET + ", SXM4", 108, _A100_DENSE, 1555,
        achieved=_borrowed(_A100_SXM),
        copies=Figure(1382, f"{_STREAM}/a100_40.txt: an A100 40GB, SXM or PCIe unknown"),
        pcie=Figure(25.1, "PCIe 4.0 x16: NVIDIA/nvbandwidth#42", measured=True), nvlink=300,
    ),
    "A100 80GB": _rates(
        _A100_SHEET + ", SXM4", 108, _A100_DENSE, 2039,
        achieved=_A100_SXM,
        copies=_copies(1737, f"{_STREAM}/a100_80.txt"), pcie=_pcie(4), nvlink=300,
    ),
    "H100 80GB": _rates(
        _H100_SHEET + ", SXM5", 132, _H100_DENSE, 3350,
        achieved=_H100_SXM,
        copies=_copies(
            2573, "NVIDIA/nccl#1264, p2pBandwidthLatencyTest, within one GPU; 2959 in NVIDIA/cuda-samples#392"
        ),
        pcie=_pcie(5), nvlink=450,
    ),
    "H200": _rates(
        f"NVIDIA H200 data sheet, half of the figures with sparsity, SXM5, by {_BOOK}", 132, _H100_DENSE, 4800,
        achieved=_measured(f"{_MM}@9d82827 database.md: H200, best of five sizes", float32=51.34, float16=759.4)
        | _as_on(f'{_MAMF}: an H100 SXM, "H200 is the same"', bfloat16=794.5)
        | _as_on(f"an H100 SXM, which has the same chip ({_MM}#79)", tf32=372.05)
        | _as_on(f"{_MAMF}: FP8 of an H200 SXM, whose dense rate is the same", int8=1453.4),
        copies_share=Figure(3174 / 4000, f"as a GH200 reaches ({_STREAM}/gh200.txt)"),
        pcie=Figure(55.4, "PCIe 5.0 x16: stas00/ml-engineering@744d01e network/README.md, nvbandwidth", measured=True),
        nvlink=450,
    ),
    "B200": _rates(
        f"NVIDIA HGX B200 data sheet, one GPU, by {_BOOK}; SMs unchecked",
        148, _dense(float32=80, tf32=1125, sixteen=2250, int8=4500), 8000,
        achieved=_measured(f"{_MM}@9d82827 database.md, best of five sizes", float32=66.24, float16=1627.64)
        | _measured(f"{_MAMF}: B200 SXM", bfloat16=1745),
        copies=_copies(6721, "NVIDIA/cccl#7391, add of 2^28 float16 elements"), pcie=_pcie(5), nvlink=900,
    ),
}  # fmt: skip
"""Rates by the names of `gpu_sizes.KNOWN_GPUS`; for GPUs sold as an SXM module and with PCIe those of the module."""

VARIANTS: Final[Mapping[str, GpuRates]] = {
    "V100 PCIe": _rates(
        "NVIDIA V100 data sheet, PCIe, by sysrqmts.com; float16 in proportion to the clock",
        80, _dense(float32=14, float16=112), 900,
        achieved=_measured(f"{_NEUSIGHT}: V100-PCIE-32GB", float32=13.72),
        shares=_as_on(f"as a V100 SXM2 reaches ({_MM}#140)", float16=97.36 / 125),
        copies=_copies(809, f"{_STREAM}/v100.txt"),
        pcie=Figure(12.35, "PCIe 3.0 x16: RRZE-HPC/gpu-benches@1038c5d README.md, cuda-memcpy", measured=True),
    ),
    "A100 40GB PCIe": _rates(
        _A100_SHEET + ", PCIe", 108, _A100_DENSE, 1555,
        achieved=_measured(f"{_MM}#108", float32=17.56, tf32=97.32, bfloat16=215.26, float16=197.51),
        copies=Figure(1382, f"{_STREAM}/a100_40.txt: an A100 40GB, SXM or PCIe unknown"), pcie=_pcie(4),
    ),
    "A100 80GB PCIe": _rates(
        _A100_SHEET + ", PCIe", 108, _A100_DENSE, 1935,
        achieved=_measured(f"{_MAMF}: A100 PCIe", bfloat16=252.9)
        | _measured(f"{_NEUSIGHT}; 18.88 at the best in Yinghan-Li/YHs_Sample#4", float32=18.06)
        | _as_on("mli/transformers-benchmarks#4: an A800 80GB PCIe, the same chip", tf32=105.97, float16=215.33),
        copies_share=Figure(1737 / 2039, f"as an A100 80GB reaches ({_STREAM}/a100_80.txt)"), pcie=_pcie(4),
    ),
    "H100 PCIe": _rates(
        _H100_SHEET + ", PCIe", 114, _dense(float32=51, tf32=378, sixteen=756, int8=1513), 2000,
        achieved=_measured(f"{_MM}#95", float32=36.95, tf32=240.43, bfloat16=492.84, float16=437.07),
        copies=_copies(1704, f"{_STREAM}/h100_pcie.txt"), pcie=_pcie(5),
    ),
}  # fmt: skip
"""PCIe versions of GPUs in `RATES`, with lower rates."""

_NO_KIND: Final = re.compile(
    r"nvidia|geforce|tesla|quadro|sxm\d?|hbm\d?e?|generation|blackwell|workstation|server|edition"
)
_SIZE: Final = re.compile(r"\d+gb")


def rates_of(name: str) -> GpuRates | None:
    """Rates of a GPU by its name in `KNOWN_GPUS` or as PyTorch reports it; None if unknown: a plan then has no times.

    PyTorch names the variant: "NVIDIA A100 80GB PCIe" and "NVIDIA A100-SXM4-80GB" are two rows. Names without a
    size ("NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4060 Ti") are known if one row has the other words."""
    if name in RATES:
        return RATES[name]
    wanted = _words(name)
    known_rates = {**RATES, **VARIANTS}
    for words in (wanted, wanted - {"pcie"}):
        rows = [row for known, row in known_rates.items() if _is_same_name(words, _words(known))]
        if rows:
            return rows[0] if len(rows) == 1 else None
    return None


def _words(name: str) -> frozenset[str]:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return frozenset(word for word in words if word and not _NO_KIND.fullmatch(word))


def _is_same_name(wanted: frozenset[str], known: frozenset[str]) -> bool:
    """Whether both have the same words, except for a size that only one of them has."""
    sizes = [{word for word in words if _SIZE.fullmatch(word)} for words in (wanted, known)]
    return wanted - sizes[0] == known - sizes[1] and (not all(sizes) or sizes[0] == sizes[1])
