"""What `memkit predict` and `memkit plan` are given: a script, or a model or recipe instead; and the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hf_memkit.cli.options import MORE, Json, MachineOptions, Short, flags_given
from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.prediction.launch_command import Launched, is_command

if TYPE_CHECKING:
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.setup.request import Request

NO_SCRIPT: Final = "Instead of a script: a model or a recipe"


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """A training script, or what describes a training without one."""

    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="Training script. It runs on this machine, up to its training."),
    ] = None
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="The script's own arguments.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Hub ID or local folder. No weights are loaded.", rich_help_panel=NO_SCRIPT)
    ] = None
    recipe: Annotated[str | None, typer.Option(help="Recipe name or YAML file.", rich_help_panel=NO_SCRIPT)] = None
    variant: Annotated[
        str, typer.Option(help="With --recipe: variant; auto: the first that fits.", rich_help_panel=NO_SCRIPT)
    ] = "auto"
    preset: Annotated[
        str | None,
        typer.Option(
            help="With --model: preset, or several joined by +. Default: Trainer's defaults.",
            rich_help_panel=NO_SCRIPT,
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --model: per_device_train_batch_size.", rich_help_panel=NO_SCRIPT)
    ] = None
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence.", rich_help_panel=NO_SCRIPT)
    ] = None
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="With --model: gradient_accumulation_steps.", rich_help_panel=NO_SCRIPT)
    ] = None
    args: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --model: your own arguments (YAML or JSON). They take precedence.",
            rich_help_panel=NO_SCRIPT,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a TrainingArguments field, or a value such as rank=32. Repeatable.",
            rich_help_panel=NO_SCRIPT,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="With --model: run code that comes with it.", rich_help_panel=NO_SCRIPT
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(MachineOptions, SubjectOptions):
    """A training, the machine for it and how to print the answer."""

    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of one machine that train together. Default: the command's, or 1.")
    ] = None
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as after `python -m`.", rich_help_panel=MORE)
    ] = False
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write one HTML page.", rich_help_panel=MORE)] = None
    short: Short = False
    as_json: Json = False

    def refuse_wrong_subject(self, verb: str) -> None:
        """Refuses options that contradict one another or the script, with a line each."""
        if self.short and self.as_json:
            raise InputError("--short, --json: mutually exclusive. Omit --short: --json has everything.")
        if self.module and self.script is None:
            raise InputError(f"-m: no module. Write its name after -m: memkit {verb} -m MODULE -- ARGUMENTS")
        given = [flag for flag in flags_given(self) if flag in _BESIDE_A_SCRIPT]
        if given and self.script is not None:
            raise InputError("\n".join(f"{flag}: not with a script. {_BESIDE_A_SCRIPT[flag]}" for flag in given))

    def started(self, verb: str, environment: Mapping[str, str] | None, nodes: int = 1) -> Launched:
        """The script, with what the command that starts it says. `environment`: variables; None: this process's."""
        from hf_memkit.cli.predict_script import found_command, found_script

        assert self.script is not None
        variables = dict(os.environ) if environment is None else environment
        if not self.module and is_command(self.script):
            return found_command((self.script, *(self.arguments or ())), variables, self.gpus, nodes)
        script = found_script(self.script, self.arguments or (), is_module=self.module, verb=verb)
        return Launched(script, self.gpus or 1, nodes, variables, is_launcher=False)

    def read(self, request: Request, techniques: tuple[str, ...] = ()) -> tuple[Recipe | None, Request]:
        """The recipe if there is one, and the request with its subject and the user's own arguments.

        Args:
            request: the machine, and a recipe's data.
            techniques: `--technique`, which replace those of the preset with the same purpose.
        """
        from hf_memkit.recipes.resolve import read_own_arguments
        from hf_memkit.setup.own_arguments import wrong_counts

        request = replace(
            request, recipe=self.recipe, variant=self.variant, model=self.model, preset=self.preset or "",
            sequence_length=self.sequence_length, trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
        if self.recipe is not None:
            return self._read_recipe(request)
        if self.variant != "auto":
            raise InputError(f"--variant {self.variant}: only recipes have variants; add --recipe NAME")
        if request.data is not None:
            raise InputError(f"--data {request.data}: only recipes read it; add --recipe NAME")
        if techniques and not request.preset:  # composed as a preset would be
            from hf_memkit.presets import PRESETS

            name = "+".join(each for each in techniques if each not in PRESETS)
            if not name:
                raise InputError(f"--technique {techniques[0]}: no preset to change; write --preset {techniques[0]}")
            request = replace(request, preset=name)
            techniques = tuple(each for each in techniques if each in PRESETS)
        request = read_own_arguments(
            replace(request, techniques=techniques), self.settings or (), self.args,
            batch_size=self.batch_size, accumulation=self.accumulation,
        )  # fmt: skip
        if problems := wrong_counts(request.arguments):
            raise SettingError("\n".join(problems))
        return None, request

    def _read_recipe(self, request: Request) -> tuple[Recipe, Request]:
        from hf_memkit.recipes.resolve import read_own_arguments
        from hf_memkit.recipes.schema import load_recipe
        from hf_memkit.recipes.settings import check_data
        from hf_memkit.recipes.sources import is_here

        given = [flag for flag in flags_given(self) if flag in _BESIDE_A_RECIPE]
        if given:
            raise InputError("\n".join(f"{flag}: not with --recipe; {_BESIDE_A_RECIPE[flag]}" for flag in given))
        recipe = load_recipe(request.recipe or "")
        if request.data is not None and is_here(request.data):
            check_data(recipe, request.data)
        return recipe, read_own_arguments(replace(request, preset=""), self.settings or (), recipe=recipe)


_OWN: Final = "Write the script's own argument, such as: --"
_PRINTED: Final = "Omit it; memkit preset show NAME --for trainer prints the arguments that a preset sets"
_BESIDE_A_SCRIPT: Final = {
    "--model": f"{_OWN} --model_name_or_path NAME",
    "--batch-size": f"{_OWN} --per_device_train_batch_size B",
    "--accumulation": f"{_OWN} --gradient_accumulation_steps N",
    "--sequence-length": f"{_OWN} --max_length L",
    "--args": f"{_OWN} FILE",
    "--set": f"{_OWN} --KEY VALUE",
    "--trust-remote-code": f"{_OWN} --trust_remote_code",
    "--preset": _PRINTED,
    "--technique": _PRINTED,
    "--recipe": "Omit the recipe or the script",
    "--variant": "Only recipes have variants; omit it",
    "--data": "The script reads its own data; omit it",
}
"""Options that contradict a script, with what to do instead, such as the argument of Trainer's and TRL's scripts."""

_BESIDE_A_RECIPE: Final = {
    "--preset": "its variants are its presets; choose one with --variant",
    "--technique": "its variants have theirs; choose one with --variant",
    "--args": "write --set KEY=VALUE",
    "--batch-size": "write --set per_device_train_batch_size=B",
    "--accumulation": "write --set gradient_accumulation_steps=N",
    "--trust-remote-code": "recipes train models of transformers only",
}
"""Options that a recipe decides, and what to do instead."""
