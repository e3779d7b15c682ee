"""A job that ran out of memory: its message, its traceback, and its arguments or records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from hf_memkit.catalog.architectures import ARCHITECTURES, built_in
from hf_memkit.catalog.library_versions import is_on
from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.common.units import GIB, MIB
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.message import OomMessage, show
from hf_memkit.measuring.out_of_memory.other_names import LENGTHS
from hf_memkit.measuring.out_of_memory.run_view import RunView, mapping
from hf_memkit.measuring.out_of_memory.surroundings import Platform
from hf_memkit.measuring.out_of_memory.traceback import Feature, TracebackFacts

_ROUNDED: Final = 0.0051
"""torch prints sizes with two decimals."""

_SEGMENT: Final = 2 * MIB
"""torch rounds a request of 10 MiB or more up to it (torch: c10/core/CachingDeviceAllocator.h, kRoundLarge)."""

_LARGE: Final = 2 * GIB
"""Nearly all larger requests are logits or attention scores: a linear layer of 8,192 tokens and 28,672 16-bit numbers
needs 0.44 GiB; logits of 8,192 tokens over a vocabulary of 128,256 need 3.91 GiB in fp32."""

_COMPILING: Final = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
"""Arguments each of which turns torch.compile on."""

_ZERO_3: Final = re.compile(r"z(?:ero)?[-_]?3|stage[-_]?3|infinity")
"""ZeRO-3 in the file name of a DeepSpeed config."""


@dataclass(frozen=True, slots=True)
class RequestedTensor:
    """A tensor whose size is the request, and the product that gives the size."""

    place: Literal["logits", "attention"]
    product: str


@dataclass(frozen=True)
class FailedJob:
    """A job that ran out of memory.

    Attributes:
        trace: what the traceback above the message shows.
        job: the job's arguments or records.
        platform: the system, if it is not plain Linux.
        ranked: whether changes are ordered by their savings, from records.
    """

    message: OomMessage
    trace: TracebackFacts
    job: RunView
    platform: Platform | None = None
    ranked: bool = False

    @property
    def larger_by(self) -> float:
        """Requested size in multiples of the GPU; 0 if unknown."""
        limit = self.message.usable_bytes
        return (self.message.requested_bytes or 0) / limit if limit else 0.0

    @property
    def resumes(self) -> bool:
        """Whether it resumes from a checkpoint, so that optimizer and engine must stay."""
        return self.trace.phase == "resume" or bool(self.argument("resume_from_checkpoint"))

    @property
    def recorded(self) -> bool:
        """Whether records of the run are known; they begin with the first step."""
        return "versions" in self.job.run

    def argument(self, name: str) -> Any:
        return self.job.argument(name)

    def uses(self, *features: str) -> bool:
        return any(feature in self.in_use for feature in features)

    @property
    def samples(self) -> int | None:
        """Samples of the micro-batch, or of the evaluation's batch."""
        return self.job.count(f"per_device_{'eval' if self.trace.phase == 'evaluate' else 'train'}_batch_size")

    def named(self, names: Iterable[str]) -> str:
        """The first of these arguments that has a number; empty if none has."""
        return next((name for name in names if self.job.count(name) is not None), "")

    def under_name(self, change: Change, names: Iterable[str]) -> Change:
        """The change under the first of these names that has a number among the arguments."""
        name = self.named(names)
        return replace(change, key=f"arguments.{name}") if name else change

    @cached_property
    def in_use(self) -> frozenset[Feature]:
        """Techniques in use, by the frames or the arguments."""
        job = self.job
        zero = mapping(mapping(job.argument("deepspeed")).get("zero_optimization"))
        adapters = ("use_peft", "lora_r", "lora_rank", "load_in_4bit", "load_in_8bit")
        fsdp_checkpoints = is_on(job.fsdp_setting("activation_checkpointing"))
        offloads: list[object] = [
            mapping(zero.get(f"offload_{what}")).get("device") for what in ("optimizer", "param")
        ]
        offloads.append(job.argument("deepspeed_offload_optimizer"))
        fsdp_offloads = any(is_on(job.fsdp_setting(name)) for name in ("cpu_offload", "offload_params"))
        offloads += ["cpu"] if fsdp_offloads or "CPUAdam" in " ".join(job.optimizers) else []
        file = str(job.argument("deepspeed")).lower() if isinstance(job.argument("deepspeed"), str) else ""

        signs: tuple[tuple[Feature, object], ...] = (
            ("checkpointing", job.checkpointing or fsdp_checkpoints),
            ("liger", job.argument("use_liger_kernel")),
            ("label smoothing", job.argument("label_smoothing_factor")),
            ("DeepSpeed", job.deepspeed),
            ("diffusers", job.argument("resolution")),
            ("FSDP", job.fsdp),
            ("fused optimizer", job.optim == "adamw_torch_fused"),
            ("paged optimizer", find_optimizer(job.optim).unpaged),
            ("SDPA", job.argument("attn_implementation") == "sdpa"),
            ("flash attention", "flash" in str(job.argument("attn_implementation"))),
            ("ZeRO-3", 3 in (zero.get("stage"), job.stage) or _ZERO_3.search(file)),
            ("offload", "offload" in file or "cpu" in offloads or "nvme" in offloads or job.states_in_ram),
            ("adapters", job.trains_adapters or any(map(job.argument, adapters))),
            ("torch.compile", job.moment.get("compilation") or any(map(job.argument, _COMPILING))),
            ("vLLM", job.argument("use_vllm") and job.argument("vllm_mode") != "server"),
            ("16-bit weights", str(job.argument("dtype")).removeprefix("torch.") in ("bfloat16", "float16", "bf16",
                                                                                     "fp16")),
            ("quantized weights", job.argument("load_in_4bit") or job.argument("load_in_8bit")),
        )  # fmt: skip
        by_frames = self.trace.in_use
        if self.recorded and not job.fsdp:  # DTensor's frames are then those of tensor parallelism
            by_frames -= {"FSDP"}
        return by_frames | {feature for feature, shown in signs if shown}

    @property
    def offloads_to_disk(self) -> bool:
        zero = mapping(mapping(self.argument("deepspeed")).get("zero_optimization"))
        device = mapping(zero.get("offload_optimizer")).get("device") or self.argument("deepspeed_offload_optimizer")
        return bool(device == "nvme")

    @property
    def requests_a_tensor(self) -> bool:
        """Whether the message is about one tensor, not a cache, a buffer or a whole program."""
        return self.message.form in ("torch-device", "torch-mps", "torch-mps-buffer")

    @property
    def large_without_frame(self) -> bool:
        """Whether one large tensor was requested without a frame that shows its purpose: backward runs in C++."""
        if not self.requests_a_tensor:
            return False
        trace = self.trace
        no_frames = trace.phase in (None, "forward") and trace.model_type is None and not trace.in_use
        hidden = trace.place is None and (trace.phase == "backward" or no_frames)
        return hidden and (self.message.requested_bytes or 0) >= _LARGE

    @cached_property
    def requested_tensor(self) -> RequestedTensor | None:
        """The logits or attention scores with the requested size, by arguments and model; None if neither has it."""
        requested, samples = self.message.requested_bytes, self.samples
        length = self.job.count(self.named(LENGTHS))
        if not requested or samples is None or length is None or not self.requests_a_tensor:
            return None
        if self.trace.phase not in (None, "forward", "backward", "evaluate"):
            return None
        if self.trace.place not in (None, "logits", "cross entropy", "attention"):
            return None
        sizes = f"{samples} × {length:,} tokens"
        for size in (2, 4):  # bytes of a number
            for vocabulary in self._vocabularies():
                # The loss of a causal language model shifts the tokens by one.
                if any(_is_size(requested, samples * tokens * vocabulary * size) for tokens in (length, length - 1)):
                    return RequestedTensor(
                        "logits", f"{sizes} × {vocabulary:,} words of the vocabulary × {size} bytes"
                    )
            heads = self._config("num_attention_heads", "n_head")
            if heads is not None and _is_size(requested, samples * heads * length**2 * size):
                return RequestedTensor("attention", f"{samples} × {heads} heads × {length:,}² tokens × {size} bytes")
        return None

    @property
    def zeros_for_logits(self) -> int | None:
        """Bytes of the zeros that compiled code makes in backward if the model returns logits that nothing uses; None
        if it makes none, or their size is unknown.

        AOTAutograd makes zeros for the absent gradient of each output (pytorch#131794); the backend `eager` does not.
        """
        no_zeros = self.uses("liger", "chunked loss", "label smoothing")
        if not self.uses("torch.compile") or no_zeros or self.argument("torch_compile_backend") == "eager":
            return None
        if self.trace.phase != "backward":
            return None
        tensor = self.requested_tensor
        if tensor is not None and tensor.place == "logits":
            return self.message.requested_bytes
        return self.job.logits_bytes

    def _config(self, *names: str) -> int | None:
        """A number of the model's config: from the arguments, or of a known model that they name."""
        name = self.argument("model_name_or_path")
        known = built_in(name) if isinstance(name, str) else None
        places = (self.job.arguments, known[1].config if known is not None else {})
        values = (place.get(name) for place in places for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    def _vocabularies(self) -> Iterator[int]:
        """The model's vocabulary size, or those of known models of its type, or of all known models."""
        own = self._config("vocab_size", "vocabulary")
        if own is not None:
            yield own
            return
        configs = [one.config for one in ARCHITECTURES.values()]
        of_type = [config for config in configs if config["model_type"] == self.trace.model_type]
        yield from sorted({int(config["vocab_size"]) for config in of_type or configs})


def _is_size(requested: int, exact: int) -> bool:
    """Whether torch prints a request of `exact` bytes as `requested`."""
    unit = GIB if requested >= GIB else MIB
    return exact - _ROUNDED * unit <= requested <= exact + _SEGMENT + _ROUNDED * unit


def requested_sentence(message: OomMessage, tensor: RequestedTensor) -> str:
    """`"7.83 GiB = 8 × 2,048 tokens × 128,256 words of the vocabulary × 4 bytes: the logits, or a copy of them."`"""
    what = "the logits, or a copy or gradient of them" if tensor.place == "logits" else "the attention scores"
    return f"{show(message.requested_bytes or 0)} = {tensor.product}: {what}."
