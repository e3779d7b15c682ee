"""Changes where it was not a training step on the card: evaluation, saving, and the machine's RAM."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.oom.change import Change, Proposal
from hf_memkit.oom.job_view import Job

__all__ = [
    "buffers_in_ram",
    "evaluation_batch",
    "gathered_predictions",
    "loader",
    "only_loss",
    "pinned_batches",
    "saving",
]


def gathered_predictions(job: Job) -> Iterator[Proposal]:
    """Predictions moved to RAM as the evaluation goes on, or made small before they are kept."""
    if job.phase != "evaluate" or job.keeps_no_predictions or job.argument("batch_eval_metrics"):
        return
    if job.argument("eval_accumulation_steps") is None:
        yield Proposal(
            Change(
                "arguments.eval_accumulation_steps", 16,
                "Trainer keeps every prediction on the card until the evaluation ends (with compute_metrics); "
                "so they go to RAM every 16 batches",
                "the evaluation waits for those copies, and RAM must hold all predictions: for a language model "
                "samples × tokens × vocabulary",
            ),
            _whole_card(job),
        )  # fmt: skip
    yield Proposal(
        Change(
            "Trainer.preprocess_logits_for_metrics", "lambda logits, labels: logits.argmax(-1)",
            "only what compute_metrics needs is kept of each batch, instead of all logits",
            "none, if the metrics are computed from the predicted classes or tokens",
        ),
        _whole_card(job) / 2,
    )  # fmt: skip


def only_loss(job: Job) -> Iterator[Proposal]:
    """No predictions at all."""
    if job.phase != "evaluate" or job.keeps_no_predictions:
        return
    yield Proposal(
        Change(
            "arguments.prediction_loss_only", True,
            "no predictions are kept; it is so already where the Trainer has no compute_metrics",
            "compute_metrics is not called: the evaluation gives the loss alone",
        ),
        0.0,
        last=True,
    )  # fmt: skip


def evaluation_batch(job: Job) -> Iterator[Proposal]:
    """Fewer samples in each evaluation batch."""
    samples = job.count("per_device_eval_batch_size")
    if job.phase != "evaluate" or samples is None or samples < 2:
        return
    yield Proposal(
        Change(
            "arguments.per_device_eval_batch_size", samples // 2,
            f"each evaluation batch has {samples} samples, whatever the training batch has",
            "none but time: the metrics are the same",
        ),
        _whole_card(job) * 0.75,
    )  # fmt: skip


def saving(job: Job) -> Iterator[Proposal]:
    """Less put together for a checkpoint."""
    if job.phase != "save":
        return
    if job.stage == 3:
        yield Proposal(
            Change(
                "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save", False,
                "at stage 3 a save gathers the whole model's 16-bit weights",
                "checkpoints then hold DeepSpeed's shards; zero_to_fp32.py, beside them, puts them together",
            ),
            2.0,
        )  # fmt: skip
    if not job.argument("save_only_model") and (job.deepspeed or job.fsdp):
        yield Proposal(
            Change(
                "arguments.save_only_model", True,
                "optimizer states are then not gathered for the checkpoint",
                "training cannot be resumed from such a checkpoint; load_best_model_at_end is refused under DeepSpeed",
            ),
            1.0,
        )  # fmt: skip


def loader(job: Job) -> Iterator[Proposal]:
    """Fewer data loader processes."""
    workers = job.count("dataloader_num_workers")
    if not workers:
        return
    yield Proposal(
        Change(
            "arguments.dataloader_num_workers", workers // 2,
            f"{workers} worker processes hold their own copies of what they load, and batches ahead",
            "batches may come too slowly for the card: watch the step time",
        ),
        3.0,
    )  # fmt: skip


def pinned_batches(job: Job) -> Iterator[Proposal]:
    """Ordinary RAM for batches."""
    if job.argument("dataloader_pin_memory") is not True or not job.on_cuda:
        return
    yield Proposal(
        Change(
            "arguments.dataloader_pin_memory", False,
            "batches lie in page-locked RAM, which the system cannot move",
            "copies to the card are slower, and wait",
        ),
        1.0,
    )  # fmt: skip


def buffers_in_ram(job: Job) -> Iterator[Proposal]:
    """Offloaded states on NVMe."""
    held = job.moment.get("held")
    places = [held.get(place) for place in ("host", "pinned")] if isinstance(held, dict) else []
    states = sum(float(place.get("optimizer_gib") or 0) for place in places if isinstance(place, dict))
    device = job.argument("deepspeed_offload_optimizer")
    offloaded = "CPUAdam" in " ".join(job.optimizers) or (job.deepspeed and states > 0) or device == "cpu"
    if not offloaded or device == "nvme":
        return
    what = f"the {states:.2f} GiB of optimizer states in RAM" if states else "the optimizer states in RAM"
    yield Proposal(
        Change(
            "arguments.deepspeed", "zero3-infinity-optimizer.json",
            f"`memkit ds copy zero3-infinity-optimizer --nvme-path DIR` moves {what} to NVMe, through buffers of a "
            "size made for this machine",
            "each step reads and writes all states on the disk: only for local NVMe",
        ),
        4.0,
    )  # fmt: skip


def _whole_card(job: Job) -> float:
    """Where no category tells, what is tried first is what usually holds most."""
    held = job.gib("loss")
    return 1.0 + (held or 0.0)
