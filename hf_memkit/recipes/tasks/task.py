"""Interface of a task: the kind of data that a recipe trains on, with the settings that depend on it. Its script
(`recipes/export/scripts`) trains, and reads and checks the data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_memkit.common.errors import MissingPackageError
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.catalog.models import ModelFacts
    from hf_memkit.recipes.schema import Data


Settings = Mapping[str, tuple[Any, str]]
"""Key → (value, reason), as for `Setup.put_all`."""


END_OF_TEXT: Final = "<|endoftext|>"


@dataclass(frozen=True)
class Framing:
    """Special tokens around a text, for a tokenizer trained on the data.

    Attributes:
        tokens: special tokens in the order of their IDs, under transformers' names (`pad_token` …).
        single, pair: templates for one text (`$A`) and for two (`$B`), as in tokenizers' `TemplateProcessing`; empty:
            no special tokens.
    """

    tokens: Mapping[str, str]
    single: str = ""
    pair: str = ""


class Task:
    """One kind of data.

    Attributes:
        name: its name in recipes.
        auto_class: class of transformers that makes the model from its config.
        trainer_class, arguments_class: `module:class` of the Trainer, and of its arguments.
        further_arguments: name → type of its arguments beyond TrainingArguments that `--set` accepts.
        model_parts: component (`hf_memkit/components`) → (its options, reason) that models of this task need.
        columns: role → default name of its column in JSON lines, CSV, parquet and on the hub; a recipe may have
            others.
        local_form: one line about valid `--data` values.
        script, rows: modules of `hf_memkit/recipes/export/scripts` that train, and that read the data.
        script_needs: further packages of the script, by pip's names.
        script_reads: further keys of the setup's section `data` that the script reads.
        examples_are: what one example is, in the plural.
        takes_length: whether `--sequence-length` is allowed; otherwise the model decides it.
        made_up_by: module in this folder that makes up images or sound, if the hub is unreachable.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    trainer_class: ClassVar[str] = "transformers:Trainer"
    arguments_class: ClassVar[str] = "transformers:TrainingArguments"
    further_arguments: ClassVar[Mapping[str, Any]] = {}
    model_parts: ClassVar[Settings] = {}
    columns: ClassVar[Mapping[str, str]] = {}
    local_form: ClassVar[str]
    script: ClassVar[str]
    rows: ClassVar[str]
    script_needs: ClassVar[tuple[str, ...]] = ()
    script_reads: ClassVar[tuple[str, ...]] = ("sequence_length",)
    examples_are: ClassVar[str] = "sequences"
    takes_length: ClassVar[bool] = True
    made_up_by: ClassVar[str] = ""

    def data_settings(self, data: Data) -> Settings:
        """Further settings of the section `data`."""
        return {}

    def sequence_length(self, requested: int | None, default: int, model: ModelFacts) -> int:
        """Length of an example in tokens: the requested one if the model allows it, or the recipe's default."""
        return requested or default

    def arguments(self, data: Data) -> Settings:
        """Fields of the arguments with other defaults than a recipe's."""
        return {}

    def with_derived_settings(self, setup: Setup) -> Setup:
        """The setup, of a run or rehearsal, with settings derived from others; the user's own are applied later."""
        return setup

    @property
    def reading(self) -> Any:
        """The module that reads the data: `read(source)` reads and checks it; an optional `list_rows(source)` opens no
        image or sound; `EXAMPLE` is one line of such data. Raises MissingPackageError if it needs a package."""
        try:
            return import_module(f"hf_memkit.recipes.export.scripts.{self.rows}")
        except ModuleNotFoundError as error:
            package = " ".join(self.script_needs) or error.name
            missing = f"recipes for {self.name} need {package}"
            raise MissingPackageError(f"{missing}. To install it, type: pip install {package}") from error

    def padded_columns(self, setup: Setup) -> tuple[str, ...]:
        """Columns that are padded to the longest row of a micro-batch: `input_ids`, and `labels` with separate
        lengths. None if all batches have one size."""
        return ()

    def framing(self, setup: Setup) -> Framing | None:
        """Special tokens of a tokenizer that is trained on the task's texts."""
        return None

    def columns_among(self, columns: Mapping[str, str], available: Collection[str]) -> dict[str, str]:
        """Role → name of its column in a local table with these columns: the recipe's name, or the default."""
        return {role: name if name in available else self.columns.get(role, name) for role, name in columns.items()}

    def folders(self, path: Path) -> Mapping[str, Any]:
        """Data of an exported script without a table: `{key of the section `data`: the folder, or folders}`."""
        return {}

    def processor_settings(self, setup: Setup, own: bool) -> tuple[Settings, tuple[str, ...]]:
        """Values of the section `data`, and modules next to the script, for the processor of images or sound. `own`:
        whether the script loads the model's own processor."""
        return {}, ()

    def examples(self) -> Iterable[Mapping[str, Any]]:
        """Rows with the default columns, for an exported script without the hub."""
        return ()
