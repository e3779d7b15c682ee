"""Why a message came: the arithmetic on its numbers. In: an `OomMessage`. Out: a `Verdict`.

Before PyTorch raises this error it gives every whole cached segment back to the driver and asks again
(torch: c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`). What is still cached then lies in pieces between
tensors that are in use, so that reserved − allocated is what could not be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hf_memkit.oom import without_figures
from hf_memkit.oom.allocator import for_fragmentation, for_size
from hf_memkit.oom.card import OWN_CONTEXT, Card, card_of, other_processes
from hf_memkit.oom.change import Remedy
from hf_memkit.oom.job_view import Job
from hf_memkit.oom.message import OomMessage
from hf_memkit.oom.sizes import show
from hf_memkit.oom.suggestions_batch import smaller_batch
from hf_memkit.oom.without_figures import Cause
from hf_memkit.record_types import RunRecord
from hf_memkit.units import GIB

__all__ = ["Cause", "Verdict", "for_job", "judge"]


_NOTABLE: Final = 0.05
"""A share of the card below which a thing is not called the cause: a few per cent are
always cached between tensors, and a desktop's few hundred MiB move the limit by less than one batch does. torch's own
text says "if reserved but unallocated memory is large", and gives no number."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause in one word, and why.

    Attributes:
        cause: one of `Cause`.
        why: the arithmetic, in words and sizes.
        settings: what helps against this cause, each with its reason.
        no_help: what is often advised, and does not help here, each with its reason.
        figures: the sizes that the arithmetic used, in GiB, by name.
    """

    cause: Cause
    why: str
    settings: tuple[Remedy, ...] = ()
    no_help: tuple[Remedy, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "why": self.why,
            "settings": [setting.to_json() for setting in self.settings],
            "no_help": [setting.to_json() for setting in self.no_help],
            "figures": self.figures,
        }


def judge(
    message: OomMessage,
    *,
    allocator_settings: str | None = None,
    samples: int | None = None,
    grows: bool = True,
    own: int | None = None,
) -> Verdict:
    """What this message means.

    Args:
        message: as `parse_message` gives it.
        allocator_settings: what `PYTORCH_ALLOC_CONF` held in that run, if it is known.
        samples: in the micro-batch, if they are known.
        grows: False where the tensor that was asked for is the same with any batch.
        own: this job's process number, if it is known: it is none of the others on the GPU.
    """
    others = tuple(process for process in message.processes if process.pid != own)
    if len(others) < len(message.processes):
        mine = next(process.size_bytes for process in message.processes if process.pid == own)
        message = replace(message, processes=others, process_bytes=message.process_bytes or mine)
    if message.form in without_figures.ANSWERS:
        cause, why, settings = without_figures.ANSWERS[message.form](message)
        return _made(cause, why, settings, _figures(message))
    if message.device_type == "mps":
        return _mps(message)
    verdict = _device(message, allocator_settings)
    limit = message.allowed_bytes or message.capacity_bytes
    if limit and (message.requested_bytes or 0) > limit:
        return replace(verdict, why=f"{verdict.why} {_no_batch(message, samples, grows)}")
    return verdict


def _no_batch(message: OomMessage, samples: int | None, grows: bool) -> str:
    """Whether a smaller batch could make that tensor fit."""
    requested, limit = message.requested_bytes or 0, message.allowed_bytes or message.capacity_bytes or 1
    if not grows:
        return "No batch size will do: it is as large with any batch."
    if samples is not None and requested > limit * samples:
        one = "it is that of one sample" if samples == 1 else f"of one sample alone it is {show(requested / samples)}"
        return f"No batch size will do: {one}. The tensor itself must be smaller, or never made whole."
    if samples is not None:
        return (
            f"Alone on the GPU it would fit for at most {int(samples * limit / requested)} of the {samples} samples."
        )
    factor = -(-requested // limit)
    return (
        f"If your batch has fewer than {factor} samples, one sample alone is too large: no batch size will do, the "
        f"tensor itself must be smaller, or never made whole. A larger batch must be at least {factor} times smaller."
    )


def for_job(verdict: Verdict, run: RunRecord, phase: object = None) -> Verdict:
    """The same with its own numbers, and without settings that cannot help this job: fewer of the workers that it does
    not have, less of an offload that it does not do, another evaluation where none ran.

    Args:
        verdict: on its error.
        run: its `run` record, or one made of the arguments alone.
        phase: where it failed, if that is known.
    """
    arguments = run.get("arguments")
    if not isinstance(arguments, Mapping):
        return verdict
    useless = set()
    if arguments.get("dataloader_num_workers") == 0:
        useless.add("arguments.dataloader_num_workers")
    if not any(str(name).startswith("deepspeed") and value for name, value in arguments.items()):
        useless.add("DeepSpeed offload")
    if isinstance(phase, str) and phase != "evaluate":
        useless.add("arguments.eval_accumulation_steps")
    batch = arguments.get("per_device_train_batch_size")
    if isinstance(batch, int) and batch < 2:
        useless.add("arguments.per_device_train_batch_size")
    values = {}
    if (change := smaller_batch(Job(run, {}))) is not None:
        values[change.key] = f"{change.current} → {change.value}"
    if isinstance(workers := arguments.get("dataloader_num_workers"), int) and workers:
        values["arguments.dataloader_num_workers"] = f"{workers} → {workers // 2}"
    fitted = (replace(one, value=values.get(one.key, one.value)) for one in verdict.settings)
    return replace(verdict, settings=tuple(one for one in fitted if one.key not in useless))


def _device(message: OomMessage, allocator_settings: str | None) -> Verdict:
    requested = message.requested_bytes
    if requested is None or message.free_bytes is None:
        return _made(
            "unknown",
            f"The text does not say how much was {'asked for, ' if requested is None else ''}free, allocated and "
            "reserved. The whole message does, in the same line or the next.",
            (),
            _figures(message),
        )
    card = card_of(message, requested)
    for rule in (_too_large, _cap, _fits, _fragmentation, _others, _overhead):
        verdict = rule(message, card, allocator_settings)
        if verdict is not None:
            return verdict
    return _size(message, card)


Rule = Callable[[OomMessage, Card, str | None], Verdict | None]


def _too_large(message: OomMessage, card: Card, allocator_settings: str | None) -> Verdict | None:
    limit = message.allowed_bytes or message.capacity_bytes
    if limit is None or card.requested <= limit:
        return None
    whose = "the process may use" if message.allowed_bytes else "the card has"
    why = f"One tensor of {show(card.requested)} was asked for, and all that {whose} is {show(limit)}."
    return _verdict("size", why, message, card, for_size(message, "the tensor alone is larger"))


def _cap(message: OomMessage, card: Card, allocator_settings: str | None) -> Verdict | None:
    allowed, free, reserved = message.allowed_bytes, message.free_bytes, message.reserved_bytes
    if allowed is None or free is None or reserved is None or reserved + card.requested <= allowed:
        return None
    if free < card.requested or (card.cached or 0) + (card.available or 0) >= card.requested:
        return None  # the card is full as well, or what is cached would do
    why = (
        f"The card has {show(free)} free, but this process may use {show(allowed)}: {show(reserved)} reserved + "
        f"{show(card.requested)} asked for is more."
    )
    lift = Remedy("torch.cuda.set_per_process_memory_fraction", "a larger fraction", True, "it is what set the limit")
    return _verdict("cap", why, message, card, (lift, *for_size(message, "the limit is not the card's")))


def _fits(message: OomMessage, card: Card, allocator_settings: str | None) -> Verdict | None:
    if card.available is None or card.available < card.requested:
        return None
    why = (
        f"{show(card.requested)} was asked for and {show(card.available)} was free when the message was written, a "
        "moment later: another process may have let go of it meanwhile, or the driver could not give it in one piece."
    )
    if other_processes(message):
        return _verdict("another process", why, message, card, _free_the_card(message))
    return _verdict("unknown", why, message, card, ())


def _fragmentation(message: OomMessage, card: Card, allocator_settings: str | None) -> Verdict | None:
    cached, available = card.cached, card.available
    if cached is None or available is None or cached + available < card.requested:
        return None
    if cached < _NOTABLE * (message.allowed_bytes or message.capacity_bytes or message.reserved_bytes or 0):
        return None
    pieces = (
        f"{show(message.reserved_bytes or 0)} reserved − {show(message.allocated_bytes or 0)} allocated = "
        f"{show(cached)} cached, in pieces between tensors that are in use"
    )
    if cached >= card.requested:
        why = f"{pieces}: none of them is {show(card.requested)} long, though together they are."
    else:
        left = cached + available - card.requested
        why = (
            f"{pieces}. With the {show(available)} that was free that is enough for {show(card.requested)}, and would "
            f"leave {show(left)}."
        )
    return _verdict("fragmentation", why, message, card, for_fragmentation(message, allocator_settings))


def _others(message: OomMessage, card: Card, allocator_settings: str | None) -> Verdict | None:
    short = card.short
    if card.others is None or short is None or card.others < max(short, _NOTABLE * (message.capacity_bytes or 0)):
        return None
    named = "other processes" if message.processes else "what is neither free nor this process's"
    why = f"{card.balance} {named.capitalize()} holds {show(card.others)} of the card: without that it would have fit."
    why = why.replace("processes holds", "processes hold")
    return _verdict("another process", why, message, card, _free_the_card(message))


def _overhead(message: OomMessage, card: Card, allocator_settings: str | None) -> Verdict | None:
    short = card.short
    if card.own_overhead is None or short is None or card.own_overhead <= OWN_CONTEXT:
        return None
    if card.own_overhead - OWN_CONTEXT < max(short, _NOTABLE * (message.capacity_bytes or 0)):
        return None
    why = (
        f"{card.balance} This process holds {show(card.own_overhead)} outside PyTorch's allocator: the CUDA context "
        "(0.5 to 2 GiB) and libraries that allocate by themselves, such as NCCL, bitsandbytes' paged states, vLLM or "
        "another framework."
    )
    helps = Remedy(
        "environment.NCCL_BUFFSIZE", "1048576", True, "smaller buffers for each of NCCL's channels (4 MiB by default)"
    )
    return _verdict(
        "context and libraries", why, message, card, (helps, *for_size(message, "none of it is PyTorch's"))
    )


def _size(message: OomMessage, card: Card) -> Verdict:
    short = card.short
    if short is None or short > 0:
        return _verdict("size", card.balance, message, card, for_size(message, "pieces are not what is missing"))
    why = (
        f"{card.balance} The card is full: even if all pieces of the cache could be joined, "
        f"{show(-short)} would be left for the next request."
    )
    return _verdict("size", why, message, card, for_size(message, "it would serve this request and fail at the next"))


def _mps(message: OomMessage) -> Verdict:
    requested, allowed = message.requested_bytes, message.allowed_bytes
    held = (message.allocated_bytes or 0) + (message.other_bytes or 0)
    if requested is None or message.allocated_bytes is None:
        return _made("unknown", "The text holds no figures.", (), _figures(message))
    if allowed is None or held + requested <= allowed:
        why = f"PyTorch and Metal hold {show(held)}, and {show(requested)} more could not be had in one piece."
        return _made("unknown", why, (), _figures(message))
    why = (
        f"{show(message.allocated_bytes)} of tensors + {show(message.other_bytes or 0)} of other Metal buffers + "
        f"{show(requested)} asked for is more than the {show(allowed)} that PyTorch allows itself: 1.7 times what "
        "Metal recommends for this Mac."
    )
    lift = Remedy(
        "environment.PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0", True,
        "no limit any more; macOS then swaps, and may stop answering: a smaller batch is better",
    )  # fmt: skip
    return _made("cap", why, (lift,), _figures(message))


def _free_the_card(message: OomMessage) -> tuple[Remedy, ...]:
    who = ", ".join(str(process.pid) for process in other_processes(message)[:5])
    ids = f" (process {who})" if who else ""
    return (
        Remedy(
            "command", "nvidia-smi", True,
            f"shows who is on the GPU{ids}. First make sure that it is no part of this job: another rank or worker, "
            "or this very process, which in a container has another number. Then wait for it, or take another GPU",
        ),
        Remedy(
            "environment.CUDA_VISIBLE_DEVICES", "an empty card", True,
            "also where several ranks of this job sit on one card: each must set its device before it loads a model",
        ),
        *for_size(message, "the memory belongs to another process"),
    )  # fmt: skip


def _verdict(cause: Cause, why: str, message: OomMessage, card: Card, settings: tuple[Remedy, ...]) -> Verdict:
    figures = _figures(message)
    extra = {"short_gib": card.short, "outside_allocator_gib": card.own_overhead, "other_processes_gib": card.others}
    figures |= {
        name: size / GIB for name, size in extra.items() if size is not None and (size > 0 or name != "short_gib")
    }
    return _made(cause, why, settings, figures)


def _made(cause: Cause, why: str, settings: tuple[Remedy, ...], figures: dict[str, float]) -> Verdict:
    helping = tuple(setting for setting in settings if setting.helps)
    return Verdict(cause, why, helping, tuple(setting for setting in settings if not setting.helps), figures)


def _figures(message: OomMessage) -> dict[str, float]:
    names = ("requested", "free", "capacity", "allowed", "allocated", "reserved", "cached", "process", "resident")
    sizes = {name: getattr(message, f"{name}_bytes") for name in names}
    return {f"{name}_gib": size / GIB for name, size in sizes.items() if size is not None}
