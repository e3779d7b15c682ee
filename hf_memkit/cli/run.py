"""`memkit run`: runs an unchanged training script with a memory report, or a recipe's folder."""

from __future__ import annotations

import contextlib
import importlib.machinery
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from hf_memkit.cli.environment import Trains
from hf_memkit.cli.options import RUNS, flags_given, option, with_options
from hf_memkit.cli.printing import quiet_libraries
from hf_memkit.cli.run_folder import FolderOptions, as_one_of_its_ranks, run_folder
from hf_memkit.common import boot
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import user_path
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.launch_command import is_command, read_command
from hf_memkit.run.planned import PlannedRun
from hf_memkit.run.script import ScriptRun, predict_script

EXAMPLES = """[bold]Examples[/bold]

  memkit run train.py -- --output_dir out    as `python train.py --output_dir out`, with a report in out

  memkit run -m my_package.train -- …        as `python -m my_package.train …`

  memkit run --plan plan.yaml train.py -- …  with the plan's settings, which override the script's

  memkit run -- torchrun --nproc_per_node 4 train.py …      also: accelerate launch, deepspeed

  torchrun --nproc_per_node 4 -m hf_memkit run train.py -- …     the same

  memkit run job                             a folder of memkit recipe NAME --export job

  memkit run job --resume                    goes on after Ctrl-C, from the last checkpoint
"""


class RunCommand(Trains):
    """With `--`, memkit's options precede it. Without it, all words after the script's name belong to the script, as
    after `python`; options that only memkit has are refused there. A recipe's folder has no arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args
        if not ctx.allow_interspersed_args:
            script = self.make_parser(ctx).parse_args(list(args))[0].get("script")
            ctx.allow_interspersed_args = isinstance(script, str) and _recipes_folder(script) is not None
        given = list(args)
        left = super().parse_args(ctx, args)
        words = ctx.params.get("arguments") or []
        if words and not ctx.allow_interspersed_args:
            _refuse_lost_options(self, given[: len(given) - len(words)], words, is_module=ctx.params["module"])
        return left


def _recipes_folder(word: str) -> Path | None:
    """The recipe's folder with this path, or None. Imports nothing for a script."""
    given = Path(word)
    if not ((given if given.is_dir() else given.parent) / "memkit-run.json").exists():
        return None
    from hf_memkit.run.folder import folder_of

    return folder_of(given)


def _refuse_lost_options(
    command: TyperCommand, before: Sequence[str], arguments: Sequence[str], *, is_module: bool
) -> None:
    """Refuses options of this command among the script's arguments, unless the script has them too. `before`: the
    words up to the script's name."""
    own = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    lost: list[str] = []
    for number, word in enumerate(arguments):
        name, glued, value = word.partition("=")
        option = own.get(name) if name.startswith("--") else None
        if option is None or name == "--help" or getattr(option, "rich_help_panel", None) == RUNS:
            continue
        takes = not getattr(option, "is_flag", False)
        if takes and not glued:
            value = next(iter(arguments[number + 1 : number + 2]), "")
        if _is_memkits(name, value, before[-1], is_module=is_module):
            lost += [word] if glued or not takes else [word, value]
    if not lost:
        return
    rest = list(arguments)
    for word in lost:
        rest.remove(word)
    ours = shlex.join([*lost, *before, *(["--", *rest] if rest else [])])
    raise InputError(
        f"{shlex.join(lost)}: stands behind the script without a --, so the script would get it. For memkit, write: "
        f"memkit run {ours}; for the script: memkit run {shlex.join([*before, '--', *arguments])}"
    )


def _is_memkits(name: str, value: str, script: str, *, is_module: bool) -> bool:
    """Whether an option after the script's name is memkit's: a plan file, or an option that no file of the script has
    as `"--name"` or as a field (`name: …`)."""
    if name == "--log" and value not in LOGS:
        return False
    if name == "--plan" and Path(value).is_file():
        try:
            PlannedRun.read(value)
        except InputError:
            return False
        return True
    field = name.removeprefix("--").replace("-", "_")
    own = re.compile(rf"(--{field}\b|--{field.replace('_', '-')}\b)(?![-_])|^\s+{field}\s*:\s*\w", re.MULTILINE)
    return not any(own.search(text) for text in _texts(script, is_module=is_module))


def _texts(script: str, *, is_module: bool) -> Iterator[str]:
    """The texts of the script and of the Python files near it."""
    folder, files = Path(script).parent, [Path(script)]
    if is_module:
        target = importlib.machinery.PathFinder.find_spec(script.partition(".")[0], [str(Path.cwd()), *sys.path])
        if target is None or target.origin is None:
            return
        folder, files = Path(target.origin).parent, [Path(target.origin)]
    for path in itertools.islice(itertools.chain(files, folder.glob("*.py"), folder.glob("*/*.py")), _MOST_FILES):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


_MOST_FILES: Final = 300
LOGS: Final = ("few", "all", "none")
"""Values of `--log`."""


def _become(words: Sequence[str], options: Sequence[str]) -> NoReturn:
    """Replaces this process by the command, which starts `memkit run` in each of its processes."""
    from hf_memkit.prediction.worker import close_workers

    launched = read_command(words)
    close_workers()
    if "--log" in options and any("torch" in word for word in launched.before):  # torchrun's parser also reads them
        raise InputError(
            "--log: torchrun takes it for an abbreviation of --log-dir; omit it, or use accelerate launch"
        )
    script = launched.script
    target = ["-m", script.target] if script.is_module else [script.target]
    own = UserScript(boot.BOOT, arguments=("run", *options, *target, "--", *script.arguments))
    command = launched.with_script(own)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be started: {error.strerror}") from None


def _run_folder(folder: Path, options: FolderOptions, of_script: list[str]) -> int:
    """Runs the folder. `of_script`: given options that only a script has."""
    if of_script:
        raise InputError(
            f"{', '.join(of_script)}: only for a script; {folder / 'args.yaml'} holds what the folder trains with"
        )
    quiet_libraries()
    if options.resume and options.overwrite:
        raise InputError("--resume, --overwrite: mutually exclusive. --overwrite starts again.")
    return as_one_of_its_ranks(lambda ranks: run_folder(folder, options, ranks))


@dataclass(frozen=True, kw_only=True)
class RunOptions(FolderOptions):
    """Options for a script, in addition to those for a recipe's folder."""

    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="Path of the script; with -m, a module's dotted name; or a folder that memkit recipe wrote.",
        ),
    ]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments of the script.")] = (
        None
    )
    module: Annotated[bool, option("SCRIPT is a module name, as after `python -m`.", "-m")] = False
    records: Annotated[
        str | None, option("Folder for records and page. Default: the Trainer's output_dir.", metavar="DIR")
    ] = None
    log: Annotated[
        str, option("Memory figures added to the Trainer's logs and dashboards.", metavar="few|all|none")
    ] = "few"
    predict: Annotated[
        bool, option("Predict the script first. The report compares predicted and measured.", "--predict")
    ] = False
    plan: Annotated[
        str | None,
        option(
            "Override the script's settings with a plan's: fields of TrainingArguments, options of "
            "from_pretrained, environment variables. Prints each override; warns where the script's value remains.",
            metavar="FILE",
        ),
    ] = None
    phases: Annotated[
        bool,
        option("Do not reset torch's peak counter, for a script that reads it.", " /--no-phases", show_default=False),
    ] = True


@with_options
def run(context: typer.Context, *, options: RunOptions) -> ScriptRun | int:
    """Run a training script unchanged and report its memory."""
    of_script = flags_given(options, "arguments", "module", "records", "log", "predict", "plan", "phases")
    of_folder = flags_given(options, *(field.name for field in fields(FolderOptions)))
    script, plan = options.script, options.plan
    job = None if options.module else _recipes_folder(script)
    # With a plan or arguments, a recipe's script is the user's script.
    if job is not None and (not of_script or of_folder or Path(script).is_dir()):
        return _run_folder(job, options, of_script)
    if of_folder:
        raise InputError(
            f"{', '.join(of_folder)}: only for a folder that memkit recipe wrote; a script's own stand after --"
        )
    if options.log not in LOGS:
        raise InputError(f"--log {options.log}: unknown. Give one of {', '.join(LOGS)}.")
    # The script may change its folder.
    folder = user_path(options.records).absolute() if options.records is not None else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"--records {options.records}: a file. Give a folder.")
    if plan is not None and options.predict:
        raise InputError("--predict, --plan: mutually exclusive. Omit --predict: the plan has its prediction.")
    planned = PlannedRun.read(plan) if plan is not None else None
    if not options.module and is_command(script):
        if options.predict:
            raise InputError("--predict: not with a command; write memkit predict -- COMMAND")
        plan_file = str(user_path(plan).absolute()) if plan is not None else None
        passed_on = {"--records": folder, "--plan": plan_file, "--log": options.log if "--log" in of_script else None}
        own = [word for name, each in passed_on.items() if each is not None for word in (name, str(each))]
        _become((script, *(options.arguments or ())), [*own, *([] if options.phases else ["--no-phases"])])
    # A launcher passes it as the script's first argument.
    launched = context.find_root().params
    by_launcher = {"--local_rank": launched["local_rank"], "--local-rank": launched["local_rank_of_torch"]}
    ranks = [f"{name}={rank}" for name, rank in by_launcher.items() if rank is not None]
    target = UserScript.at(script, [*ranks, *(options.arguments or ())], is_module=options.module)
    prediction = predict_script(target) if options.predict else planned.prediction if planned is not None else None
    callback = {"output_dir": folder, "log": options.log, "phases": options.phases, "summary": "stderr"}
    return ScriptRun(target, {**callback, "prediction": prediction}, planned)
