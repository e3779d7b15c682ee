"""States, gradients and weights in host RAM, on a disk or on other GPUs.

`hf_memkit/deepspeed/techniques.py` puts the settings of the DeepSpeed presets."""

from __future__ import annotations

from typing import Any, Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, Technique, advice, technique


@technique(
    "cpu-offload-optimizer",
    slot="optimizers",
    saves="AdamW's moments are in RAM, and without accumulation the gradients too: 12 bytes a parameter in fp32",
    costs="16 bytes of RAM a parameter (half of it page-locked); AdamW runs on the CPU, and each step transfers twice",
    not_when="there are several GPUs, or the weights are 16-bit (zero2-offload keeps an fp32 master copy)",
    proof="gpu",
    packages=("torchao",),
    gpu_only="torchao's optimizer copies between a GPU and pinned host memory",
)
def cpu_offload_optimizer(setup: Setup) -> Setup:
    """torchao's CPUOffloadOptimizer around torch's fused AdamW, on one GPU.

    The optimizer clips the gradients in RAM, and Trainer's `max_grad_norm` is 0: Trainer would clip gradients that
    were copied already. Accumulated gradients stay on the GPU: torchao would keep those of the last micro-batch only.
    """
    job = setup.resolved_for
    accumulated = job.accumulation > 1
    gradients = (
        f"accumulated on the GPU over {job.accumulation} micro-batches, because torchao would keep only the last one's"
        if accumulated
        else "freed on the GPU as soon as they are in RAM"
    )
    if job.processes > 1:
        setup = setup.with_problems(
            [f"cpu-offload-optimizer supports one GPU, and there are {job.processes}; use zero2-offload"]
        )
    return setup.put(
        "trainer_parts.cpu_offload_optimizer",
        {"max_grad_norm": 1.0},
        f"AdamW steps in RAM (torchao) and clips there to Trainer's default norm; gradients are {gradients}",
    ).put("arguments.max_grad_norm", 0.0, "the optimizer clips: Trainer would clip gradients that were copied already")


def _zero(name: str, saves: str, costs: str, **more: Any) -> Technique:
    """A DeepSpeed preset."""
    return advice(name, "offload", {"arguments.deepspeed": f"{name}.json"}, saves, costs, slows=True, **more)


_ON_THE_CPU: Final = (
    "AdamW runs on the CPU, and each step transfers over the bus; up to 20 bytes of RAM a parameter (18 without "
    "accumulation); DeepSpeed compiles its CPU optimizer once"
)

_zero(
    "zero2",
    saves="`memkit ds copy zero2` splits gradients and optimizer states over the GPUs",
    costs="more communication between GPUs in each step; DeepSpeed also keeps fp32 master weights",
    unless=("FSDP", "adapters"), planned=InPlans("engine", "zero2", turn=1),
)  # fmt: skip
_zero(
    "zero3",
    saves="`memkit ds copy zero3` splits weights, gradients and optimizer states over several GPUs, as FSDP's "
    "full_shard does; make TrainingArguments before from_pretrained, and set no device_map",
    costs="the GPUs exchange all weights in every forward and backward pass, about 1.5 times the communication of "
    "ZeRO-2; with one GPU, use zero3-offload",
    not_when="there is one GPU, so that nothing is split, or the 16-bit weights fit on each GPU",
    offered={"load": 3, "host/load": 3}, unless=("FSDP", "ZeRO-3", "quantized weights"), slot="engine",
    planned=InPlans("engine", "zero3", turn=2),
)  # fmt: skip
_zero(
    "zero2-offload",
    saves="`memkit ds copy zero2-offload` moves gradients and optimizer states to RAM; 16-bit weights and two buckets "
    "stay on the GPU",
    costs=_ON_THE_CPU,
    not_when="the machine has little RAM",
    offered={"optimizer": 3}, devices=("cuda", "rocm"), unless=("offload", "FSDP", "adapters", "ZeRO-3"),
    slot="engine", planned=InPlans("engine", "zero2-offload", turn=3),
)  # fmt: skip
_zero(
    "zero3-offload-optimizer",
    saves="`memkit ds copy zero3-offload-optimizer` moves gradients and optimizer states to RAM",
    costs=_ON_THE_CPU,
    offered={"optimizer": 3}, devices=("cuda", "rocm"), only_with=("ZeRO-3",), unless=("offload", "FSDP", "adapters"),
)  # fmt: skip
_zero(
    "zero3-offload",
    saves="`memkit ds copy zero3-offload` keeps weights, gradients and optimizer states in RAM; make "
    "TrainingArguments before from_pretrained: only then does ZeRO-3 split the weights while they load",
    costs="about 20 bytes of RAM a parameter; AdamW runs on the CPU, and all weights cross the bus in every forward "
    "and backward pass",
    not_when="the 16-bit weights fit on the GPU (zero2-offload transfers less), or RAM is short",
    offered={"load": 3}, only_with=("ZeRO-3",), unless=("FSDP",), slot="engine",
    planned=InPlans("engine", "zero3-offload", turn=4),
)  # fmt: skip
_zero(
    "zero3-infinity-optimizer",
    saves="`memkit ds copy zero3-infinity-optimizer --nvme-path DIR` moves the optimizer states from RAM to NVMe; "
    "`memkit ds check FILE --ram SIZE` prints the RAM that it needs (if the GPUs have room, omit offload_optimizer)",
    costs="each step reads and writes all states on the disk; needs a local NVMe disk",
    offered={"host/optimizer": 1, "host/offload": 1, "host/anything": 2},
)  # fmt: skip
_zero(
    "zero3-infinity",
    saves="weights and optimizer states are on the disk; buckets, the layers in use and staging buffers stay on the "
    "GPU and in RAM",
    costs="about 18 bytes of disk a parameter, 12 of them written at each step (an SSD wears out); much slower steps",
    not_when="the states fit on the GPU or in RAM",
    slot="engine", planned=InPlans("engine", "zero3-infinity", turn=5),
)  # fmt: skip
advice(
    "pageable-states", "offload", {"deepspeed.zero_optimization.offload_optimizer.pin_memory": False},
    saves="offloaded states use pageable RAM instead of page-locked RAM; set the same key in offload_param",
    costs="transfers between RAM and GPU are slower",
    slows=True, offered={"pinned/DeepSpeed": 1, "pinned/anything": 2},
)  # fmt: skip
