"""The command-line tools, environment variables and torch modules of each kind of accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DeviceTools:
    """The names for one kind of device; empty if it has none.

    Attributes:
        processes: command that lists the processes on the devices.
        choice: variable that selects devices.
        allocator: variable of the allocator's settings.
        module: torch's module.
    """

    processes: str
    choice: str
    allocator: str
    module: str


_TOOLS: Final = {
    "cuda": DeviceTools("nvidia-smi", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "torch.cuda"),
    "rocm": DeviceTools("rocm-smi --showpids", "HIP_VISIBLE_DEVICES", "PYTORCH_HIP_ALLOC_CONF", "torch.cuda"),
    "npu": DeviceTools("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NPU_ALLOC_CONF", "torch.npu"),
    "xpu": DeviceTools("xpu-smi ps", "ZE_AFFINITY_MASK", "PYTORCH_ALLOC_CONF", "torch.xpu"),
    "mlu": DeviceTools("cnmon", "MLU_VISIBLE_DEVICES", "PYTORCH_MLU_ALLOC_CONF", "torch.mlu"),
    "musa": DeviceTools("mthreads-gmi", "MUSA_VISIBLE_DEVICES", "PYTORCH_MUSA_ALLOC_CONF", "torch.musa"),
    "hpu": DeviceTools("hl-smi", "HABANA_VISIBLE_MODULES", "", ""),
    "tpu": DeviceTools("tpu-info", "TPU_VISIBLE_CHIPS", "", ""),
    "neuron": DeviceTools("neuron-top", "NEURON_RT_VISIBLE_CORES", "", ""),
    "mps": DeviceTools("", "", "", "torch.mps"),
}
"""torch 2.13 (torch/cuda, torch/xpu, torch/mps), torch_npu, torch_mlu and torch_musa (their READMEs), and the makers'
manuals of the command-line tools. Every version of torch reads these variables; 2.9 and later also read
PYTORCH_ALLOC_CONF on CUDA and ROCm (torch: c10/cuda/CUDAAllocatorConfig.h)."""


def tools_of(device_type: str | None) -> DeviceTools:
    """The tools of a kind of device; NVIDIA's if it is unknown."""
    return _TOOLS.get(device_type or "cuda", _TOOLS["cuda"])


def allocator_variable(device_type: str | None, torch: tuple[int, ...] = ()) -> str:
    """The variable of the allocator's settings in this version of torch (empty: unknown); empty if there is none."""
    if device_type in ("cuda", "rocm", None) and torch >= (2, 9):
        return "PYTORCH_ALLOC_CONF"
    return tools_of(device_type).allocator
