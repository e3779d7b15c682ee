"""A candidate setup of a plan: the script's own settings with some of them overridden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hf_memkit.setup.script_overrides import Overrides
from hf_memkit.setup.techniques.registry import GROUPS, Group


@dataclass(frozen=True, slots=True)
class Choice:
    """One change to the script's settings.

    Attributes:
        slot: kind of change, such as `"checkpointing"`. A setup has at most one choice of each slot.
        name: label in tables, such as `"activation checkpointing"`.
        settings: key → value: `arguments.NAME` is a field of TrainingArguments, `fsdp_config.NAME` a key of its field
            `fsdp_config` (beside `arguments.fsdp_config`, the script's own), `model.NAME` an option of
            from_pretrained, `environment.NAME` an environment variable, `adapter.NAME` a field of a LoraConfig,
            `loss.chunked` whether memkit's chunked loss replaces the model's.
        group: how it changes the result.
        result: a phrase that describes this change; empty if the result stays the same.
        costs_time: whether it never makes a step faster.
        engine: name of the DeepSpeed preset that it uses; empty if none.
        install: command to type first on the machine that trains; empty if none.
        code: lines of Python to add to the script, for what no setting can do; empty if none.
    """

    slot: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    group: Group = "same result"
    result: str = ""
    costs_time: bool = False
    engine: str = ""
    install: str = ""
    code: str = ""


FSDP_CONFIG: Final = "fsdp_config"

Combination = tuple[Choice, ...]
"""Choices, at most one of each slot."""


def combine(*choices: Choice | None) -> Combination:
    """One choice per slot, the last one given; without choices that conflict with another one."""
    given = [choice for choice in choices if choice is not None]
    slots = {choice.slot: choice for choice in given}
    if "engine" in slots or any("arguments.optim" in each.settings for each in given if each.slot != "optimizer"):
        slots.pop("optimizer", None)
    if "padding" in slots:
        slots.pop("attention", None)  # training without padding sets its own
    return tuple(slots.values())


def uses_fsdp(choices: Iterable[Choice]) -> bool:
    """Whether one of them makes FSDP2 the engine."""
    return any("arguments.fsdp" in choice.settings for choice in choices)


def without(combination: Combination, *slots: str) -> Combination:
    """The choices except those of these slots."""
    return tuple(choice for choice in combination if choice.slot not in slots)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The script with this micro-batch and these choices.

    Attributes:
        micro_batch_size: sequences per GPU in one forward pass.
        accumulation: micro-batches per optimizer step.
        choices: the other changes to the script's settings.
        batch_group: how this micro-batch changes the result, compared with the script's micro-batch.
        batch_result: a phrase that describes this change.
    """

    micro_batch_size: int
    accumulation: int
    choices: Combination = ()
    batch_group: Group = "same result"
    batch_result: str = ""

    @property
    def group(self) -> Group:
        """The largest deviation from the script's result among the micro-batch and the choices."""
        return max((self.batch_group, *(choice.group for choice in self.choices)), key=GROUPS.index)

    @property
    def result(self) -> str:
        """A phrase that describes how the result changes; empty if it stays the same."""
        phrases = [choice.result for choice in self.choices if choice.result]
        return "; ".join([*phrases, *([self.batch_result] if self.batch_group != "same result" else [])])

    @property
    def name(self) -> str:
        """`"4 × 2, activation checkpointing"`."""
        return ", ".join([f"{self.micro_batch_size} × {self.accumulation}", *(choice.name for choice in self.choices)])

    @property
    def engine(self) -> str:
        """Name of the DeepSpeed preset that it uses; empty if none."""
        return next((choice.engine for choice in self.choices if choice.engine), "")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all choices."""
        return {key: value for choice in self.choices for key, value in choice.settings.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        """Fields of TrainingArguments that override the script's."""
        batch = {
            "per_device_train_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation,
        }
        changes = training_arguments(self.settings)
        if self.accumulation == 1:
            changes.pop("accelerator_config", None)  # `sync_each_batch` has no effect without accumulation
        return {**batch, **changes}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that override the script's."""
        return {name: str(value) for name, value in self._section("environment").items()}

    @property
    def overrides(self) -> Overrides:
        """The settings that `memkit run --plan` applies, including those that otherwise need the lines of `code`."""
        return Overrides(
            self.arguments, self._section("model"), self.environment, self._section("adapter"), self._section("loss")
        )  # fmt: skip

    @property
    def code(self) -> str:
        """Lines of Python to add to the script by hand; empty if none."""
        return "\n".join(choice.code for choice in self.choices if choice.code)

    def with_batch_result(self, phrase: str) -> Candidate:
        """A copy whose micro-batch also changes the result as `phrase` says; it is at least "nearly the same"."""
        group = max((self.batch_group, GROUPS[1]), key=GROUPS.index)
        result = "; ".join(filter(None, (self.batch_result, phrase)))
        return replace(self, batch_group=group, batch_result=result)

    def _section(self, section: str) -> dict[str, Any]:
        return _section_of(self.settings, section)


def training_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TrainingArguments that these settings of choices override."""
    fields = _section_of(settings, "arguments")
    if changes := _section_of(settings, FSDP_CONFIG):
        fields[FSDP_CONFIG] = {**fields.get(FSDP_CONFIG, {}), **changes}
    return fields


def _section_of(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in settings.items() if key.partition(".")[0] == section}
