"""What `preset()` returns: a setup that can also make TrainingArguments, model and Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Self

from hf_memkit.catalog.library_versions import argument_types, current_name, to_installed_arguments
from hf_memkit.checks import RULES, Problem, Subject, check
from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.deepspeed import ops
from hf_memkit.presets.users_values import without_replaced
from hf_memkit.setup import build
from hf_memkit.setup.build.model import model_options
from hf_memkit.setup.setup import Setting, Setup
from hf_memkit.setup.techniques.allocator import VARIABLE, set_allocator

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


_OF_TRAINER: Final = {"data_collator", "optimizers", "callbacks"}
"""Names that Trainer takes, should TrainingArguments ever have them too."""

_SIZES: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")


def mistakes_of(setup: Setup, own: Mapping[str, Any] | None = None) -> tuple[list[Problem], list[Problem]]:
    """(mistakes that the rules know in a setup, what they say of the machine's size).

    `own`: fields of TrainingArguments, under today's names, that replace the setup's.
    """
    subject = Subject.of_setup(setup)
    subject = replace(subject, arguments={**(subject.arguments or {}), **(own or {})})
    found = check(subject)
    lacks = [problem for problem in found if RULES[problem.rule].module == "capacity"]
    return [problem for problem in found if problem not in lacks], lacks


@dataclass(frozen=True)
class PresetSetup(Setup):
    """A preset resolved for one model and one GPU, by `hf_memkit.preset`.

    Three ways to use it, from all to little:

    ```python
    trainer = setup.trainer(output_dir="out", train_dataset=data)   # everything
    arguments = setup.training_arguments(output_dir="out")          # TrainingArguments; the model is yours
    arguments = TrainingArguments(output_dir="out", **setup.plain_arguments)  # a plain dictionary
    ```

    With the second and third, what TrainingArguments cannot say is yours to do: `outside_arguments` lists it, and
    `install(model)` does the part that belongs on the model.
    """

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """The same setup, which can also make the objects."""
        return cls(**{each.name: getattr(setup, each.name) for each in fields(setup)})

    @property
    def plain_arguments(self) -> dict[str, Any]:
        """Keyword arguments for TrainingArguments, as the installed transformers names them, the DeepSpeed config too.

        `arguments` has today's names, and leaves the DeepSpeed config in its own section.
        """
        deepspeed = {"deepspeed": self["deepspeed.config"]} if "deepspeed.config" in self else {}
        return {**to_installed_arguments(self.arguments), **deepspeed}

    @property
    def model_options(self) -> dict[str, Any]:
        """Keyword arguments for `AutoModelForCausalLM.from_pretrained`, as plain data."""
        return model_options(self)

    @property
    def outside_arguments(self) -> tuple[Setting, ...]:
        """The settings that TrainingArguments cannot say: of the model, its parts, the optimizer, the environment."""
        inside = {"arguments", "deepspeed", "data"}
        facts = {"model.name", "model.origin", "model.architecture"}
        return tuple(s for s in self.settings if s.key.partition(".")[0] not in inside and s.key not in facts)

    def training_arguments(
        self, output_dir: str, arguments_class: type[TrainingArguments] | None = None, **own: Any
    ) -> TrainingArguments:
        """The TrainingArguments. What is given here overrides the preset.

        Args:
            output_dir: where checkpoints and records go.
            arguments_class: a subclass, such as `Seq2SeqTrainingArguments` or TRL's `SFTConfig`.
            own: any of its fields. What only went with a value of the preset that they replace is dropped too; every
                such setting is printed.

        Raises:
            SettingError: they would change the global batch that was asked for, or do nothing or harm
                (`hf_memkit.checks`).
            MissingPackageError: something that DeepSpeed's operators are built with is missing.
            RunError: transformers refuses them, or an operator cannot be built.
        """
        setup, mine = self._settled(own)
        setup._prepare(mine)
        return build.build_arguments(setup, {**mine, "output_dir": output_dir}, arguments_class)

    def _prepare(self, own: Mapping[str, Any]) -> None:
        """What comes before TrainingArguments, which start CUDA and join DeepSpeed's process group: the allocator's
        setting, and DeepSpeed's operators."""
        if "deepspeed.config" in self:
            import torch

            cpu = bool(own.get("use_cpu", self.get("arguments.use_cpu"))) or not torch.cuda.is_available()
            ops.build(ops.needed(self["deepspeed.config"], cpu=cpu), print, cpu=cpu)
        text = self.get(f"environment.{VARIABLE}")
        if text is not None:
            set_allocator(str(text), print)

    def _settled(self, own: Mapping[str, Any]) -> tuple[PresetSetup, dict[str, Any]]:
        """This setup without what the user's own fields replace, which is printed, and these under today's names."""
        mine = {current_name(name): getattr(value, "value", value) for name, value in own.items()}  # enums are texts
        setup, replaced = without_replaced(self, mine)
        changed = [name for name in _SIZES if name in mine and mine[name] != self.get(f"arguments.{name}")]
        batch = self.request.global_batch_size if self.request is not None else None
        if changed and batch is not None:
            raise SettingError(
                f"{changed[0]}={mine[changed[0]]}: the preset has global_batch_size={batch}. "
                f"Give the size to preset(arguments=…), and memkit adjusts the other one"
            )
        if mine:
            mistakes, _ = mistakes_of(setup, mine)
            if refused := [str(problem) for problem in mistakes if problem.refuses]:
                raise SettingError("\n".join(refused))
        for each in replaced:
            print(f"Override: {each}")
        return PresetSetup.of(replace(setup, replaced=(*self.replaced, *replaced))), mine

    def load_model(self, *, random_weights: bool = False, say: Callable[[str], None] = print) -> Any:
        """The model with its dtype, quantisation, padded vocabulary, adapters and parts.

        With ZeRO-3, make the TrainingArguments first and keep them: they have the weights split while they are made.

        Args:
            random_weights: builds the model from its config values instead of loading it.
            say: receives messages for the user, a line a call.

        Raises:
            InputError: the preset was resolved without a model.
            MissingPackageError: a package is missing.
            RunError: the weights cannot be loaded, or a part cannot do its work on this model.
        """
        if "model.name" not in self:
            raise InputError(
                "this preset has no model. Write preset(…, model='ID or folder'), or load yours and pass model=…"
            )
        build.require_packages(self)
        model = build.build_model(self, say, random_weights=random_weights)
        self.install(model)
        return model

    def install(self, model: Any) -> Callable[[], None]:
        """Installs the setup's model parts on your own model; returns what removes them.

        Raises:
            RunError: a part cannot do its work on this model.
        """
        return build.install_model_parts(model, self)

    def trainer_options(
        self, model: Any, arguments: TrainingArguments, processing_class: Any = None, **own: Any
    ) -> dict[str, Any]:
        """Keyword arguments for Trainer beside `model` and `args`; `own` overrides them, your callbacks are kept.

        Raises:
            SettingError: two parts give the same argument.
            RunError: a part cannot do its work here.
        """
        return build.trainer_options(
            self, model=model, arguments=arguments, processing_class=processing_class, own=own, say=print
        )

    def trainer(
        self,
        output_dir: str,
        *,
        model: Any = None,
        processing_class: Any = None,
        arguments: Mapping[str, Any] | None = None,
        trainer_class: type[Trainer] | None = None,
        arguments_class: type[TrainingArguments] | None = None,
        **own: Any,
    ) -> Trainer:
        """A Trainer with everything that the setup asks for, made in the order that works.

        Args:
            output_dir: where checkpoints and records go.
            model: your own model, on which the parts are installed; None: the preset's, loaded.
            processing_class: tokenizer or processor, as Trainer takes it.
            arguments: fields of TrainingArguments that override the preset's.
            trainer_class, arguments_class: subclasses to use.
            own: keyword arguments of Trainer (`train_dataset`, `data_collator`, `callbacks` …), which override too.

        Raises:
            InputError: no model was given, neither here nor to the preset.
            SettingError: `arguments` would change the global batch, or do nothing or harm; `own` has a field of
                TrainingArguments; two parts give the same argument.
            MissingPackageError: a package is missing.
            RunError: something cannot be built.
        """
        from transformers import Trainer

        setup, mine = self._settled(arguments or {})
        misplaced = sorted(set(own) & set(argument_types()) - _OF_TRAINER)
        if misplaced:
            raise SettingError(
                f"{misplaced[0]} is a field of TrainingArguments. Write trainer(…, arguments={{{misplaced[0]!r}: …}})"
            )
        build.require_packages(setup)
        setup._prepare(mine)
        made = build.build_arguments(setup, {**mine, "output_dir": output_dir}, arguments_class)
        if model is None:
            model = setup.load_model()
        else:
            setup.install(model)
        options = setup.trainer_options(model, made, processing_class, **own)
        return (trainer_class or Trainer)(model=model, args=made, **options)
