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

    presets = [(name, each.audience, ", ".join(each.techniques)) for name, each in PRESETS.items()]
    families = []
    for family in FAMILIES:
        if names := [name for name, each in TECHNIQUES.items() if each.family == family]:
            families.append((f"  {family.replace('_', ' ')}", ", ".join(names)))
    join = "Techniques, which can be joined to a preset by + (memkit preset list --techniques shows more):"
    show = "Show one: memkit preset show NAME. Write its arguments to a file: memkit preset copy NAME args.yaml."
    table = Table(("preset", "for", "techniques"), presets, whole=True)
    blocks = (table, Lines([join]), Facts(families), Lines([show]))
    reason = "memory settings for your own script."
    return Answer(title="Presets", verdict=f"{len(PRESETS)} presets", reason=reason, blocks=blocks)


def techniques_answer() -> Answer:
    """All techniques with savings, costs, and when not to use them."""
    from hf_memkit.setup.techniques.registry import FAMILIES, TECHNIQUES

    blocks: list[AnswerBlock] = []
    for family in FAMILIES:
        members = [each for each in TECHNIQUES.values() if each.family == family]
        if members and blocks:
            blocks.append(Lines([""]))
        if members:
            blocks.append(Lines([family.replace("_", " ")], "strong"))
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

    lines = [f"PROBLEM: {problem}" for problem in setup.problems]
    for part in map(str.strip, setup.preset.split("+")):
        lines.append(f"{part}: {PRESETS[part].audience if part in PRESETS else 'a technique'}")
    rows = [(name, TECHNIQUES[name].saves, TECHNIQUES[name].costs) for name in setup.techniques]
    options = "".join(f" --technique {name}" for name in _added_techniques(setup))
    return Answer(
        title=f"Preset: {setup.preset}",
        verdict=lines[0],
        state="bad" if setup.problems else "none",
        blocks=(
            Lines(lines[1:]),
            Table(("technique", "saves", "costs"), rows, whole=True),
            settings_block(s for s in setup.settings if s.key not in ("model.origin", "model.architecture")),
            ledger_block(setup.ledger),
            Lines(list(_remarks(setup, file)), "command"),
            Lines([f"Write this to a file: memkit preset copy {setup.preset} args.yaml{options}"], "command"),
        ),
    )


def print_files(setup: Setup, file: ArgumentFile, paths: list[Path], script: str, *, new_folder: bool = False) -> None:
    """Prints the written files and how to use them; to standard error the settings that they cannot contain."""
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")
    if missing := [each.setting for each in file.outside if each.essential]:
        also = f"Your script must also set: {'; '.join(missing)} (below)"
        say_to_stderr(f"Note: this file alone is not preset {setup.preset!r}. {also}")
    if new_folder:
        say(f"Created the folder {paths[0].parent}")
    for path in paths:
        say(f"Wrote {path}")
    _print_use(setup, paths, script)
    for line in _remarks(setup, file):
        say_to_stderr(line)


def _print_use(setup: Setup, paths: list[Path], script: str) -> None:
    """Prints how to use the files."""
    target = paths[0]
    is_json = target.suffix.lower() == ".json"
    launcher = next((path for path in paths if path.stem.endswith("-accelerate")), None)
    job = setup.resolved_for
    several = job.nodes > 1
    on_each = " --main_process_ip FIRST_MACHINE --machine_rank NUMBER" if several else ""
    start = "python"
    if launcher is not None:
        start = f"accelerate launch --config_file {launcher}{on_each}"
    elif job.processes > 1:
        nodes = f"--nnodes {job.nodes} --master_addr FIRST_MACHINE --node_rank NUMBER " if several else ""
        start = f"torchrun {nodes}--nproc_per_node {job.gpus}"
    if script == "trl":
        with_launcher = f" --accelerate_config {launcher}{on_each}" if launcher is not None else ""
        say(f"Use it: trl sft --config {target}{with_launcher}")
        if is_json:
            say("TRL reads YAML; JSON is YAML too")
    elif is_json:
        say(f"Use it: {start} SCRIPT {target}, with no other argument: that is how transformers' examples read it")
    elif script == "run_clm":
        say_to_stderr(f"Note: transformers' examples read JSON only: memkit preset copy … {target.stem}.json")
    else:
        say(f'Use it: HfArgumentParser(TrainingArguments).parse_yaml_file("{target}"); start it with: {start} SCRIPT')


def print_problems(setup: Setup, file: ArgumentFile) -> None:
    """Prints to standard error how many settings the file lacks, and the setup's problems."""
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")
    if count := len(file.outside):
        settings = "1 setting" if count == 1 else f"{count} settings"
        say_to_stderr(f"Note: {settings} cannot be in this file; see the comments at its end")


def _added_techniques(setup: Setup) -> tuple[str, ...]:
    """Techniques that were requested in addition to the preset."""
    return setup.request.techniques if setup.request is not None else ()


def _remarks(setup: Setup, file: ArgumentFile) -> Iterator[str]:
    """Lines: what the file overrides, and settings that it cannot contain."""
    for each in file.replaced:
        yield f"Override: {each}"
    if file.outside:
        yield "An argument file cannot set this; do it in the script or the shell:"
        for line in file.outside:
            yield f"  {line.setting}: {line.reason}"
            yield f"      {line.line}"
        added = _added_techniques(setup)
        techniques = f", techniques={json.dumps(added)}" if added else ""
        yield f'Or do all of it in Python: hf_memkit.preset("{setup.preset}"{techniques}, …).trainer(…)'
    for note in file.notes:
        yield f"Note: {note}"
