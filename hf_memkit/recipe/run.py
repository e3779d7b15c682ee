"""Runs a setup: data → blocks → model → Trainer with the memory report → evaluation, trained model, run file.

Nothing is written before the data has been read and found good.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit._version import __version__
from hf_memkit.errors import InputError, RunError
from hf_memkit.memory.records import read_records
from hf_memkit.models import hub_reachable
from hf_memkit.recipe import build
from hf_memkit.recipe.environment import set_environment
from hf_memkit.recipe.output import last_checkpoint, write_run
from hf_memkit.training_setup import Setting, TrainingSetup
from hf_memkit.units import GB
from hf_memkit.zero import ops

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_memkit.recipe.packing import Packed

__all__ = ["Run", "run"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One run of a recipe.

    Attributes:
        recipe, variant: names.
        setup: what runs here.
        target: the setup that this is the rehearsal of; None if this is the real thing.
        not_rehearsed: what of the target does not run here, each with its reason.
    """

    recipe: str
    variant: str
    setup: TrainingSetup
    target: TrainingSetup | None = None
    not_rehearsed: tuple[Setting, ...] = ()

    @property
    def output(self) -> str:
        return str(self.setup["arguments.output_dir"])

    @property
    def is_rehearsal(self) -> bool:
        return self.target is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "variant": self.variant,
            "rehearsal": self.is_rehearsal,
            "setup": self.setup.to_json(),
            "target": self.target.to_json() if self.target else None,
            "not_rehearsed": [setting.to_json() for setting in self.not_rehearsed],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Run:
        return cls(
            recipe=content["recipe"],
            variant=content["variant"],
            setup=TrainingSetup.from_json(content["setup"]),
            target=TrainingSetup.from_json(content["target"]) if content["target"] else None,
            not_rehearsed=tuple(Setting(**setting) for setting in content["not_rehearsed"]),
        )


def run(
    job: Run,
    say: Say,
    *,
    resume: Mapping[str, Any] | None = None,
    before_writing: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and saves; returns the content of the run file, `status` being `finished` or `interrupted`.

    Args:
        job: what to run.
        say: told what happens, a line a call.
        resume: the run file of the run to go on with.
        before_writing: called once all input has been found good (to clear the folder of an earlier run).

    Raises:
        DataError: the data cannot be used. Nothing was written.
        MissingPackageError: something must be installed first. Nothing was written.
        RunError: the setup cannot be built, or the data differs from that of the run to go on with.
    """
    setup = job.setup
    build.require_packages(setup.preset)
    set_environment(setup, say)
    packed, tokenizer = _data(setup, say)
    checksum = hashlib.sha256(packed.train.array.tobytes()).hexdigest()
    if resume is not None and resume["blocks_sha256"] != checksum:
        raise RunError(
            f"the data is not that of the run in {job.output}: its blocks differ; start again with --overwrite"
        )
    if "deepspeed.config" in setup:
        cpu = bool(setup.get("arguments.use_cpu"))
        ops.build(ops.needed(setup["deepspeed.config"], cpu=cpu), say, cpu=cpu)
    content = {
        "schema": 1,
        "memkit": __version__,
        "status": "running",
        **job.to_json(),
        "blocks_sha256": checksum,
        "result": None,
    }
    if before_writing is not None:
        before_writing()
    try:
        Path(job.output).mkdir(parents=True, exist_ok=True)
        write_run(job.output, content)
    except OSError as error:
        raise InputError(
            f"--output {job.output}: cannot be written to ({error.strerror}); give another folder"
        ) from None
    started = time.monotonic()
    try:
        trainer, interrupted = _train(job, packed, tokenizer, say, resuming=resume is not None)
        content["result"] = {
            **_result(job, trainer, packed),
            "disk_swap_gb": _swap_bytes(setup) / GB if "deepspeed.config" in setup else None,
            "wall_time_s": time.monotonic() - started,
        }
    finally:
        _remove_swap(setup)
        _leave_process_group()
    content["status"] = "interrupted" if interrupted else "finished"
    write_run(job.output, content)
    return content


def _data(setup: TrainingSetup, say: Say) -> tuple[Packed, Any]:
    from hf_memkit.recipe.data import load_documents
    from hf_memkit.recipe.packing import pack
    from hf_memkit.recipe.tokenizer import check_vocabulary, get_tokenizer

    data = setup.section("data")
    documents = load_documents(
        data["source"],
        default_hub_id=data["hub_id"],
        default_hub_config=data["hub_config"],
        text_column=data["text_column"],
        hub_reachable=hub_reachable(),
    )
    say(f"Data: {documents.source}")
    chosen = get_tokenizer(
        data["tokenizer"], documents, vocabulary_size=data["vocabulary_size"], allow_download=hub_reachable()
    )
    say(f"Tokenizer: {chosen.reason}")
    check_vocabulary(chosen.tokenizer, data["vocabulary_size"])
    packed = pack(
        documents, chosen.tokenizer, sequence_length=data["sequence_length"], holdout_fraction=data["held_out"]
    )
    return packed, chosen.tokenizer


def _train(job: Run, packed: Packed, tokenizer: Any, say: Say, *, resuming: bool) -> tuple[Trainer, bool]:
    """(the trainer after training, whether it was told to stop early)."""
    import torch
    from transformers import Trainer
    from transformers.trainer_utils import set_seed

    from hf_memkit.memory import attach
    from hf_memkit.recipe.packing import epochs
    from hf_memkit.recipe.stopping import StopOnSignal

    setup = job.setup
    arguments = build.build_arguments(setup)
    set_seed(arguments.seed)
    model = build.build_model(setup, say)
    sequences = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    say(
        f"Blocks: {len(packed.train)} of {setup['data.sequence_length']} tokens to train on, "
        f"{len(packed.held_out)} held out; {arguments.max_steps} steps of {sequences} read them "
        f"{epochs(arguments.max_steps, sequences, packed.train):.1f} times"
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=packed.train,
        eval_dataset=_evaluated(packed, setup),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=build.optimizer_class_and_options(setup),
    )
    facts = {"recipe": job.recipe, "variant": job.variant, "rehearsal": job.is_rehearsal}
    report = attach(trainer, run_facts={**facts, "setup": setup.to_json()["settings"]})
    if "deepspeed.config" in setup:
        from hf_memkit.zero.wiring import DeepSpeedWiring

        trainer.add_callback(DeepSpeedWiring(lambda: trainer.deepspeed))
    stop = StopOnSignal(say, report.mark_interrupted)
    trainer.add_callback(stop)
    checkpoint = last_checkpoint(job.output) if resuming else None
    if resuming:
        say(f"Going on from {checkpoint}" if checkpoint else "No whole checkpoint yet: starting from the first step")
        if checkpoint and _swap_folder(setup):
            say("DeepSpeed does not bring back Adam's moments from NVMe: they start again from zero.")
    try:
        with stop:
            trainer.train(resume_from_checkpoint=checkpoint)
    except torch.OutOfMemoryError as error:
        message = str(error).split(". ")[0]
        step = trainer.state.global_step + 1
        report.write_record("oom", {"step": step, "phase": report.phase, "message": str(error)})
        report.close()
        raise RunError(
            f"out of memory in step {step}, phase {report.phase}: {message}; set a smaller "
            f"per_device_train_batch_size (--set), a shorter --sequence-length, or take another --variant"
        ) from error
    if not stop.requested:
        trainer.save_model(str(Path(job.output) / "model"))
    return trainer, stop.requested


def _evaluated(packed: Packed, setup: TrainingSetup) -> Any:
    """The held-out blocks that are evaluated: whole batches, because Trainer counts the loss of a smaller last batch
    as often as that of a whole one (transformers: trainer.py, `loss.repeat(batch_size)`)."""
    batch = int(setup["arguments.per_device_eval_batch_size"])
    count = min(int(setup["data.evaluated_blocks"]), len(packed.held_out))
    count = count // batch * batch or count
    return type(packed.held_out)(packed.held_out.array[:count])


def _result(job: Run, trainer: Trainer, packed: Packed) -> dict[str, Any]:
    """What the run came to; losses in nats a token. Whatever was not measured is None."""
    from hf_memkit.recipe.packing import unigram_loss

    losses = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    before = next((loss for step, loss in losses if step == 0), None)
    after = losses[-1][1] if losses and losses[-1][0] > 0 else None
    path = Path(job.output) / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []
    end: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "end"), {})
    return {
        "steps": trainer.state.global_step,
        "held_out_loss_before": before,
        "held_out_loss": after,
        "unigram_loss": unigram_loss(_evaluated(packed, job.setup)),
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer_classes": end.get("optimizer_classes"),
        "recomputed_layers": end.get("recomputed_layers"),
        "peak_allocated_gib": end.get("peak_allocated_gib"),
        "peak_reserved_gib": end.get("peak_reserved_gib"),
    }


def _swap_folder(setup: TrainingSetup) -> Path | None:
    zero = setup.get("deepspeed.config", {}).get("zero_optimization", {})
    path = zero.get("offload_param", {}).get("nvme_path")
    return Path(path) / "zero_stage_3" if path else None  # deepspeed: runtime/zero/stage3.py


def _swap_bytes(setup: TrainingSetup) -> int:
    folder = _swap_folder(setup)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder else 0


def _remove_swap(setup: TrainingSetup) -> None:
    """DeepSpeed leaves its swap files behind, 18 bytes a parameter; nobody else reads them."""
    folder = _swap_folder(setup)
    if folder is not None and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def _leave_process_group() -> None:
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
