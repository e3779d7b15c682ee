"""A setup: everything that Trainer needs for one model on one machine, with a reason for each choice.

A `Setup` is an immutable value of plain data. It can be made, checked and printed on a machine that could not
run it; `TrainingArguments`, the model and the optimizer are built from it only where training happens. Methods return
changed copies:

```python
setup = Setup(preset="resident").put("arguments.bf16", True, "the GPU computes in bf16")
setup.arguments  # {"bf16": True}
```

Keys are `section.name`. The sections:

| section | holds |
|---|---|
| `model` | where the model comes from, its dtype, its changes (vocabulary padding) |
| `adapter` | LoRA, as the fields of `peft.LoraConfig`; empty for full training |
| `data` | source, sequence length, tokenizer, share held out |
| `arguments` | fields of `transformers.TrainingArguments` |
| `optimizer` | `class` (import path) and its arguments, if Trainer's `optim` has no such optimizer |
| `deepspeed` | `preset`; `config`: the whole DeepSpeed JSON; `sizes`: its computed values, with reasons |
| `environment` | environment variables that must be set before torch starts |
| `trainer` | `class` and `arguments_class` (`module:class`), if it is not transformers' Trainer |
| `model_parts` | parts installed on the model (`hf_memkit/components/NAME.py`, `install`), with their options |
| `trainer_parts` | parts that give Trainer keyword arguments (`hf_memkit/components/NAME.py`, `trainer_options`) |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Self

from hf_memkit.catalog.models import Origin
from hf_memkit.common.as_json import as_json
from hf_memkit.setup.job import DEFAULT_MICRO_BATCH, Job
from hf_memkit.setup.ledger import Ledger, Row
from hf_memkit.setup.request import Request

SECTIONS: Final = (
    "model", "adapter", "data", "arguments", "optimizer", "deepspeed", "environment", "trainer", "model_parts",
    "trainer_parts",
)  # fmt: skip

_ORIGINS: Final[Mapping[Origin, str]] = {
    "local": "a local folder",
    "hub": "the hub, or its cache",
    "architecture": "a built-in architecture: the hub was not asked, or did not answer",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice: `key` (`section.name`), its plain `value`, and the reason for the value."""

    key: str
    value: Any
    reason: str

    def __post_init__(self) -> None:
        section = self.key.partition(".")[0]
        if section not in SECTIONS or "." not in self.key:
            raise ValueError(f"setting key {self.key!r} must be SECTION.NAME with a section of {SECTIONS}")
        if not self.reason:
            raise ValueError(f"setting {self.key!r} has no reason")
        # A copy of plain data, so that callers cannot change a nested value of an immutable setup.
        object.__setattr__(self, "value", as_json(self.value))

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": as_json(self.value), "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Replaced:
    """A setting of the preset that the user's own argument replaced or removed.

    Attributes:
        setting: the preset's setting.
        by: the user's field of TrainingArguments.
        value: its value.
        why: why a setting was removed together with the field; empty for the field itself.
    """

    setting: Setting
    by: str
    value: Any
    why: str = ""

    def __str__(self) -> str:
        name = self.setting.key.removeprefix("arguments.")
        preset = f"the preset's {self.setting.value!r}: {self.setting.reason}"
        if not self.why:
            return f"your {name} = {self.value!r} replaces {preset}"
        return f"your {self.by} = {self.value!r} drops {name} ({self.why}); {preset}"

    def to_json(self) -> dict[str, Any]:
        return {**self.setting.to_json(), "by": self.by, "own_value": self.value, "why": self.why}


@dataclass(frozen=True)
class Setup:
    """A preset resolved for one model and one machine.

    Attributes:
        preset: the preset's name, which is also the variant's.
        settings: every choice, with unique keys, in order of insertion.
        ledger: memory that these choices need, independent of the batch.
        problems: why this setup cannot run on its machine; empty if it can.
        notes: information for the user before the start.
        techniques: names of the techniques that made it, in order of application.
        job: model, machine and batch that it was resolved for; None for one read from a file.
        request: the user's request.
        warnings: parts of the request that it lacks, so that it is another job than the user's.
        why: reason for this preset or variant, if several were tried.
        rejected: (preset or variant, reason) of those tried before it.
        replaced: the preset's settings that the user's own arguments replaced.
    """

    preset: str
    settings: tuple[Setting, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()
    job: Job | None = field(default=None, compare=False, repr=False)
    request: Request | None = field(default=None, compare=False, repr=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    why: str = field(default="", compare=False)
    rejected: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    replaced: tuple[Replaced, ...] = ()

    def put(self, key: str, value: Any, reason: str) -> Self:
        """A copy with `key` set; an existing key keeps its position."""
        new = Setting(key, value, reason)
        if key in self:
            return replace(self, settings=tuple(new if old.key == key else old for old in self.settings))
        return replace(self, settings=(*self.settings, new))

    def put_model(self, name: str, origin: Origin, config: Mapping[str, Any]) -> Self:
        """A copy that trains this model: hub ID or folder, source of its weights, its config values."""
        setup = self.put("model.name", name, "asked for").put("model.origin", origin, _ORIGINS[origin])
        return setup.put("model.architecture", dict(config), "the model's config values")

    def put_all(
        self, section: str, values: Mapping[str, tuple[Any, str]] | None = None, /, **named: tuple[Any, str]
    ) -> Self:
        """A copy with each `name: (value, reason)` of `values`, and each `name=(value, reason)`, put in `section`."""
        setup = self
        for name, (value, reason) in {**(values or {}), **named}.items():
            setup = setup.put(f"{section}.{name}", value, reason)
        return setup

    def drop(self, prefix: str) -> Self:
        """A copy without the key `prefix` or, if `prefix` is a section, without that section."""
        kept = tuple(s for s in self.settings if s.key != prefix and s.key.partition(".")[0] != prefix)
        return replace(self, settings=kept)

    def with_rows(self, *rows: Row) -> Self:
        """A copy with these terms added to its ledger."""
        return replace(self, ledger=self.ledger.with_rows(rows))

    def with_notes(self, *notes: str) -> Self:
        return replace(self, notes=(*self.notes, *notes))

    def with_problems(self, problems: Iterable[str]) -> Self:
        return replace(self, problems=(*self.problems, *problems))

    def made_by(self, techniques: Iterable[str]) -> Self:
        """A copy with these names as its techniques."""
        return replace(self, techniques=tuple(techniques))

    @cached_property
    def _by_key(self) -> Mapping[str, Setting]:
        return {setting.key: setting for setting in self.settings}

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __getitem__(self, key: str) -> Any:
        """The value of `key`. Raises KeyError if it is not set."""
        return as_json(self._by_key[key].value)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` if it is not set."""
        setting = self._by_key.get(key)
        return default if setting is None else as_json(setting.value)

    def section(self, name: str) -> dict[str, Any]:
        """`{name: value}` of one section, as a new dict."""
        return {s.key.partition(".")[2]: self[s.key] for s in self.settings if s.key.startswith(f"{name}.")}

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `transformers.TrainingArguments`."""
        return self.section("arguments")

    @property
    def resolved_for(self) -> Job:
        """The job. Raises ValueError for a setup that was read from a file or built by hand."""
        if self.job is None:
            raise ValueError(f"setup {self.preset!r} was resolved for no job; give it one: replace(setup, job=Job(…))")
        return self.job

    @property
    def sized_job(self) -> Job:
        """The job with the batch and the sequence length of the settings."""
        sized = replace(self.resolved_for, sequence_length=self.sequence_length)
        return replace(sized, micro_batch_size=self.micro_batch_size, accumulation=self.accumulation)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one process in one forward pass."""
        default = self.job.micro_batch_size if self.job is not None else DEFAULT_MICRO_BATCH
        return int(self.get("arguments.per_device_train_batch_size", default))

    @property
    def accumulation(self) -> int:
        """Micro-batches in an optimizer step of one process."""
        return int(self.get("arguments.gradient_accumulation_steps", self.job.accumulation if self.job else 1))

    @property
    def sequence_length(self) -> int:
        """Tokens in a sequence. Raises KeyError if neither a setting nor the job has it."""
        if self.job is None:
            return int(self["data.sequence_length"])
        return int(self.get("data.sequence_length", self.job.sequence_length))

    @property
    def zero(self) -> dict[str, Any]:
        """`zero_optimization` of its DeepSpeed config; empty without one."""
        section = (self.get("deepspeed.config") or {}).get("zero_optimization")
        return section if isinstance(section, dict) else {}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The setup from `to_json`'s result: enough to run it again."""
        settings = tuple(Setting(item["key"], item["value"], item["reason"]) for item in content["settings"])
        return cls(
            preset=content["preset"],
            settings=settings,
            ledger=Ledger.from_json(content.get("ledger", {})),
            problems=tuple(content.get("problems", ())),
            notes=tuple(content["notes"]),
            techniques=tuple(content.get("techniques", ())),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "techniques": list(self.techniques),
            "settings": [setting.to_json() for setting in self.settings],
            "ledger": self.ledger.to_json(),
            "problems": list(self.problems),
            "notes": list(self.notes),
        }
