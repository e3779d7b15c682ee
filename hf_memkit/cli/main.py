"""The `memkit` command: its verbs; errors become one line each and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from types import ModuleType
from typing import Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from hf_memkit._version import __version__
from hf_memkit.catalog.environments import missing_here
from hf_memkit.cli import check, doctor, ds, environment, explain, plan, predict, preset, recipe, report, run
from hf_memkit.cli.options import INTERRUPTED, show_what_can_be_shown
from hf_memkit.cli.printing import quiet_libraries
from hf_memkit.common import boot
from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.errors import InputError, MemkitError, did_you_mean
from hf_memkit.run.script import ScriptRun

# click's UsageError through a public name of typer: some versions of typer contain click, others depend on it.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

_INSTEAD: Final = {
    ("memkit recipe", "--accumulation"): "write --set gradient_accumulation_steps=N",
    ("memkit recipe", "--batch-size"): "write --set per_device_train_batch_size=B",
    ("memkit recipe", "--preset"): "choose one of the recipe's variants: --variant NAME",
    ("memkit recipe", "--technique"): "change them in the recipe's file, which --copy FILE writes",
    ("memkit predict", "--…"): "write the script's arguments after --",
    ("memkit plan", "--…"): "write the script's arguments after --",
    ("memkit run", "--…"): "write the script's arguments after --",
}
"""(verb, option that it does not have) → what to write; `--…` is any other option."""

app = typer.Typer(
    name="memkit",
    help="Make Hugging Face Trainer jobs fit the GPU you have, and see where the memory goes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_FIRST: Final = "Start here"
_MORE: Final = "More commands"


def _add(module: ModuleType, panel: str, summary: str, kind: type[TyperCommand] | None = None) -> None:
    """Adds the command that the module is named after, with its examples."""
    name = module.__name__.rpartition(".")[2]
    app.command(name, cls=kind, help=summary, epilog=module.EXAMPLES, rich_help_panel=panel)(getattr(module, name))


_HERE, _TRAINS = environment.InEnvironment, environment.Trains
_add(explain, _FIRST, "Explain an out-of-memory error from a log or a run, and list what to change.", _HERE)
_add(predict, _FIRST, "Predict a training's peak memory and whether it fits. Needs no GPU.", _TRAINS)
_add(plan, _FIRST, "Find the fastest setup of a training script that fits a GPU. Needs no GPU.", _TRAINS)
_add(run, _FIRST, "Run a training script as it is, and report its memory.", run.RunCommand)
_add(recipe, _FIRST, "List the recipes, or run one: model, data and settings for one size of GPU.", _HERE)
_add(report, _MORE, "Show where the memory went in a run, as text or as one HTML page.")
_add(check, _MORE, "Find known mistakes in a DeepSpeed JSON, an argument file or a recipe.", _HERE)
app.add_typer(preset.app, rich_help_panel=_MORE)
app.add_typer(ds.app, rich_help_panel=_MORE)
_add(doctor, _MORE, "Check this machine and print fixes for what is missing.", _HERE)


def _version(asked: bool) -> None:
    if asked:
        print(f"memkit {__version__}")
        raise typer.Exit


@app.callback()
def _memkit(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    # DeepSpeed's launcher puts this before all other arguments, torch.distributed.launch the one with a hyphen; their
    # environment variables say the same.
    local_rank: int | None = typer.Option(None, "--local_rank", hidden=True),
    local_rank_of_torch: int | None = typer.Option(None, "--local-rank", hidden=True),
) -> None:
    context.obj = dict(os.environ)  # the user's own variables, for a script that is predicted
    # `doctor` shows the libraries' own messages, and in `run` they belong to the script.
    if context.invoked_subcommand != "run":
        show_what_can_be_shown()
    if context.invoked_subcommand not in ("doctor", "run"):
        quiet_libraries()


_LONGEST: Final = 10_000
"""Maximum length of an error line, in characters."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; raises the errors of a script of `memkit run`."""
    excepthook = sys.excepthook
    try:
        try:
            result = app(args=arguments, prog_name="memkit", standalone_mode=False)
        finally:
            sys.excepthook = excepthook  # Typer replaces it
        if isinstance(result, ScriptRun):
            result.prepare()
    except MemkitError as error:
        for line in str(error).splitlines():
            print(f"memkit: error: {printable(line, _LONGEST)}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            for line in note.splitlines():
                print(printable(line, _LONGEST), file=sys.stderr)
        return error.exit_code
    except _UsageError as error:
        if error.format_message():  # without a command, typer has printed the help, and its error has no text
            line = _usage_message(error, sys.argv[1:] if arguments is None else arguments)
            print(f"memkit: error: {printable(line, _LONGEST)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not (message := boot.missing(error.name) or missing_here()):
            raise
        print(f"memkit: error: {message}", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("memkit: interrupted", file=sys.stderr)  # a recipe that trains has its own line, with --resume
        return INTERRUPTED
    if isinstance(result, ScriptRun):
        result.run()  # outside `try`: its errors are the script's
    return result if isinstance(result, int) else 0


_OUTSIDE: Final = re.compile(r"Invalid value for '(--[\w-]+)': Input should be (greater|less) than or equal to (\d+)")
"""The parser's message for a number that is too small or too large."""


def _usage_message(error: Any, words: list[str]) -> str:
    """The message of the parser's error, with what to write instead."""
    message = error.format_message().rstrip(".")
    if outside := _OUTSIDE.fullmatch(message):
        flag, side, bound = outside.groups()
        given = words[words.index(flag) + 1] if flag in words[:-1] else ""
        message = f"{flag} {given}".rstrip() + f": give {bound} or {'more' if side == 'greater' else 'fewer'}"
    verb = error.ctx.command_path if error.ctx is not None else _verb(words)
    # An error of the base class is about a surplus word.
    option = getattr(error, "option_name", "" if type(error) is _UsageError else None)
    fix = _INSTEAD.get((verb, option or ""), "")
    has_script = any(word.endswith(".py") or word == "-m" for word in words)
    takes_arguments = verb != "memkit predict" or has_script
    if not fix and option is not None and message.startswith("No such option") and takes_arguments:
        fix = _INSTEAD.get((verb, "--…"), "")
    if fix:
        near = did_you_mean(option or "", getattr(error, "possibilities", None) or ())
        message = message.partition(" (Possible")[0]
        message += f"{near} {fix[0].upper()}{fix[1:]}" if near else f"; {fix}"
    return f"{message} (see `{verb} --help`)"


def _verb(words: list[str]) -> str:
    """The verb of the command line, such as `"memkit predict"`, for an error of the parser without a context."""
    command: Any = typer.main.get_command(app)
    path = ["memkit"]
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path.append(word)
    return " ".join(path)


def main_and_exit() -> NoReturn:
    _open_closed_streams()
    environment.command_line[:] = sys.argv[1:]
    code = 0
    try:
        code = main()
        if not sys.stdout.closed:  # a script of `memkit run` may close it
            sys.stdout.flush()
    except SystemExit as error:  # rich's, where the reader of the help has ended
        if not (isinstance(error.__context__, BrokenPipeError) and "--help" in sys.argv):
            raise
    except OSError as error:
        of_answer = error.filename is None and error.errno in _NO_SPACE and sys.argv[1:2] != ["run"]
        if not of_answer:
            raise
        # At its end, Python writes what is left of the answer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"memkit: error: cannot write the answer: {error.strerror}", file=sys.stderr)
        code = InputError.exit_code
    raise SystemExit(code)


def _open_closed_streams() -> None:
    """Gives the standard streams that the caller closed (`>&-`) to /dev/null: Python has None for them, and the next
    file that is opened would get their number, and other programs' output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    # Standard input stays None, as without memkit: nothing reads it.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of standard output. Errors of other files have a name; those of a script of `memkit run` are its own."""
