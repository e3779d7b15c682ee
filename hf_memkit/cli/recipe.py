"""`memkit recipe`: lists the recipes, shows a setup, exports it, or runs it.

Imports of torch and transformers happen inside the functions, so that `memkit --help` stays quick.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_memkit.hardware import Gpu
    from hf_memkit.recipe.run import Run

__all__ = ["EXAMPLES", "recipe"]

EXAMPLES = """[bold]Examples[/bold]

  memkit recipe                                              lists the recipes

  memkit recipe gpt2-on-16gb --data my.txt                   runs one (rehearses it if there is no GPU)

  memkit recipe gpt2-on-16gb --dry-run --gpu T4              shows every setting for a card, with its reason

  memkit recipe gpt2-on-16gb --set learning_rate=1e-5        changes any field of TrainingArguments

  memkit recipe gpt2-on-16gb --resume                        goes on with a run that was stopped

  memkit recipe gpt2-on-16gb --gpu-memory 16GB --export job  writes a plain script
"""


def recipe(
    name: Annotated[str | None, typer.Argument(help="A recipe's name, or a YAML file. None: list them.")] = None,
    variant: Annotated[
        str, typer.Option(help="Which of the recipe's variants; auto: the first that fits card, RAM and disk.")
    ] = "auto",
    model: Annotated[str | None, typer.Option(help="Hub ID or local folder, instead of the recipe's model.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Text, JSON-lines or parquet file, a folder of them, or a hub ID.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Resolve for this card, such as T4 or 'RTX 4090'.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Resolve for a card of this size with bf16, such as 16GB.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Resolve for this much RAM, such as 64GB.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens in a sequence.")] = None,
    output: Annotated[str, typer.Option(help="Folder for checkpoints, records and the model.")] = "",
    nvme_path: Annotated[
        str | None, typer.Option(help="Folder on a fast disk for what the infinity variant swaps.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any field of TrainingArguments.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --output.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show every setting, run nothing.")] = False,
    export: Annotated[str | None, typer.Option(metavar="DIR", help="Write a plain script that does the same.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the recipes, or run one."""
    from hf_memkit.cli import render

    if name is None:
        return render.recipes(as_json)
    output = _expand(output) or ""
    _prepare_libraries()
    if resume:
        elsewhere = {
            "--model": model,
            "--data": data,
            "--gpu": gpu,
            "--gpu-memory": gpu_memory,
            "--ram": ram,
            "--set": setting,
            "--max-steps": max_steps,
            "--sequence-length": sequence_length,
            "--nvme-path": nvme_path,
            "--overwrite": overwrite,
            "--dry-run": dry_run,
            "--export": export,
        }
        job, earlier = _earlier_run(name, variant, output, [option for option, value in elsewhere.items() if value])
        return _train(job, earlier, overwrite=False, as_json=as_json)

    from hf_memkit.hardware import gpu_of_size, named_gpu, this_machine
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.rehearse import rehearse
    from hf_memkit.recipe.resolve import Overrides, resolve
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import load_recipe
    from hf_memkit.recipe.settings import parse_settings
    from hf_memkit.units import parse_size

    model, data, nvme_path = (_expand(path) for path in (model, data, nvme_path))
    loaded = load_recipe(name)
    overrides = Overrides(
        variant=variant,
        model=model,
        data=data,
        max_steps=max_steps,
        sequence_length=sequence_length,
        output=output,
        nvme_path=nvme_path,
        settings=parse_settings(setting or []),
    )
    here = this_machine(nvme_path or output or ".")
    described = named_gpu(gpu) if gpu else gpu_of_size(gpu_memory) if gpu_memory else None
    if gpu and gpu_memory and described is not None:
        described = described.with_capacity(gpu_of_size(gpu_memory).capacity_bytes)
    machine = here.with_gpu(described) if described else here
    machine = machine.with_ram(parse_size(ram)) if ram else machine
    if nvme_path:  # checkpoints go to another disk than the swapped states
        machine = replace(machine, output_free_bytes=this_machine(output or ".").disk_free_bytes)
    resolved = resolve(loaded, machine, overrides, use_hub=hub_reachable())
    # What runs here: the setup itself on a card, its rehearsal without one. A card that is only described is shown.
    job = Run(loaded.name, resolved.variant, resolved.setup)
    shown_only = dry_run or export is not None
    if here.gpu is not None and described is not None and not shown_only:
        _refuse_another_card(described, here.gpu)
    if here.gpu is None and (described is None or not shown_only):
        rehearsed = rehearse(resolved)
        job = Run(loaded.name, resolved.variant, rehearsed.setup, resolved.setup, rehearsed.not_rehearsed)
    if dry_run:
        return render.setup(resolved, job, as_json)
    if export:
        from hf_memkit.recipe.export import export_script

        for problem in job.setup.problems:
            render.say_to_stderr(f"memkit: warning: the script is for another machine: this one {problem}")
        written = export_script(job, Path(export))
        return render.exported(written, as_json)
    if not as_json:
        render.opening(loaded, resolved, job)
    return _train(job, None, overwrite=overwrite, as_json=as_json)


def _expand(path: str | None) -> str | None:
    """`~` stands for the home folder also where the shell leaves it alone, as in `--output=~/runs`."""
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def _refuse_another_card(described: Gpu, here: Gpu) -> None:
    """A setup for a card that is larger, or computes in bf16, would fail on the one that is here."""
    from hf_memkit.errors import DoesNotFitError

    if described.usable_bytes > here.usable_bytes or (described.bf16 and not here.bf16):
        raise DoesNotFitError(
            f"this machine has {here.name}, which is smaller than {described.name} or lacks its bf16; leave out --gpu "
            f"and --gpu-memory to run here, or add --dry-run or --export"
        )


def _earlier_run(name: str, variant: str, output: str, others: list[str]) -> tuple[Run, dict[str, Any]]:
    """The run that `--resume` means, with the settings it was started with; `others` are options given besides."""
    from hf_memkit.errors import InputError
    from hf_memkit.recipe.output import unfinished_run
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import load_recipe

    if others:
        raise InputError(f"--resume goes on with the run's own settings; leave out {', '.join(others)}")
    _folder, earlier = unfinished_run(load_recipe(name).name, variant, output)
    return Run.from_json(earlier), earlier


def _train(job: Run, earlier: dict[str, Any] | None, *, overwrite: bool, as_json: bool) -> int:
    """Runs `job`; 0 if it finished, 1 if it was stopped."""
    from hf_memkit.cli import render
    from hf_memkit.errors import DoesNotFitError
    from hf_memkit.recipe.output import clear, refuse_used
    from hf_memkit.recipe.run import run

    if earlier is None:
        if not job.is_rehearsal and job.setup.problems:
            raise DoesNotFitError(f"variant {job.variant!r} {'; '.join(job.setup.problems)}")
        if not overwrite:
            refuse_used(job.output)
    say = render.say_to_stderr if as_json else render.say
    with _stdout_to_stderr() if as_json else contextlib.nullcontext():
        content = run(job, say, resume=earlier, before_writing=(lambda: clear(job.output)) if overwrite else None)
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        render.closing(job, content)
    return 0 if content["status"] == "finished" else 1


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keeps standard output for the JSON: Trainer prints its log lines there."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _prepare_libraries() -> None:
    """What must be set before torch is imported; and keeps messages that no user of memkit can act on out of sight."""
    import logging
    import os
    import warnings

    from hf_memkit.hardware import use_one_card

    use_one_card()
    os.environ.setdefault("DS_LOG_LEVEL", "error")  # read when deepspeed is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data loader forks
    if not Path("/dev/nvidiactl").exists():
        # Training on the CPU: waiting threads that spin make a busy machine several times slower. Read by OpenMP when
        # torch is imported, so it cannot wait until the setup is known.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to find that out
    for logger in ("torchao", "torch.utils._pytree", "accelerate", "bitsandbytes"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    # DeepSpeed and torch disagree about names of collectives, at every call.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
