"""Size a DeepSpeed preset: every buffer computed for one model and one machine, each with its reason."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.units import MIB, format_size
from hf_memkit.deepspeed.aio import AioMeasurement
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.presets import load
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.deepspeed.stage_3 import SWAP_BUFFERS, is_swapped
from hf_memkit.setup.job import PROCESS_BYTES
from hf_memkit.setup.ledger import Ledger

GPU_SHARE: Final = 0.02
"""Maximum share of the GPU for the gradient buckets. ZeRO-R uses a constant size (Rajbhandari et al. 2020, arXiv
1910.02054, 6.2), but no constant suits both an 8 GB GPU and an 80 GB GPU."""

PREFETCH_ELEMENTS: Final = 50_000_000  # DeepSpeed's default of `stage3_prefetch_bucket_size`: 100 MB in 16 bit

SMALLEST_BUCKET_ELEMENTS: Final = 5_000_000  # 10 MB in 16 bit. Smaller messages are dominated by latency.

PINNED_SHARE: Final = 0.9
"""Maximum share of RAM for page-locked states, which cannot be swapped out: the rest is for the system."""


@dataclass(frozen=True, slots=True)
class SizedKey:
    """One computed value; `key`: its dotted path in the JSON."""

    key: str
    value: Any
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "reason": self.reason}


@dataclass(frozen=True)
class Sized:
    """A sized preset."""

    config: dict[str, Any]  # the DeepSpeed JSON
    choices: tuple[
        SizedKey, ...
    ]  # every value that differs from the preset's constant or was confirmed for the machine
    ledger: Ledger  # memory of this config, DeepSpeed's part of the job only
    notes: tuple[str, ...]  # warnings for the user


def size_preset(
    name: str,
    model: ModelFacts,
    machine: Machine,
    *,
    nvme_path: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    aio: AioMeasurement | None = None,
    accumulation: bool = True,
    adapters: Sequence[int] = (),
) -> Sized:
    """The preset `name` with its buffers computed for `model` on `machine` (without a GPU its limits are ignored).

    Args:
        nvme_path: folder for swap files; None keeps the preset's placeholder.
        gpus: processes on each machine.
        aio: measurement of `nvme_path`; None keeps the preset's section `aio`.
        accumulation: whether gradients of several micro-batches are accumulated.
        adapters: elements of each adapter parameter, if only they are trained; empty: the model is trained.

    Raises:
        InputError: there is no such preset.
    """
    sizing = _Sizing(load(name), model, machine, gpus, nodes, accumulation, tuple(adapters))
    sizing.paths(nvme_path, aio)
    sizing.buckets()
    sizing.live_parameters()
    sizing.swap_buffers()
    sizing.hierarchy()
    sizing.pinning()
    sizing.locking()
    return Sized(sizing.config, tuple(sizing.choices.values()), sizing.ledger(), tuple(sizing.notes))


class _Sizing:
    """The config being sized. Each method decides one kind of buffer."""

    def __init__(
        self, config: dict[str, Any], model: ModelFacts, machine: Machine, gpus: int, nodes: int, accumulation: bool,
        adapters: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.config = copy.deepcopy(config)
        self.zero: dict[str, Any] = self.config.get("zero_optimization", {})
        self.model, self.machine = model, machine
        self.gpus, self.processes, self.nodes = gpus, gpus * nodes, nodes
        self.accumulation, self.adapters = accumulation, adapters
        self.choices: dict[str, SizedKey] = {}
        self.notes: list[str] = []

    def ledger(self) -> Ledger:
        return zero_ledger(
            self.config, self.model, gpus=self.gpus, nodes=self.nodes, accumulation=self.accumulation,
            adapters=self.adapters,
        )  # fmt: skip

    def _put(self, path: str, value: Any, reason: str) -> None:
        *sections, key = path.split(".")
        section = self.config
        for name in sections:
            section = section[name]
        section[key] = value
        self.choices[path] = SizedKey(path, value, reason)

    def _offload(self, part: str) -> dict[str, Any]:
        section: dict[str, Any] = self.zero.get(part, {})
        return section

    def _share(self, elements: int) -> int:
        return -(-elements // self.processes)

    def paths(self, nvme_path: str | None, aio: AioMeasurement | None) -> None:
        for part in ("offload_optimizer", "offload_param"):
            if self._offload(part).get("device") == "nvme" and nvme_path is not None:
                self._put(f"zero_optimization.{part}.nvme_path", nvme_path, "asked for")
        if "aio" in self.config and aio is not None:
            for key, value in aio.settings.items():
                self._put(f"aio.{key}", value, aio.why)
            self.notes.append(f"{nvme_path}: {aio.label}")

    def buckets(self) -> None:
        """Gradient buckets: the preset's constant, or less for a small GPU or model."""
        if "reduce_bucket_size" not in self.zero:
            return
        constant = int(self.zero["reduce_bucket_size"])
        value, reason = constant, "the preset's constant: large enough to be efficient for any size of the model"
        if self.machine.gpu is not None:
            element_bytes = 2 * (2 if self.zero.get("overlap_comm") and self.zero["stage"] < 3 else 1)
            limit = int(GPU_SHARE * self.machine.gpu.usable_bytes) // element_bytes
            if limit < value:
                value = max(limit // 1_000_000 * 1_000_000, SMALLEST_BUCKET_ELEMENTS)
                reason = f"at most {GPU_SHARE:.0%} of the GPU for buckets"
        if self.model.parameters < value:
            # DeepSpeed needs an even all-gather bucket.
            value = self.model.parameters + self.model.parameters % 2
            reason = "the whole model is smaller than the preset's bucket"
        self._put("zero_optimization.reduce_bucket_size", value, reason)
        if "allgather_bucket_size" in self.zero:
            self._put("zero_optimization.allgather_bucket_size", value, "as reduce_bucket_size; takes no buffer")

    def live_parameters(self) -> None:
        """Stage 3: parameters gathered at once."""
        if self.zero.get("stage") != 3:
            return
        model = self.model
        layer = model.parameters // max(1, model.layers)
        live = int(self.zero["stage3_max_live_parameters"])
        enough = 2 * model.largest_parameter
        if live < enough:
            live, reason = enough, "twice the largest parameter, so that the next one can be gathered in advance"
        elif model.parameters < live:
            live, reason = model.parameters, "the whole model"
        else:
            reason = "the preset's constant, and more than twice the largest parameter"
        self._put("zero_optimization.stage3_max_live_parameters", live, reason)
        self._put("zero_optimization.stage3_max_reuse_distance", live, "as stage3_max_live_parameters")
        prefetch, reason = min(PREFETCH_ELEMENTS, layer), "at most one layer ahead"
        if self.zero.get("stage3_allgather_sequential"):
            prefetch, reason = 0, "one parameter at a time"
        elif self._prefetches_twice():
            prefetch, reason = 0, "off: DeepSpeed would read the output layer's weights twice, and stop"
        self._put("zero_optimization.stage3_prefetch_bucket_size", prefetch, reason)
        threshold = int(self.zero["stage3_param_persistence_threshold"])
        kept = sum(size for size in model.sizes if size <= threshold)
        if kept > model.parameters // 100:
            threshold = 10 * model.width
            self._put(
                "zero_optimization.stage3_param_persistence_threshold", min(threshold, layer),
                "norms and biases stay whole; the preset's constant would keep more than 1 % of this small model",
            )  # fmt: skip

    def _prefetches_twice(self) -> bool:
        """Whether prefetching from NVMe can list the output layer's weights twice, which fails with "param 0 already
        assigned swap buffer".

        They are the last parameter of forward and the first of backward, and the list reaches twice as far as the
        parameters in flight from elsewhere (deepspeed 0.19.8: runtime/zero/partitioned_param_coordinator.py,
        `__prefetch_nvme_param_partitions`).
        """
        if self._offload("offload_param").get("device") != "nvme":
            return False
        settings = ZeroSettings.from_config(self.config)
        element = settings.element_bytes
        not_swapped = sum(size for size in self.model.sizes if not is_swapped(settings, element * self._share(size)))
        return 2 * min(not_swapped, settings.live_elements) >= self.model.vocabulary * self.model.width

    def swap_buffers(self) -> None:
        """Stage 3: sub-groups, and the pinned buffers between RAM and disk."""
        if self.zero.get("stage") != 3:
            return
        share, largest = self._share(self.model.parameters), self._share(self.model.largest_parameter)
        sub_group = max(min(int(self.zero["sub_group_size"]), share), largest)
        reason = "the tile of the optimizer's step: the preset's constant"
        if sub_group == share:
            reason = "one tile: a process's share is smaller than the preset's constant"
        elif sub_group == largest:
            reason = "the tile of the optimizer's step: no smaller than the largest parameter's share"
        key = "zero_optimization.sub_group_size"
        self._put(key, sub_group, reason)
        if self._offload("offload_optimizer").get("device") == "nvme":
            while self._ram_bytes() > self.machine.ram_bytes and sub_group > largest:
                sub_group = max(sub_group // 2, largest)
                self._put(key, sub_group, "smaller tiles than the preset's, so that RAM holds their buffers")
        if self._offload("offload_param").get("device") == "nvme":
            self._put(
                "zero_optimization.offload_param.buffer_size", -(-largest // 1024) * 1024,
                f"holds the largest parameter's share, {largest:,} elements, and no more: "
                f"{self._offload('offload_param')['buffer_count']} of them are page-locked",
            )  # fmt: skip

    def hierarchy(self) -> None:
        if "zero_hpz_partition_size" in self.zero:
            several = self.gpus > 1 and self.nodes > 1
            reason = "one copy of the weights in each machine" if several else "off: it saves nothing in one machine"
            self._put("zero_optimization.zero_hpz_partition_size", self.gpus if several else 1, reason)
        uneven = sum(1 for size in self.model.sizes if self._share(size) % 8)
        if self.zero.get("zero_quantized_weights") and uneven:
            self.notes.append(
                f"{uneven} parameters have shares that are not a multiple of 8 elements on {self.processes} GPUs, and "
                f"DeepSpeed's quantiser may stop at them (deepspeed 0.19.8: csrc/quantization). Then give another "
                f"number of GPUs, or choose zero3"
            )

    def pinning(self) -> None:
        """Page-lock the states if RAM has room for them with their rounding."""
        part = "offload_optimizer"
        if self._offload(part).get("device") not in ("cpu", "nvme"):
            return
        if "zenflow" in self.zero:  # its states move to shared memory, and their page-locked memory would be wasted
            return
        key = f"zero_optimization.{part}.pin_memory"
        self._put(key, True, "transfers then overlap computation")
        needed, limit = self._ram_bytes(), int(PINNED_SHARE * self.machine.ram_bytes)
        if needed > limit:
            self._put(
                key, False,
                f"page-locked blocks round up to powers of two: {format_size(needed)} of "
                f"{format_size(self.machine.ram_bytes)}; transfers are slower without",
            )  # fmt: skip

    def locking(self) -> None:
        """Note if swap buffers exceed the process's limit of `mlock`; torch's pinned memory has no limit."""
        locked = self.machine.memlock_bytes
        buffers = sum(row.size_bytes for row in self.ledger().rows if row.term in SWAP_BUFFERS) // self.gpus
        if locked is not None and buffers > locked:
            self.notes.append(
                f"Each process locks {format_size(buffers)} of swap buffers with mlock and stops where it may not: "
                f"the limit here is {locked / MIB:.0f} MiB; raise it (ulimit -l unlimited, or docker --ulimit "
                f"memlock=-1)"
            )

    def _ram_bytes(self) -> int:
        return self.ledger().total_bytes("host", "pinned") + self.gpus * PROCESS_BYTES
