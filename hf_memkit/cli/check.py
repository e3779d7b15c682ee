"""`memkit check`: finds known mistakes in DeepSpeed JSON, accelerate's YAML, argument files and recipes, before any
model is loaded."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hf_memkit.cli.options import Json, MachineOptions, option, tell, with_options
from hf_memkit.cli.printing import print_json
from hf_memkit.common.resources import documentation
from hf_memkit.common.user_files import user_path

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.checks import Problem, Severity
    from hf_memkit.checks.reading import File
    from hf_memkit.common.answer.answer import Answer, LineKind, State


EXAMPLES = """[bold]Examples[/bold]

  memkit check ds.json                           a DeepSpeed JSON alone

  memkit check ds.json --args args.yaml          also against Trainer's arguments

  memkit check zero3.yaml --args args.yaml       the YAML of accelerate launch

  memkit check args.yaml --model gpt2-xl --gpu-memory 16GB --ram 32GB

  memkit check recipe.yaml --json

  memkit check ds.json --output-format sarif     for code scanning

[bold]Severities[/bold]

  error      the run fails, or its result is wrong

  warning    the run loses memory or time, or a setting has no effect

  hint       advice that a good config may ignore
"""

_FORMATS: Final = ("text", "json", "sarif")
_KINDS: Final[Mapping[Severity, LineKind]] = {"error": "strong", "warning": "warning", "hint": "note"}


@dataclass(frozen=True, kw_only=True)
class CheckOptions(MachineOptions):
    """What files are checked against, and how problems are printed."""

    args: Annotated[
        str | None,
        option("Trainer's arguments (YAML or JSON), for a DeepSpeed or FSDP JSON or accelerate's YAML."),
    ] = None
    model: Annotated[str | None, option("Also check buffers and memory for this model (Hub ID or local folder).")] = (
        None
    )
    gpus: Annotated[int | None, option("GPUs (processes) on each machine.", min=1)] = None
    nvme_path: Annotated[str | None, option("Folder whose free disk space counts.")] = None
    fail_on: Annotated[
        str, option("Lowest severity that makes the exit code 1.", "--fail-on", metavar="error|warning|hint")
    ] = "error"
    output_format: Annotated[str | None, option("Output format.", "--output-format", metavar="text|json|sarif")] = None
    as_json: Json = False


@with_options
def check(
    files: Annotated[
        list[str],
        typer.Argument(
            help="DeepSpeed or FSDP JSON, YAML of accelerate launch, argument files (YAML or JSON), or recipes."
        ),
    ],
    *,
    options: CheckOptions,
) -> int:
    return check_files(files, options)


def check_files(files: list[str], options: CheckOptions) -> int:
    """Prints the problems of the files. Returns 1 if one has at least the severity of `--fail-on`, else 0.

    Files of kinds that memkit does not check are hints, unless all are. Unreadable files are reported last.
    """
    from hf_memkit.checks import not_checked
    from hf_memkit.checks.reading import read
    from hf_memkit.checks.rule import SEVERITIES
    from hf_memkit.common.errors import InputError

    _refuse_wrong_options(options)
    read_files: list[File] = []
    unreadable: list[str] = []
    for path in files:
        try:
            read_files.append(read(path))
        except InputError as error:
            unreadable.append(str(error))
    others = {file.path: other for file in read_files if (other := not_checked(file)) is not None}
    if len(others) == len(read_files):
        raise InputError("\n".join([*(f"{path}: {other}" for path, other in others.items()), *unreadable]))

    arguments = None if options.args is None else read(options.args)
    known = _known(options)
    problems = [problem for file in read_files for problem in _problems(file, arguments, known)]
    has_arguments = arguments is not None or any(file.kind == "arguments" for file in read_files)
    if has_arguments and importlib.util.find_spec("transformers") is None:
        missing = "names and values of arguments are not checked: transformers is not in this environment"
        tell(f"{missing}. Name the Python that trains: --python PATH")
    _print(problems, ", ".join(str(file.path) for file in read_files), options)

    if unreadable:
        raise InputError("\n".join(unreadable))
    failing = SEVERITIES[: SEVERITIES.index(options.fail_on) + 1]
    return 1 if any(problem.severity in failing for problem in problems) else 0


def _refuse_wrong_options(options: CheckOptions) -> None:
    from hf_memkit.checks.rule import SEVERITIES
    from hf_memkit.common.errors import InputError, did_you_mean

    output, nvme_path = options.output_format or "text", options.nvme_path
    choices = (("--fail-on", options.fail_on, SEVERITIES), ("--output-format", output, _FORMATS))
    for name, value, allowed in choices:
        if value not in allowed:
            raise InputError(f"{name} {value}: not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
    if options.as_json and options.output_format not in (None, "json"):
        raise InputError(f"--json and --output-format {output}: two formats. Give only one")
    if nvme_path is not None and not user_path(nvme_path).is_dir():
        raise InputError(f"--nvme-path {nvme_path}: no such folder. Give a folder on the disk for the swap files")


def _known(options: CheckOptions) -> dict[str, Any]:
    """The fields of `Subject` that the options describe: model, machine, GPUs, and whether the job runs here."""
    from hf_memkit.catalog.models import describe, hub_reachable, refuse_absent

    if options.model is not None:
        refuse_absent(options.model)
    described = any((options.gpu, options.gpu_memory, options.ram))
    machine = options.machine(options.nvme_path) if described or options.model or options.nvme_path else None
    if machine is not None and described:
        machine = replace(machine, memlock_bytes=None)  # this machine's limit for locked memory
    if machine is not None and machine.gpu is None and not described and not options.nvme_path:
        machine = None  # a laptop or a CI runner: the job will run elsewhere
    model = None
    if options.model is not None:
        model = describe(options.model, use_hub=hub_reachable(), use_built_in=True)
    return {"model": model, "machine": machine, "gpus": options.gpus, "here": not described}


def _problems(file: File, arguments: File | None, known: Mapping[str, Any]) -> list[Problem]:
    from hf_memkit.checks import Problem, not_checked, read_subject
    from hf_memkit.checks import check as apply_rules

    if (other := not_checked(file)) is not None:
        return [Problem("not-checked", "hint", str(file.path), "", None, other.kind, other.advice.rstrip("."))]
    if file.kind == "recipe":
        return _recipe_problems(file, known["machine"], known["gpus"])
    return apply_rules(read_subject(file, arguments, **known))


def _recipe_problems(file: File, machine: Machine | None, gpus: int | None) -> list[Problem]:
    """The problems of a recipe's file; if it has none, those of each variant's setup for the recipe's GPU."""
    from hf_memkit.catalog.hardware import this_machine
    from hf_memkit.checks import Problem, Subject
    from hf_memkit.checks import check as apply_rules
    from hf_memkit.common.errors import InputError, RecipeError
    from hf_memkit.recipes.resolve import resolve
    from hf_memkit.recipes.schema import read_recipe
    from hf_memkit.setup.request import Request

    try:
        recipe = read_recipe(file.path)
    except RecipeError as error:
        return [_read_line(file, line) for line in error.problems]
    problems: list[Problem] = []
    here = machine or this_machine()
    for variant in recipe.variants:
        try:
            setup, _ = resolve(Request(variant=variant, gpus=gpus), recipe=recipe, here=here)
        except InputError as error:
            key, fix = f"variants.{variant}", "list variants and values with `memkit recipe`"
            problems.append(Problem("recipe", "error", str(file.path), key, None, str(error), fix))
            continue
        subject = Subject.of_setup(setup)
        subject = replace(subject, ledger=setup.ledger) if machine else replace(subject, machine=None)
        problems += [
            replace(problem, file=str(file.path), key=f"variants.{variant}: {problem.key}")
            for problem in apply_rules(subject)
        ]
    return problems


def _read_line(file: File, line: str) -> Problem:
    """A line of RecipeError, `FILE: KEY: [VALUE:] what is allowed`, as a problem."""
    from hf_memkit.checks import Problem

    _, _, rest = line.partition(f"{file.path}: ")
    key, _, what = rest.partition(": ")
    value: Any = file.content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    fix = "write an allowed value"
    if what == "missing":
        what, fix = "a recipe must have this key", "add the key"
    elif what.startswith("unknown key"):
        fix = "rename or delete the key"
    return Problem("recipe", "error", str(file.path), key, value, what, fix)


def _print(problems: list[Problem], names: str, options: CheckOptions) -> None:
    """Prints the problems of the files `names` in the format of the options."""
    from rich.console import Console

    from hf_memkit.common.answer.terminal import show

    if options.as_json or options.output_format == "json":
        print_json([problem.to_json() for problem in problems])
    elif options.output_format == "sarif":
        from hf_memkit.checks.sarif import sarif

        print_json(sarif(problems))
    else:
        show(_answer(problems, names), console=Console(soft_wrap=True, highlight=False))


def _answer(problems: list[Problem], names: str) -> Answer:
    from hf_memkit.checks.rule import SEVERITIES
    from hf_memkit.common.answer.answer import Answer, Lines

    if not problems:
        return Answer(title="memkit check", verdict=f"No known mistakes in {names}.", state="good")
    counts = Counter(problem.severity for problem in problems)
    shown = [f"{counts[each]} {each}{'s' * (counts[each] > 1)}" for each in SEVERITIES if each in counts]
    blocks = []
    for problem in sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity)):
        blocks.append(Lines([f"{problem.severity} {problem.place}"], _KINDS[problem.severity]))
        blocks.append(Lines([f"    {problem.why} ({problem.rule})", f"    → {problem.fix}"]))
    blocks.append(Lines([f"All rules with their sources: {documentation('checks.md')}"]))
    state: State = "bad" if counts["error"] else "near"
    return Answer(title="memkit check", verdict=f"{', '.join(shown)} in {names}", state=state, blocks=blocks)
