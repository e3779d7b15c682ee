"""`memkit doctor`: checks this machine, one line for each check, and prints fixes for what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from hf_memkit.cli.options import Json, option
from hf_memkit.cli.printing import print_json

if TYPE_CHECKING:
    from hf_memkit.checks.doctor import Check, Status
    from hf_memkit.common.answer.answer import Answer, LineKind

EXAMPLES = """[bold]Examples[/bold]

  memkit doctor                          checks everything except the disk's speed

  memkit doctor --nvme-path /mnt/nvme    also measures that disk with DeepSpeed's own reads and writes
"""


def doctor(
    nvme_path: Annotated[
        str | None, option("Folder on a fast disk: test it and measure its speed (some seconds).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Check this machine and print fixes for what is missing."""
    import os

    os.environ.setdefault("DS_LOG_LEVEL", "error")
    from rich.console import Console

    from hf_memkit.checks.doctor import diagnose
    from hf_memkit.common.answer.terminal import show

    checks = diagnose(nvme_path)
    needed = [check.name for check in checks if check.core and check.status == "missing"]
    if as_json:
        print_json([check.to_json() for check in checks])
    else:
        show(_answer(checks, needed), console=Console(soft_wrap=True, highlight=False))
    return 1 if needed else 0


def _answer(checks: Sequence[Check], needed: Sequence[str]) -> Answer:
    """A line for each check below the name of its group. `needed`: names of missing things that memkit needs."""
    from hf_memkit.common.answer.answer import Answer, Lines

    kinds: dict[Status, LineKind] = {"ok": "text", "warning": "warning", "missing": "strong"}
    width = max(len(check.name) for check in checks)
    blocks = []
    for group, of_group in groupby(checks, key=lambda check: check.group):
        blocks.append(Lines([group], "strong"))
        for check in of_group:
            blocks.append(Lines([f"  {check.status:<7}  {check.name:<{width}}  {check.finding}"], kinds[check.status]))
            if check.fix:
                blocks.append(Lines([f"{'':<{width + 13}}→ {check.fix}"]))
    if needed:
        verdict, reason = "memkit does not work on this machine without", ", ".join(needed)
        return Answer(title="memkit doctor", verdict=verdict, reason=reason, state="bad", blocks=blocks)
    return Answer(title="memkit doctor", verdict="memkit works on this machine", state="good", blocks=blocks)
