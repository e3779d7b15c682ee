"""Runs a recipe's folder: in this process, in processes that it starts, or as one rank of a launcher.

Functions import torch and transformers, so that `memkit --help` stays fast.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from hf_memkit.cli import printing
from hf_memkit.cli.environment import command_line
from hf_memkit.cli.options import INTERRUPTED, MOST_GPUS, flags_given, runs
from hf_memkit.common.errors import InputError
from hf_memkit.run.ranks import (
    FOLDER_VARIABLE,
    MASTER_PORT,
    LaunchLayout,
    Ranks,
    errors_to_launcher,
    leave_exit_code,
    ranks_from_environment,
)

if TYPE_CHECKING:
    from hf_memkit.run.folder import RecipeRun


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """Options for a run of a recipe's folder."""

    gpus: Annotated[int | None, runs("GPUs on each machine.", "--gpus", min=1, max=MOST_GPUS)] = None
    nodes: Annotated[int | None, runs("Machines.", "--nodes", min=1, max=MOST_GPUS)] = None
    node_rank: Annotated[int | None, runs("Number of this machine, from 0.", min=0)] = None
    master_addr: Annotated[str | None, runs("Address of machine 0.")] = None
    master_port: Annotated[int | None, runs("Free port of machine 0. Default: 29500.", min=1, max=65535)] = None
    resume: Annotated[bool, runs("Continue a run that was stopped.", "--resume")] = False
    overwrite: Annotated[bool, runs("Replace the run in the folder.", "--overwrite")] = False
    as_json: Annotated[bool, runs("Print JSON.", "--json")] = False

    @property
    def shown_only(self) -> bool:
        """Whether nothing will run."""
        return False

    def place(self, ranks: Ranks, gpus: int = 1, nodes: int = 1) -> LaunchLayout:
        """The processes: the launcher's, else the requested ones, else `gpus` and `nodes`. Refuses options that
        contradict each other or the launcher, or are incomplete."""
        if ranks.launched:
            return self._place_of_launcher(ranks)
        address, port = self.master_addr or "", self.master_port or MASTER_PORT
        place = LaunchLayout(self.gpus or gpus, self.nodes or nodes, self.node_rank or 0, address, port)
        if place.nodes == 1:
            if names := ", ".join(self._of_several_machines()):
                raise InputError(f"{names}: only for several machines. Add --nodes N, or omit {names}")
            return place
        missing = [] if place.master_addr else ["--master-addr ADDRESS (of machine 0)"]
        missing += [f"--node-rank N (0 to {place.nodes - 1})"] if self.node_rank is None else []
        if missing and not self.shown_only:
            raise InputError(f"--nodes {place.nodes}: on every machine, add {' and '.join(missing)}")
        if place.node_rank >= place.nodes:
            raise InputError(f"--node-rank {place.node_rank}: too large. Write 0 to {place.nodes - 1}")
        return place

    def _of_several_machines(self) -> list[str]:
        flags = flags_given(self, "master_addr", "master_port")
        return [*flags, "--node-rank"] if self.node_rank else flags

    def _place_of_launcher(self, ranks: Ranks) -> LaunchLayout:
        place = LaunchLayout(ranks.local_world_size, ranks.nodes)
        if place.processes != ranks.world_size:
            counts = f"{ranks.world_size} processes, {ranks.local_world_size} of them on this machine"
            raise InputError(f"the launcher started {counts}. Start the same number on each machine")
        started = f"the launcher started {place.gpus} processes on each of {place.nodes} machines"
        if self.gpus not in (None, place.gpus):
            raise InputError(f"--gpus {self.gpus}: {started}. Omit --gpus")
        if self.nodes not in (None, place.nodes):
            raise InputError(f"--nodes {self.nodes}: {started}. Omit --nodes")
        names = ", ".join(self._of_several_machines())
        if names and FOLDER_VARIABLE not in os.environ:  # memkit starts its ranks with all options
            raise InputError(f"{names}: set by the launcher. Omit {names}")
        return place


def as_one_of_its_ranks(job: Callable[[Ranks], int]) -> int:
    """Returns `job(ranks)`. Errors of a rank go to the process that started it; Ctrl-C prints one line."""
    ranks = ranks_from_environment()
    try:
        with errors_to_launcher():
            return job(ranks)
    except KeyboardInterrupt as interrupt:  # typer would exit silently
        if FOLDER_VARIABLE not in os.environ:  # otherwise the process that started this one prints it
            print(f"\nmemkit: {'; '.join(('interrupted', *map(str, interrupt.args)))}", file=sys.stderr)
        return INTERRUPTED if FOLDER_VARIABLE not in os.environ else 1


def run_folder(folder: Path, options: FolderOptions, ranks: Ranks) -> int:
    """Trains as the files of the folder say, also if the user changed them; returns the exit code as `train`."""
    from hf_memkit.catalog.hardware import use_one_gpu
    from hf_memkit.run.folder import RecipeRun, refuse_state, written_run
    from hf_memkit.run.launch import launch
    from hf_memkit.run.machine import refuse_too_large

    if not ranks.is_first:
        return train(RecipeRun.from_json(ranks.share("job")), ranks, options)
    job, content = written_run(folder)
    refuse_state(folder, content["status"], resume=options.resume, overwrite=options.overwrite)
    place = options.place(ranks, job.gpus, job.nodes)
    _same_processes(job, place)
    if place.processes > 1 and not ranks.launched:
        refuse_too_few_gpus(place)
        return launch(command_line, place)
    if place.gpus == 1:
        if (visible := job.setup.get("environment.CUDA_VISIBLE_DEVICES")) is not None:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(visible))
        use_one_gpu()
    refuse_mistakes(job)
    refuse_too_large(job, printing.say_to_stderr)
    ranks.share("job", job.to_json())
    return train(job, ranks, options)


def train(job: RecipeRun, ranks: Ranks, options: FolderOptions, write: Callable[[], object] | None = None) -> int:
    """Trains `job`; 0 if finished, as in a shell 128 and the signal's number if one stopped it. `write`: writes its
    folder."""
    from hf_memkit.cli.recipe_answer import closing
    from hf_memkit.prediction.worker import close_workers
    from hf_memkit.run.training import run

    close_workers()
    as_json = options.as_json
    say = printing.say_to_stderr if as_json else printing.say
    if not ranks.is_first:
        say = printing.silent
    output, errors = LastingStream(sys.stdout), LastingStream(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        # Standard output is for the JSON: Trainer prints its logs there.
        with contextlib.redirect_stdout(errors) if as_json else contextlib.nullcontext():
            content = run(job, say, ranks, resume=options.resume, overwrite=options.overwrite, write=write)
        if ranks.is_first and as_json:
            printing.print_json(content)
        elif ranks.is_first:
            closing(job, content)
    code = 128 + signal.Signals[content["stopped_by"]] if content["stopped_by"] else 0
    if FOLDER_VARIABLE not in os.environ:
        return code
    leave_exit_code(ranks, code)
    return 0


class LastingStream(io.TextIOBase):
    """A standard stream without which a training goes on, where its reader has ended: `| head`, a lost connection."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._kept():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept():
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # from here on it writes to nothing
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def refuse_too_few_gpus(place: LaunchLayout) -> None:
    """Refuses fewer GPUs than processes, which would share one. No GPU means a rehearsal."""
    import torch

    visible = torch.cuda.device_count()
    if 0 < visible < place.gpus:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = f"CUDA_VISIBLE_DEVICES={variable} leaves {visible}" if variable else f"this machine has {visible}"
        raise InputError(f"--gpus {place.gpus}: {limit}. Give --gpus {visible} or fewer.")


def _same_processes(job: RecipeRun, place: LaunchLayout) -> None:
    """Refuses another number of processes: batch, data order and ZeRO checkpoints depend on it."""
    if (place.gpus, place.nodes) != (job.gpus, job.nodes):
        machines, options = "", f"--gpus {job.gpus}"
        if job.nodes > 1:
            machines, options = f" on each of {job.nodes} machines", f"{options} --nodes {job.nodes}"
        split = f"its batch and checkpoints are for {job.gpus} processes{machines}"
        raise InputError(f"{job.output}: {split}. Add {options}")


def refuse_mistakes(job: RecipeRun) -> None:
    """Refuses a run with known mistakes, and prints hints."""
    from hf_memkit.run.training import mistakes_of_run

    problems = mistakes_of_run(job)
    if mistakes := [str(problem) for problem in problems if problem.refuses]:
        raise InputError("\n".join(mistakes))
    for hint in problems:
        printing.say_to_stderr(f"memkit: hint: {hint}")
