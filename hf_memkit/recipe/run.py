"""Runs a recipe: writes its folder (the script, args.yaml, the DeepSpeed JSON), and runs the script that lies there.

```
setup ──> folder ──> the script ──> Trainer.train(), with the memory report, signals, resume, swap folder ──> run file
```

The script makes data, model and Trainer, and is the one that `--export` writes. What a run adds acts where the script
calls `Trainer.train()`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from hf_memkit import train
from hf_memkit._version import __version__
from hf_memkit.checks import Problem, Subject, check
from hf_memkit.errors import DataError, InputError, RunError
from hf_memkit.memory.records import read_records
from hf_memkit.recipe.environment import Swap, nvme_path, set_environment
from hf_memkit.recipe.export import export_script
from hf_memkit.recipe.output import RUN_FILE, RecipeRun, last_checkpoint, start_again, write_run
from hf_memkit.recipe.ranks import FOLDER_VARIABLE, Ranks
from hf_memkit.recipe.schema import load_recipe
from hf_memkit.recipe.tasks import DEFAULT_TASK, task_of
from hf_memkit.setup import Setup
from hf_memkit.units import GB
from hf_memkit.user_script import UserScript
from hf_memkit.zero import ops
from hf_memkit.zero.process_group import leave_process_group

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

    from hf_memkit.callback.oom_note import OomNote


Say = Callable[[str], None]

_IN_THE_SETUP = ("card-too-small", "ram-too-small", "disk-too-small")
"""The setup's own problems say these, with activations and processes added to what DeepSpeed holds."""


def mistakes_of_run(job: RecipeRun) -> list[Problem]:
    """Known mistakes in what runs here. Of a run that goes on, only its settings are known."""
    if job.setup.job is not None and not job.is_rehearsal:
        return mistakes_of_target(job.setup)
    return check(Subject(job.setup.get("deepspeed.config"), job.setup.arguments, gpus=job.gpus, nodes=job.nodes))


def mistakes_of_target(setup: Setup) -> list[Problem]:
    """Known mistakes in the setup for the GPU in question, which need not be here."""
    return [problem for problem in check(setup) if problem.rule not in _IN_THE_SETUP]


def run(
    job: RecipeRun,
    say: Say,
    ranks: Ranks,
    *,
    resume: Mapping[str, Any] | None = None,
    before_writing: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and saves; returns the content of the run file, `status` being `finished` or `interrupted`.

    Called by every rank with the same job. Rank 0 writes the run file, which the others do not see: of what they
    return, only `status` is right.

    Args:
        job: what to run.
        say: told what happens, a line a call.
        ranks: this process among those that train together.
        resume: the run file of the run to go on with.
        before_writing: called on rank 0 once all input has been found good (to clear the folder of an earlier run).

    Raises:
        DataError: the data cannot be used. Nothing stays behind.
        InputError: the output folder, or that for NVMe, cannot be used.
        DoesNotFitError: the NVMe folder has no room.
        MissingPackageError: something must be installed first. Nothing was written.
        RunError: the setup cannot be built, or the data differs from that of the run to go on with.
    """
    setup = job.setup
    train.require_packages(setup)
    set_environment(setup, say, ranks)
    if "deepspeed.config" in setup:
        cpu = bool(setup.get("arguments.use_cpu"))
        with ranks.leader_first("operators"):
            ops.build(ops.needed(setup["deepspeed.config"], cpu=cpu), say, cpu=cpu)
    swap = Swap(setup, ranks)
    swap.try_folder()
    content: dict[str, Any] = {
        "schema": 1, "memkit": __version__, "status": "running", **job.to_json(),
        "blocks_sha256": resume["blocks_sha256"] if resume is not None else None,
        "files": resume.get("files", []) if resume is not None else [], "result": None,
    }  # fmt: skip
    if ranks.is_first and before_writing is not None:
        before_writing()
    ranks.wait_for_all("cleared")
    files = list[Path]()
    with ranks.leader_first("files"):
        if ranks.leads_machine and resume is None:
            files = _write_folder(job)
            content["files"] = [path.name for path in files]
            if ranks.is_first:
                write_run(job.output, content)
                files.append(Path(job.output) / RUN_FILE)
    if setup["model.origin"] == "architecture":
        of = f"not from those of {setup['model.name']}: this is no fine-tuning"
        is_small = setup.get("arguments.use_cpu")
        say("The small model starts from random weights." if is_small else f"WARNING: RANDOM weights, {of}.")
    script = Path(job.output) / f"{task_of(setup).script}.py"
    if not script.exists():
        raise RunError(f"--resume: {script}: no such file. Restore it, or {start_again(job.output)}")
    training = _Training(job, say, ranks, content, resuming=resume is not None)
    started = time.monotonic()
    with swap.held(say):
        try:
            training.run(script)
        except BaseException:
            if not ranks.launched:  # with other ranks in it, that could wait for one that is gone
                leave_process_group()
            if not training.has_begun:
                _take_away(files, Path(job.output))
            raise
        ranks.wait_for_all("trained")
        if ranks.is_first:
            content["result"] = {
                **training.result,
                "disk_swap_gb": swap.size_bytes() / GB if "deepspeed.config" in setup else None,
                "wall_time_s": time.monotonic() - started,
            }
        leave_process_group()
    content["status"] = "interrupted" if training.is_stopped else "finished"
    if ranks.is_first:
        write_run(job.output, content)
    ranks.leave_together()
    return content


def _write_folder(job: RecipeRun) -> list[Path]:
    try:
        Path(job.output).mkdir(parents=True, exist_ok=True)
        return export_script(job, Path(job.output))
    except OSError as error:
        raise InputError(f"--output {job.output}: not writable ({error.strerror}). Choose another folder") from None


def _take_away(files: Iterable[Path], folder: Path) -> None:
    """Removes the files of a run that failed before its first step."""
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    with suppress(OSError):  # there is something else in it
        folder.rmdir()


class _Stopped(BaseException):
    """Ends the script below `train()` after a signal. `except Exception` in the script does not catch it."""


class _Training:
    """One run of a recipe's script. It acts where the script calls `Trainer.train()`.

    Attributes:
        has_begun: whether the data and the model were found good, and the first step began.
        is_stopped: whether a signal ended the training.
        result: losses and metrics for the run file; on rank 0 only.
    """

    def __init__(self, job: RecipeRun, say: Say, ranks: Ranks, content: dict[str, Any], *, resuming: bool) -> None:
        self.has_begun = self.is_stopped = False
        self.result: dict[str, Any] = {}
        self._job, self._say, self._ranks, self._content = job, say, ranks, content
        self._resuming = resuming

    def run(self, script: Path) -> None:
        """Runs the script to its end, or to the end of its training if that is stopped.

        Raises:
            DataError: the script ended with a message, which is about its data.
            RunError: memory ran out, or the model cannot be loaded.
        """
        from transformers import Trainer

        plain = Trainer.train

        def trained(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._train(trainer, plain)

        Trainer.train = trained
        try:
            with _on_its_own(script.parent.resolve()), suppress(_Stopped):
                UserScript.found(str(script)).run()
        except SystemExit as left:
            if left.code not in (None, 0):
                raise DataError(str(left.code)) from None
        except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
            why = _why_it_failed(error, script.parent.resolve(), self._job.setup)
            if why is None:
                raise
            raise RunError(why) from error
        finally:
            Trainer.train = plain

    def _train(self, trainer: Any, plain: Callable[..., Any]) -> Any:
        from hf_memkit.callback import attach, oom_advice
        from hf_memkit.callback.oom_note import advice_from_text
        from hf_memkit.recipe.stopping import StopOnSignal

        job, ranks, say = self._job, self._ranks, self._say
        self._compare_data(trainer)
        facts = {"recipe": job.recipe, "variant": job.variant, "rehearsal": job.is_rehearsal}
        facts["setup"] = job.setup.to_json()["settings"]
        if job.target_prediction is not None:
            facts["target_prediction"] = dict(job.target_prediction)
        report = attach(trainer, summary=False, run_facts=facts, prediction=job.prediction)
        started_by_memkit = FOLDER_VARIABLE in os.environ
        stop = StopOnSignal(
            say, report.mark_interrupted, ranks=ranks.world_size, started_by_memkit=started_by_memkit
        )  # fmt: skip
        trainer.add_callback(stop)
        checkpoint = self._checkpoint(trainer)
        if ranks.is_first:
            write_run(job.output, self._content)
        ranks.wait_for_all("run file")
        self.has_begun = True
        try:
            with stop, oom_advice():
                ended = plain(trainer, resume_from_checkpoint=checkpoint)
        except Exception as error:
            advice = report.advice or advice_from_text(error)  # the latter where the first step had not begun
            if advice is None:
                raise
            _end_progress_bars()
            raise _out_of_memory(advice, job) from error
        finally:
            for callback in trainer.callback_handler.callbacks:
                if hasattr(callback, "leave"):  # components/fp32_products.py
                    callback.leave()
        if ranks.is_first:
            self.result = _result(job, trainer)
        if stop.requested:
            self.is_stopped = True
            raise _Stopped
        return ended

    def _compare_data(self, trainer: Any) -> None:
        """Writes the checksum of the training data into the run file, and prints how much data there is.

        Raises:
            RunError: another machine, or the run that goes on, has other data.
        """
        job, ranks, rows, arguments = self._job, self._ranks, trainer.train_dataset, trainer.args
        found = checksum(rows)
        if ranks.share("data", found) != found:
            raise RunError(
                f"rank {ranks.rank} has different examples than rank 0. Use the same data and package versions on all "
                "machines"
            )
        if self._content["blocks_sha256"] not in (None, found):
            raise RunError(
                f"--resume: the data differs from that of the run in {job.output}. Restore the data, or "
                f"{start_again(job.output)}"
            )
        self._content["blocks_sha256"] = found
        each = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks.world_size
        steps = arguments.max_steps
        self._say(
            f"Data: {_source(job)}: {len(rows)} examples to train on, {len(trainer.eval_dataset)} held out; {steps} "
            f"steps of {each} read them {steps * each / len(rows):.1f} times"
        )

    def _checkpoint(self, trainer: Any) -> str | None:
        """Where the training goes on, None: at its beginning. With DeepSpeed its swapped states are watched."""
        job, setup = self._job, self._job.setup
        if "deepspeed.config" in setup:
            from hf_memkit.zero.swap_guard import SwapGuard

            trainer.add_callback(SwapGuard(lambda: trainer.deepspeed))
        if not self._resuming:
            return None
        checkpoint: str | None = self._ranks.share("checkpoint", last_checkpoint(job.output))
        go_on = (
            f"Continuing from {checkpoint}" if checkpoint else "No whole checkpoint yet: starting from the first step"
        )
        self._say(go_on)
        if checkpoint and nvme_path(setup):
            from hf_memkit.zero.nvme_resume import RestoreSwappedStates

            trainer.add_callback(RestoreSwappedStates(lambda: trainer.deepspeed, checkpoint))
        return checkpoint


@contextmanager
def _on_its_own(folder: Path) -> Iterator[None]:
    """Restores what the script changes in this process: `__main__`, `sys.argv`, `sys.path`, and modules of its
    folder."""
    main, arguments, path, loaded = sys.modules["__main__"], sys.argv, list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, arguments, path
        for name in set(sys.modules) - loaded:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                del sys.modules[name]


def _why_it_failed(error: BaseException, folder: Path, setup: Setup) -> str | None:
    """Why the script failed, in one line, if its model cannot be loaded or a part of the setup refused the model;
    None: for another reason, which needs its traceback."""
    frames = [entry.f_code for entry, _ in traceback.walk_tb(error.__traceback__)]
    if any(code.co_name == "from_pretrained" for code in frames) and isinstance(error, OSError | ValueError):
        return train.why_not_loaded(setup["model.name"], error)
    last = Path(frames[-1].co_filename)
    parts = {*setup.section("model_parts"), *setup.section("trainer_parts")}
    if last.parent == folder and last.stem in parts:
        return f"{last.stem.replace('_', ' ')}: {error}"
    return None


def _source(job: RecipeRun) -> str:
    """Where the rows are, for a person."""
    if job.setup["data.source"] is not None:
        return str(job.setup["data.source"])
    data = yaml.safe_load((Path(job.output) / "args.yaml").read_text(encoding="utf-8"))["data"]
    made_up = "made-up examples, used because the hub is not reachable (--data trains on your own)"
    return str(data.get("hub_id") or made_up)


def checksum(rows: Any) -> str:
    """SHA-256 of the rows' names, lengths and values, however they lie in their files."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=_ROWS):
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


_ROWS: Final = 1000


def _out_of_memory(advice: OomNote, job: RecipeRun) -> RunError:
    """The error in one line; the changes that would help are a note to it."""
    error = RunError(f"{advice.happened} {_smaller(job)}")
    error.add_note(advice.details())
    return error


def _smaller(job: RecipeRun) -> str:
    """The options of this recipe that need less memory, to be typed as they stand."""
    setup, request = job.setup, job.setup.request
    batch, length = int(setup["arguments.per_device_train_batch_size"]), int(setup["data.sequence_length"])
    options = [f"--set per_device_train_batch_size={batch // 2}"] if batch > 1 else []
    if task_of(setup).takes_length and length >= 4:
        options.append(f"--sequence-length {length // 2}")
    with suppress(InputError):  # the file of a recipe of one's own may be gone
        variants = list(load_recipe((request and request.recipe) or job.recipe).variants)
        later = variants[variants.index(job.variant) + 1 :] if job.variant in variants else []
        options += [f"--variant {name}" for name in later]
    if not options:
        return "Use a GPU with more memory, or a smaller --model"
    return f"Start again with {' or '.join(options)}"


def _end_progress_bars() -> None:
    """So that the error begins a line of its own."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()


def _result(job: RecipeRun, trainer: Trainer) -> dict[str, Any]:
    """What the run came to; losses in nats a token, or an example where it has one label. Whatever was not measured is
    None."""
    losses = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    before = next((loss for step, loss in losses if step == 0), None)
    after = losses[-1][1] if losses and losses[-1][0] > 0 else None
    path = Path(job.output) / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []
    end: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "end"), {})
    packed = task_of(job.setup).name == DEFAULT_TASK
    compared = job.is_rehearsal and not packed
    return {
        "steps": trainer.state.global_step,
        "held_out_loss_before": before,
        "held_out_loss": after,
        "label_frequency_loss": label_frequency_loss(trainer) if compared else None,
        "unigram_loss": unigram_loss(trainer) if packed else None,
        **_of_classes(trainer),
        "metrics": _last_metrics(trainer),
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer_classes": end.get("optimizer_classes"),
        "recomputed_layers": end.get("recomputed_layers"),
        "peak_allocated_gib": end.get("peak_allocated_gib"),
        "peak_reserved_gib": end.get("peak_reserved_gib"),
    }


def _of_classes(trainer: Trainer) -> dict[str, Any]:
    """If each row has one class: the classes (`labels`), and the accuracy of always answering with the most frequent
    class of the training data (`majority_accuracy`); else empty."""
    if "labels" not in trainer.train_dataset.column_names or not isinstance(trainer.train_dataset[0]["labels"], int):
        return {}
    trained, held_out = list(trainer.train_dataset["labels"]), list(trainer.eval_dataset["labels"])
    majority = Counter(trained).most_common(1)[0][0]
    names: dict[int, str] = trainer.model.config.id2label
    return {"labels": list(names.values()), "majority_accuracy": held_out.count(majority) / len(held_out)}


def _last_metrics(trainer: Trainer) -> dict[str, float]:
    """What the last evaluation measured beside the loss: accuracy and the like, by name."""
    timing = ("loss", "runtime", "samples_per_second", "steps_per_second")
    last: dict[str, Any] = next((each for each in reversed(trainer.state.log_history) if "eval_loss" in each), {})
    named = {key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")}
    return {key: float(value) for key, value in named.items() if key not in timing}


_BATCHES: Final = 500
"""Of training examples: their labels' frequencies are known well enough from so many."""


def label_frequency_loss(trainer: Trainer) -> float | None:
    """The held-out loss, in nats a label, of always answering with the training labels' frequencies.

    With n(v) the number of training labels v, N their sum, and V labels in all, the answer gives each label the
    probability (n(v) + 1) / (N + V). None where the examples are split among several processes.
    """
    import torch

    if trainer.args.world_size > 1:
        return None
    trained, held_out = (
        torch.bincount(torch.cat(list(_labels(trainer.get_eval_dataloader(rows)))))
        for rows in (trainer.train_dataset, trainer.eval_dataset)
    )
    labels = max(len(trained), len(held_out))
    n, seen = (torch.nn.functional.pad(counts, (0, labels - len(counts))).double() for counts in (trained, held_out))
    nats = -((n + 1) / (n.sum() + labels)).log()
    return float((seen * nats).sum() / seen.sum())


def unigram_loss(trainer: Trainer) -> float:
    """The entropy, in nats a token, of the tokens that a causal model has to predict in the held-out blocks.

    With n(v) the number of times that token v is a label, N the sum of n, and p(v) = n(v) / N, this is
    -Σ p(v) ln p(v): the mean loss of the best model that looks at no context, fitted to these very blocks. A model
    with a lower loss uses context. It is a bound from hindsight: a fair unigram model, fitted to the training
    blocks, does worse.
    """
    import torch

    n = torch.bincount(torch.cat(list(_labels(trainer.eval_dataset.iter(_ROWS))))).double()
    share = n[n > 0] / n.sum()
    return float(-(share * share.log()).sum())


def _labels(batches: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Those that count in the loss: transformers leaves out -100."""
    for number, batch in enumerate(batches):
        if number == _BATCHES:
            return
        labels = batch["labels"].flatten().cpu()
        yield labels[labels >= 0]
