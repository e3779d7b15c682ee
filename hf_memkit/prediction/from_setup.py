"""`predict`: a setup → its prediction, by a trace on fake CUDA tensors; where these fail on fake CPU tensors, which is
said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Final

from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.catalog.fp16_overflow import overflow_in_fp16
from hf_memkit.catalog.library_versions import free_order
from hf_memkit.catalog.models import without_collections
from hf_memkit.common.errors import InputError, NoKernel, TraceFailed
from hf_memkit.common.resources import documentation
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.prediction.allocator.capacity import reserved_interval, smallest_cap
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import AllocatorSettings, parse_settings
from hf_memkit.prediction.gpu_memory import OUTLIERS_ASSUMED
from hf_memkit.prediction.prediction import Prediction, with_rest
from hf_memkit.prediction.running_scripts import ScriptJob, script_request
from hf_memkit.prediction.setup_as_script import SETUP_SCRIPT, SetupTraining, trace_setup
from hf_memkit.prediction.split_states import bucket_bytes, is_split, one_rank, split_notes, without_engine
from hf_memkit.prediction.trace.edit import ExtraAllocation, edited
from hf_memkit.prediction.trace.request import Device
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.verdict import Confidence, Level
from hf_memkit.prediction.worker import shared_worker
from hf_memkit.setup.bf16_on_gpus import emulated_by_setup, unscaled_by_setup
from hf_memkit.setup.build import missing_package
from hf_memkit.setup.job import Job, process_row
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.request import refuse_below_one
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques import setup_ledger as sums
from hf_memkit.setup.techniques.allocator import VARIABLE


def predict(setup: Setup, *, trust_remote_code: bool = False, usual: Setup | None = None) -> Prediction:
    """Bytes that a training needs, by phase and category, and whether the machine has them.

    Args:
        setup: what is trained: `model.architecture`, `arguments.*` and whatever its techniques put there. Of its job
            come the model's shapes (None: only a trace can tell) and the machine (without a GPU: no verdict).
        trust_remote_code: whether code that comes with the model may be run, in the child process.
        usual: the same setup with the lengths of a usual batch, where `setup` has those of the worst: it is traced
            after two steps of that. None: all batches are alike.

    Raises:
        InputError: nothing can be said of this job, with the reason.
        NoKernel: the GPU refuses an operation of it, so that it does not train.
        ValueError: the setup has no job.
    """
    found = _predicted(setup, trust_remote_code=trust_remote_code, usual=usual)
    model = setup.sized_job.model
    fp16 = setup.get("arguments.fp16")
    overflow = overflow_in_fp16(model.config.get("model_type")) if model is not None and fp16 else ""
    return found.with_warnings(emulated_by_setup(setup), overflow)


def _predicted(setup: Setup, *, trust_remote_code: bool, usual: Setup | None) -> Prediction:
    job = setup.sized_job
    model = job.model
    _refuse_impossible(setup, job)
    if why := unscaled_by_setup(setup):  # at once, and where nothing is traced on a GPU
        raise NoKernel(why)
    setup = setup.put("arguments.per_device_train_batch_size", job.micro_batch_size, "asked for")
    setup = setup.put("arguments.gradient_accumulation_steps", job.accumulation, "asked for")
    ledger = _ledger(setup, job)
    notes: list[str] = []
    failures: list[TraceFailed] = []
    if is_split(setup) and ledger is None:
        raise InputError(
            "deepspeed: what it splits is known only for causal language models of transformers; predict without it, "
            "or predict the script: memkit predict train.py"
        )
    request = script_request(ScriptJob(SETUP_SCRIPT, job.machine, job.gpus, job.nodes))
    traced = setup
    if is_split(setup):  # DeepSpeed's engine does not save as Trainer does
        traced = without_engine(setup).put("arguments.save_strategy", "no", "the ledger has the engine's checkpoint")
    training = SetupTraining(traced, job.sequence_length, usual=usual, trust_remote_code=trust_remote_code)
    for device in _devices(notes):
        try:
            found = trace_setup(shared_worker(), training, replace(request, device=device))
        except TraceFailed as failure:
            if failure.kind == NoKernel.__name__:
                raise NoKernel(str(failure)) from failure
            if failure.refused and (model is None or _is_the_users(failure)):
                raise InputError(str(failure)) from failure
            if failure.kind == "ModuleNotFoundError" and (missing := missing_package(setup)):
                raise InputError(f"a trace needs {missing}") from failure
            failures.append(failure)
            notes.append(f"not traced on {_ON[device]}: {failure}")
            continue
        trainer = "TRL's SFTTrainer" if setup.get("trainer.class") == "trl:SFTTrainer" else "transformers.Trainer"
        return from_trace(found, device, setup, job, ledger, notes, trainer=trainer)
    if len(failures) > 1 and _is_the_users(failures[-1]):  # the real Trainer fails at it on both devices
        raise InputError(f"this training cannot be traced: {failures[0]}") from failures[0]
    raise InputError("; ".join(notes))


_MOST_TOKENS: Final = 2**24
"""Of one GPU in one forward pass: far more than GPUs hold, and still a batch that a child process can make."""

_MOST_PROCESSES: Final = 2**17

_NOT_THE_USERS: Final = frozenset(
    {
        "Unmodelled", "MissingPackageError", "ImportError", "ModuleNotFoundError", "PackageNotFoundError", "worker",
        "TimeoutError", "MemoryError", "NotImplementedError", "UnsupportedOperatorException", "AttributeError",
    }
)  # fmt: skip
"""Kinds of failures that say what cannot be modelled or is not installed here, and nothing of the job."""


def _is_the_users(failure: TraceFailed) -> bool:
    """Whether an exception of the training itself ended it, not a signal, a time limit or what is missing here."""
    return failure.kind.isidentifier() and not failure.kind.startswith("SIG") and failure.kind not in _NOT_THE_USERS


def _refuse_impossible(setup: Setup, job: Job) -> None:
    """Raises InputError for numbers that no training has, or an engine that is not modelled."""
    micro_batch_size, sequence_length, gpus, nodes = job.micro_batch_size, job.sequence_length, job.gpus, job.nodes
    refuse_below_one(micro_batch_size=micro_batch_size, sequence_length=sequence_length, gpus=gpus, nodes=nodes)
    if job.tokens > _MOST_TOKENS:
        raise InputError(
            f"a batch of {micro_batch_size} × {sequence_length} tokens: at most {_MOST_TOKENS} tokens in one forward "
            f"pass of a GPU can be predicted; give a smaller batch or length"
        )
    if job.processes > _MOST_PROCESSES:
        raise InputError(f"{gpus} × {nodes} GPUs: at most {_MOST_PROCESSES} can be predicted; give fewer")
    if setup.get("arguments.fsdp"):
        raise InputError(
            f"fsdp={setup['arguments.fsdp']!r}: FSDP is not modelled; predict without it, or with a DeepSpeed preset "
            f"(memkit ds list)"
        )


_ON: Final[dict[Device, str]] = {"cuda": "fake CUDA tensors", "cpu": "fake CPU tensors", "real cpu": "the CPU"}

_LEVEL: Final[dict[Device, Level]] = {"cuda": "trace", "cpu": "cpu trace", "real cpu": "cpu trace"}


MEASURED_ON: Final = f"GPUs of others: {documentation('predict.md')}"
"""Where traces were compared with trainings: benchmarks/results/published.json."""


def _devices(notes: list[str]) -> tuple[Device, ...]:
    worker = shared_worker()
    try:
        worker.wait()
    except TraceFailed as failure:
        notes.append(str(failure))
        return ()
    if worker.without_shim is None:
        return ("cuda", "cpu")
    notes.append(f"traced on fake CPU tensors, because fake CUDA tensors fail with this torch: {worker.without_shim}")
    return ("cpu",)


def _ledger(setup: Setup, job: Job) -> Ledger | None:
    """The setup's own ledger, or one computed for it; None where neither it nor the model's shapes are known."""
    if setup.ledger.rows or job.model is None:
        return setup.ledger if setup.ledger.rows else None
    rows = sums.rows(replace(setup, job=job))
    if is_split(setup):
        config = setup["deepspeed.config"]
        held = zero_ledger(
            config, job.model, gpus=job.gpus, nodes=job.nodes, accumulation=job.accumulation > 1,
            adapters=adapter_tensors(job.model, setup.section("adapter")),
        )  # fmt: skip
        rows = (*held.rows, *rows, process_row(job.gpus))
    return Ledger(rows)


@without_collections()
def from_trace(
    trace: Trace,
    device: Device,
    setup: Setup,
    job: Job,
    ledger: Ledger | None,
    notes: list[str],
    *,
    trainer: str,
    libraries: Mapping[str, str] | None = None,
    enough_bytes: int | None = None,
) -> Prediction:
    """A trace, put through the allocator and judged.

    Args:
        trace: of two optimizer steps.
        device: where its tensors lay.
        setup: what else decides bytes: the allocator's settings, what DeepSpeed splits.
        job: the machine, and how many processes there are.
        ledger: what is not on the GPU, and what DeepSpeed splits; None: not known.
        notes: what is to be said beside it; more is added.
        trainer: what trained, in words.
        libraries: versions of torch and transformers that made the trace; None: those of this process.
        enough_bytes: where what is allocated, and what lies outside, takes more, no more is asked of the allocator:
            what it reserves is then one figure, and the smallest cap what is allocated.
    """
    split = is_split(setup)
    if split:
        assert ledger is not None
        trace = one_rank(trace, ledger, bucket_bytes(setup))
        notes.extend(split_notes(ledger))
    elif job.processes > 1:
        kinds = zip(trace.sizes_bytes, trace.category_of, strict=True)
        gradients = sum(size for size, category in kinds if CATEGORIES[category] == "gradients")
        # Two steps and up to two micro-batches were traced; each parameter has one gradient at a time.
        steps = max(1, sum(phase == "optimizer" for *_, phase in trace.spans()))
        term = "gradient buckets of DistributedDataParallel"
        trace = edited(trace, [ExtraAllocation(gradients // steps, "buffers", term)])
    if job.processes > 1:
        notes.append("the buffers of the communication library (NCCL) lie outside the allocator and are not included")
    if dict(setup.get("model.quantization") or {}).get("load_in_8bit"):
        notes.append(OUTLIERS_ASSUMED)
    settings = AllocatorSettings()
    if text := setup.get(f"environment.{VARIABLE}"):
        settings, said = parse_settings(str(text))
        notes.extend(said)
    gpu = job.machine.gpu
    capacity = gpu.capacity_bytes if gpu is not None else None
    plain = replay(trace, settings, gpu_bytes=capacity)
    versions = {name: libraries[name] if libraries else version(name) for name in ("torch", "transformers")}
    order = free_order(versions["torch"])
    alone = plain if order == "segment" else replay(trace, settings, gpu_bytes=capacity, order=order)
    if setup.get("arguments.predict_with_generate") and "evaluate" in alone.allocated_by_phase:
        notes.append("evaluations generate: every answer is counted at its maximum length")
    outside = gpu.context_bytes if gpu is not None else 0
    if enough_bytes is not None and alone.peak_allocated_bytes + outside > enough_bytes:
        cap = alone.peak_allocated_bytes
        low = high = plain.peak_reserved_bytes
    else:
        cap = smallest_cap(trace, settings, gpu_bytes=capacity, without_cap=plain)
        low, high = reserved_interval(trace, settings, gpu_bytes=capacity, smallest_cap_bytes=cap, without_cap=plain)
    peak = trace.peak()
    rests_on = f"two optimizer steps of {trainer} on {_ON[device]}"
    if split:
        rests_on += ", joined with the formulas of what DeepSpeed holds"
    return Prediction(
        peak_allocated_bytes=alone.peak_allocated_bytes,
        peak_reserved_bytes=(low, max(high, alone.peak_reserved_bytes)),  # the phases' own is among them
        outside_allocator_bytes=outside,
        smallest_cap_bytes=cap,
        phases={
            phase: (allocated, alone.reserved_by_phase[phase]) for phase, allocated in alone.allocated_by_phase.items()
        },
        categories=with_rest(peak.categories, alone.peak_allocated_bytes),
        peak_phase=peak.phase,
        peak_operation=peak.operation,
        peak_module=peak.module,
        confidence=Confidence(_LEVEL[device], rests_on, None if split or device != "cuda" else MEASURED_ON),
        source=", ".join(f"{name} {number}" for name, number in versions.items()),
        host_rss_bytes=ledger.total_bytes("host") if ledger is not None else None,
        pinned_bytes=ledger.total_bytes("pinned") if ledger is not None else None,
        disk_bytes=ledger.total_bytes("disk") if ledger is not None else None,
        notes=tuple(notes),
        memory_fraction=settings.memory_fraction,
        modules=peak.modules,
    ).judged(job.machine)
