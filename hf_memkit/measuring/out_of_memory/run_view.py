"""Reads the figures that advice needs from a run's records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common.terms import CATEGORIES, PHASES, Category
from hf_memkit.common.units import GIB
from hf_memkit.measuring.record_types import ModulesRecord, RunRecord

ACTIVATION_PHASES: Final = ("forward", "backward")
STATES_PHASES: Final = ("load", "data", "forward", "backward", "optimizer")
"""Phases in which weights, gradients and optimizer states are on the GPU."""

_WITHOUT_BF16: Final = re.compile(
    r"\b(?:T4|P4|P40|P100|V100|K80|M40|M60|GTX|TITAN (?:X|Xp|V|RTX)|RTX 20\d\d|Quadro RTX)", re.I
)
"""GPUs of compute capability below 8.0."""

_LANGUAGE_MODEL: Final = re.compile(r"(?:ForCausalLM|LMHeadModel|ForMaskedLM)$")
"""Classes of models with logits for every input token."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment; sizes in GiB, None if unknown.

    Attributes:
        moment: an `OomRecord` or a `StepRecord`.
        names: name of an argument in TrainingArguments → in the user's file, if they differ.
    """

    run: RunRecord
    moment: Mapping[str, Any]
    modules: ModulesRecord | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self.run.get("arguments") or {}

    @property
    def hardware(self) -> Mapping[str, Any]:
        return self.run.get("hardware") or {}

    @property
    def phase(self) -> str | None:
        """The phase in which it failed; of a step record, the phase with the highest peak."""
        if phase := self.moment.get("phase"):
            return str(phase)
        peaks = {
            phase: values["peak_allocated_gib"]
            for phase, values in self.moment.get("phases", {}).items()
            if phase in PHASES and "peak_allocated_gib" in values
        }
        return max(peaks, key=lambda phase: peaks[phase], default=None)

    @property
    def categories(self) -> Mapping[str, float]:
        """GiB on the device by category."""
        return self.moment.get("categories") or {}

    def gib(self, category: Category) -> float | None:
        """GiB of a category on the device; None if not measured."""
        return self.categories.get(f"{category}_gib")

    @property
    def batch_gib(self) -> float | None:
        """Activations and loss, which grow with the batch."""
        held = [size for size in (self.gib("activations"), self.gib("loss")) if size is not None]
        return sum(held) if held else None

    @property
    def model_states(self) -> float | None:
        """Gradients and optimizer states on the device; None if there are none."""
        return ((self.gib("gradients") or 0.0) + (self.gib("optimizer") or 0.0)) or None

    @property
    def states_in_ram(self) -> float:
        """Optimizer states in RAM, page-locked or not."""
        held: Mapping[str, Mapping[str, float]] = self.moment.get("held", {})
        return sum(held.get(place, {}).get("optimizer_gib", 0.0) for place in ("host", "pinned"))

    @property
    def activations_unknown(self) -> bool:
        """Whether activations and loss may be in `other`: no categories were measured, or the model is compiled."""
        sizes = {name: self.gib(name) or 0.0 for name in CATEGORIES}
        return not self.categories or sizes["other"] > sum(sizes.values()) / 2

    def argument(self, name: str) -> Any:
        return self.arguments.get(name)

    def count(self, name: str) -> int | None:
        """A whole number among the arguments."""
        value = self.arguments.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def trainable(self) -> int | None:
        return self.run.get("trainable_parameters")

    @property
    def parameters(self) -> int | None:
        return self.run.get("parameters")

    @property
    def trains_adapters(self) -> bool:
        """Whether fewer than a tenth of the parameters are trained."""
        return bool(self.trainable and self.parameters and self.trainable * 10 < self.parameters)

    @property
    def embedding_parameters(self) -> int | None:
        """Trained parameters of embeddings; None if the record of modules has none."""
        rows = (self.modules or {}).get("rows", [])
        embeddings = [row for row in rows if "Embedding" in row.get("class", "")]
        return sum(row.get("trainable_parameters", 0) * row.get("repeats", 1) for row in embeddings) or None

    @property
    def deepspeed(self) -> bool:
        engine = self.run.get("engine", "").lower()
        return "deepspeed" in engine or self.stage is not None or any("DeepSpeed" in name for name in self.optimizers)

    @property
    def fsdp(self) -> bool:
        engine = self.run.get("engine", "").lower()
        return "fsdp" in engine or "fullyshard" in engine or bool(self.argument("fsdp"))

    def fsdp_setting(self, name: str) -> str:
        """A setting of `fsdp_config`, in small letters; empty if it is not set."""
        settings = mapping(self.argument("fsdp_config"))
        return str(settings.get(name, settings.get(f"fsdp_{name}", ""))).lower()

    @property
    def keeps_gathered_layers(self) -> bool:
        """Whether FSDP keeps gathered weights from forward to backward."""
        by_word = "shard_grad_op" in str(self.argument("fsdp")).lower()
        return by_word or self.fsdp_setting("reshard_after_forward") in ("false", "shard_grad_op", "2")

    def keeps_whole_gradient(self, factor: int = 1) -> bool:
        """Whether each GPU keeps FSDP's whole gradient between micro-batches, if there were `factor` times as many."""
        settings = mapping(mapping(self.argument("accelerator_config")).get("gradient_accumulation_kwargs"))
        steps = factor * (self.count("gradient_accumulation_steps") or 1)
        return self.fsdp and steps > 1 and not is_on(str(settings.get("sync_each_batch")))

    @property
    def stage(self) -> int | None:
        """DeepSpeed's ZeRO stage."""
        return self.count("deepspeed_stage")

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Class names, from the outer wrapper to the optimizer."""
        return tuple(self.run.get("optimizer_classes", ()))

    @property
    def optim(self) -> str:
        return str(self.argument("optim") or "")

    @property
    def checkpointing(self) -> bool:
        return any(self.argument(f"{name}_checkpointing") for name in ("activation", "gradient"))

    @property
    def on_cuda(self) -> bool:
        return self.hardware.get("device_type") == "cuda"

    @property
    def has_bf16(self) -> bool | None:
        """Whether the GPU supports bf16; None: no GPU, or unknown."""
        name = self.hardware.get("device_name")
        if not self.on_cuda or name is None:
            return None
        return _WITHOUT_BF16.search(name) is None

    @property
    def weights_in_fp32(self) -> bool:
        """Whether most weights are in fp32."""
        types = self.run.get("weights_dtypes", {})
        return max(types, key=lambda kind: types[kind], default=None) == "float32"

    @property
    def cause(self) -> str | None:
        return self.moment.get("cause")

    @property
    def logits_bytes(self) -> int | None:
        """Size of the logits that a language model returns for a micro-batch; None if unknown."""
        tokens = self.moment.get("tokens")
        vocabulary = self.run.get("vocabulary")
        if not tokens or not vocabulary or _LANGUAGE_MODEL.search(self.run.get("model_class", "")) is None:
            return None
        # accelerate converts the outputs of mixed precision to fp32 (accelerate 1.15: convert_outputs_to_fp32).
        in_fp32 = self.weights_in_fp32 or self.argument("bf16") or self.argument("fp16")
        micro_batches = self.moment.get("micro_batches", 1)  # a step record counts the tokens of all
        return int(tokens * vocabulary * (4 if in_fp32 else 2) / micro_batches)

    def version(self, package: str) -> tuple[int, ...]:
        """A package's version, such as `(5, 23)`; empty if unknown."""
        return tuple(int(part) for part in re.findall(r"\d+", self.run.get("versions", {}).get(package, ""))[:2])

    def states_gib_per(self, bytes_a_parameter: float) -> float | None:
        """GiB of states with `bytes_a_parameter` for each trained parameter."""
        return self.trainable * bytes_a_parameter / GIB if self.trainable is not None else None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
