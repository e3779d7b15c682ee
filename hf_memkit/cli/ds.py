"""`memkit ds`: lists, shows and copies DeepSpeed presets, sized for a model and a machine, and checks any JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_memkit.cli.check import CheckOptions, check_files
from hf_memkit.cli.environment import InEnvironment
from hf_memkit.cli.options import Json, SizingOptions, option, with_options
from hf_memkit.cli.printing import print_json, say, say_to_stderr
from hf_memkit.common.errors import InputError
from hf_memkit.setup.request import Request

if TYPE_CHECKING:
    from hf_memkit.setup.setup import Setup


app = typer.Typer(
    name="ds",
    help="DeepSpeed presets: plain JSON for Trainer, sized for your model and GPU.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog="""[bold]Examples[/bold]

  memkit ds list

  memkit ds copy zero3-infinity ds.json --model gpt2-xl --gpu-memory 16GB --ram 32GB --nvme-path /fast

  memkit ds check ds.json --args args.yaml
""",
)


_Name = Annotated[str, typer.Argument(help="A preset's name.")]
_DESTINATION = typer.Argument(metavar="[DEST]", help="File or folder, or - to print. Default: NAME.json.")


@app.command("list", cls=InEnvironment, help="List the presets, what each saves and what it costs.")
def list_presets(as_json: Json = False) -> int:
    from hf_memkit.common.answer.answer import Lines, Table
    from hf_memkit.common.answer.terminal import show_blocks
    from hf_memkit.deepspeed.presets import preset_index

    index = preset_index()
    if as_json:
        print_json([info.to_json() for info in index.values()])
        return 0
    rows = [(info.name, info.summary, info.saves, info.costs) for info in index.values()]
    more = "Details and requirements: memkit ds show NAME. Sized for a model: memkit ds copy NAME --model MODEL."
    show_blocks([Table(("preset", "what it is", "saves", "costs"), rows, whole=True), Lines([more])])
    return 0


@app.command(cls=InEnvironment, help="Show a preset: its use, needs and JSON; with --model, the memory it needs.")
@with_options
def show(name: _Name, *, options: SizingOptions, as_json: Json = False) -> int:
    from hf_memkit.deepspeed.presets import preset_index
    from hf_memkit.recipes.resolve import resolve

    setup = resolve(Request(deepspeed=name, **vars(options)))[0]
    info = preset_index()[name]
    if as_json:
        print_json({**info.to_json(), **_to_json(setup)})
        return 0
    needs = [f"{info.gpus} GPUs or more"] if info.gpus > 1 else []
    needs += [f"deepspeed{info.deepspeed}"] if info.deepspeed else []
    rows = {
        info.name: info.summary,
        "For": info.audience,
        "Saves": info.saves,
        "Costs": info.costs,
        "Needs": ", ".join([*needs, *info.packages]),
        "Needs a GPU": info.not_on_cpu,
    }
    for problem in setup.problems:
        say(f"PROBLEM: {problem}")
    for label, value in rows.items():
        if value:
            say(f"{label}: {value}")
    _print_sizes(setup)
    print_json(setup["deepspeed.config"])
    return 0


@app.command(cls=InEnvironment, help="Write a preset to a file; with --model, its buffers for that model and machine.")
@with_options
def copy(
    name: _Name,
    destination: Annotated[str | None, _DESTINATION] = None,
    *,
    options: SizingOptions,
    accelerate: Annotated[bool, option("Also write an accelerate launch config.", "--accelerate")] = False,
    overwrite: Annotated[bool, option("Overwrite existing files.", "--overwrite")] = False,
    as_json: Json = False,
) -> int:
    import yaml

    from hf_memkit.common.user_files import refuse_existing, user_path, write_text
    from hf_memkit.deepspeed.presets import accelerate_config, refuse_other_deepspeed
    from hf_memkit.recipes.resolve import resolve

    setup = resolve(Request(deepspeed=name, **vars(options)))[0]
    if destination == "-":
        if accelerate or as_json:
            raise InputError("-: prints the DeepSpeed JSON alone. Give a file, or omit --accelerate and --json")
        refuse_other_deepspeed(name)
        print_json(setup["deepspeed.config"])
        return 0
    target = user_path(destination or f"{name}.json")
    if target.is_dir() or (destination or "").endswith("/"):
        target = target / f"{name}.json"
    launch = target.with_name(f"{target.stem}-accelerate.yaml")
    files = [target, launch] if accelerate else [target]
    refuse_other_deepspeed(name)
    for file in files:
        refuse_existing(file, overwrite=overwrite)
    write_text(target, json.dumps(setup["deepspeed.config"], indent=2) + "\n", overwrite=overwrite)
    if accelerate:
        job, stage = setup.resolved_for, int(setup.zero.get("stage", 0))
        content = accelerate_config(str(target), stage=stage, gpus=job.gpus, nodes=job.nodes)
        write_text(launch, yaml.safe_dump(content, sort_keys=False), overwrite=overwrite)
    if as_json:
        print_json({"files": [str(file) for file in files], **_to_json(setup)})
        return 0
    for problem in setup.problems:
        say_to_stderr(f"PROBLEM: {problem}")
    _print_sizes(setup)
    for file in files:
        say(f"Wrote {file}")
    say(f'Use it: TrainingArguments(..., deepspeed="{target}")')
    if accelerate:
        say(f"Or without that argument: accelerate launch --config_file {launch} SCRIPT")
    return 0


@app.command("check", cls=InEnvironment, help="Find known mistakes in a DeepSpeed JSON, before any model is loaded.")
@with_options
def check_file(file: Annotated[str, typer.Argument(help="A DeepSpeed JSON.")], *, options: CheckOptions) -> int:
    return check_files([file], options)


def _to_json(setup: Setup) -> dict[str, Any]:
    job = setup.resolved_for
    return {
        "config": setup["deepspeed.config"],
        "model": job.model.to_json() if job.model is not None else None,
        "sizes": setup.get("deepspeed.sizes", []),
        "ledger": setup.ledger.to_json() if job.model is not None else None,
        "machine": job.machine.to_json(),
        "notes": list(setup.notes),
        "problems": list(setup.problems),
    }


def _print_sizes(setup: Setup) -> None:
    from hf_memkit.cli.setup_blocks import ledger_block
    from hf_memkit.common.answer.answer import AnswerBlock, Lines, Table
    from hf_memkit.common.answer.terminal import show_blocks

    model, gpu = setup.resolved_for.model, setup.resolved_for.machine.gpu
    blocks: list[AnswerBlock] = []
    if model is not None:
        sizes = f"{model.parameters:,} parameters, {model.largest_parameter:,} of them in the largest tensor"
        about_model = f"Model: {model.name}, {sizes}."
        about_gpu = "GPU: none here, and none given (--gpu)."
        if gpu is not None:
            about_gpu = f"GPU: {gpu.name} ({gpu.source})."
        rows = [
            (size["key"].removeprefix("zero_optimization."), json.dumps(size["value"]), size["reason"])
            for size in setup["deepspeed.sizes"]
        ]
        blocks += [Lines([about_model, about_gpu]), Table(("key", "value", "why"), rows), ledger_block(setup.ledger)]
        blocks.append(Lines(["Not included: activations, the loss, and the processes themselves."]))
    blocks.append(Lines([f"Note: {note}" for note in setup.notes]))
    show_blocks(blocks)
