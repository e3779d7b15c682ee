"""`memkit run`: runs an unchanged training script with a memory report, or a recipe's folder."""

from __future__ import annotations

import contextlib
import importlib.machinery
import itertools
import os
import re
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
from hf_memkit.common.commands import command
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
    """Without `--`, all words after the script's name are the script's, as after `python`; options that only memkit
    has are refused there. Options may follow a recipe's folder, which has no arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args
        if not ctx.allow_interspersed_args:
            script = self.make_parser(ctx).parse_args(list(args))[0].get("script")
            ctx.allow_interspersed_args = isinstance(script, str) and _recipes_folder(script) is not None
        typed = list(args)
        remaining = super().parse_args(ctx, args)
        arguments = ctx.params.get("arguments") or []
        if arguments and not ctx.allow_interspersed_args:
            before = typed[: len(typed) - len(arguments)]
            _refuse_lost_options(self, before, arguments, is_module=ctx.params["module"])
        return remaining


def _recipes_folder(word: str) -> Path | None:
    """The recipe's folder with this path, or None. Imports nothing for a script."""
    given = Path(word)
    if not ((given if given.is_dir() else given.parent) / "memkit-run.json").exists():
        return None
    from hf_memkit.run.folder import folder_of

    return folder_of(given)


def _refuse_lost_options(
    verb: TyperCommand, before: Sequence[str], arguments: Sequence[str], *, is_module: bool
) -> None:
    """Refuses options of this verb among the script's arguments, unless the script has them too. `before`: the
    words up to the script's name."""
    options = {name: each for each in verb.params for name in (*each.opts, *each.secondary_opts)}
    lost: list[str] = []
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        option = options.get(name) if name.startswith("--") and name != "--help" else None
        if option is None or getattr(option, "rich_help_panel", None) == RUNS:
            rest.append(word)
            continue
        value_follows = not equals and not getattr(option, "is_flag", False)
        if value_follows:
            value = words[0] if words else ""
        if not _is_memkits(name, value, before[-1], is_module=is_module):
            rest.append(word)
            continue
        lost.append(word)
        if value_follows and words:
            lost.append(words.pop(0))

    if lost:
        for_memkit = command("memkit", "run", *lost, *before, *(["--", *rest] if rest else []))
        for_script = command("memkit", "run", *before, "--", *arguments)
        raise InputError(
            f"{command(*lost)}: memkit's option or the script's? For memkit, write: {for_memkit}; "
            f"for the script: {for_script}"
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
    flags = rf"--{field}\b|--{field.replace('_', '-')}\b"
    of_script = re.compile(rf"({flags})(?![-_])|^\s+{field}\s*:\s*\w", re.MULTILINE)
    return not any(of_script.search(text) for text in _texts(script, is_module=is_module))


def _texts(script: str, *, is_module: bool) -> Iterator[str]:
    """The texts of the script and of the Python files near it."""
    file = Path(script)
    if is_module:
        spec = importlib.machinery.PathFinder.find_spec(script.partition(".")[0], [str(Path.cwd()), *sys.path])
        if spec is None or spec.origin is None:
            return
        file = Path(spec.origin)
    files = itertools.chain([file], file.parent.glob("*.py"), file.parent.glob("*/*.py"))
    for path in itertools.islice(files, _MOST_FILES):
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
        raise InputError("--log: torchrun reads it as its own --log-dir. Omit it, or use accelerate launch")
    script = launched.script
    target = ["-m", script.target] if script.is_module else [script.target]
    memkit_run = UserScript(boot.BOOT, arguments=("run", *options, *target, "--", *script.arguments))
    command = launched.with_script(memkit_run)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be started: {error.strerror}") from None


def _run_folder(folder: Path, options: FolderOptions, of_script: list[str]) -> int:
    """Runs the folder. `of_script`: given options that only a script has."""
    if of_script:
        raise InputError(f"{', '.join(of_script)}: only for a script. Change {folder / 'args.yaml'} instead")
    quiet_libraries()
    if options.resume and options.overwrite:
        raise InputError("--resume, --overwrite: mutually exclusive. --overwrite replaces the run.")
    return as_one_of_its_ranks(lambda ranks: run_folder(folder, options, ranks))


_SCRIPT = typer.Argument(metavar="SCRIPT", help="Script; with -m a module; or a folder that memkit recipe wrote.")
_ARGUMENTS = typer.Argument(metavar="-- ARGUMENTS", help="Arguments of the script.")
_RECORDS = option("Folder for records and page. Default: the Trainer's output_dir.", metavar="DIR")
_PREDICT = option("Predict the script first. The report compares predicted and measured.", "--predict")
_PLAN = option("Run with the settings of a plan, which override the script's. Prints each override.", metavar="FILE")
_NO_PHASES = option(
    "Do not reset torch's peak counter, for a script that reads it.", " /--no-phases", show_default=False
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(FolderOptions):
    """Options for a script, in addition to those for a recipe's folder."""

    script: Annotated[str, _SCRIPT]
    arguments: Annotated[list[str] | None, _ARGUMENTS] = None
    module: Annotated[bool, option("SCRIPT is a module name, as after `python -m`.", "-m")] = False
    records: Annotated[str | None, _RECORDS] = None
    log: Annotated[str, option("Memory figures in the Trainer's logs and dashboards.", metavar="few|all|none")] = "few"
    predict: Annotated[bool, _PREDICT] = False
    plan: Annotated[str | None, _PLAN] = None
    phases: Annotated[bool, _NO_PHASES] = True


@with_options
def run(context: typer.Context, *, options: RunOptions) -> ScriptRun | int:
    """Run a training script unchanged and report its memory."""
    of_script = flags_given(options, "arguments", "module", "records", "log", "predict", "plan", "phases")
    of_folder = flags_given(options, *(field.name for field in fields(FolderOptions)))
    script, plan = options.script, options.plan
    recipes_folder = None if options.module else _recipes_folder(script)
    # With a plan or arguments, a recipe's script is the user's script.
    if recipes_folder is not None and (not of_script or of_folder or Path(script).is_dir()):
        return _run_folder(recipes_folder, options, of_script)

    if of_folder:
        only = "only for a folder that memkit recipe wrote"
        raise InputError(f"{', '.join(of_folder)}: {only}. Write the script's arguments after --")
    if options.log not in LOGS:
        raise InputError(f"--log {options.log}: unknown. Give one of {', '.join(LOGS)}.")
    # An absolute path, because the script may change its folder.
    records = user_path(options.records).absolute() if options.records is not None else None
    if records is not None and records.exists() and not records.is_dir():
        raise InputError(f"--records {options.records}: a file. Give a folder.")
    if plan is not None and options.predict:
        raise InputError("--predict, --plan: mutually exclusive. Omit --predict: the plan has its prediction.")
    planned = PlannedRun.read(plan) if plan is not None else None

    if not options.module and is_command(script):
        if options.predict:
            raise InputError("--predict: not with a command. Predict it first: memkit predict -- COMMAND")
        passed_on = ["--records", str(records)] if records is not None else []
        passed_on += ["--plan", str(user_path(plan).absolute())] if plan is not None else []
        passed_on += ["--log", options.log] if "--log" in of_script else []
        passed_on += [] if options.phases else ["--no-phases"]
        _become((script, *(options.arguments or ())), passed_on)

    # A launcher passes it as the script's first argument.
    launched = context.find_root().params
    by_launcher = {"--local_rank": launched["local_rank"], "--local-rank": launched["local_rank_of_torch"]}
    ranks = [f"{name}={rank}" for name, rank in by_launcher.items() if rank is not None]
    target = UserScript.at(script, [*ranks, *(options.arguments or ())], is_module=options.module)
    prediction = planned.prediction if planned is not None else None
    if options.predict:
        prediction = predict_script(target)
    callback = {"output_dir": records, "log": options.log, "phases": options.phases, "summary": "stderr"}
    return ScriptRun(target, {**callback, "prediction": prediction}, planned)
