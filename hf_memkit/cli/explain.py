"""`memkit explain`: explains an out-of-memory message, a log or a run's records."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_memkit.cli.options import Json, option
from hf_memkit.cli.printing import print_json
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_memkit.measuring.out_of_memory import Explanation


EXAMPLES = """[bold]Examples[/bold]

  memkit explain train.log                     a log of any size

  python train.py 2>&1 | memkit explain

  memkit explain train.log --args args.yaml    advice from your arguments

  memkit explain out/                          a recorded run: measured savings
"""

_HOW = "Type memkit explain FILE, memkit explain RUN_DIR, or python train.py 2>&1 | memkit explain"


def explain(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|RUN_DIR|-]", help="Log or message, or the folder of a run. Default, and -: standard input."
        ),
    ] = None,
    args: Annotated[
        str | None, option("The job's arguments (YAML or JSON), which the advice uses.", "--args", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> int:
    """Explains an out-of-memory error, or an error of FSDP, and lists what helps most."""
    from rich.console import Console

    from hf_memkit.common.answer.answer import Lines
    from hf_memkit.common.answer.safe_text import printable
    from hf_memkit.common.answer.terminal import show

    arguments, notes = _arguments(args) if args is not None else (None, [])
    explanations, empty = _explanations(source, arguments)
    for note in notes:
        print(f"memkit: {printable(note, 400)}", file=sys.stderr)
    if as_json:
        print_json([explanation.to_json() for explanation in explanations])
    elif empty is not None:
        print(empty)
    else:
        first, *others = explanations
        answer = first.answer()
        if others:
            headlines = [other.headline() for other in others]
            answer = answer.then(Lines(["Other ranks (--json has the details):"]), Lines(headlines, "command"))
        width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
        show(answer, console=Console(width=width, highlight=False))
    return 0 if any(explanation.error is not None for explanation in explanations) else 1


def _arguments(path: str) -> tuple[Mapping[str, Any], list[str]]:
    """The arguments in the user's file, with the DeepSpeed config that it names, and a line for each part that is
    ignored. Another tool's file is no error. Raises InputError if the file cannot be read."""
    from hf_memkit.catalog.argument_values import check_values, misspelt
    from hf_memkit.catalog.former_arguments import former_arguments
    from hf_memkit.catalog.library_versions import current_name
    from hf_memkit.checks.apply import deepspeed_of, deepspeed_of_launcher
    from hf_memkit.checks.reading import read
    from hf_memkit.setup.own_arguments import former_lines

    file = read(path)
    if file.refusal and not file.content:  # a shell script
        return {}, [f"--args ignored: {file.path}: {file.refusal}"]
    if file.kind == "recipe":
        return {}, [f"--args ignored: {file.path}: a recipe. Give the arguments of the job"]
    if file.kind == "accelerate":
        engine = deepspeed_of_launcher(file)
        note = f"{file.path}: a config of accelerate launch; keys other than DeepSpeed's are ignored"
        return ({"deepspeed": engine.content} if engine is not None else {}), [note]
    sections = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler")
    if file.kind == "deepspeed" and any(isinstance(file.content.get(name), dict) for name in sections):
        return {"deepspeed": file.content}, []

    checked, ignored = check_values(file.content)
    for name in checked:
        if near := misspelt(str(name)):
            ignored.append(f"{name}: did you mean {' or '.join(near)}?")
    ignored += [f"{name}: appears twice, the last is used" for name in file.duplicates]
    # A value of another type may be another tool's: `bf16: auto`.
    values = {name: value for name, value in file.content.items() if current_name(str(name)) not in checked} | checked
    try:
        config = deepspeed_of(file)
        values |= {"deepspeed": config.content} if config is not None else {}
    except InputError as error:
        ignored.append(f"deepspeed: {error}")

    notes = []
    if not file.refusal:
        notes = former_lines(str(file.path), file.content)
        former = former_arguments(file.content)
        ignored = [line for line in ignored if line.partition(":")[0] not in former]
    if ignored or file.other:
        whose = f"{file.other.kind}; unknown keys are ignored" if file.other else "ignored, or read as another tool's"
        note = f"{file.path}: {whose}"
        notes.append(f"{note}: {'; '.join(ignored[:_LISTED])}" if ignored else note)
    return _with_model(values), notes


_LISTED = 5
"""Ignored arguments that the note names."""


def _with_model(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the sizes of a model in a local folder, by which an allocation is recognised as logits."""
    from hf_memkit.measuring.out_of_memory.other_names import job_of
    from hf_memkit.measuring.out_of_memory.run_view import mapping

    name = job_of(values).argument("model_name_or_path")
    if not isinstance(name, str) or not name:
        return values
    try:
        config = mapping(json.loads((Path(name) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return values
    sizes = {**config, **mapping(config.get("text_config"))}
    return {key: sizes[key] for key in ("vocab_size", "num_attention_heads", "n_head") if key in sizes} | values


def _explanations(source: str | None, arguments: Mapping[str, Any] | None) -> tuple[list[Explanation], str | None]:
    """(the explanations, what to print if there is nothing to explain)."""
    if source is None or source == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError(f"no log on standard input. {_HOW}")
        return _of_log(io.BufferedReader(sys.stdin.buffer), None, arguments)
    path = Path(source)
    if path.is_dir():
        if arguments is not None:
            raise InputError(f"--args: the records in {source!r} already hold the run's arguments. Omit --args")
        return _of_run(path)
    try:
        with path.open("rb") as log:
            return _of_log(log, path, arguments)
    except OSError as error:
        raise InputError(f"{source!r}: cannot be read ({error.strerror}). {_HOW}") from error


_PATIENCE_S = 2.0


@contextmanager
def _printing_progress(what: str) -> Iterator[None]:
    """Prints what is being done, if it takes longer than `_PATIENCE_S`."""
    timer = Timer(_PATIENCE_S, lambda: print(f"memkit: {what} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _of_log(
    raw: io.BufferedReader[Any], path: Path | None, arguments: Mapping[str, Any] | None
) -> tuple[list[Explanation], str | None]:
    from hf_memkit.common.answer.safe_text import printable
    from hf_memkit.measuring.out_of_memory import Explanation, explain_oom

    if raw.peek(1):
        start = raw.peek(64)[:64]
        marked = start.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in start
        encoding = "utf-16" if marked else "utf-8"  # PowerShell's `>` writes UTF-16
        with _printing_progress(f"reading {'standard input' if path is None else printable(str(path))} to its end"):
            return [
                explain_oom(io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline=""), arguments)
            ], None
    name = "Standard input" if path is None else printable(str(path))
    how = "python train.py 2>&1 | memkit explain" if path is None else "python train.py > train.log 2>&1"
    why = "a pipe or `>` alone omits standard error, where errors go"
    return [Explanation(None)], f"{name} is empty: {why}. Type: {how}"


def _of_run(folder: Path) -> tuple[list[Explanation], str | None]:
    """One explanation for each rank that ran out of memory in the run's last training."""
    from hf_memkit.common.answer.safe_text import printable
    from hf_memkit.measuring.out_of_memory import Explanation, explain_killed, explain_oom, explain_records
    from hf_memkit.measuring.report.load import load_run

    explanations: list[Explanation] = []
    run = load_run(folder)
    for rank in run.ranks:
        error = rank.end.get("error") if rank.end is not None else None
        if rank.ooms:
            explanations.append(explain_records(rank.run, rank.ooms[-1], modules={"rows": list(rank.modules)}))
        elif rank.ending.kind == "killed":
            last = rank.steps[-1] if rank.steps else {}
            in_ram = rank.ending.cause == "host memory"
            explanations.append(explain_killed(rank.run, last, rank.ending.why, in_ram=in_ram))
        elif error:
            engine = f"distributed_type: {rank.run.get('engine', '')}"  # FSDP's errors need it
            explanations.append(explain_oom(f"{error}\n\n{engine}"))
    if known := [explanation for explanation in explanations if explanation.error is not None]:
        return known, None
    name = printable(folder)
    none = f"{name}: no out-of-memory error recorded. How the run ended: {run.ending.why.rstrip('.')}."
    return [Explanation(None)], f"{none}\nFor its memory use, type: {command('memkit', 'report', folder)}"
