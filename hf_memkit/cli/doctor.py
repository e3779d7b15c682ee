"""`memkit doctor`: checks this machine, one line for each check, and prints fixes for what is missing."""

from __future__ import annotations

import json
from typing import Annotated

from hf_memkit.cli.options import Json, option

EXAMPLES = """[bold]Examples[/bold]

  memkit doctor                          checks everything except the disk's speed

  memkit doctor --nvme-path /mnt/nvme    also measures that disk with DeepSpeed's own reads and writes
"""

_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor(
    nvme_path: Annotated[
        str | None, option("Folder on a fast disk: test it and measure its speed (some seconds).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Check this machine and print fixes for what is missing."""
    import os

    os.environ.setdefault("DS_LOG_LEVEL", "error")
    from hf_memkit.checks.doctor import diagnose

    lines = diagnose(nvme_path)
    needed = [line for line in lines if line.core and line.status == "missing"]
    if as_json:
        print(json.dumps([line.to_json() for line in lines], indent=2))
        return 1 if needed else 0

    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True, highlight=False)
    width = max(len(line.name) for line in lines)
    group = ""
    for line in lines:
        if line.group != group:
            group = line.group
            console.print(f"[bold]{escape(group)}[/bold]")
        colour = _COLOURS[line.status]
        console.print(f"  [{colour}]{line.status:<7}[/{colour}]  {escape(line.name):<{width}}  {escape(line.finding)}")
        if line.fix:
            console.print(f"  {'':<7}  {'':<{width}}  [bold]→ {escape(line.fix)}[/bold]")
    if needed:
        console.print(f"memkit does not work on this machine without: {', '.join(line.name for line in needed)}.")
    return 1 if needed else 0
