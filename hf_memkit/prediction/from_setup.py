"""`predict`: predicts a setup by a trace on fake CUDA tensors, or on fake CPU tensors if those fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Final

from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.catalog.fit import Level
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
from hf_memkit.prediction.confidence import Confidence
from hf_memkit.prediction.gpu_memory import OUTLIERS_ASSUMED
from hf_memkit.prediction.prediction import Prediction, with_rest
from hf_memkit.prediction.running_scripts import ScriptJob, cpu_notes, script_request
from hf_memkit.prediction.setup_as_script import SETUP_SCRIPT, SetupJob, trace_setup
from hf_memkit.prediction.split_states import bucket_bytes, is_split, one_rank, split_notes, without_engine
from hf_memkit.prediction.trace.edit import ExtraAllocation, edited
from hf_memkit.prediction.trace.request import Device
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.traced_training import COMPILED, FSDP_COMPARED
from hf_memkit.prediction.worker import shared_worker
from hf_memkit.setup.bf16_on_gpus import emulated_by_setup, unscaled_by_setup
from hf_memkit.setup.build import missing_package
from hf_memkit.setup.job import Job, process_row
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.request import refuse_below_one
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques import setup_ledger as sums
from hf_memkit.setup.techniques.allocator import VARIABLE
from hf_memkit.setup.techniques.offload_fsdp import NEEDS_SEVERAL_GPUS


def predict(setup: Setup, *, trust_remote_code: bool = False, typical: Setup | None = None) -> Prediction:
    """Predicts the memory of a training by phase and category, and whether the machine has it.

    Args:
        setup: the training: `model.architecture`, `arguments.*` and settings of its techniques. Its job has the
            model's shapes (None: only a trace shows them) and the machine (without a GPU: no verdict).
        trust_remote_code: whether code that comes with the model may run, in the child process.
        typical: the same setup with the lengths of a typical batch, if `setup` has those of the worst: two steps with
            it are traced first. Default: all batches are alike.

    Raises:
        InputError: the job cannot be predicted, with the reason.
        NoKernel: the GPU lacks a kernel for an operation, so the job does not train.
        ValueError: the setup has no job.
    """
    prediction = _predict(setup, trust_remote_code=trust_remote_code, typical=typical)
    model = setup.sized_job.model
    fp16 = setup.get("arguments.fp16")
    overflow = overflow_in_fp16(model.config.get("model_type")) if model is not None and fp16 else ""
    return prediction.with_warnings(emulated_by_setup(setup), overflow)


def _predict(setup: Setup, *, trust_remote_code: bool, typical: Setup | None) -> Prediction:
    job = setup.sized_job
    _refuse_impossible(setup, job)
    if why := unscaled_by_setup(setup):  # before a trace, and also without a GPU
        raise NoKernel(why)
    setup = setup.put("arguments.per_device_train_batch_size", job.micro_batch_size, "asked for")
    setup = setup.put("arguments.gradient_accumulation_steps", job.accumulation, "asked for")
    ledger = _ledger(setup, job)
    if is_split(setup) and ledger is None:
        raise InputError(
            "deepspeed: what it splits is known only for causal language models of transformers; predict without it, "
            "or predict the script: memkit predict train.py"
        )
    traced = setup
    if is_split(setup):  # DeepSpeed's engine does not save as Trainer does
        traced = without_engine(setup).put("arguments.save_strategy", "no", "the ledger has the engine's checkpoint")
    setup_job = SetupJob(traced, job.sequence_length, typical=typical, trust_remote_code=trust_remote_code)
    request = script_request(ScriptJob(SETUP_SCRIPT, job.machine, job.gpus, job.nodes))

    worker = shared_worker()
    try:
        worker.wait()
    except TraceFailed as failure:
        raise InputError(str(failure)) from failure
    devices: list[Device] = ["cuda", "cpu"] if worker.shim_error is None else ["cpu"]
    if setup.get("arguments.fsdp"):
        devices.remove("cpu")  # there Trainer copies the model to each process and says nothing
    notes = cpu_notes(worker)
    failures: list[TraceFailed] = []
    for device in devices:
        try:
            training = trace_setup(worker, setup_job, replace(request, device=device))
        except TraceFailed as failure:
            _refuse_failed(setup, failure)
            failures.append(failure)
            notes.append(f"not traced on {_ON[device]}: {failure}")
            continue
        notes.extend(note for note in training.notes if note.startswith(COMPILED))
        if training.fsdp:
            notes.append(FSDP_COMPARED)
        trainer = "TRL's SFTTrainer" if setup.get("trainer.class") == "trl:SFTTrainer" else "transformers.Trainer"
        trace = training.of_steps()["worst"]
        prediction = from_trace(trace, device, setup, job, ledger, notes, trainer=trainer)
        return prediction.with_compilation(training.compilation)
    if failures and (len(failures) > 1 or setup.get("arguments.fsdp")):
        first, last = failures[0], failures[-1]
        if str(first) == str(last) or _is_users_error(last):  # the real Trainer fails on both devices
            raise InputError(f"this training cannot be traced: {first}") from first
    raise InputError("; ".join(notes))


def _refuse_failed(setup: Setup, failure: TraceFailed) -> None:
    """Raises the error for a failure that no other device avoids."""
    if failure.kind == NoKernel.__name__:
        raise NoKernel(str(failure)) from failure
    if failure.refused and (setup.sized_job.model is None or _is_users_error(failure)):
        raise InputError(str(failure)) from failure
    if failure.kind == "ModuleNotFoundError" and (missing := missing_package(setup)):
        raise InputError(f"a trace needs {missing}") from failure
    if setup.get("arguments.torch_compile"):  # code that is compiled for a CPU needs other memory
        way_out = "" if failure.refused else ". Omit torch_compile, or measure with memkit run"
        raise InputError(f"this training cannot be traced: {failure}{way_out}") from failure


_MAX_TOKENS: Final = 2**24
"""Tokens of one GPU in one forward pass: far more than GPUs hold, and still possible in a child process."""

_MAX_PROCESSES: Final = 2**17

_NOT_USERS_ERRORS: Final = frozenset(
    {
        "Unmodelled", "MissingPackageError", "ImportError", "ModuleNotFoundError", "PackageNotFoundError", "worker",
        "TimeoutError", "MemoryError", "NotImplementedError", "UnsupportedOperatorException", "AttributeError",
    }
)  # fmt: skip
"""Kinds of failures for jobs that cannot be modelled or need missing packages, and not for errors of the job."""


def _is_users_error(failure: TraceFailed) -> bool:
    """Whether the training itself raised, instead of a signal, a time limit or a missing package."""
    kind = failure.kind
    return kind.isidentifier() and not kind.startswith("SIG") and kind not in _NOT_USERS_ERRORS


def _refuse_impossible(setup: Setup, job: Job) -> None:
    """Raises InputError for impossible numbers, or an engine that is not modelled."""
    micro_batch_size, sequence_length, gpus, nodes = job.micro_batch_size, job.sequence_length, job.gpus, job.nodes
    refuse_below_one(micro_batch_size=micro_batch_size, sequence_length=sequence_length, gpus=gpus, nodes=nodes)
    if job.tokens > _MAX_TOKENS:
        raise InputError(
            f"a batch of {micro_batch_size} × {sequence_length} tokens: at most {_MAX_TOKENS} tokens in one forward "
            f"pass of a GPU can be predicted; give a smaller batch or length"
        )
    if job.processes > _MAX_PROCESSES:
        raise InputError(f"{gpus} × {nodes} GPUs: at most {_MAX_PROCESSES} can be predicted; give fewer")
    if setup.get("arguments.fsdp") and job.processes == 1:
        raise InputError(f"fsdp: {NEEDS_SEVERAL_GPUS}")


_ON: Final[dict[Device, str]] = {"cuda": "fake CUDA tensors", "cpu": "fake CPU tensors", "real cpu": "the CPU"}

_LEVEL: Final[dict[Device, Level]] = {"cuda": "trace", "cpu": "cpu trace", "real cpu": "cpu trace"}

MEASURED_ON: Final = f"other people's GPUs: {documentation('predict.md')}"
"""Comparison of traces with trainings: benchmarks/results/published.json."""


def _ledger(setup: Setup, job: Job) -> Ledger | None:
    """The setup's ledger, or one computed for it; None if it has none and the model's shapes are unknown."""
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
    """Replays a trace through the allocator and adds the verdict.

    Args:
        trace: of two optimizer steps.
        setup: other settings that decide memory: the allocator's, DeepSpeed's.
        ledger: memory outside the GPU, and memory that DeepSpeed splits; None: unknown.
        notes: more are added.
        libraries: versions of torch and transformers that made the trace. Default: those of this process.
        enough_bytes: if allocated memory and memory outside the allocator exceed this, the smallest cap is not
            searched: it is then the allocated memory, and reserved memory is a single figure.
    """
    split = is_split(setup)
    trace = _rank_trace(trace, setup, job, ledger)
    if split:
        assert ledger is not None
        notes.extend(split_notes(ledger))
    if job.processes > 1:
        notes.append("the buffers of the communication library (NCCL) lie outside the allocator and are not included")
    if dict(setup.get("model.quantization") or {}).get("load_in_8bit"):
        notes.append(OUTLIERS_ASSUMED)
    settings = AllocatorSettings()
    if text := setup.get(f"environment.{VARIABLE}"):
        settings, allocator_notes = parse_settings(str(text))
        notes.extend(allocator_notes)

    gpu = job.machine.gpu
    capacity = gpu.capacity_bytes if gpu is not None else None
    outside = gpu.context_bytes if gpu is not None else 0
    versions = {name: libraries[name] if libraries else version(name) for name in ("torch", "transformers")}
    by_segment = replay(trace, settings, gpu_bytes=capacity)
    as_run = by_segment  # in the order in which this version of torch reuses free blocks
    order = free_order(versions["torch"])
    if order != "segment":
        as_run = replay(trace, settings, gpu_bytes=capacity, order=order)
    if setup.get("arguments.predict_with_generate") and "evaluate" in as_run.allocated_by_phase:
        notes.append("evaluations generate: every answer is counted at its maximum length")
    if enough_bytes is not None and as_run.peak_allocated_bytes + outside > enough_bytes:
        cap = as_run.peak_allocated_bytes
        low = high = by_segment.peak_reserved_bytes
    else:
        cap = smallest_cap(trace, settings, gpu_bytes=capacity, without_cap=by_segment)
        low, high = reserved_interval(
            trace, settings, gpu_bytes=capacity, smallest_cap_bytes=cap, without_cap=by_segment
        )

    peak = trace.peak()
    rests_on = f"two optimizer steps of {trainer} on {_ON[device]}"
    if split:
        rests_on += ", joined with the formulas of what DeepSpeed holds"
    return Prediction(
        peak_allocated_bytes=as_run.peak_allocated_bytes,
        peak_reserved_bytes=(low, max(high, as_run.peak_reserved_bytes)),  # includes the phases' peak
        outside_allocator_bytes=outside,
        smallest_cap_bytes=cap,
        phases={
            phase: (allocated, as_run.reserved_by_phase[phase])
            for phase, allocated in as_run.allocated_by_phase.items()
        },
        categories=with_rest(peak.categories, as_run.peak_allocated_bytes),
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
        activations=peak.activations,
    ).with_verdict(job.machine)


def _rank_trace(trace: Trace, setup: Setup, job: Job, ledger: Ledger | None) -> Trace:
    """The trace of one rank: with what DeepSpeed or DistributedDataParallel adds or splits."""
    if is_split(setup):
        assert ledger is not None
        return one_rank(trace, ledger, bucket_bytes(setup))
    if job.processes == 1 or setup.get("arguments.fsdp"):  # FSDP2 is traced as it is
        return trace
    storages = zip(trace.sizes_bytes, trace.category_of, strict=True)
    gradients = sum(size for size, category in storages if CATEGORIES[category] == "gradients")
    # Two steps with up to two micro-batches were traced; each parameter has one gradient at a time.
    steps = max(1, sum(phase == "optimizer" for *_, phase in trace.spans()))
    term = "gradient buckets of DistributedDataParallel"
    return edited(trace, [ExtraAllocation(gradients // steps, "buffers", term)])
