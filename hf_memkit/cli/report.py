"""`memkit report`: shows the records of a run, finished or running, as text, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_memkit.cli.options import Json, option
from hf_memkit.cli.printing import print_json, typed_command

EXAMPLES = """[bold]Examples[/bold]

  memkit report out                          one screen: the peak, what filled it, how it ended, what to change

  memkit report out --html report.html       the same with charts, in one file that opens offline

  memkit report out --follow                 while it runs; Ctrl-C stops the display, not the job

  memkit report out --modules                with the table by module
"""


def report(
    run_dir: Annotated[str, typer.Argument(help="Folder with memory-rank*.jsonl: the Trainer's output_dir.")],
    html: Annotated[str | None, option("Write a page to this file, or to memory-report.html in this folder.")] = None,
    follow: Annotated[bool, option("Update the report until the job ends.", "--follow")] = False,
    modules: Annotated[bool, option("Add parameters and bytes by module.", "--modules")] = False,
    as_json: Json = False,
) -> int:
    """Show the memory report of a run, finished or running."""
    from rich.console import Console

    from hf_memkit.common.answer.document import check_file
    from hf_memkit.common.answer.terminal import show
    from hf_memkit.common.errors import InputError
    from hf_memkit.measuring.report import following
    from hf_memkit.measuring.report.answer import PAGE, report_answer, report_json, write_page
    from hf_memkit.measuring.report.load import load_run

    if follow and as_json:
        raise InputError("--follow, --json: mutually exclusive. Omit --follow to print the run once.")
    console = Console(highlight=False)
    if html is not None:
        path = Path(html)
        path = path / PAGE if path.is_dir() else path
        check_file(path)
    if follow:
        run = following.follow(run_dir, console, modules=modules)
        if run is None:
            return 0
    else:
        run = load_run(run_dir)
        if as_json:
            print_json(report_json(run))
        elif html is None:
            show(report_answer(run, modules=modules), console=console)
    if html is not None:
        write_page(run, path, typed_command())
        if not as_json:
            console.print(f"Wrote {path}", markup=False, soft_wrap=True)
    return 0
