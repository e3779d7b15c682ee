"""The answers of `memkit preset`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memkit.cli.printing import say, say_to_stderr
from hf_memkit.cli.setup_blocks import ledger_block, settings_block
from hf_memkit.common.answer.answer import Answer, AnswerBlock, Facts, Lines, Table

if TYPE_CHECKING:
    from hf_memkit.presets.argument_file import ArgumentFile
    from hf_memkit.setup.setup import Setup


def presets_answer() -> Answer:
    """The presets, and the names of the techniques."""
    from hf_memkit.presets import PRESETS
    from hf_memkit.setup.techniques.registry import FAMILIES, TECHNIQUES

    rows = [(name, each.audience, ", ".join(each.techniques)) for name, each in PRESETS.items()]
    by_family = {
        family: ", ".join(name for name, each in TECHNIQUES.items() if each.family == family) for family in FAMILIES
    }
    joined = "Techniques; join them to a preset by + (memkit preset list --techniques: what each saves and costs):"
    show_one = "Show one: memkit preset show NAME. Write its arguments to a file: memkit preset copy NAME args.yaml."
    return Answer(
        title="Presets",
        verdict=f"{len(PRESETS)} presets",
        reason="memory settings for your own script.",
        blocks=(
            Table(("preset", "for", "techniques"), rows, whole=True),
            Lines([joined]),
            Facts([(f"  {family.replace('_', ' ')}", names) for family, names in by_family.items() if names]),
            Lines([show_one]),
        ),
    )


def techniques_answer() -> Answer:
    """All techniques with savings, costs, and when not to use them."""
    from hf_memkit.setup.techniques.registry import FAMILIES, TECHNIQUES

    blocks: list[AnswerBlock] = []
    for family in FAMILIES:
        members = [each for each in TECHNIQUES.values() if each.family == family]
        blocks += [Lines([""])] if members and blocks else []
        blocks += [Lines([family.replace("_", " ")], "strong")] if members else []
        for each in members:
            values = ", ".join(f"{name} ({kind.__name__})" for name, kind in each.values.items())
            rows = {"saves": each.saves, "costs": each.costs, "not when": each.not_when, "values": values}
            blocks.append(Facts([(f"  {what}", text) for what, text in rows.items() if text], heading=each.name))
    reason = "what each saves and costs, and when not to use it."
    return Answer(title="Techniques", verdict=f"{len(TECHNIQUES)} techniques", reason=reason, blocks=blocks)


def preset_answer(setup: Setup, file: ArgumentFile) -> Answer:
    """A preset: its problems on this machine, audience, techniques, settings with reasons, ledger, and settings that
    a file cannot contain."""
    from hf_memkit.presets import PRESETS
    from hf_memkit.setup.techniques.registry import TECHNIQUES

    parts = [part.strip() for part in setup.preset.split("+")]
    lines = [f"PROBLEM: {problem}" for problem in setup.problems]
    lines += [f"{part}: {PRESETS[part].audience}" if part in PRESETS else f"{part}: a technique" for part in parts]
    rows = [(name, TECHNIQUES[name].saves, TECHNIQUES[name].costs) for name in setup.techniques]
    beside = "".join(f" --technique {name}" for name in _beside(setup))
    return Answer(
        title=f"Preset: {setup.preset}",
        verdict=lines[0],
        state="bad" if setup.problems else "none",
        blocks=(
            Lines(lines[1:]),
            Table(("technique", "saves", "costs"), rows, whole=True),
            settings_block(s for s in setup.settings if s.key not in ("model.origin", "model.architecture")),
            ledger_block(setup.ledger),
            Lines(list(_aside(setup, file)), "command"),
            Lines([f"Write this to a file: memkit preset copy {setup.preset} args.yaml{beside}"], "command"),
        ),
    )


def written(setup: Setup, shown: ArgumentFile, files: list[Path], script: str, *, new_folder: bool = False) -> None:
    """Prints the written files and how to use them; to standard error the settings that they cannot contain."""
    target = files[0]
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")
    if missing := [each.setting for each in shown.outside if each.essential]:
        say_to_stderr(
            f"Note: this file alone is not preset {setup.preset!r}. Your script must also set: "
            f"{'; '.join(missing)} (below)"
        )
    if new_folder:
        say(f"Created the folder {target.parent}")
    for file in files:
        say(f"Wrote {file}")
    _print_use(target, script)
    for line in _aside(setup, shown):
        say_to_stderr(line)


def _print_use(target: Path, script: str) -> None:
    """Prints how to use the file."""
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
    """Prints to standard error that the printed file lacks settings, and the setup's problems."""
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")
    outside = len(file.outside)
    if outside:
        things = "1 thing" if outside == 1 else f"{outside} things"
        say_to_stderr(f"Note: {things} cannot be set by arguments; see the comments at the end")


def _beside(setup: Setup) -> tuple[str, ...]:
    """Techniques that were requested in addition to the preset."""
    return setup.request.techniques if setup.request is not None else ()


def _aside(setup: Setup, file: ArgumentFile) -> Iterator[str]:
    """Lines: what the file overrides, and settings that it cannot contain."""
    for each in file.replaced:
        yield f"Override: {each}"
    if file.outside:
        yield "An argument file cannot set this; do it in the script or the shell:"
        for line in file.outside:
            yield f"  {line.setting}: {line.reason}"
            yield f"      {line.line}"
        beside = f", techniques={json.dumps(_beside(setup))}" if _beside(setup) else ""
        yield f'Or do all of it in Python: hf_memkit.preset("{setup.preset}"{beside}, …).trainer(…)'
    for note in file.notes:
        yield f"Note: {note}"
