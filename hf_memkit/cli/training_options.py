"""Options that `memkit predict` and `memkit plan` share: a script, model or recipe, and the machine."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hf_memkit.cli.options import MOST_GPUS, Json, MachineOptions, Short, flags_given, more, option, tell
from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.common.resources import names
from hf_memkit.common.user_files import is_there
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.launch_command import Launched, is_command, read_command

if TYPE_CHECKING:
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.setup.request import Request

no_script = functools.partial(option, rich_help_panel="Instead of a script: a model or a recipe")

_SCRIPT = typer.Argument(metavar="SCRIPT", help="Training script. It runs on this machine, up to its training.")
_ARGUMENTS = typer.Argument(metavar="-- ARGUMENTS", help="The script's own arguments.")
_GPUS = option("GPUs of one machine that train together. Default: the command's, or 1.", min=1, max=MOST_GPUS)
_ARGS = no_script("With --model: your own arguments (YAML or JSON). They take precedence.", metavar="FILE")
_SET = no_script(
    "Override a TrainingArguments field, or a value such as rank=32. Repeatable.", "--set", metavar="KEY=VALUE"
)


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """A training script, or the description of a training without one."""

    script: Annotated[str | None, _SCRIPT] = None
    arguments: Annotated[list[str] | None, _ARGUMENTS] = None
    model: Annotated[str | None, no_script("Hub ID or local folder. No weights are loaded.")] = None
    recipe: Annotated[str | None, no_script("Recipe name or YAML file.")] = None
    variant: Annotated[str, no_script("With --recipe: variant; auto: the first that fits.")] = "auto"
    preset: Annotated[str | None, no_script("With --model: preset, or several joined by +. Default: none.")] = None
    batch_size: Annotated[int | None, no_script("With --model: per_device_train_batch_size.", min=1)] = None
    sequence_length: Annotated[int | None, no_script("Tokens in a sequence.", min=1)] = None
    accumulation: Annotated[int | None, no_script("With --model: gradient_accumulation_steps.", min=1)] = None
    args: Annotated[str | None, _ARGS] = None
    settings: Annotated[list[str] | None, _SET] = None
    trust_remote_code: Annotated[bool, no_script("With --model: run the model's own code.", "--trust-remote-code")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(MachineOptions, SubjectOptions):
    """A training, the machine for it and how to print the answer."""

    gpus: Annotated[int | None, _GPUS] = None
    module: Annotated[bool, more("SCRIPT is a module, as after `python -m`.", "-m")] = False
    html: Annotated[str | None, more("Write one HTML page.", metavar="FILE")] = None
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
        """The script and how it is started. `environment`: variables; None: those of this process."""
        assert self.script is not None
        variables = dict(os.environ) if environment is None else environment
        if not self.module and is_command(self.script):
            return _read_launch((self.script, *(self.arguments or ())), variables, self.gpus, nodes)
        script = _user_script(self.script, self.arguments or (), is_module=self.module, verb=verb)
        return Launched(script, self.gpus or 1, nodes, variables, is_launcher=False)

    def read(self, request: Request, techniques: tuple[str, ...] = ()) -> tuple[Recipe | None, Request]:
        """(the recipe if there is one, the request with model or recipe and the user's own arguments).

        Args:
            request: contains the machine, and a recipe's data.
            techniques: `--technique`, which replace those of the preset with the same purpose.
        """
        from hf_memkit.recipes.resolve import read_own_arguments
        from hf_memkit.setup.own_arguments import wrong_counts

        names = ("recipe", "variant", "model", "sequence_length", "trust_remote_code")
        request = replace(request, preset=self.preset or "", **{name: getattr(self, name) for name in names})
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
        request = replace(request, techniques=techniques)
        pairs, batch_size, accumulation = self.settings or (), self.batch_size, self.accumulation
        request = read_own_arguments(request, pairs, self.args, batch_size=batch_size, accumulation=accumulation)
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


def _user_script(target: str, arguments: Sequence[str], *, is_module: bool, verb: str) -> UserScript:
    """The script or module; refuses a path without a file."""
    if not is_module and not is_there(target):
        if target in names("recipes"):
            raise InputError(f"{target} is a recipe, not a script. Type memkit {verb} --recipe {target}")
        is_path = target.endswith(".py") or target.startswith((".", "/")) or target.count("/") > 1
        is_file = Path(target).suffix in (".yaml", ".yml", ".json", ".ipynb", ".sh", ".txt")
        what = "write the path of your training script"
        if not (is_path or is_file):
            what = f"give a model with --model {target}"
        raise InputError(f"{target}: no such file; {what} (see `memkit {verb} --help`)")
    return UserScript.at(target, arguments, is_module=is_module)


def _read_launch(words: Sequence[str], environment: Mapping[str, str], gpus: int | None, nodes: int) -> Launched:
    """The script that a command starts, with its GPUs and variables. Refuses what `read_command` refuses, and
    `--gpus` or `--nodes` that contradict the command."""
    launched = read_command(words, environment, gpus=gpus or 1)
    variables = {**environment, **launched.environment}
    if not launched.is_launcher and not launched.front_end:
        _refuse_several_gpus(launched.before, variables)
    if launched.gpus is None and gpus is None:
        tell("the command starts a process for each GPU of the machine; predicted for 1: give --gpus N")
    own_gpus, own_nodes = launched.sizes(gpus, nodes)
    return replace(launched, gpus=own_gpus, nodes=own_nodes, environment=variables)


def _refuse_several_gpus(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuses plain Python with several GPUs or Slurm tasks, for which Trainer starts no processes. `words`: the
    command up to the script."""
    tasks = re.search(r"(?:^| )(?:-n|--ntasks(?:-per-node)?)[ =]?([2-9]|\d\d+)\b", " ".join(words))
    if "srun" in words and tasks is not None:
        cause = f"starts {tasks[1]} processes that Trainer does not connect"
        raise InputError(f"srun{tasks[0]}: {cause}. Write srun torchrun, or srun accelerate launch")
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").strip(",")
    if "," in visible:
        count = len(visible.split(","))
        cause = f"one process with {count} GPUs uses nn.DataParallel, which memkit cannot predict"
        fix = f"Write torchrun --nproc_per_node {count}, or name one GPU"
        raise InputError(f"CUDA_VISIBLE_DEVICES={visible}: {cause}. {fix}")


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
