"""`memkit preset`: lists the presets, shows one with its reasons, writes one as a file of Trainer's arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_memkit.cli.environment import InEnvironment
from hf_memkit.cli.options import Json, SizingOptions, flags_given, option, with_options
from hf_memkit.cli.printing import print_json
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError, SettingError, did_you_mean
from hf_memkit.common.user_files import refuse_existing, user_path, write_text
from hf_memkit.setup.request import Request

if TYPE_CHECKING:
    from hf_memkit.presets.argument_file import ArgumentFile
    from hf_memkit.setup.setup import Setup


app = typer.Typer(
    name="preset",
    help="Show or write memory settings for your own script, each with its reason.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog="""[bold]Examples[/bold]

  memkit preset show 8bit --model gpt2-xl --gpu-memory 16GB --batch-size 32

  memkit preset copy 8bit args.json --args mine.json

      Use it: python SCRIPT args.json, with no other argument: …

  memkit preset copy qlora sft.yaml --for trl             then: trl sft --config sft.yaml
""",
)

Name = Annotated[str, typer.Argument(help="A preset, or presets and techniques joined by +, such as lean+lora.")]
_SET = option(
    "Override a TrainingArguments field, or a value such as rank=32. Repeatable.", "--set", metavar="KEY=VALUE"
)
_ARGS = option("Your own arguments (YAML or JSON). They take precedence.", "--args", metavar="FILE")
_TECHNIQUE = option("Use this technique instead of the preset's for the same purpose. Repeatable.", metavar="NAME")
_FOR = option("Script that reads them: trainer, run_clm or trl.", "--for", metavar="SCRIPT")
_DESTINATION = typer.Argument(
    metavar="[DEST]", help="File (.yaml or .json), folder, or - to print. Default: NAME.yaml (run_clm: NAME.json)."
)


@dataclass(frozen=True, kw_only=True)
class PresetOptions(SizingOptions):
    """Options of `show` and `copy`."""

    batch_size: Annotated[int | None, option("Sequences in an optimizer step, on all GPUs together.", min=1)] = None
    sequence_length: Annotated[int | None, option("Tokens in a sequence.", min=1)] = None
    settings: Annotated[list[str] | None, _SET] = None
    args: Annotated[str | None, _ARGS] = None
    technique: Annotated[list[str] | None, _TECHNIQUE] = None
    script: Annotated[str, _FOR] = "trainer"

    def request(self, name: str) -> Request:
        sizing = {field.name: getattr(self, field.name) for field in fields(SizingOptions)}
        return Request(
            preset=name,
            techniques=tuple(self.technique or ()),
            global_batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            **sizing,
        )


@app.command("list", cls=InEnvironment, help="List the presets and the jobs that each is for, or the techniques.")
def list_presets(
    techniques: Annotated[bool, option("List the techniques: what each saves and costs.", "--techniques")] = False,
    as_json: Json = False,
) -> int:
    from hf_memkit.cli.preset_answer import presets_answer, techniques_answer
    from hf_memkit.common.answer.terminal import show
    from hf_memkit.presets import PRESETS
    from hf_memkit.setup.techniques.registry import TECHNIQUES

    if as_json:
        presets = [
            {"name": name, "for_whom": each.audience, "techniques": list(each.techniques)}
            for name, each in PRESETS.items()
        ]
        print_json({"presets": presets, "techniques": [t.to_json() for t in TECHNIQUES.values()]})
    else:
        show(techniques_answer() if techniques else presets_answer())
    return 0


@app.command(cls=InEnvironment, help="Show a preset: each setting with its reason; with --model, the memory it needs.")
@with_options
def show(name: Name, *, options: PresetOptions, as_json: Json = False) -> int:
    from hf_memkit.cli.preset_answer import preset_answer
    from hf_memkit.common.answer import terminal

    setup = _resolve(name, options)
    script = options.script
    if as_json:
        print_json({**setup.to_json(), **_file_of(setup, script).to_json()})
    else:
        terminal.show(preset_answer(setup, _file_of(setup, script, "DEEPSPEED.json")))
    return 0


@app.command(cls=InEnvironment, help="Write a preset and your own arguments to a YAML or JSON file for your script.")
@with_options
def copy(
    name: Name,
    destination: Annotated[str | None, _DESTINATION] = None,
    *,
    options: PresetOptions,
    overwrite: Annotated[bool, option("Replace existing files.", "--overwrite")] = False,
    as_json: Json = False,
) -> int:
    from hf_memkit.catalog.former_arguments import former_arguments
    from hf_memkit.cli import preset_answer

    script = options.script
    target = _target(name, destination, script)
    setup = _resolve(name, options)
    assert setup.request is not None
    if former := former_arguments(setup.request.arguments):  # the parsers of the installed libraries fail on them
        lines = (f"{setup.request.args_file}: {key}: {each.fix} ({each.why})" for key, each in former.items())
        raise SettingError("\n".join(lines))
    shown = _file_of(setup, script, "DEEPSPEED.json")
    _refuse_without_use(shown, name, script)
    if target is None:
        print(shown.text(as_yaml=True), end="")
        preset_answer.print_problems(setup, _file_of(setup, script))
        return 0

    new_folder = not target.parent.exists()
    files = _write(target, setup, script, options.args, overwrite=overwrite)
    if as_json:
        deepspeed = _deepspeed(files) if "deepspeed.config" in setup else ""
        written = _file_of(setup, script, deepspeed)
        print_json({**setup.to_json(), "files": [str(file) for file in files], **written.to_json()})
        return 0
    preset_answer.print_files(setup, shown, files, script, new_folder=new_folder)
    return 0


def _resolve(name: str, options: PresetOptions) -> Setup:
    """The setup of the preset. All input is checked before anything is written."""
    from hf_memkit.presets.not_in_file import SCRIPTS
    from hf_memkit.recipes.resolve import read_own_arguments, resolve_partly
    from hf_memkit.setup.bf16_on_gpus import emulated_by_setup
    from hf_memkit.setup.techniques.offload_fsdp import NEEDS_SEVERAL_GPUS

    script = options.script
    request = read_own_arguments(options.request(name), options.settings or (), options.args)
    if script not in SCRIPTS:
        fix = did_you_mean(script, SCRIPTS) or f"; write one of {', '.join(SCRIPTS)}"
        raise InputError(f"--for {script}: unknown{fix}")
    if request.nvme_path is not None:
        request = replace(request, nvme_path=_folder(request.nvme_path))
    needs_model = " and ".join(flags_given(options, "ram", "sequence_length"))
    no_model = SettingError(f"{needs_model}: no effect without a model. Add --model, or omit {needs_model}")
    if needs_model and not (request.model or request.arguments.get("model_name_or_path")):
        raise no_model  # before torch is imported

    setup = resolve_partly(request)
    if request.nvme_path is not None and "nvme_path" not in str(setup.get("deepspeed.config")):
        unused = f"preset {request.preset!r} does not use the disk"
        raise SettingError(f"--nvme-path: {unused}. Omit --nvme-path, or choose preset infinity")
    if problem := emulated_by_setup(setup):
        setup = replace(setup, problems=(problem, *setup.problems))
    if NEEDS_SEVERAL_GPUS in setup.problems:  # one GPU is the default here, not a known number
        others = tuple(each for each in setup.problems if each != NEEDS_SEVERAL_GPUS)
        setup = replace(setup, problems=others).with_notes(NEEDS_SEVERAL_GPUS)
    job = setup.resolved_for
    if job.model is None:
        if needs_model:
            raise no_model
        return setup
    if job.machine.gpu is None:
        return setup.with_notes("no GPU here and none given (--gpu): computed for a GPU with bf16, of any size")
    # Only if a size was solved for, the ledger has activations on the GPU.
    solved = any(row.place == "device" and row.category in ("activations", "loss") for row in setup.ledger.rows)
    if not setup.problems and not solved:
        predict = command("memkit", "predict", "--model", job.model.name, "--preset", request.preset)
        setup = setup.with_notes(f"to see whether this batch fits, type: {predict}")
    return setup


def _folder(path: str) -> str:
    if not path.strip():
        raise InputError("--nvme-path: empty; give a folder on a fast disk")
    folder = user_path(path)
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise InputError(f"--nvme-path {path}: no such folder. Give an existing folder, or a new one in it.")
    return str(folder)


def _file_of(setup: Setup, script: str, deepspeed: str = "") -> ArgumentFile:
    """The argument file. `deepspeed`: path of the DeepSpeed JSON if the preset has one."""
    from hf_memkit.presets.argument_file import argument_file

    assert setup.request is not None
    own = setup.request.arguments
    return argument_file(setup, own=own, replaced=setup.replaced, script=script, deepspeed=deepspeed)


def _refuse_without_use(file: ArgumentFile, name: str, script: str) -> None:
    """Refuses an empty file, and one with which the script would train differently from the preset."""
    if not file.entries:
        raise InputError(f"preset {name!r} sets no arguments. To see its lines of code: memkit preset show {name}")
    missing = [each.setting for each in file.outside if each.essential]
    if missing and script != "trainer":
        lacks = f"this script has no argument for {'; '.join(missing)}, which preset {name!r} needs"
        raise InputError(f"--for {script}: {lacks}. For your own script: memkit preset copy {name} --for trainer")


def _target(name: str, destination: str | None, script: str) -> Path | None:
    """The path of the YAML or JSON file to write; None for standard output."""
    if destination == "-":
        return None
    own_name = f"{name}.json" if script == "run_clm" else f"{name}.yaml"
    path = user_path(destination) if destination else Path(own_name)
    if path.is_dir() or (destination or "").endswith("/"):
        path = path / own_name
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise InputError(f"{path}: not .yaml or .json; give such a file, a folder (new: with / at its end), or -")
    return path


def _write(target: Path, setup: Setup, script: str, args: str | None, *, overwrite: bool) -> list[Path]:
    """Writes the file and, beside it, the JSON for DeepSpeed or, with FSDP, the YAML for `accelerate launch`; returns
    all of them."""
    from hf_memkit.presets.argument_file import accelerate_file

    config = setup.get("deepspeed.config")
    launch = accelerate_file(setup)
    files = [target]
    if launch:
        files.append(target.with_name(f"{target.stem}-accelerate.yaml"))
    if config is not None:
        files.append(target.with_name(f"{target.stem}-deepspeed.json"))
    if args is not None and any(file.exists() and file.samefile(user_path(args)) for file in files):
        raise InputError(f"{target}: --args reads this file; give another name")
    for file in files:
        refuse_existing(file, overwrite=overwrite)

    deepspeed = _deepspeed(files) if config is not None else ""
    text = _file_of(setup, script, deepspeed).text(as_yaml=target.suffix.lower() != ".json")
    write_text(target, text, overwrite=overwrite)
    if config is not None:
        write_text(files[1], json.dumps(config, indent=2) + "\n", overwrite=overwrite)
    elif launch:
        write_text(files[1], launch, overwrite=overwrite)
    return files


def _deepspeed(files: list[Path]) -> str:
    return str(files[1]) if len(files) > 1 else ""
