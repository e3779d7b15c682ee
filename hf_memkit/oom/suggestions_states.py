"""Changes to what lives from step to step: weights, gradients, optimizer states; and to the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.oom.change import Change, Proposal
from hf_memkit.oom.run_view import RunView
from hf_memkit.optimizers import OPTIMIZERS, find_optimizer, paged_form
from hf_memkit.units import GIB

__all__ = [
    "adapters",
    "allocator",
    "base_weights",
    "eight_bit",
    "fused_optimizer",
    "offload",
    "paged",
    "sharding",
]

_ON_THE_CARD: Final = ("load", "data", "forward", "backward", "optimizer")

_FP32_STATES_BYTES: Final = OPTIMIZERS["adamw_torch"].states.bytes_a_parameter
_EIGHT_BIT_BYTES: Final = OPTIMIZERS["adamw_bnb_8bit"].states.bytes_a_parameter

_OFFLOADED_BYTES: Final = 20
"""What ZeRO-Offload holds in RAM a parameter, at most: fp32 master weight, gradient and two moments, the 16-bit copy
on its way to the card, and with accumulation 16-bit gradients (deepspeed 0.19.8: runtime/zero/stage_1_and_2.py;
`memkit ds show zero2-offload --model …` has the ledger)."""


def allocator(job: RunView) -> Iterator[Proposal]:
    """Segments that grow, where the matter is pieces."""
    settings = str(job.hardware.get("allocator_settings") or "").lower().replace(" ", "")
    if job.cause != "fragmentation" or not job.on_cuda:
        return
    cached = job.moment.get("fragmentation_gib")
    size = f"{cached:.2f} GiB were" if isinstance(cached, int | float) else "what was asked for was"
    reason = f"{size} cached in pieces too small for the request"
    weight = 1e6  # before all others: it answers this cause, and costs nothing
    if "expandable_segments:true" in settings:
        if job.argument("torch_empty_cache_steps") is None:
            # transformers 5.23: training_args.py, help of torch_empty_cache_steps, has the cost
            change = Change(
                "arguments.torch_empty_cache_steps", 1, reason + ", though segments are expandable already",
                "about 10% slower, as transformers' documentation has it",
            )  # fmt: skip
            yield Proposal(change, weight)
        return
    change = Change(
        "environment.PYTORCH_ALLOC_CONF", "expandable_segments:True", reason,
        "none on Linux; tensors on the card can then not be shared between processes",
    )  # fmt: skip
    yield Proposal(change, weight)


def eight_bit(job: RunView) -> Iterator[Proposal]:
    """AdamW with 8-bit states."""
    held = _states(job)
    if held is None or not _plain_adamw(job) or not job.on_cuda:
        return
    saves, basis = _eight_bit_saving(job, held)
    yield Proposal(
        Change(
            "arguments.optim", "adamw_bnb_8bit",
            f"AdamW's states take {held:.2f} GiB; in 8 bit about 2 bytes a parameter instead of 8, but for "
            "embeddings, which bitsandbytes keeps in 32 bit",
            "states are rounded to 8 bit (Dettmers et al. 2021, arXiv 2110.02861: no loss in their tasks); the "
            "package bitsandbytes",
            saves, basis,
        ),
        saves if saves is not None else held * (1 - _EIGHT_BIT_BYTES / _FP32_STATES_BYTES),
    )  # fmt: skip


def paged(job: RunView) -> Iterator[Proposal]:
    """8-bit states that may leave the card."""
    held = job.gib("optimizer")
    if not held or job.phase not in _ON_THE_CARD or not job.on_cuda or job.deepspeed or job.fsdp:
        return
    row = find_optimizer(job.optim)
    if row.unpaged or (row.algorithm, row.packages, row.bits) != ("AdamW", ("bitsandbytes",), 8):
        return
    yield Proposal(
        Change(
            "arguments.optim", paged_form(job.optim),
            f"the {held:.2f} GiB of 8-bit states lie in memory that CUDA moves to RAM when the card is full",
            "the same result; each step waits for the bus where states were moved; not on Windows or WSL2",
        ),
        held,
    )  # fmt: skip


def fused_optimizer(job: RunView) -> Iterator[Proposal]:
    """One kernel over all parameters, without temporaries of their size."""
    if job.phase != "optimizer" or job.optim != "adamw_torch" or job.deepspeed:
        return
    weights = job.gib("weights")
    if not weights or not job.trainable or not job.parameters or not job.on_cuda:
        return
    copy = weights * job.trainable / job.parameters
    yield Proposal(
        Change(
            "arguments.optim", "adamw_torch_fused",
            "adamw_torch works on all parameters at once and makes temporaries as large as they are (torch: "
            f"torch/optim/adamw.py, foreach): here {copy:.2f} GiB; the fused kernel makes none",
            "the same result up to rounding; no slower",
        ),
        copy,
    )  # fmt: skip


def base_weights(job: RunView) -> Iterator[Proposal]:
    """Frozen fp32 weights in 16 bit, where only adapters are trained."""
    held = job.gib("weights")
    if not held or not job.trains_adapters or job.weights_type not in ("float32", "torch.float32"):
        return
    if job.phase not in (*_ON_THE_CARD, "evaluate") or not job.has_bf16:
        return
    parameters, trainable = job.parameters or 0, job.trainable or 0
    frozen = (parameters - trainable) * 4 / GIB
    if frozen > held:
        return
    yield Proposal(
        Change(
            "model.dtype", "bfloat16",
            f"the frozen weights take {frozen:.2f} GiB in fp32, and nothing updates them",
            "forward and backward are rounded to bf16; the adapters stay in fp32 (PEFT casts them up)",
            round(frozen / 2, 2),
            f"{parameters - trainable:,} frozen parameters, 2 bytes each instead of 4",
        ),
        frozen / 2,
    )  # fmt: skip


def adapters(job: RunView) -> Iterator[Proposal]:
    """LoRA: gradients and states of a few adapters instead of the whole model's."""
    gradients, states = job.gib("gradients"), job.gib("optimizer")
    if job.phase not in _ON_THE_CARD or job.trains_adapters or not job.trainable:
        return
    held = (gradients or 0) + (states or 0)
    if not held:
        return
    yield Proposal(
        Change(
            "adapter.LoraConfig", {"target_modules": "all-linear"},
            f"gradients and optimizer states of the whole model take {held:.2f} GiB; those of LoRA adapters are small",
            "another training: the model's own weights stay as they are (Hu et al. 2021, arXiv 2106.09685); the "
            "package peft",
        ),
        held,
        last=True,
    )  # fmt: skip


def sharding(job: RunView) -> Iterator[Proposal]:
    """Gradients and states split over the cards that there are."""
    held = _model_states(job)
    if not held or job.world_size < 2 or job.fsdp or job.phase not in _ON_THE_CARD or job.trains_adapters:
        return
    stage = job.stage if job.stage is not None else (0 if not job.deepspeed else None)
    if stage is None or stage >= 3:
        return
    name, what = ("zero2", "gradients and optimizer states") if stage < 2 else ("zero3", "weights as well")
    if stage == 2:
        held = job.gib("weights") or 0.0
    if not held:
        return
    yield Proposal(
        Change(
            "arguments.deepspeed", f"{name}.json",
            f"`memkit ds copy {name}` splits {what} over the {job.world_size} processes, each of which holds all of "
            "them now",
            "more communication between the cards in each step; DeepSpeed keeps fp32 master weights besides",
        ),
        held * (1 - 1 / job.world_size),
    )  # fmt: skip


def offload(job: RunView) -> Iterator[Proposal]:
    """ZeRO-Offload: gradients and states in RAM, the update on the CPU."""
    held = _model_states(job)
    if not held or job.fsdp or not job.on_cuda or job.phase not in _ON_THE_CARD or job.trains_adapters:
        return
    stage = job.stage
    if (job.deepspeed and stage is None) or job.argument("deepspeed_offload_optimizer"):
        return
    if _held_in(job, "host") or _held_in(job, "pinned") or "CPUAdam" in " ".join(job.optimizers):
        return  # they are there already
    ram = job.hardware.get("ram_limit_gib") or job.hardware.get("ram_gib")
    needs = job.states_gib_per(_OFFLOADED_BYTES)
    if needs is None or (isinstance(ram, int | float) and needs > ram):
        return
    name = "zero3-offload-optimizer" if stage == 3 else "zero2-offload"
    yield Proposal(
        Change(
            "arguments.deepspeed", f"{name}.json",
            f"`memkit ds copy {name}` moves gradients and optimizer states, {held:.2f} GiB on this card, into RAM",
            f"the AdamW step runs on the CPU and each step crosses the bus; up to {needs:.1f} GiB of RAM (20 bytes a "
            "parameter); DeepSpeed builds its CPU optimizer once",
        ),
        held,
    )  # fmt: skip


def _states(job: RunView) -> float | None:
    """What the optimizer's states hold, or will hold where the first step is making them."""
    if job.phase not in _ON_THE_CARD:
        return None
    held = job.gib("optimizer")
    if job.phase == "optimizer":
        return max(held or 0.0, job.states_gib_per(_FP32_STATES_BYTES) or 0.0) or None
    return held or None


def _model_states(job: RunView) -> float | None:
    return ((job.gib("gradients") or 0.0) + (job.gib("optimizer") or 0.0)) or None


def _plain_adamw(job: RunView) -> bool:
    row = find_optimizer(job.optim)
    plain = row.algorithm == "AdamW" and row.bits == 32 and not row.unpaged
    plain = plain and not job.optim.endswith(("_xla", "_npu_fused"))  # bitsandbytes has no kernels there
    return plain and not job.deepspeed and not job.fsdp


def _eight_bit_saving(job: RunView, held: float) -> tuple[float | None, str | None]:
    """GiB, where the table of modules tells the embeddings, and the states measured are AdamW's fp32 ones."""
    embeddings, trainable = job.embedding_parameters, job.trainable
    measured = job.gib("optimizer")
    if embeddings is None or trainable is None or not measured or embeddings > trainable:
        return None, None
    if abs(measured - trainable * _FP32_STATES_BYTES / GIB) > 0.02 * measured:
        return None, None  # 16-bit states, or states on other devices: the arithmetic does not hold
    saves = (trainable - embeddings) * (_FP32_STATES_BYTES - _EIGHT_BIT_BYTES) / GIB
    basis = (
        f"{held:.2f} GiB of states measured, 8 bytes a parameter; {trainable - embeddings:,} of {trainable:,} "
        f"parameters are not embeddings and take {_EIGHT_BIT_BYTES:.2f}"
    )
    return round(saves, 2), basis


def _held_in(job: RunView, place: str) -> bool:
    held = job.moment.get("held")
    inside = held.get(place) if isinstance(held, dict) else None
    return isinstance(inside, dict) and bool(inside.get("optimizer_gib"))
