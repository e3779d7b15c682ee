"""Apply every rule to a subject or files: a DeepSpeed JSON, or arguments for HfArgumentParser with their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hf_memkit.checks import rules
from hf_memkit.checks.accelerate_files import SECTION, deepspeed_config, in_the_yaml, own_engine, processes
from hf_memkit.checks.other_files import LLAMA_FACTORY, Other, nothing_known
from hf_memkit.checks.reading import File, Kind, parse_json, read
from hf_memkit.checks.rule import RULES, Problem
from hf_memkit.checks.subject import Subject, walk
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError
from hf_memkit.setup.setup import Setup

assert rules.__path__  # imported for the registry that it fills

_STAGE: Final = "zero_optimization.stage"
_NAMES: Final = {
    "accelerate": "config of accelerate launch",
    "deepspeed": "DeepSpeed JSON",
    "fsdp": "JSON of fsdp_config",
    "recipe": "recipe",
}


def check(job: Setup | Subject) -> list[Problem]:
    """All problems of a setup or of a subject, in the order of the file's keys; empty if there are none."""
    subject = Subject.of_setup(job) if isinstance(job, Setup) else job
    problems = _apply(subject)
    if _stage_is_wrong(subject, problems):
        problems = _problems_at_every_stage(subject, problems)
    if subject.launcher is not None and subject.config_file == subject.launcher_file:
        needs = "in a DeepSpeed JSON (deepspeed_config_file)"
        at_keys_of_yaml: list[Problem | None] = []
        for problem in problems:
            if RULES[problem.rule].module == "launcher":
                at_keys_of_yaml.append(problem)
            elif problem.file != subject.config_file:
                fix = problem.fix.replace("in the DeepSpeed config", needs)
                at_keys_of_yaml.append(replace(problem, fix=fix))
            else:
                at_keys_of_yaml.append(in_the_yaml(problem, subject.launcher))
        problems = [problem for problem in at_keys_of_yaml if problem is not None]
    order = {path: number for number, (path, _) in enumerate(walk(subject.config or {}))}

    def place(problem: Problem) -> int:
        path = problem.key
        while path and path not in order:
            path = path.rpartition(".")[0]
        return order.get(path, len(order))

    return sorted(problems, key=place)


def _apply(subject: Subject) -> list[Problem]:
    """The problems of all rules, in their order."""
    return [problem for rule in RULES.values() for problem in rule.problems(subject)]


def _stage_is_wrong(subject: Subject, problems: list[Problem]) -> bool:
    """Whether the stage is no ZeRO stage, or is missing and a similar key is misspelt or misplaced."""
    if subject.has(_STAGE):
        return subject.at(_STAGE) not in (0, 1, 2, 3) or isinstance(subject.at(_STAGE), bool)
    strange = ("rejected-key", "unknown-key", "misplaced-key")
    keys = [problem.key.rpartition(".") for problem in problems if problem.rule in strange]
    names = [name.lower() for section, _, name in keys if section in ("", "zero_optimization")]
    return any(name == "zero_stage" or (4 <= len(name) <= 6 and get_close_matches(name, ["stage"])) for name in names)


def _problems_at_every_stage(subject: Subject, problems: list[Problem]) -> list[Problem]:
    """Problems of the stage itself, and those at every stage: the others follow from the wrong stage."""
    at_stages = [_apply(subject.at_stage(stage)) for stage in (0, 1, 2, 3)]
    everywhere = set.intersection(*({(each.rule, each.key) for each in at_stage} for at_stage in at_stages))
    of_the_stage = [each for each in problems if each.key == _STAGE and RULES[each.rule].module == "keys"]
    others = [each for each in at_stages[-1] if each.key != _STAGE and (each.rule, each.key) in everywhere]
    return of_the_stage + others


def check_file(path: str | Path, args_file: str | Path | None = None, **known: Any) -> list[Problem]:
    """All problems of a DeepSpeed JSON or an argument file.

    Args:
        path: the file; its keys show its kind. The JSON that an argument file names as `deepspeed:` is checked too.
        args_file: an argument file to check a DeepSpeed JSON against.
        known: further fields of `Subject`: `model`, `machine`, `gpus`, `nodes`, `here`.

    Raises:
        InputError: a file cannot be read, or is neither of the two.
    """
    return check(read_subject(read(path), None if args_file is None else read(args_file), **known))


def read_subject(file: File, arguments: File | None = None, **known: Any) -> Subject:
    """The subject in a file, with the arguments of a second file. `known`: further fields of `Subject`. Raises
    InputError if the second file has no arguments, or memkit does not check the first."""
    if refusal := not_checked(file):
        raise InputError(f"{file.path}: {refusal}")
    if file.kind == "recipe":
        raise InputError(f"{file.path}: this is a recipe; check it with `{command('memkit', 'check', file.path)}`")
    pinned = arguments is not None and arguments.other is not None and arguments.other.kind == LLAMA_FACTORY
    if arguments is not None and arguments.refusal and not pinned:
        raise InputError(f"--args {arguments.path}: {arguments.refusal}")
    if arguments is not None and arguments.kind not in ("arguments", "other"):
        name = _NAMES[arguments.kind]
        raise InputError(f"--args {arguments.path}: this is a {name}. Give a file of Trainer's arguments")

    config: File | None = file
    if file.kind == "fsdp":
        own_arguments = arguments or File(file.path, "arguments", {"fsdp": True})
        arguments = replace(own_arguments, content={**own_arguments.content, "fsdp_config": file.content})
        known |= {"fsdp_file": str(file.path)}
        config = deepspeed_of(arguments)
    if file.kind == "accelerate":
        own = arguments.content if arguments is not None else None
        gpus, nodes = processes(file.content)
        known = {"gpus": gpus, "nodes": nodes} | {name: value for name, value in known.items() if value is not None}
        known |= {"launcher": file.content, "launcher_file": str(file.path)}
        config = deepspeed_of_launcher(file, own)
    if file.kind == "arguments":
        if arguments is not None:
            raise InputError(f"{file.path}: this is an argument file; --args is for a DeepSpeed JSON. Omit it")
        config = deepspeed_of(file)
        arguments = file

    if config is not None:
        known |= {"config": config.content, "config_file": str(config.path), "duplicates": config.duplicates}
    if arguments is not None:
        known |= {"arguments": arguments.content, "arguments_file": str(arguments.path)}
        settings = _named(arguments, "fsdp_config", "fsdp")
        if settings is not None and settings.path != arguments.path:
            known |= {"fsdp_file": str(settings.path)}
        if settings is not None:
            known |= {"arguments": {**arguments.content, "fsdp_config": settings.content}}
        known |= {"duplicate_arguments": arguments.duplicates, "pinned": pinned}
    return Subject(**known)


def deepspeed_of_launcher(file: File, arguments: Mapping[str, Any] | None = None) -> File | None:
    """The DeepSpeed config of a job launched by accelerate: the JSON of the arguments or of the YAML, or the YAML's
    own; None with another or no engine, or a missing JSON."""
    if own_engine(file.content) != "DEEPSPEED":
        return None
    section = file.content.get(SECTION)
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    named = (arguments or {}).get("deepspeed") or named
    if named:
        return deepspeed_of(replace(file, content={"deepspeed": named}))
    return replace(file, kind="deepspeed", content=deepspeed_config(file.content, arguments))


def not_checked(file: File) -> Other | None:
    """The kind of a file that memkit does not check, with the file to give instead; None if it checks it."""
    return file.other or (nothing_known(file.content) if file.kind == "arguments" else None)


def deepspeed_of(file: File) -> File | None:
    """The DeepSpeed config in, or named by, an argument file; None if there is none, or its file does not exist."""
    return _named(file, "deepspeed", "deepspeed")


def _named(file: File, argument: str, kind: Kind) -> File | None:
    """The config in an argument's value, or in the file that it names; None if there is none, or no such file."""
    value: Any = file.content.get(argument)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return File(file.path, kind, *parse_json(f"{file.path}: {argument}", value))
    if isinstance(value, Mapping):
        return File(file.path, kind, value)
    for path in (Path(value), file.path.parent / value) if isinstance(value, str) and value else ():
        if path.exists():
            return replace(read(path), path=path, kind=kind)
    return None
