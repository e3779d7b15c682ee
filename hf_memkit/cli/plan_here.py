"""What `memkit plan --verify` runs and shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_memkit.cli.options import tell

if TYPE_CHECKING:
    from rich.table import Table

    from hf_memkit.common.user_script import UserScript
    from hf_memkit.plan.measured_steps import Verified
    from hf_memkit.plan.plan import Plan


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
            tell(f"{each.judgement.candidate.name}: {each.failed}")

    try:
        with ended_by_signals():
            plan, _ = verify(plan, script, environment=environment, on_start=tell, on_end=done)
    except KeyboardInterrupt:
        tell("stopped; no process of the script is left")
    if plan.proposed is not None and not any(each.passed for each in found):
        tell(f"not verified: {plan.proposed.candidate.name}, now the best setup")
    return plan, tuple(found)


def show_verified(found: Sequence[Verified]) -> None:
    """A table of each run: measured beside predicted."""
    from rich.console import Console
    from rich.text import Text

    from hf_memkit.measuring.report.sanitize import text

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
