"""Memory and compute capability of named GPUs, as PyTorch reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A named GPU.

    Attributes:
        box_gb: size on the box.
        capability: CUDA compute capability.
        total_gib: capacity that PyTorch reports on Linux, the minimum of several drivers; None: no report.
        thread: thread with the report.
        context_mib: memory of a training's process outside PyTorch's allocator, measured; None: not measured.
    """

    box_gb: int
    capability: float
    total_gib: float | None = None
    thread: str = ""
    context_mib: int | None = None


_HOPPER_MIB: Final = 758
"""In every training on an H100: torch 2.11, CUDA 13.0 (benchmarks/results/predict.json, `outside_allocator_gib`). 619
MiB of it belong to the context, the rest to libraries (`calibrate` in that file)."""


KNOWN_GPUS: Final[dict[str, KnownGpu]] = {
    "T4": KnownGpu(16, 7.5, 14.56, "Zheng-Chong/CatVTON#133"),
    "P100": KnownGpu(16, 6.0),
    "V100 16GB": KnownGpu(16, 7.0, 15.77, "nomic-ai/gpt4all#544"),
    "V100 32GB": KnownGpu(32, 7.0, 31.74, "liucongg/ChatGLM-Finetuning#73"),
    "RTX 2080 Ti": KnownGpu(11, 7.5, 10.76, "JDAI-CV/image-captioning#11"),
    "RTX 3060": KnownGpu(12, 8.6, 11.75, "TencentARC/PhotoMaker#47"),
    "RTX 3080": KnownGpu(10, 8.6, 9.78, "zai-org/CogVideo#34"),
    "RTX 3090": KnownGpu(24, 8.6, 23.69, "vllm-project/vllm#2140"),
    "RTX 3090 Ti": KnownGpu(24, 8.6),
    "RTX 4060 Ti 16GB": KnownGpu(16, 8.9),
    "RTX 4070": KnownGpu(12, 8.9),
    "RTX 4080": KnownGpu(16, 8.9),
    "RTX 4090": KnownGpu(24, 8.9, 23.49, "ali-vilab/VGen#104"),
    "RTX 5080": KnownGpu(16, 12.0),
    "RTX 5090": KnownGpu(32, 12.0, 31.37, "Wan-Video/Wan2.1#465"),
    "RTX A4000": KnownGpu(16, 8.6, 15.61, "DengKaiCQ/VGGT-Long#6"),
    "RTX A5000": KnownGpu(24, 8.6, 23.67, "Magicboomliu/Accelerator-Simple-Template#7"),
    "RTX A6000": KnownGpu(48, 8.6),
    "RTX 6000 Ada": KnownGpu(48, 8.9, 44.43, "DINGYANB/MTVCrafter#21"),
    "RTX PRO 6000": KnownGpu(96, 12.0, 94.97, "antirez/ds4#431"),
    "A10": KnownGpu(24, 8.6, 22.06, "OpenBMB/MiniCPM-V#640"),
    "A10G": KnownGpu(24, 8.6, 21.99, "OpenBMB/MiniCPM-V#588"),
    "A40": KnownGpu(48, 8.6),
    "L4": KnownGpu(24, 8.9, 22.03, "ArcInstitute/evo2#190"),
    "L40S": KnownGpu(48, 8.9, 44.42, "Wan-Video/Wan2.1#205"),
    "A100 40GB": KnownGpu(40, 8.0, 39.39, "TianheWu/CoSeR#10"),
    "A100 80GB": KnownGpu(80, 8.0, 79.14, "vllm-project/vllm#4408"),
    "H100 80GB": KnownGpu(80, 9.0, 79.11, "vllm-project/vllm#27508", _HOPPER_MIB),
    "H200": KnownGpu(141, 9.0, context_mib=_HOPPER_MIB),
    "B200": KnownGpu(180, 10.0),
}

VISIBLE_SHARE: Final = 0.975
"""GiB that PyTorch sees for each "GB" on the box of a GPU without a report: the ratio of an RTX A4000."""
