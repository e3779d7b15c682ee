"""The subject of a check: a DeepSpeed config, Trainer's arguments, and known facts about the model and the machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from hf_memkit.catalog.hardware import Gpu, Machine
from hf_memkit.catalog.library_versions import current_name
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.setup import Setup


class _Absent:
    """No value at all, unlike `null`."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()


@functools.cache
def installed_deepspeed() -> str:
    """Version of the installed DeepSpeed; without one, the version that memkit was written against."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "0.19.8"


def walk(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a nested mapping, as (dotted path, value), sections included."""
    for key, value in section.items():
        here = f"{path}.{key}" if path else str(key)
        yield here, value
        if isinstance(value, Mapping):
            yield from walk(value, here)


@dataclass(frozen=True)
class Subject:
    """One job as far as it is known. Rules that need an unknown field do not apply.

    Attributes:
        config: the DeepSpeed JSON; None if the job does not use DeepSpeed.
        arguments: fields of TrainingArguments that are set; None if unknown. Old names become the current ones.
        model: the model's shapes; None if unknown.
        model_config: the model's config of transformers, where its shapes are unknown; empty if that is, too.
        machine: where the job runs; None if unknown.
        gpus: processes on each machine; None if unknown.
        nodes: machines.
        config_file, arguments_file: their paths, for messages.
        duplicates: keys that appear twice in the config's file (a mapping cannot hold them).
        duplicate_arguments: keys that appear twice in the argument file.
        here: whether the job runs on this machine, so that rules can look at folders and shared memory.
        deepspeed: version of DeepSpeed that reads the config.
        superseded_arguments: arguments under an old name whose new name is also set; computed, not given.
        former_names: current name → former name, of arguments that have only that; computed, not given.
        pinned: whether the arguments are of a tool that pins its own libraries, so that the installed ones do not tell
            which names and values are allowed.
        launcher: content of the YAML of `accelerate launch`; None if there is none.
        launcher_file: its path. Where the YAML itself is the DeepSpeed config, `config_file` is the same.
        fsdp_file: path of the JSON from which the argument `fsdp_config` was read; empty if it is no file.
        settings: a setup's settings other than `arguments.*` and `deepspeed.config`, by key; empty for files.
        ledger: a recipe variant's ledger, to compare with the GPU; empty for files, and for setups that list their
            shortages themselves.
    """

    config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] | None = None
    model: ModelFacts | None = None
    machine: Machine | None = None
    gpus: int | None = None
    nodes: int = 1
    config_file: str = ""
    arguments_file: str = ""
    duplicates: tuple[str, ...] = ()
    here: bool = False
    deepspeed: str = field(default_factory=installed_deepspeed)
    duplicate_arguments: tuple[str, ...] = ()
    pinned: bool = False
    launcher: Mapping[str, Any] | None = None
    launcher_file: str = ""
    fsdp_file: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    superseded_arguments: Mapping[str, Any] = field(default_factory=dict, init=False)
    former_names: Mapping[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.arguments is not None:
            given = self.arguments
            # With both names Trainer uses the new one (transformers 5.23.0: training_args.py 1533-1543).
            old = {name: value for name, value in given.items() if current_name(name) != name}
            current = {current_name(name): value for name, value in old.items()} | {
                name: value for name, value in given.items() if name not in old
            }
            object.__setattr__(self, "arguments", {current_name(name): current[current_name(name)] for name in given})
            former = {current_name(name): name for name in old if current_name(name) not in given}
            object.__setattr__(self, "former_names", former)
            superseded = {name: value for name, value in old.items() if current_name(name) in given}
            object.__setattr__(self, "superseded_arguments", superseded)

    @classmethod
    def of_setup(cls, setup: Setup) -> Subject:
        """The subject of a setup. The machine of a setup without a GPU counts as unknown."""
        job = setup.job
        machine = job.machine if job is not None and job.machine.gpu is not None else None
        model, gpus, nodes = (job.model, job.gpus, job.nodes) if job is not None else (None, 1, 1)
        settings = {s.key: s.value for s in setup.settings if not s.key.startswith("arguments.")}
        settings.pop("deepspeed.config", None)
        return cls(setup.get("deepspeed.config"), setup.arguments, model, machine, gpus, nodes, settings=settings)

    def at(self, path: str) -> Any:
        """The config's value at a dotted path, or ABSENT."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return ABSENT
            node = node[part]
        return node

    def has(self, path: str) -> bool:
        return self.at(path) is not ABSENT

    def at_stage(self, stage: int) -> Subject:
        """The same job at another ZeRO stage."""
        section = self.at("zero_optimization")
        changed = {**section, "stage": stage} if isinstance(section, Mapping) else {"stage": stage}
        other = replace(self, config={**(self.config or {}), "zero_optimization": changed})
        object.__setattr__(other, "superseded_arguments", self.superseded_arguments)
        object.__setattr__(other, "former_names", self.former_names)
        return other

    def argument(self, name: str, default: Any = None) -> Any:
        """The value of the argument `name`, or `default` if it is not set. An empty value (null) sets nothing."""
        value = None if self.arguments is None else self.arguments.get(name)
        return default if value is None else value

    @property
    def own_names(self) -> Mapping[str, Any]:
        """The arguments of a file for the installed libraries; empty for a setup, whose names memkit wrote."""
        return {} if self.arguments is None or not self.arguments_file or self.pinned else self.arguments

    def written(self, name: str) -> str:
        """The name of an argument as the user wrote it, which may be a former one."""
        return self.former_names.get(name, name)

    def on(self, name: str) -> bool:
        """Whether the argument `name` is set to true."""
        return self.argument(name) is True

    @property
    def compiles(self) -> bool:
        """Whether Trainer compiles: a backend or mode turns it on too (transformers 5.23.0: training_args.py 1621)."""
        return any(self.argument(f"torch_compile{name}") not in (None, False) for name in ("", "_backend", "_mode"))

    @property
    def mixed(self) -> bool:
        """Whether the arguments ask for mixed precision."""
        return self.on("bf16") or self.on("fp16")

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step: Trainer's argument, or its default."""
        value = self.argument("gradient_accumulation_steps", 1)
        return value if isinstance(value, int) else 1

    def setting(self, key: str, default: Any = None) -> Any:
        """The setup's setting `key` (`model_parts.chunked_loss`), or `default`; files have none."""
        return self.settings.get(key, default)

    def shown_value(self, key: str, argument: bool) -> Any:
        """The value shown in a problem: of the argument `key`, or of the config or the setup; None if missing."""
        if argument:
            return self.argument(key)
        return self.at(key) if self.has(key) else self.setting(key)

    def is_null(self, key: str, argument: bool) -> bool:
        """Whether the argument `key`, or that key of the config, has the value null."""
        return (self.arguments or {}).get(key, ABSENT) is None if argument else self.at(key) is None

    def has_setting(self, key: str) -> bool:
        """Whether the setup sets `key`, or, if `key` is a section, anything in it."""
        return key in self.settings or any(name.startswith(f"{key}.") for name in self.settings)

    @property
    def adapter(self) -> dict[str, Any]:
        """The fields of the setup's LoraConfig; empty without adapters."""
        return {key.partition(".")[2]: value for key, value in self.settings.items() if key.startswith("adapter.")}

    @property
    def half_weights(self) -> bool:
        """Whether the setup loads the weights in 16 bits."""
        return self.setting("model.dtype") in ("bfloat16", "float16")

    @property
    def config_of_model(self) -> Mapping[str, Any]:
        """The model's config of transformers; empty if it is unknown."""
        return self.model_config if self.model is None else self.model.config

    @property
    def model_type(self) -> str | None:
        """The model's type; None if the model is unknown."""
        return self.config_of_model.get("model_type")

    @property
    def gpu(self) -> Gpu | None:
        """The GPU; None if there is none, or it is unknown."""
        return None if self.machine is None else self.machine.gpu

    @cached_property
    def filled(self) -> Mapping[str, Any]:
        """The config with "auto" for bf16 and fp16 filled in as Trainer does, if its arguments are known.

        transformers 5.23.0: integrations/deepspeed.py 175-181.
        """
        config = dict(self.config or {})
        for name in ("bf16", "fp16") if self.arguments is not None else ():
            section = config.get(name)
            if isinstance(section, Mapping) and section.get("enabled") == "auto":
                config[name] = {**section, "enabled": self.on(name) or self.on(f"{name}_full_eval")}
        return config

    def enabled(self, name: str) -> bool | None:
        """Whether "fp16" or "bf16" is on; None if Trainer decides and its arguments are unknown."""
        section = self.filled.get(name)
        value = section.get("enabled") if isinstance(section, Mapping) else None
        return None if value == "auto" else value is True

    @property
    def computes_in(self) -> str | None:
        """The config's precision, fp16, bf16 or fp32; None if Trainer decides and its arguments are unknown."""
        fp16, bf16 = self.enabled("fp16"), self.enabled("bf16")
        if fp16 is None or bf16 is None:
            return None
        if fp16:
            return "fp16"
        return "bf16" if bf16 else "fp32"

    @cached_property
    def zero(self) -> ZeroSettings:
        """The config as DeepSpeed reads it, with its defaults."""
        return ZeroSettings.from_config(self.filled)

    @property
    def processes(self) -> int | None:
        """Total number of processes; None if unknown."""
        return None if self.gpus is None else self.gpus * self.nodes

    @property
    def several(self) -> bool:
        """Whether there is known to be more than one process."""
        return (self.processes or 1) > 1

    @property
    def without_gpu(self) -> bool:
        """Whether the job is known to run on a CPU."""
        return self.on("use_cpu") or (self.machine is not None and self.machine.gpu is None)

    @property
    def deepspeed_release(self) -> tuple[int, ...]:
        """Version of DeepSpeed as numbers: (0, 19, 8)."""
        numbers = (part for part in self.deepspeed.split("+")[0].split(".") if part.isdigit())
        return tuple(int(part) for part in numbers)
