"""The memory keys of a DeepSpeed JSON with their values or defaults, as DeepSpeed 0.19.8 reads them.

Trainer fills "auto": for batch, clipping and precision, and from the model's hidden size for three sizes. Elsewhere
DeepSpeed drops "auto" and uses the default (deepspeed: runtime/config_utils.py, `DeepSpeedConfigModel.__init__`), and
so does this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Device = Literal["none", "cpu", "nvme"]

_16_BIT = ("fp16", "bf16", "bfloat16")  # the last is an old name of the one before it

_DTYPE_BYTES = {  # deepspeed: runtime/config.py, `DtypeEnum`
    **dict.fromkeys(("torch.float32", "fp32", "float32", "float"), 4),
    **dict.fromkeys(("torch.float16", "fp16", "float16", "half", "torch.bfloat16", "bf16", "bfloat16"), 2),
}


@dataclass(frozen=True, slots=True)
class Offload:
    """`offload_optimizer` or `offload_param` (deepspeed: runtime/zero/offload_config.py)."""

    device: Device = "none"  # where the states go
    pin_memory: bool = True  # whether their RAM is page-locked
    buffer_count: int = 4  # pinned buffers for NVMe
    buffer_elements: int = 100_000_000  # elements of one buffer (`offload_param` only)
    max_in_cpu: int = 1_000_000_000  # elements that stay in RAM even with NVMe (`offload_param` only)
    pipelined: bool = False  # reads and writes overlap the step (`offload_optimizer` only)
    ratio: float = 1.0  # offloaded share of the sub-groups (`offload_optimizer`, stage 3 only)


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """The keys of a DeepSpeed JSON that affect memory. Fields with `_elements` count elements, not bytes.

    Attributes:
        master_bytes, moment_bytes: bytes of a master weight, and of one of Adam's two moments.
        live_elements, prefetch_elements, persistent_elements: stage 3's `stage3_max_live_parameters`,
            `stage3_prefetch_bucket_size` and `stage3_param_persistence_threshold`.
        zenflow_share: share of the gradients that ZenFlow applies at once (`zenflow.topk_ratio`); 0 without ZenFlow.
    """

    stage: int  # 0 to 3
    element_bytes: int  # bytes of a weight in the model: 2 under fp16, bf16 or "auto", otherwise 4
    master_bytes: int
    moment_bytes: int
    accumulator_bytes: int  # bytes of an accumulated gradient (`data_types.grad_accum_dtype`)
    bucket_elements: int  # `reduce_bucket_size`
    buckets: int  # number of these buffers that exist at once
    sub_group_elements: int  # `sub_group_size`
    live_elements: int
    prefetch_elements: int
    persistent_elements: int
    sequential: bool  # `stage3_allgather_sequential`
    secondary_partition: int  # `zero_hpz_partition_size`
    optimizer: Offload
    parameters: Offload
    aio_block_bytes: int  # `aio.block_size`; smaller tensors are not swapped
    aio_parallelism: int  # `aio.intra_op_parallelism`, which sets the alignment of swapped tensors
    optimizer_type: str | None  # `optimizer.type`; None if Trainer makes the optimizer
    memory_efficient_linears: bool = True  # `memory_efficient_linear`
    zenflow_share: float = 0.0
    zenflow_overlap: bool = False  # its step runs in a separate process (`zenflow.overlap_step`)
    gathers_to_save: bool = False  # `stage3_gather_16bit_weights_on_model_save`

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden_size: int = 0) -> ZeroSettings:
        """Read any DeepSpeed JSON; a value of the wrong type counts as absent. `hidden_size`: of the model; 0:
        unknown, so that "auto" is DeepSpeed's default."""
        zero = dict(section_of(config, "zero_optimization"))
        stage = _integer(zero, "stage", 0)
        if hidden_size:
            # Trainer's values (transformers 5.23.0: integrations/deepspeed.py, 232).
            sizes = {"reduce_bucket_size": hidden_size * hidden_size}
            if stage == 3:
                sizes["stage3_prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
                sizes["stage3_param_persistence_threshold"] = 10 * hidden_size
            zero |= {name: size for name, size in sizes.items() if zero.get(name) == "auto"}
        element_bytes = 2 if any(section_of(config, name).get("enabled") in (True, "auto") for name in _16_BIT) else 4
        accumulate = section_of(config, "data_types").get("grad_accum_dtype")
        zenflow = section_of(zero, "zenflow")
        lean_master = any(section_of(config, name).get(f"{name}_master_weights_and_grads") is True for name in _16_BIT)
        parameters = section_of(section_of(config, "optimizer"), "params")
        lean_moments = section_of(config, "bf16").get("bf16_optimizer_states") is True
        lean_moments = lean_moments or (lean_master and parameters.get("fp32_optimizer_states") is False)
        contiguous = zero.get("contiguous_gradients", True) is not False
        offloaded = _offload(zero, "offload_optimizer", Offload(buffer_count=4))
        overlap = zero.get("overlap_comm", stage == 3)
        buckets = 0
        if contiguous or (stage < 3 and offloaded.device != "none"):
            buckets = 2 if stage < 3 and overlap is True else 1
        kind = section_of(config, "optimizer").get("type")
        return cls(
            stage=stage,
            element_bytes=element_bytes,
            master_bytes=2 if lean_master else 4,
            moment_bytes=2 if lean_moments else 4,
            accumulator_bytes=_DTYPE_BYTES.get(str(accumulate), element_bytes),
            bucket_elements=_integer(zero, "reduce_bucket_size", 500_000_000),
            buckets=buckets if stage else 0,
            sub_group_elements=_integer(zero, "sub_group_size", 1_000_000_000),
            live_elements=_stage_3(zero, "max_live_parameters", 1_000_000_000),
            prefetch_elements=_stage_3(zero, "prefetch_bucket_size", 50_000_000),
            persistent_elements=_stage_3(zero, "param_persistence_threshold", 100_000),
            sequential=zero.get("stage3_allgather_sequential", zero.get("allgather_sequential")) is True,
            secondary_partition=_integer(zero, "zero_hpz_partition_size", 1),
            optimizer=offloaded,
            parameters=_offload(zero, "offload_param", Offload(buffer_count=5)) if stage == 3 else Offload(),
            aio_block_bytes=_integer(section_of(config, "aio"), "block_size", 1_048_576),
            aio_parallelism=max(1, _integer(section_of(config, "aio"), "intra_op_parallelism", 1)),
            optimizer_type=kind if isinstance(kind, str) else None,
            memory_efficient_linears=zero.get("memory_efficient_linear") is not False,
            zenflow_share=_number(zenflow, "topk_ratio", 0.1) if "zenflow" in zero else 0.0,
            zenflow_overlap=zenflow.get("overlap_step") is True,
            gathers_to_save=zero.get("stage3_gather_16bit_weights_on_model_save") is True,
        )

    @property
    def swaps_optimizer(self) -> bool:
        """Whether optimizer states go to disk. Below stage 3 DeepSpeed silently treats "nvme" as "cpu"."""
        return self.stage == 3 and self.optimizer.device == "nvme"

    @property
    def swaps_parameters(self) -> bool:
        return self.parameters.device == "nvme"


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a DeepSpeed config or of another section; empty if absent."""
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(section: Mapping[str, Any], name: str, default: float) -> float:
    value = section.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value >= 0 else default


def _integer(section: Mapping[str, Any], name: str, default: int) -> int:
    return int(_number(section, name, default))


def _stage_3(zero: Mapping[str, Any], name: str, default: int) -> int:
    """A key of stage 3, which DeepSpeed accepts without its prefix too."""
    return _integer(zero, f"stage3_{name}", _integer(zero, name, default))


def _offload(zero: Mapping[str, Any], name: str, default: Offload) -> Offload:
    section = section_of(zero, name)
    device = section.get("device", "none")
    return Offload(
        device=device if device in ("cpu", "nvme") else "none",
        pin_memory=section.get("pin_memory", True) is not False,
        buffer_count=_integer(section, "buffer_count", default.buffer_count),
        buffer_elements=_integer(section, "buffer_size", default.buffer_elements),
        max_in_cpu=_integer(section, "max_in_cpu", default.max_in_cpu),
        pipelined=section.get("pipeline_read") is True or section.get("pipeline_write") is True,
        ratio=min(1.0, _number(section, "ratio", 1.0)),
    )
