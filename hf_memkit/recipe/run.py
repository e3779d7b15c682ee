"""Runs a setup: data → blocks → model → Trainer with the memory report → evaluation, trained model, run file.

Nothing is written before the rules of `hf_memkit.checks` and the data have been applied and found good; folders are
tried by `hf_memkit.recipe.environment`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit import train
from hf_memkit._version import __version__
from hf_memkit.checks import Problem, Subject, check
from hf_memkit.errors import InputError, RunError
from hf_memkit.memory.records import read_records
from hf_memkit.recipe.environment import Swap, nvme_path, set_environment
from hf_memkit.recipe.output import RecipeRun, last_checkpoint, start_again, write_run
from hf_memkit.recipe.prepare import first, prepare_data, without_needless_grouping
from hf_memkit.recipe.ranks import FOLDER_VARIABLE, Ranks
from hf_memkit.recipe.schema import load_recipe
from hf_memkit.recipe.tasks import Examples, task_of
from hf_memkit.setup import Setup
from hf_memkit.units import GB
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
        DataError: the data cannot be used. Nothing was written.
        InputError: the output folder, or that for NVMe, cannot be used.
        DoesNotFitError: the NVMe folder has no room.
        MissingPackageError: something must be installed first. Nothing was written.
        RunError: the setup cannot be built, or the data differs from that of the run to go on with.
    """
    setup = job.setup
    train.require_packages(setup)
    set_environment(setup, say, ranks)
    examples = prepare_data(setup, say, ranks)
    if resume is not None and resume["blocks_sha256"] != examples.checksum:
        raise RunError(
            f"--resume: the data differs from that of the run in {job.output}. Restore the data, or "
            f"{start_again(job.output)}"
        )
    setup = without_needless_grouping(setup, examples, say)
    job = replace(job, setup=setup)
    if "deepspeed.config" in setup:
        cpu = bool(setup.get("arguments.use_cpu"))
        with ranks.leader_first("operators"):
            ops.build(ops.needed(setup["deepspeed.config"], cpu=cpu), say, cpu=cpu)
    swap = Swap(setup, ranks)
    swap.try_folder()
    content = {
        "schema": 1,
        "memkit": __version__,
        "status": "running",
        **job.to_json(),
        "blocks_sha256": examples.checksum,
        "result": None,
    }
    if ranks.is_first:
        if before_writing is not None:
            before_writing()
        _start_run_file(job, content)
    ranks.wait_for_all("run file")
    started = time.monotonic()
    with swap.held(say):
        try:
            trainer, interrupted = _train(job, examples, say, ranks, resuming=resume is not None)
        except BaseException:
            if not ranks.launched:  # with other ranks in it, that could wait for one that is gone
                leave_process_group()
            raise
        ranks.wait_for_all("trained")
        if ranks.is_first:
            content["result"] = {
                **_result(job, trainer, examples),
                "disk_swap_gb": swap.size_bytes() / GB if "deepspeed.config" in setup else None,
                "wall_time_s": time.monotonic() - started,
            }
        leave_process_group()
    content["status"] = "interrupted" if interrupted else "finished"
    if ranks.is_first:
        write_run(job.output, content)
    ranks.leave_together()
    return content


def _start_run_file(job: RecipeRun, content: dict[str, Any]) -> None:
    try:
        Path(job.output).mkdir(parents=True, exist_ok=True)
        write_run(job.output, content)
    except OSError as error:
        raise InputError(f"--output {job.output}: not writable ({error.strerror}). Choose another folder") from None


def _train(job: RecipeRun, examples: Examples, say: Say, ranks: Ranks, *, resuming: bool) -> tuple[Trainer, bool]:
    """(the trainer after training, whether it was told to stop early)."""
    from transformers.trainer_utils import set_seed

    from hf_memkit.callback import attach, oom_advice
    from hf_memkit.callback.oom_note import advice_from_text
    from hf_memkit.recipe.stopping import StopOnSignal

    setup, task = job.setup, task_of(job.setup)
    arguments = train.build_arguments(setup, task.run_arguments(setup))
    set_seed(arguments.seed)
    model = train.build_model(setup, say, values=task.model_values(setup, examples))
    train.install_model_parts(model, setup)
    sequences = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks.world_size
    say(task.told(setup, examples, arguments.max_steps, sequences))
    trainer: Trainer = train.trainer_class(setup)(
        model=model,
        args=arguments,
        train_dataset=examples.train,
        eval_dataset=_evaluated(examples, job),
        **train.trainer_options(
            setup,
            model=model,
            arguments=arguments,
            processing_class=examples.processing_class,
            own=task.trainer_options(setup, examples),
        ),
    )
    train.after_making(setup, trainer)
    facts = {"recipe": job.recipe, "variant": job.variant, "rehearsal": job.is_rehearsal}
    facts["setup"] = setup.to_json()["settings"]
    if job.target_prediction is not None:
        facts["target_prediction"] = dict(job.target_prediction)
    report = attach(trainer, summary=False, run_facts=facts, prediction=job.prediction)
    if "deepspeed.config" in setup:
        from hf_memkit.zero.swap_guard import SwapGuard
        from hf_memkit.zero.wiring import DeepSpeedWiring

        trainer.add_callback(DeepSpeedWiring(lambda: trainer.deepspeed))
        trainer.add_callback(SwapGuard(lambda: trainer.deepspeed))
    stop = StopOnSignal(
        say, report.mark_interrupted, ranks=ranks.world_size, started_by_memkit=FOLDER_VARIABLE in os.environ
    )
    trainer.add_callback(stop)
    checkpoint = ranks.share("checkpoint", last_checkpoint(job.output)) if resuming else None
    if resuming:
        say(f"Continuing from {checkpoint}" if checkpoint else "No whole checkpoint yet: starting from the first step")
        if checkpoint and nvme_path(setup):
            from hf_memkit.zero.nvme_resume import RestoreSwappedStates

            trainer.add_callback(RestoreSwappedStates(lambda: trainer.deepspeed, checkpoint))
    try:
        with stop, oom_advice():
            trainer.train(resume_from_checkpoint=checkpoint)
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
    if not stop.requested:
        trainer.save_model(str(Path(job.output) / "model"))
    return trainer, stop.requested


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


def _evaluated(examples: Examples, job: RecipeRun) -> Any:
    """The held-out examples that are evaluated: whole batches on every rank, because Trainer counts the loss of a
    smaller last batch as often as that of a whole one (transformers: trainer.py, `loss.repeat(batch_size)`)."""
    batch = int(job.setup["arguments.per_device_eval_batch_size"]) * job.processes
    count = min(int(job.setup["data.evaluated_blocks"]), len(examples.held_out))
    return first(examples.held_out, count // batch * batch or count)


def _result(job: RecipeRun, trainer: Trainer, examples: Examples) -> dict[str, Any]:
    """What the run came to; losses in nats a token, or an example where it has one label. Whatever was not measured is
    None."""
    losses = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    before = next((loss for step, loss in losses if step == 0), None)
    after = losses[-1][1] if losses and losses[-1][0] > 0 else None
    path = Path(job.output) / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []
    end: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "end"), {})
    of_data = {"unigram_loss": None, **task_of(job.setup).result(examples, _evaluated(examples, job))}
    compared = job.is_rehearsal and of_data["unigram_loss"] is None
    return {
        "steps": trainer.state.global_step,
        "held_out_loss_before": before,
        "held_out_loss": after,
        "label_frequency_loss": label_frequency_loss(trainer) if compared else None,
        **of_data,
        "metrics": _last_metrics(trainer),
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer_classes": end.get("optimizer_classes"),
        "recomputed_layers": end.get("recomputed_layers"),
        "peak_allocated_gib": end.get("peak_allocated_gib"),
        "peak_reserved_gib": end.get("peak_reserved_gib"),
    }


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


def _labels(batches: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Those that count in the loss: transformers leaves out -100."""
    for number, batch in enumerate(batches):
        if number == _BATCHES:
            return
        labels = batch["labels"].flatten().cpu()
        yield labels[labels >= 0]
