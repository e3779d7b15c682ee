"""What to change so that this job fits. In: a `run` record and the record of a moment. Out: one to three changes.

A change is never proposed that is in force already, that the engine refuses, or that saves nothing in the phase where
it failed. Figures come from the records or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.compat import name_in_version
from hf_memkit.liger_support import LIGER_OPTIONS
from hf_memkit.oom import suggestions_states as of_states
from hf_memkit.oom.change import Change, Proposal
from hf_memkit.oom.run_view import RunView
from hf_memkit.record_types import ModulesRecord, RunRecord
from hf_memkit.units import GIB

__all__ = ["smaller_batch", "suggest"]

ACTIVATION_PHASES: Final = ("forward", "backward")

_BATCH_COST: Final = (
    "the same result up to rounding; more and smaller forwards a step, slower where the card is not kept busy"
)


def batch(job: RunView) -> Iterator[Proposal]:
    """A smaller micro-batch with as many more of them: the same samples in each optimizer step."""
    before_forward = job.phase == "data"
    unknown = before_forward or job.activations_unknown
    held = None if unknown else _of_the_batch(job)
    change = smaller_batch(job)
    if job.phase not in (*ACTIVATION_PHASES, "data") or change is None or not (held or unknown):
        return
    if held is None:
        what = "; what is computed before the model's forward grows with the samples" if before_forward else ""
        yield Proposal(replace(change, reason=change.reason + what), 2.0)
        return
    saves = held * (1 - change.value / change.current)
    basis = (
        f"activations and loss measured at that moment, which grow with the samples: {change.value} of "
        f"{change.current} samples hold {held - saves:.2f} GiB of the {held:.2f}"
    )
    reason = f"{change.reason}; activations and loss hold {held:.2f} GiB for {change.current}"
    yield Proposal(replace(change, reason=reason, saves_gib=round(saves, 2), basis=basis), saves)


def smaller_batch(job: RunView, most: float | None = None) -> Change | None:
    """The next smaller micro-batch of which a whole number makes up this one; None for one sample, or if not known.

    Args:
        most: with no more samples than that, if there is such a part.
    """
    samples = job.count("per_device_train_batch_size")
    if job.argument("auto_find_batch_size") and isinstance(job.moment.get("samples"), int):
        samples = int(job.moment["samples"])
    if samples is None or samples < 2:
        return None
    parts = [samples // factor for factor in range(2, samples + 1) if samples % factor == 0]
    smaller = next((part for part in parts if most is None or part <= most), parts[-1])
    steps = job.count("gradient_accumulation_steps") or 1
    return Change(
        "arguments.per_device_train_batch_size", smaller,
        f"with gradient_accumulation_steps {steps} → {steps * (samples // smaller)} each step sees the same samples",
        _BATCH_COST,
        current=samples,
    )  # fmt: skip


def checkpointing(job: RunView) -> Iterator[Proposal]:
    """Activations recomputed in backward instead of kept."""
    held = None if job.activations_unknown else job.gib("activations")
    if job.phase not in ACTIVATION_PHASES or job.checkpointing or not (held or job.activations_unknown):
        return
    cost = "about one more forward pass a step (Chen et al. 2016, arXiv 1604.06174); the same result"
    holds = f"activations hold {held:.2f} GiB, of which" if held is not None else "of the activations"
    reason = f"{holds} each layer's input stays and the rest is recomputed"
    held = held if held is not None else 1.0
    if job.fsdp:
        # transformers refuses both switches together (trainer.py: "FSDP's activation_checkpointing").
        yield Proposal(Change("arguments.fsdp_config", {"activation_checkpointing": True}, reason, cost), held)
    else:
        name = name_in_version("activation_checkpointing", job.transformers)
        yield Proposal(Change(f"arguments.{name}", True, reason, cost), held)


def fused_loss(job: RunView) -> Iterator[Proposal]:
    """Logits and loss in chunks, never whole."""
    held = job.gib("loss")
    known = job.run.get("model_type") in LIGER_OPTIONS
    if job.phase not in ACTIVATION_PHASES or not held or not known or job.argument("use_liger_kernel"):
        return
    if not job.on_cuda and job.hardware.get("device_type") != "xpu":
        return
    vocabulary = job.run.get("vocabulary")
    words = f" over {vocabulary:,} words" if isinstance(vocabulary, int) else ""
    yield Proposal(
        Change(
            "arguments.use_liger_kernel", True,
            f"logits and loss{words} hold {held:.2f} GiB; Liger's fused loss makes them in chunks",
            "the package liger-kernel; results differ by rounding, and the output has no logits in training",
        ),
        held,
    )  # fmt: skip


def half_precision(job: RunView) -> Iterator[Proposal]:
    """Autocast. Activations halve; each weight gets a 16-bit copy while it runs."""
    held = job.gib("activations")
    if job.phase not in ACTIVATION_PHASES or not held or job.has_bf16 is None or job.deepspeed or job.fsdp:
        return
    if job.argument("bf16") or job.argument("fp16") or job.weights_type not in ("float32", "torch.float32"):
        return
    if not job.parameters:
        return
    copies = job.parameters * 2 / GIB
    gain = held / 2 - copies
    if gain <= 0:
        return
    name = "bf16" if job.has_bf16 else "fp16"
    why = "" if job.has_bf16 else " (this card does not compute in bf16)"
    yield Proposal(
        Change(
            f"arguments.{name}", True,
            f"16-bit matrix products{why}: of {held:.2f} GiB of activations most take half, against {copies:.2f} GiB "
            "of 16-bit copies of the weights",
            "results differ by 16-bit rounding in forward and backward; weights and optimizer stay in fp32; faster",
        ),
        gain,
    )  # fmt: skip


def eager_attention(job: RunView) -> Iterator[Proposal]:
    """Attention that does not write out its sequence × sequence matrices."""
    held = job.gib("activations")
    if job.phase not in ACTIVATION_PHASES or not held or job.run.get("attention") != "eager":
        return
    yield Proposal(
        Change(
            "model.attn_implementation", "sdpa",
            f"eager attention keeps a matrix of sequence × sequence for every head and layer; activations hold "
            f"{held:.2f} GiB",
            "results differ by rounding; a model without it says so when it is loaded, and gives no attention weights",
        ),
        held,
    )  # fmt: skip


def sequence_length(job: RunView) -> Iterator[Proposal]:
    """Shorter sequences."""
    longest, held = job.longest_sequence, _of_the_batch(job)
    if job.phase not in ACTIVATION_PHASES or longest is None or longest < 2 or not held:
        return
    saves = held * (1 - (longest // 2) / longest)
    yield Proposal(
        Change(
            "data.max_length", longest // 2,
            f"the longest sequence of that batch has {longest} tokens, and all others are padded to it",
            "longer texts are cut: what stands behind the limit is not learned",
            round(saves, 2),
            f"activations and loss measured at that moment ({held:.2f} GiB) grow with the tokens, or faster: half the "
            "tokens save at least half",
        ),
        saves,
        last=True,
    )  # fmt: skip


def _of_the_batch(job: RunView) -> float | None:
    held = [size for size in (job.gib("activations"), job.gib("loss")) if size is not None]
    return sum(held) if held else None


# Where it was not a training step on the card: evaluation, saving, and the machine's RAM.


def gathered_predictions(job: RunView) -> Iterator[Proposal]:
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


def only_loss(job: RunView) -> Iterator[Proposal]:
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


def evaluation_batch(job: RunView) -> Iterator[Proposal]:
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


def saving(job: RunView) -> Iterator[Proposal]:
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


def loader(job: RunView) -> Iterator[Proposal]:
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


def pinned_batches(job: RunView) -> Iterator[Proposal]:
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


def buffers_in_ram(job: RunView) -> Iterator[Proposal]:
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


def _whole_card(job: RunView) -> float:
    """Where no category tells, what is tried first is what usually holds most."""
    held = job.gib("loss")
    return 1.0 + (held or 0.0)


Rule = Callable[[RunView], Iterator[Proposal]]

_DEVICE: Final[tuple[Rule, ...]] = (
    of_states.allocator,
    batch,
    checkpointing,
    fused_loss,
    eager_attention,
    half_precision,
    of_states.fused_optimizer,
    of_states.eight_bit,
    of_states.paged,
    of_states.base_weights,
    of_states.sharding,
    of_states.offload,
    of_states.adapters,
    sequence_length,
    evaluation_batch,
    gathered_predictions,
    only_loss,
    saving,
)
_HOST: Final[tuple[Rule, ...]] = (loader, buffers_in_ram, pinned_batches)

_HOST_CAUSES: Final = ("host memory", "shared memory")
_NOTHING_TO_SAVE: Final = ("kernel resources",)

_NOTICED: Final = 0.002
"""Of the card. Less than that is within what the allocator rounds up to: its segments have 2 to 20 MiB each."""


def suggest(
    run: RunRecord,
    moment: Mapping[str, Any],
    *,
    modules: ModulesRecord | None = None,
    limit: int = 3,
) -> list[Change]:
    """The changes that would save most for this job, most first; those that change what is trained come last.

    Where the largest have no figure, the last place goes to one whose saving was measured, if there is one.

    Args:
        run: the `run` record.
        moment: an `OomRecord`, or the `StepRecord` of the highest peak, of which the cause may be told (`cause`).
        modules: the `modules` record, from which the saving of an 8-bit optimizer follows.
        limit: how many at most.
    """
    job = RunView(run, moment, modules)
    if job.cause in _NOTHING_TO_SAVE:
        return []
    rules = _HOST if job.cause in _HOST_CAUSES else _DEVICE
    proposals = [proposal for rule in rules for proposal in rule(job) if not _too_little(job, proposal)]
    proposals.sort(key=lambda proposal: (proposal.last, -proposal.at_most_gib))
    chosen: dict[str, Change] = {}
    for proposal in proposals:
        chosen.setdefault(proposal.change.key, proposal.change)  # two values for one setting are no advice
    changes = list(chosen.values())
    return _with_a_figure(changes[:limit], [change for change in changes[limit:] if change.saves_gib is not None])


def _too_little(job: RunView, proposal: Proposal) -> bool:
    """A change of the states of a few adapters, say: it costs something and makes no room."""
    capacity = job.hardware.get("capacity_gib")
    if not isinstance(capacity, int | float) or not job.measured:
        return False
    return 0 < proposal.at_most_gib < _NOTICED * capacity


def _with_a_figure(first: list[Change], others: list[Change]) -> list[Change]:
    """`first`, with one change among them whose saving this run has measured, if there is any: it is the one to count
    on."""
    if len(first) < 2 or not others or any(change.saves_gib is not None for change in first):
        return first
    return [*first[:-1], others[0]]
