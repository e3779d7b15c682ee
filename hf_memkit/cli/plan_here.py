"""What `memkit plan` does on a machine with the GPU: `--verify` and `--calibrate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_memkit.errors import InputError

if TYPE_CHECKING:
    import typer
    from rich.table import Table

    from hf_memkit.plan.plan import Plan
    from hf_memkit.plan.verified import Verified
    from hf_memkit.user_script import UserScript


def given_besides(context: typer.Context, *names: str) -> list[str]:
    """What was typed besides these parameters, each as it is typed."""
    typed = []
    for each in context.command.params:
        source = context.get_parameter_source(str(each.name))
        if each.name not in names and source is not None and source.name == "COMMANDLINE":
            typed.append(each)
    return [each.opts[0] if each.opts[0].startswith("-") else "-- ARGUMENTS" for each in typed]


def calibrated(run_dir: str | None, given: Sequence[str], *, as_json: bool) -> int:
    """
    Args:
        run_dir: a run's records; None: this machine's GPU is measured.
        given: options that have no effect here.

    Raises:
        InputError, RunError: as `calibrate` and `calibrate_by_run`; or one of the others was given.
    """
    if given:
        raise InputError(
            f"--calibrate: not with {', '.join(given)}. Measure this machine's GPU: memkit plan --calibrate. Read a "
            "run's records: memkit plan --calibrate RUN_DIR"
        )
    from hf_memkit.plan import calibrate

    if run_dir is None:
        found, file = calibrate.calibrate(said=_tell)
    else:
        found, file = calibrate.calibrate_by_run(run_dir)
    if as_json:
        print(json.dumps({**found.to_json(), "file": str(file)}, indent=2))
        return 0
    print(f"{found.gpu}: {found.said()}.")
    print(f"Later plans for this GPU use it: {file}")
    return 0


def verified(
    plan: Plan, script: UserScript, environment: Mapping[str, str] | None
) -> tuple[Plan, tuple[Verified, ...]]:
    """Runs what is proposed, as `verify` does; tells on standard error what runs and what came of it. Ctrl-C ends what
    runs, and the plan stands as far as it is verified."""
    from hf_memkit.cli.predict_script import ended_by_signals
    from hf_memkit.plan.verify import verify

    found: list[Verified] = []

    def done(each: Verified) -> None:
        found.append(each)
        if not each.passed:
            _tell(f"{each.judged.candidate.name}: {each.failed}")

    try:
        with ended_by_signals():
            plan, _ = verify(plan, script, environment=environment, said=_tell, done=done)
    except KeyboardInterrupt:
        _tell("stopped; no process of the script is left")
    if plan.proposed is not None and not any(each.passed for each in found):
        _tell(f"not verified: {plan.proposed.candidate.name}, now the best setup")
    return plan, tuple(found)


def show_verified(found: Sequence[Verified]) -> None:
    """A table of each run: measured beside predicted."""
    from rich.console import Console
    from rich.text import Text

    from hf_memkit.report.sanitize import text

    console = Console(highlight=False)
    for each in found:
        console.print()
        console.print(_table(each), crop=False)
        if not each.passed:
            console.print(Text(text(each.failed, 300), "red"))
            for line in each.last_lines:
                console.print(Text(f"  {text(line, 300)}", "dim"), crop=False)
        for note in each.notes:
            console.print(Text(f"Note: {text(note, 300)}.", "dim"))


def _table(found: Verified) -> Table:
    from hf_memkit.cli.tables import plain_table

    table = plain_table(found.title, "measured", "predicted")
    for row in found.rows():
        table.add_row(*row)
    return table


def _tell(line: str) -> None:
    print(f"memkit: {line}", file=sys.stderr, flush=True)
