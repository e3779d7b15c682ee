"""What a task is: the kind of data that a recipe trains on, and everything that depends on it.

Its script (`recipes/export/scripts`) trains, and reads and checks the data. Here are the settings that follow from the
task.
"""

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
"""Key → (value, reason), as `Setup.put_all` takes it."""


END_OF_TEXT: Final = "<|endoftext|>"


@dataclass(frozen=True)
class Framing:
    """What a tokenizer that is trained on the data puts around a text.

    Attributes:
        tokens: special tokens in the order of their IDs, by what transformers calls them (`pad_token` …).
        single, pair: what becomes of one text (`$A`) and of two (`$B`), as `TemplateProcessing` of tokenizers has it;
            empty: nothing stands around it.
    """

    tokens: Mapping[str, str]
    single: str = ""
    pair: str = ""


class Task:
    """One kind of data.

    Attributes:
        name: as recipes name it.
        auto_class: the class of transformers that makes the model from its config.
        trainer_class, arguments_class: `module:class` of the Trainer, and of its arguments.
        further_arguments: name → type of what `--set` takes of its arguments beyond TrainingArguments.
        model_parts: part (`hf_memkit/components`) → (its options, reason) that models of this task need.
        columns: role → the column's default name in JSON lines, CSV, parquet and on the hub; a recipe may name others.
        local_form: one line: what a `--data` value may be.
        script, rows: the modules of `hf_memkit/recipes/export/scripts` that train, and that read the data.
        script_needs: packages that it needs beyond what all scripts do, as pip names them.
        script_reads: what it reads of the section `data` as the setup has it, beside what all of them do.
        takes_length: whether a `--sequence-length` can be chosen; the model decides it otherwise.
        made_up_by: the module beside this one that makes up what is no text, where no hub can be reached.
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
    takes_length: ClassVar[bool] = True
    made_up_by: ClassVar[str] = ""

    def data_settings(self, data: Data) -> Settings:
        """Further settings of the section `data`."""
        return {}

    def sequence_length(self, asked: int | None, default: int, model: ModelFacts) -> int:
        """The length of an example in tokens: what was `asked` for, if the model can have it, or the recipe's
        `default`."""
        return asked or default

    def arguments(self, data: Data) -> Settings:
        """Fields of the arguments whose defaults in this task differ from a recipe's."""
        return {}

    def settled(self, setup: Setup) -> Setup:
        """The setup, of a run or of its rehearsal, with what follows from its other settings. The user's own come
        after."""
        return setup

    @property
    def reading(self) -> Any:
        """The module that reads the data: `read(source)` reads and checks it all; `listed(source)`, where there is
        one, opens no file of images or sound; `EXAMPLE` is one line of such data. A MissingPackageError where it needs
        a package."""
        try:
            return import_module(f"hf_memkit.recipes.export.scripts.{self.rows}")
        except ModuleNotFoundError as error:
            package = " ".join(self.script_needs) or error.name
            raise MissingPackageError(
                f"a {self.name} recipe needs {package}, which is not installed; run: pip install {package}"
            ) from error

    def padded(self, setup: Setup) -> tuple[str, ...]:
        """Columns of the examples that are padded to the longest of a micro-batch: `input_ids`, and `labels` where
        these have their own lengths. None where all batches have one size."""
        return ()

    def framing(self, setup: Setup) -> Framing | None:
        """The special tokens of a tokenizer that is trained on the task's texts."""
        return None

    def columns_among(self, columns: Mapping[str, str], there: Collection[str]) -> dict[str, str]:
        """Role → the name that its column has among those of a local table: as the recipe names it, or the default."""
        return {role: name if name in there else self.columns.get(role, name) for role, name in columns.items()}

    def folders(self, path: Path) -> Mapping[str, Any]:
        """What an exported script reads in place of a table: `{key of the section `data`: the folder, or folders}`."""
        return {}

    def processor_settings(self, setup: Setup, own: bool) -> tuple[Settings, tuple[str, ...]]:
        """(values of the section `data`, modules beside the script) of what makes tensors of images or sound.

        `own`: whether the script loads what the model came with.
        """
        return {}, ()

    def examples(self) -> Iterable[Mapping[str, Any]]:
        """Rows with the default columns: the data of an exported script where no hub can be reached."""
        return ()
