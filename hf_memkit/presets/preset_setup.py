"""Result of `preset()`: a setup that can also make TrainingArguments, model and Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Self

from hf_memkit.catalog.library_versions import argument_types, current_name, to_installed_arguments
from hf_memkit.checks import Problem, Subject, check
from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.deepspeed import ops
from hf_memkit.presets.users_values import remove_replaced
from hf_memkit.setup import build
from hf_memkit.setup.build.model import model_options
from hf_memkit.setup.setup import Setting, Setup
from hf_memkit.setup.techniques.allocator import VARIABLE, set_allocator

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


_OF_TRAINER: Final = {"data_collator", "optimizers", "callbacks"}
"""Names of Trainer's arguments, in case TrainingArguments get them too."""

_SIZES: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")

_SIZE_RULES: Final = ("card-too-small", "ram-too-small", "memlock-too-small", "disk-too-small")


def mistakes_of(setup: Setup, own: Mapping[str, Any] | None = None) -> tuple[list[Problem], list[Problem]]:
    """Mistakes in a setup by the rules, and those about the machine's size. `own`: fields of TrainingArguments, under
    current names, that replace the setup's."""
    subject = Subject.of_setup(setup)
    subject = replace(subject, arguments={**(subject.arguments or {}), **(own or {})})
    problems = check(subject)
    size_problems = [problem for problem in problems if problem.rule in _SIZE_RULES]
    return [problem for problem in problems if problem not in size_problems], size_problems


@dataclass(frozen=True)
class PresetSetup(Setup):
    """A preset resolved for one model and one GPU, by `hf_memkit.preset`.

    Three ways to use it, from everything to a dictionary:

    ```python
    trainer = setup.trainer(output_dir="out", train_dataset=data)   # everything
    arguments = setup.training_arguments(output_dir="out")          # TrainingArguments; the model is yours
    arguments = TrainingArguments(output_dir="out", **setup.plain_arguments)  # a plain dictionary
    ```

    With the second and third, apply `outside_arguments` yourself; `install(model)` installs the components.
    """

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """The same setup as a PresetSetup."""
        return cls(**{field.name: getattr(setup, field.name) for field in fields(setup)})

    @property
    def plain_arguments(self) -> dict[str, Any]:
        """Keyword arguments for TrainingArguments, under the installed transformers' names, with the DeepSpeed config.
        `arguments` has current names, and keeps the DeepSpeed config in its own section."""
        deepspeed = {"deepspeed": self["deepspeed.config"]} if "deepspeed.config" in self else {}
        return {**to_installed_arguments(self.arguments), **deepspeed}

    @property
    def model_options(self) -> dict[str, Any]:
        """Keyword arguments for `AutoModelForCausalLM.from_pretrained`, as plain data."""
        return model_options(self)

    @property
    def outside_arguments(self) -> tuple[Setting, ...]:
        """Settings outside TrainingArguments: of the model, its components, the optimizer, the environment."""
        inside = {"arguments", "deepspeed", "data"}
        facts = {"model.name", "model.origin", "model.architecture"}
        return tuple(s for s in self.settings if s.key.partition(".")[0] not in inside and s.key not in facts)

    def training_arguments(
        self, output_dir: str, arguments_class: type[TrainingArguments] | None = None, **own: Any
    ) -> TrainingArguments:
        """The TrainingArguments. Fields given here override the preset's.

        Args:
            output_dir: folder for checkpoints and records.
            arguments_class: a subclass, such as `Seq2SeqTrainingArguments` or TRL's `SFTConfig`.
            own: any of its fields. Settings that depend on a replaced value are dropped too; all are printed.

        Raises:
            SettingError: they would change the requested global batch, or have no effect or harm (`hf_memkit.checks`).
            MissingPackageError: tools to build DeepSpeed's operators are missing.
            RunError: transformers refuses them, or an operator cannot be built.
        """
        setup, mine = self._with_own_fields(own)
        setup._prepare(mine)
        return build.build_arguments(setup, {**mine, "output_dir": output_dir}, arguments_class)

    def _prepare(self, own: Mapping[str, Any]) -> None:
        """Set up the allocator and DeepSpeed's operators, before TrainingArguments start CUDA and DeepSpeed."""
        if "deepspeed.config" in self:
            import torch

            cpu = bool(own.get("use_cpu", self.get("arguments.use_cpu"))) or not torch.cuda.is_available()
            ops.build(ops.needed(self["deepspeed.config"], cpu=cpu), print, cpu=cpu)
        text = self.get(f"environment.{VARIABLE}")
        if text is not None:
            set_allocator(str(text), print)

    def _with_own_fields(self, own: Mapping[str, Any]) -> tuple[PresetSetup, dict[str, Any]]:
        """This setup without what the user's fields replace (printed), and these fields under current names."""
        # Enumerations become texts.
        own_fields = {current_name(name): getattr(value, "value", value) for name, value in own.items()}
        setup, replaced = remove_replaced(self, own_fields)
        changed = [name for name in _SIZES if name in own_fields and own_fields[name] != self.get(f"arguments.{name}")]
        batch = self.request.global_batch_size if self.request is not None else None
        if changed and batch is not None:
            raise SettingError(
                f"{changed[0]}={own_fields[changed[0]]}: the preset has global_batch_size={batch}. "
                f"Give the size to preset(arguments=…), and memkit adjusts the other one"
            )
        if own_fields:
            mistakes, _ = mistakes_of(setup, own_fields)
            if refused := [str(problem) for problem in mistakes if problem.refuses]:
                raise SettingError("\n".join(refused))
        for setting in replaced:
            print(f"Override: {setting}")
        return PresetSetup.of(replace(setup, replaced=(*self.replaced, *replaced))), own_fields

    def load_model(self, *, random_weights: bool = False, say: Callable[[str], None] = print) -> Any:
        """The model with its dtype, quantisation, padded vocabulary, adapters and components.

        With ZeRO-3, create the TrainingArguments first and keep them: they split the weights at creation.

        Args:
            random_weights: build the model from its config values instead of loading it.
            say: receives messages for the user, a line a call.

        Raises:
            InputError: the preset was resolved without a model.
            MissingPackageError: a package is missing.
            RunError: the weights cannot be loaded, or a component cannot work on this model.
        """
        if "model.name" not in self:
            write = "Write preset(…, model='ID or folder'), or load yours and pass model=…"
            raise InputError(f"this preset has no model. {write}")
        build.require_packages(self)
        model = build.build_model(self, say, random_weights=random_weights)
        self.install(model)
        return model

    def install(self, model: Any) -> Callable[[], None]:
        """Install the setup's model components on your own model; returns a function that removes them.

        Raises:
            RunError: a component cannot work on this model.
        """
        return build.install_model_parts(model, self)

    def trainer_options(
        self, model: Any, arguments: TrainingArguments, processing_class: Any = None, **own: Any
    ) -> dict[str, Any]:
        """Keyword arguments for Trainer without `model` and `args`; `own` overrides them, its callbacks are added.

        Raises:
            SettingError: two components give the same argument.
            RunError: a component cannot work here.
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
        """A Trainer with all of the setup's settings, made in the right order.

        Args:
            output_dir: folder for checkpoints and records.
            model: your own model, on which the components are installed; None: the preset's, loaded.
            processing_class: tokenizer or processor, as for Trainer.
            arguments: fields of TrainingArguments that override the preset's.
            trainer_class, arguments_class: subclasses to use.
            own: keyword arguments of Trainer (`train_dataset`, `data_collator`, `callbacks` …), which override too.

        Raises:
            InputError: no model was given, neither here nor to the preset.
            SettingError: `arguments` would change the global batch, or have no effect or harm; `own` has a field of
                TrainingArguments; two components give the same argument.
            MissingPackageError: a package is missing.
            RunError: something cannot be built.
        """
        from transformers import Trainer

        setup, own_fields = self._with_own_fields(arguments or {})
        misplaced = sorted(set(own) & set(argument_types()) - _OF_TRAINER)
        if misplaced:
            raise SettingError(
                f"{misplaced[0]} is a field of TrainingArguments. Write trainer(…, arguments={{{misplaced[0]!r}: …}})"
            )
        build.require_packages(setup)
        setup._prepare(own_fields)
        training_args = build.build_arguments(setup, {**own_fields, "output_dir": output_dir}, arguments_class)
        if model is None:
            model = setup.load_model()
        else:
            setup.install(model)
        options = setup.trainer_options(model, training_args, processing_class, **own)
        return (trainer_class or Trainer)(model=model, args=training_args, **options)
