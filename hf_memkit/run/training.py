"""Train a recipe's folder: run its script in this process. Where the script calls `Trainer.train()`, memkit adds the
memory report, stopping on Ctrl-C, and resuming."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_memkit.checks import Problem, Subject, check
from hf_memkit.common.commands import command
from hf_memkit.common.errors import DataError, RunError
from hf_memkit.common.units import GB
from hf_memkit.common.user_script import UserScript
from hf_memkit.components.resuming import checkpoint_to_resume, refuse_finished, restore_all_weights
from hf_memkit.deepspeed import ops
from hf_memkit.run.folder import ARGUMENTS_FILE, RecipeRun, clear, read_run, start_again, write_run
from hf_memkit.run.machine import Swap, nvme_path, set_environment
from hf_memkit.run.ranks import FOLDER_VARIABLE, INTACT, Ranks
from hf_memkit.run.result import result_of
from hf_memkit.setup import build
from hf_memkit.setup.process_group import leave_process_group
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.measuring.callback.oom_note import OomNote

Say = Callable[[str], None]

_IN_THE_SETUP = ("card-too-small", "ram-too-small", "disk-too-small")
"""Rules about memory. A setup's `problems` are more exact: they include activations and all processes."""


def mistakes_of_run(job: RecipeRun) -> list[Problem]:
    """Known mistakes in this run. For a resumed run, only its settings are known."""
    if job.setup.job is not None and not job.is_rehearsal:
        return mistakes_of_target(job.setup)
    return check(Subject(job.setup.get("deepspeed.config"), job.setup.arguments, gpus=job.gpus, nodes=job.nodes))


def mistakes_of_target(setup: Setup) -> list[Problem]:
    """Known mistakes in the setup for its target GPU, which need not be here."""
    return [problem for problem in check(setup) if problem.rule not in _IN_THE_SETUP]


def run(
    job: RecipeRun,
    say: Say,
    ranks: Ranks,
    *,
    resume: bool = False,
    overwrite: bool = False,
    write: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Train, evaluate and save; returns the content of the run file, `status` being `finished` or `interrupted`.

    Called by every rank with the same job. Rank 0 writes the run file, which the others do not see: in their results
    only `status` and `stopped_by` are right.

    Args:
        job: the run; its folder is `job.output`.
        say: prints a message.
        write: writes the folder, once the machine has been tested; None: it exists. If the run fails before its first
            step, the folder is removed.

    Raises:
        DataError: the data cannot be used.
        InputError: the folder, or that for NVMe, cannot be used.
        DoesNotFitError: the NVMe folder has no room.
        MissingPackageError: something must be installed first. Nothing was written.
        RunError: the setup cannot be built, or the data differs from that of the resumed run.
    """
    setup = job.setup
    folder = Path(job.output)
    build.require_packages(setup)
    set_environment(setup, say, ranks)
    if "deepspeed.config" in setup:
        cpu = bool(setup.get("arguments.use_cpu"))
        with ranks.leader_first("operators"):
            ops.build(ops.needed(setup["deepspeed.config"], cpu=cpu), say, cpu=cpu)
    swap = Swap(setup, ranks)
    swap.try_folder()

    if ranks.is_first and overwrite:
        clear(folder, whole=write is not None)
    if ranks.is_first and write is not None:
        write()
    ranks.wait_for_all("written")
    if ranks.leads_machine and write is not None and read_run(folder) is None:
        write()  # this machine does not see the first one's disk
    ranks.wait_for_all("written everywhere")

    previous = read_run(folder)
    if previous is None or not (script := folder / previous["files"][0]).exists():
        raise RunError(f"{folder}: the script is missing. Restore it, or {start_again(folder)}")
    content = {**previous, **job.to_json(), "status": "running", "stopped_by": None}
    if not resume:
        content |= {"blocks_sha256": None, "result": None}
    if ranks.is_first:
        write_run(folder, content)
    if setup["model.origin"] == "architecture":
        if setup.get("arguments.use_cpu"):
            if not resume:
                say("The small model starts from random weights.")
        else:
            say(f"WARNING: RANDOM weights instead of those of {setup['model.name']}: this is not fine-tuning.")

    training = _Training(job, say, ranks, content, resuming=resume)
    start_s = time.monotonic()
    with swap.held(say):
        try:
            training.run(script)
        except BaseException:
            if not ranks.launched:  # with other ranks, this could wait for one that has ended
                leave_process_group()
            if not training.has_begun:
                _restore_folder(folder, previous if write is None else None, ranks)
            raise
        ranks.wait_for_all("trained")
        if ranks.is_first:
            content["result"] = {
                **training.result,
                "disk_swap_gb": swap.size_bytes() / GB if "deepspeed.config" in setup else None,
                "wall_time_s": time.monotonic() - start_s,
            }
        leave_process_group()

    content["status"] = "interrupted" if training.stopped_by else "finished"
    content["stopped_by"] = training.stopped_by and training.stopped_by.name
    if ranks.is_first:
        write_run(folder, content)
    ranks.leave_together()
    return content


def _restore_folder(folder: Path, previous: dict[str, Any] | None, ranks: Ranks) -> None:
    """Restore the folder's state before this run: `previous` is its run file's content, None: it did not exist."""
    if previous is not None:
        if ranks.is_first:
            write_run(folder, previous)
    elif ranks.leads_machine:
        clear(folder)
        with suppress(OSError):  # not empty
            folder.rmdir()


class _Stopped(BaseException):
    """Ends the script after `train()` was stopped by a signal. `except Exception` in the script does not catch it."""


class _Training:
    """One run of a recipe's script, with additions where it calls `Trainer.train()`.

    Attributes:
        has_begun: whether data and model were accepted, and the first step began.
        stopped_by: the signal that ended the training, if one did.
        result: losses and metrics for the run file; on rank 0 only.
    """

    def __init__(self, job: RecipeRun, say: Say, ranks: Ranks, content: dict[str, Any], *, resuming: bool) -> None:
        self.has_begun = False
        self.stopped_by: signal.Signals | None = None
        self.result: dict[str, Any] = {}
        self._job = job
        self._say = say
        self._ranks = ranks
        self._content = content
        self._resuming = resuming

    def run(self, script: Path) -> None:
        """Run the script to its end, or to the end of its training if that is stopped.

        Raises:
            DataError: the script ended with a message about its data.
            RunError: memory ran out, or the model cannot be loaded.
        """
        from transformers import Trainer

        plain = Trainer.train

        Trainer.train = lambda trainer, *args, **kwargs: self._train(trainer, plain)
        try:
            with _restored_process(script.parent.resolve()), suppress(_Stopped):
                UserScript.at(str(script)).run()
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise DataError(str(exit.code)) from None
        except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
            why = _known_cause(error, script.parent.resolve(), self._job.setup)
            if why is None:
                raise
            raise RunError(why) from error
        finally:
            Trainer.train = plain

    def _train(self, trainer: Any, plain: Callable[..., Any]) -> Any:
        """Replaces `Trainer.train`; `plain` is the original."""
        from hf_memkit.components.stopping import StopOnSignal
        from hf_memkit.measuring.callback.callback import attach
        from hf_memkit.measuring.callback.oom_note import advice_from_text
        from hf_memkit.measuring.callback.oom_watch import oom_advice

        job, ranks = self._job, self._ranks
        self._compare_data(trainer)
        facts = {"recipe": job.recipe, "variant": job.variant, "rehearsal": job.is_rehearsal}
        facts["setup"] = job.setup.to_json()["settings"]
        if job.target_prediction is not None:
            facts["target_prediction"] = dict(job.target_prediction)
        report = attach(trainer, summary=False, run_facts=facts, prediction=job.prediction)
        by_memkit = FOLDER_VARIABLE in os.environ
        stop = StopOnSignal(self._say, report.mark_interrupted, ranks=ranks.world_size, by_memkit=by_memkit)
        trainer.add_callback(stop)
        checkpoint = self._checkpoint(trainer)
        restore_all_weights(trainer)
        if ranks.is_first:
            write_run(job.output, self._content)
        ranks.wait_for_all("run file")

        self.has_begun = True
        try:
            with stop, oom_advice():
                output = plain(trainer, resume_from_checkpoint=checkpoint)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(INTACT) from None
        except Exception as error:
            advice = report.advice or advice_from_text(error)  # the latter before the first step
            if advice is None:
                raise
            raise _out_of_memory_error(job, advice) from error
        finally:
            for callback in trainer.callback_handler.callbacks:
                if hasattr(callback, "leave"):  # components/fp32_products.py
                    callback.leave()

        if ranks.is_first:
            self.result = result_of(job, trainer)
        if stop.requested is not None:
            self.stopped_by = stop.requested
            raise _Stopped
        return output

    def _compare_data(self, trainer: Any) -> None:
        """Write the checksum of the training data into the run file, and print the amount of data. Raises RunError:
        another machine, or the resumed run, has other data."""
        folder, rows, arguments = self._job.output, trainer.train_dataset, trainer.args
        sha256 = checksum(rows)
        if self._ranks.share("data", sha256) != sha256:
            differs = f"rank {self._ranks.rank} has other examples than rank 0"
            raise RunError(f"{differs}. Use the same data and package versions on all machines")
        if self._content["blocks_sha256"] not in (None, sha256):
            changed = f"the data has changed since the run in {folder} began"
            raise RunError(f"--resume: {changed}. Restore the data, or {start_again(folder)}")
        self._content["blocks_sha256"] = sha256

        batch_size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        batch_size *= self._ranks.world_size
        epochs = epochs_of(arguments, len(rows), self._ranks.world_size)
        times = f"{epochs:.1f}" if epochs >= 1 else f"{epochs:.2g}"
        self._say(
            f"Data: {_source(self._job)}: {len(rows)} examples to train on, {len(trainer.eval_dataset)} held out; "
            f"{arguments.max_steps} steps of {batch_size} read them {times} times"
        )

    def _checkpoint(self, trainer: Any) -> str | None:
        """The checkpoint to resume from; None: the first step. Adds DeepSpeed's callbacks for swapped states."""
        setup = self._job.setup
        if "deepspeed.config" in setup:
            from hf_memkit.deepspeed.swap_guard import SwapGuard

            trainer.add_callback(SwapGuard(lambda: trainer.deepspeed))
        if not self._resuming:
            return None
        own = checkpoint_to_resume(self._job.output, self._say)
        checkpoint: str | None = self._ranks.share("checkpoint", own)
        if checkpoint is not None:
            refuse_finished(checkpoint, trainer.args)
        self._say(f"Continuing from {checkpoint}" if checkpoint else "No complete checkpoint: starting from step 1")
        if checkpoint and nvme_path(setup):
            from hf_memkit.deepspeed.nvme_resume import RestoreSwappedStates

            trainer.add_callback(RestoreSwappedStates(lambda: trainer.deepspeed, checkpoint))
        return checkpoint


def epochs_of(arguments: Any, rows: int, processes: int) -> float:
    """How often `max_steps` steps read the rows. Each epoch ends with smaller batches or a smaller step, if they do
    not divide the rows (transformers 5.23.0: trainer.py 1497-1509; accelerate 1.15.0: data_loader.py 123-147)."""
    batches = rows / (arguments.per_device_train_batch_size * processes)
    batches = max(1, math.floor(batches) if arguments.dataloader_drop_last else math.ceil(batches))
    accumulated = arguments.gradient_accumulation_steps
    epochs, steps = divmod(arguments.max_steps, math.ceil(batches / accumulated))
    return float(epochs + steps * accumulated / batches)


def _out_of_memory_error(job: RecipeRun, advice: OomNote) -> RunError:
    from tqdm import tqdm  # type: ignore[import-untyped]

    for bar in list(getattr(tqdm, "_instances", ())):  # so that the error starts on a new line
        bar.close()
    fix = "Use a GPU with more memory, or a smaller --model"
    if job.needs_less:
        fix = f"Start again: {command('memkit', 'recipe', job.asked)} with {' or '.join(job.needs_less)}"
    error = RunError(f"{advice.happened} {fix}")
    error.add_note(advice.details())
    return error


@contextmanager
def _restored_process(folder: Path) -> Iterator[None]:
    """Undo the script's changes of `__main__`, `sys.argv` and `sys.path`, and unload its folder's modules."""
    main, arguments = sys.modules["__main__"], sys.argv
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = main, arguments
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                del sys.modules[name]


def _known_cause(error: BaseException, folder: Path, setup: Setup) -> str | None:
    """One line for an error of loading the model or a component that refused it. Others need a traceback: None."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(code.co_name == "from_pretrained" for code in frames) and isinstance(error, OSError | ValueError):
        return build.why_not_loaded(setup["model.name"], error)
    raised_in = Path(frames[-1].co_filename)
    components = {*setup.section("model_parts"), *setup.section("trainer_parts")}
    if raised_in.parent == folder and raised_in.stem in components:
        return f"{raised_in.stem.replace('_', ' ')}: {error}"
    return None


def _source(job: RecipeRun) -> str:
    """Source of the rows, for messages."""
    if job.setup["data.source"] is not None:
        return str(job.setup["data.source"])
    data = yaml.safe_load((Path(job.output) / ARGUMENTS_FILE).read_text(encoding="utf-8"))["data"]
    made_up = "made-up examples, used because the hub is not reachable (--data trains on your own)"
    return str(data.get("hub_id") or made_up)


def checksum(rows: Any) -> str:
    """SHA-256 of the rows' names, lengths and values, independent of their files' layout."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for name in sorted(table.column_names):
            digest.update(name.encode())
            column = table.column(name)
            if hasattr(column.type, "value_type"):
                digest.update(compute.list_value_length(column).to_numpy().tobytes())
                column = compute.list_flatten(column)
            kind = str(column.type)
            is_number = kind.startswith(("int", "uint", "float", "double", "bool"))
            digest.update(column.to_numpy().tobytes() if is_number else repr(column.to_pylist()).encode())
    return digest.hexdigest()
