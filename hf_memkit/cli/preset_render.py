"""What `memkit preset` prints for a person."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from hf_memkit.cli.render import say, say_to_stderr
from hf_memkit.cli.tables import ledger_table, plain_table, settings_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_memkit.presets.argument_file import ArgumentFile
    from hf_memkit.setup.setup import Setup


def presets() -> None:
    """The presets, and the names of the techniques."""
    from hf_memkit.presets import PRESETS
    from hf_memkit.setup.techniques.registry import FAMILIES, TECHNIQUES

    table = plain_table("preset", "for whom", "techniques")
    for name, each in PRESETS.items():
        table.add_row(name, each.audience, ", ".join(each.techniques))
    Console(highlight=False).print(table)
    say("")
    say("Techniques; join them to a preset by + (memkit preset list --techniques: what each saves and costs):")
    for family in FAMILIES:
        names = [name for name, each in TECHNIQUES.items() if each.family == family]
        if names:
            say(f"  {family.replace('_', ' ')}: {', '.join(names)}")
    say("")
    say("Show one: memkit preset show NAME. Write its arguments to a file: memkit preset copy NAME args.yaml.")


def techniques() -> None:
    """Every technique with what it saves and costs, and when not to use it; a block each, which any width can show."""
    from hf_memkit.setup.techniques.registry import FAMILIES, TECHNIQUES

    console = Console(highlight=False)
    for family in FAMILIES:
        found = [each for each in TECHNIQUES.values() if each.family == family]
        if found:
            console.print(f"[bold]{family.replace('_', ' ')}[/bold]")
        for each in found:
            table = plain_table("", "")
            table.show_header = False
            values = ", ".join(f"{name} ({kind.__name__})" for name, kind in each.values.items())
            rows = {"saves": each.saves, "costs": each.costs, "not when": each.not_when, "values": values}
            for what, text in rows.items():
                if text:
                    table.add_row(f"    {what}", escape(text))
            console.print(f"  {each.name}")
            console.print(table)


def shown(setup: Setup, file: ArgumentFile) -> None:
    """A preset: what the machine lacks for it, for whom it is, its techniques, every setting with its reason, the
    ledger, and what a file cannot say."""
    from hf_memkit.presets import PRESETS
    from hf_memkit.setup.techniques.registry import TECHNIQUES

    for problem in setup.problems:
        say(f"PROBLEM: {problem}")
    for part in setup.preset.split("+"):
        each = PRESETS.get(part.strip())
        say(f"{part.strip()}: {each.audience}" if each else f"{part.strip()}: a technique")
    wide = Console(highlight=False)
    table = plain_table("technique", "saves", "costs")
    for name in setup.techniques:
        table.add_row(name, escape(TECHNIQUES[name].saves), escape(TECHNIQUES[name].costs))
    wide.print(table)
    say("")
    wide.print(settings_list(s for s in setup.settings if s.key not in ("model.origin", "model.architecture")))
    if setup.ledger.rows:
        say("")
        wide.print(ledger_table(setup.ledger, wide.width))
    _aside(setup, file, say)
    beside = "".join(f" --technique {name}" for name in _beside(setup))
    say(f"Write this to a file: memkit preset copy {setup.preset} args.yaml{beside}")


def written(setup: Setup, shown: ArgumentFile, files: list[Path], script: str, *, new_folder: bool = False) -> None:
    """After the files were written: what they are, how they are used, and what they cannot say (standard error)."""
    target = files[0]
    if missing := [each.setting for each in shown.outside if each.essential]:
        say_to_stderr(
            f"Note: this file alone is not preset {setup.preset!r}. Your script must also set: "
            f"{'; '.join(missing)} (below)"
        )
    if new_folder:
        say(f"Created the folder {target.parent}")
    for file in files:
        say(f"Wrote {file}")
    _use(target, script)
    _aside(setup, shown, say_to_stderr)
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")


def _use(target: Path, script: str) -> None:
    """How the file is used."""
    is_json = target.suffix.lower() == ".json"
    if script == "trl":
        say(f"Use it: trl sft --config {target}")
        if is_json:
            say("TRL reads YAML; JSON is YAML too")
    elif is_json:
        say(f"Use it: python SCRIPT {target}, with no other argument: that is how transformers' examples read it")
    elif script == "run_clm":
        say_to_stderr(f"Note: transformers' examples read JSON only; memkit preset copy … {target.stem}.json")
    else:
        say(f'Use it: HfArgumentParser(TrainingArguments).parse_yaml_file("{target}")')


def printed(setup: Setup, file: ArgumentFile) -> None:
    """After the file went to standard output, whose comments say the rest; on standard error."""
    outside = len(file.outside)
    if outside:
        things = "1 thing" if outside == 1 else f"{outside} things"
        say_to_stderr(f"Note: {things} cannot be set by arguments; see the comments at the end")
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")


def _beside(setup: Setup) -> tuple[str, ...]:
    """Techniques that were named beside the preset."""
    return setup.request.techniques if setup.request is not None else ()


def _aside(setup: Setup, file: ArgumentFile, tell: Callable[[str], None]) -> None:
    for each in file.replaced:
        tell(f"Override: {each}")
    if file.outside:
        tell("An argument file cannot set this; do it in the script or the shell:")
        for line in file.outside:
            tell(f"  {line.setting}: {line.reason}")
            tell(f"      {line.line}")
        beside = f", techniques={json.dumps(_beside(setup))}" if _beside(setup) else ""
        tell(f'Or do all of it in Python: hf_memkit.preset("{setup.preset}"{beside}, …).trainer(…)')
    for note in file.notes:
        tell(f"Note: {note}")
