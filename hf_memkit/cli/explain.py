"""`memkit explain`: explains an out-of-memory message, a log or a run's records."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_memkit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_memkit.oom import Explanation

__all__ = ["EXAMPLES", "explain"]

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
        str | None,
        typer.Option("--args", metavar="FILE", help="The job's arguments (YAML or JSON), which the advice uses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Explains an out-of-memory error and lists the changes that save most."""
    explanations, instead = _explanations(source, _arguments(args) if args is not None else None)
    if as_json:
        print(json.dumps([explanation.to_json() for explanation in explanations], indent=2))
    elif instead is not None:
        print(instead)
    else:
        width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
        first, *others = explanations
        print(first.text(width))
        if others:
            print("\nOther ranks (--json has the details)")
        for other in others:
            print(f"  {other.headline()}")
    return 0 if any(explanation.found is not None for explanation in explanations) else 1


def _arguments(path: str) -> Mapping[str, Any] | None:
    """What the user's file of arguments holds, each field of its own type, with the DeepSpeed config that it names.
    None for a file of another tool, which is noted."""
    from hf_memkit.checks.apply import deepspeed_of
    from hf_memkit.checks.reading import read
    from hf_memkit.own_arguments import former_lines, read_file

    file = read(path)
    if file.refusal:
        print(f"memkit: note: --args {path}: {file.refusal}", file=sys.stderr)
        return None
    own, _ = read_file(file)
    for line in former_lines(path, own):
        print(f"memkit: note: {line}", file=sys.stderr)
    config = deepspeed_of(file)
    return own if config is None else {**own, "deepspeed": config.content}


def _explanations(source: str | None, arguments: Mapping[str, Any] | None) -> tuple[list[Explanation], str | None]:
    """The explanations; and what to print instead if there is nothing to explain."""
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


def _of_log(
    raw: io.BufferedReader[Any], path: Path | None, arguments: Mapping[str, Any] | None
) -> tuple[list[Explanation], str | None]:
    from hf_memkit.oom import Explanation, explain_oom
    from hf_memkit.report.sanitize import text

    if raw.peek(1):
        start = raw.peek(64)[:64]
        marked = start.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in start
        encoding = "utf-16" if marked else "utf-8"  # PowerShell's `>` writes UTF-16
        return [explain_oom(io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline=""), arguments)], None
    name = "Standard input" if path is None else text(str(path))
    how = "python train.py 2>&1 | memkit explain" if path is None else "python train.py > train.log 2>&1"
    why = "a pipe or `>` alone omits standard error, where errors go"
    return [Explanation(None)], f"{name} is empty: {why}. Type: {how}"


def _of_run(folder: Path) -> tuple[list[Explanation], str | None]:
    """One explanation for each rank that ran out of memory in the run's last training."""
    from hf_memkit.oom import Explanation, explain_killed, explain_oom, explain_records
    from hf_memkit.report.load import load_run
    from hf_memkit.report.sanitize import text

    found: list[Explanation] = []
    run = load_run(folder)
    for rank in run.ranks:
        error = rank.end.get("error") if rank.end is not None else None
        if rank.ooms:
            found.append(explain_records(rank.run, rank.ooms[-1], modules={"rows": list(rank.modules)}))
        elif rank.ending.kind == "killed":
            last = rank.steps[-1] if rank.steps else {}
            in_ram = rank.ending.cause == "host memory"
            found.append(explain_killed(rank.run, last, rank.ending.why, in_ram=in_ram))
        elif error:
            found.append(explain_oom(str(error)))
    told = [explanation for explanation in found if explanation.found is not None]
    if told:
        return told, None
    name = text(folder)
    instead = f"{name}: no out-of-memory error recorded. How the run ended: {run.ending.why.rstrip('.')}."
    return [Explanation(None)], f"{instead}\nFor its memory use, type: memkit report {shlex.quote(name)}"
