"""One setup that a plan considers: the script's own, with other settings in the place of some of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memkit.setup.script_overrides import Overrides
from hf_memkit.setup.techniques.registry import GROUPS, Group

__all__ = ["GROUPS", "Alternative", "Group", "SetupCandidate"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One thing that a setup does in another way than the script.

    Attributes:
        slot: what is decided, such as `"checkpointing"`: of each slot a setup has one choice.
        name: as a table shows it, such as `"activation checkpointing"`.
        settings: key → value: `arguments.NAME` is a field of TrainingArguments, `model.NAME` an option of
            from_pretrained, `environment.NAME` a variable, `adapter.NAME` a field of a LoraConfig, `loss.chunked`
            whether the loss is memkit's in chunks.
        group: what it does to the result.
        result: that in words; empty where it does nothing.
        costs_time: whether a step never is faster with it than without.
        engine: name of the DeepSpeed preset that it brings; empty: none.
        install: what to type first on the machine that trains; empty: nothing.
        code: what has to be changed in the script, where no setting does it, as lines of Python; empty: nothing.
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


@dataclass(frozen=True, slots=True)
class SetupCandidate:
    """
    Attributes:
        micro_batch_size: sequences of one GPU in one forward pass.
        accumulation: micro-batches an optimizer step.
        choices: what is done in another way than in the script, in the order of slots.
        batch_group: what this micro-batch does to the result, if it is another than the script's.
        batch_result: that in words.
    """

    micro_batch_size: int
    accumulation: int
    choices: tuple[Alternative, ...] = ()
    batch_group: Group = "same result"
    batch_result: str = ""

    @property
    def group(self) -> Group:
        """The farthest from the script's result that any part of it is."""
        return max((self.batch_group, *(each.group for each in self.choices)), key=GROUPS.index)

    @property
    def result(self) -> str:
        """What it does to the result, in words; empty: nothing."""
        said = [each.result for each in self.choices if each.result]
        return "; ".join([*said, *([self.batch_result] if self.batch_group != "same result" else [])])

    @property
    def name(self) -> str:
        """`"4 × 2, activation checkpointing"`."""
        return ", ".join([f"{self.micro_batch_size} × {self.accumulation}", *(each.name for each in self.choices)])

    @property
    def arguments(self) -> dict[str, Any]:
        """Fields of TrainingArguments in the place of the script's."""
        batch = {
            "per_device_train_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation,
        }
        return {**batch, **self._of("arguments")}

    @property
    def environment(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._of("environment").items()}

    @property
    def overrides(self) -> Overrides:
        """What `memkit run --plan` sets; where the script needs other code, what that code does too."""
        return Overrides(
            self.arguments, self._of("model"), self.environment, self._of("adapter"), self._of("loss")
        )  # fmt: skip

    @property
    def code(self) -> str:
        """What has to be changed in the script by hand; empty: nothing."""
        return "\n".join(each.code for each in self.choices if each.code)

    def with_result(self, said: str) -> SetupCandidate:
        """The same, whose micro-batch does this to the result besides."""
        group = max((self.batch_group, GROUPS[1]), key=GROUPS.index)
        result = "; ".join(filter(None, (self.batch_result, said)))
        return replace(self, batch_group=group, batch_result=result)

    def without(self, *slots: str) -> tuple[Alternative, ...]:
        """Its choices but those of these slots."""
        return tuple(each for each in self.choices if each.slot not in slots)

    def _of(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for choice in self.choices:
            for key, value in choice.settings.items():
                where, _, name = key.partition(".")
                if where == section:
                    found[name] = value
        return found
