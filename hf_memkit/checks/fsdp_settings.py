"""Settings of FSDP: Trainer's `fsdp` and `fsdp_config`, the section `fsdp_config` of accelerate's YAML, or both.

Settings have their names without `fsdp_`: Trainer and accelerate's launcher take both forms (transformers 5.23.0:
training_args.py 2784-2786; accelerate 1.15.0: commands/launch.py 1270-1271).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.checks.accelerate_files import own_engine, section
from hf_memkit.checks.rule import Match
from hf_memkit.checks.subject import Subject

SECTION: Final = "fsdp_config"

LEFT_TO_THE_LAUNCHER: Final[tuple[str, ...]] = (
    "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules", "min_num_params",
    "offload_params", "transformer_layer_cls_to_wrap",
)  # fmt: skip
"""Settings of the YAML that are in effect where Trainer makes the plugin and its `fsdp_config` lacks them (accelerate
1.15.0: utils/dataclasses.py 1880-1973)."""


@dataclass(frozen=True)
class FsdpSettings:
    """FSDP of one job.

    Attributes:
        version: 1 or 2; 0 if the value is neither.
        given: name of each setting that is written somewhere → its place and value.
        by_trainer: whether Trainer makes the plugin, from its arguments; if not, accelerate does, from its YAML.
    """

    version: int
    given: Mapping[str, Match]
    by_trainer: bool

    def value(self, name: str, default: Any = None) -> Any:
        return self.given[name].value if name in self.given else default

    def on(self, name: str) -> bool:
        return is_on(str(self.value(name)))

    def place(self, name: str) -> Match:
        """The setting's place; if it is missing, where it would be."""
        key = f"{SECTION}.{name}" if self.by_trainer else f"{SECTION}.fsdp_{name}"
        return self.given.get(name, Match(key, None, argument=self.by_trainer, launcher=not self.by_trainer))

    @property
    def read(self) -> Mapping[str, Match]:
        """The settings where the engine's maker looks: those of Trainer's arguments, or of accelerate's YAML."""
        return {name: match for name, match in self.given.items() if match.launcher is not self.by_trainer}

    @property
    def policy(self) -> str:
        """How layers are wrapped, in capitals."""
        default = "TRANSFORMER_BASED_WRAP" if self.by_trainer else "NO_WRAP"
        return str(self.value("auto_wrap_policy") or default).upper()

    @property
    def state_dict(self) -> str:
        """What is saved, in capitals."""
        default = "FULL_STATE_DICT" if self.by_trainer or self.version == 1 else "SHARDED_STATE_DICT"
        return str(self.value("state_dict_type") or default).upper()


def fsdp_of(subject: Subject) -> FsdpSettings | None:
    """FSDP of a job; None if nothing turns it on, or it is that of XLA."""
    of_launcher = launched_settings(subject)
    if not subject.argument("fsdp"):
        is_launched = own_engine(subject.launcher or {}) == "FSDP"
        return FsdpSettings(_version(of_launcher, 1), of_launcher, False) if is_launched else None

    given = {name: of_launcher[name] for name in LEFT_TO_THE_LAUNCHER if name in of_launcher}
    if former := subject.argument("fsdp_transformer_layer_cls_to_wrap"):  # before transformers 5
        given["transformer_layer_cls_to_wrap"] = Match("fsdp_transformer_layer_cls_to_wrap", former, argument=True)
    given |= argument_settings(subject)
    return None if xla_switch(subject) is not None else FsdpSettings(_version(given, 2), given, True)


def argument_settings(subject: Subject) -> dict[str, Match]:
    """The settings in Trainer's `fsdp_config`."""
    content = subject.argument(SECTION)
    given = {}
    for key, value in content.items() if isinstance(content, Mapping) else ():
        place = str(key) if subject.fsdp_file else f"{SECTION}.{key}"
        given[str(key).removeprefix("fsdp_")] = Match(place, value, argument=True, file=subject.fsdp_file)
    return given


def xla_switch(subject: Subject) -> Match | None:
    """The key by which Trainer takes XLA's FSDP; None if it does not."""
    xla = argument_settings(subject).get("xla")
    return xla if subject.argument("fsdp") and xla is not None and is_on(str(xla.value)) else None


def launched_settings(subject: Subject) -> dict[str, Match]:
    """The settings in accelerate's YAML, if its engine is FSDP."""
    launcher = subject.launcher or {}
    content = section(launcher, SECTION) if own_engine(launcher) == "FSDP" else {}
    plain = {str(key).removeprefix("fsdp_"): str(key) for key in content}
    return {name: Match(f"{SECTION}.{key}", content[key], launcher=True) for name, key in plain.items()}


def _version(given: Mapping[str, Match], default: int) -> int:
    value = str(given["version"].value) if "version" in given else str(default)
    return int(value) if value in ("1", "2") else 0
