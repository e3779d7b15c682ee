"""`predict_script`: predicts an unchanged training script, before anything is trained.

The script runs on this machine up to `Trainer.train()`, of which two steps are traced (`child/script/script.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hf_memkit.catalog.environments import find_environment
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.errors import InputError, ScriptFailed
from hf_memkit.common.units import format_gib, format_size
from hf_memkit.common.user_script import UserScript
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.prediction.auto_batch_size import first_that_fits
from hf_memkit.prediction.from_setup import from_trace
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.running_scripts import (
    ScriptJob,
    is_live,
    name_of,
    refuse_unpredictable,
    run_and_trace,
)
from hf_memkit.prediction.script_prediction import BatchNeeds, ScriptPrediction
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.traced_training import FSDP_COMPARED, Engine, HostMemory, TracedTraining
from hf_memkit.prediction.vllm_share import with_vllm
from hf_memkit.prediction.waiting_script import WaitingScript
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.bf16_on_gpus import emulated_bf16
from hf_memkit.setup.job import Job, process_row
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.allocator import VARIABLE, user_settings

PRESET: Final = "script"  # replaces a preset's name: the script decides everything


def predict_script(
    script: UserScript | str | Path,
    arguments: Sequence[str] = (),
    *,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    python: str | Path | None = None,
) -> Prediction:
    """Predicts the memory of a training script. Its code runs on this machine up to `train()`.

    >>> predict_script("train.py", ["--model_name_or_path", "gpt2-xl"], gpu="RTX 4090")          # doctest: +SKIP

    Args:
        script: path of the script; `UserScript("trl.scripts.sft", is_module=True)` is a module, as after `python -m`.
        arguments: its command-line arguments.
        gpu: the GPU: a name such as `"T4"`, or a size such as `"16GB"`. Default: this machine's.
        gpu_memory, ram: override the sizes of the GPU and of this machine.
        gpus, nodes: GPUs per machine, and machines.
        python: the interpreter of another environment, with whose libraries the script runs. Default: this one.
            `hf_memkit.prediction.comparison.compare` shows the differences.

    Returns:
        The prediction; assumptions are in its `notes`.

    Raises:
        InputError: there is no such script, it never calls `Trainer.train()`, or it cannot be modelled.
        ScriptFailed: it raised an exception; `text` is the traceback.
    """
    if isinstance(arguments, str):
        raise InputError(f"arguments={arguments!r}: must be a list, such as {arguments.split()}")
    if isinstance(script, UserScript):
        if arguments:
            raise InputError("arguments: the UserScript has its own; omit arguments")
    else:
        script = UserScript.at(str(script), arguments)
    machine = described_machine(gpu, gpu_memory, ram, None, option="gpu")
    other = find_environment(python) if python is not None else None
    try:
        job = ScriptJob(script, machine, gpus, nodes, ram_is_given=ram is not None, other=other)
        return predict_job(job).prediction
    except ScriptFailed as error:
        error.add_note(error.text)
        raise


def predict_job(job: ScriptJob) -> ScriptPrediction:
    """The prediction of a script; raises the errors of `predict_script`."""
    with WaitingScript(job) as waiting:
        return predict_waiting(waiting)


def predict_waiting(waiting: WaitingScript) -> ScriptPrediction:
    """The prediction of a script that waits at its Trainer. Raises the errors of `predict_script`."""
    return _predicted(waiting.job, waiting.unchanged)


def predict_in(worker: Worker, job: ScriptJob) -> ScriptPrediction:
    """The prediction of a script, such as memkit's own, in a process that runs already. The script has no standard
    input, and does not wait."""
    refuse_unpredictable(job)
    return _predicted(job, lambda rows: run_and_trace(job, worker, micro_batch_size=rows))


def _predicted(job: ScriptJob, traced_with: Callable[[int | None], TracedTraining]) -> ScriptPrediction:
    """The prediction of a training.

    Args:
        traced_with: traces it with so many rows per GPU; None: with the script's own number.
    """
    own = traced_with(None)
    return first_that_fits(
        predict_traced(own, job), own.batches_tried, lambda rows: predict_traced(traced_with(rows), job)
    )


def predict_traced(traced: TracedTraining, job: ScriptJob, *, enough_bytes: int | None = None) -> ScriptPrediction:
    """The prediction of a script that has been traced. `enough_bytes`: a size that it certainly does not fit; above
    it the least memory is not searched (`from_trace`)."""
    machine, ranks = job.machine, job.gpus * job.nodes
    steps = _StepPredictor(traced, job)
    notes = list(traced.notes)
    if machine.gpu is None:
        notes.append("no verdict: this machine has no GPU, and none is named (--gpu NAME)")
    if ranks > 1:
        notes.append(f"the script ran as the first of {ranks} ranks; the others were not started")
    if traced.sharded:
        notes.append(FSDP_COMPARED)
    if traced.optional is not None:
        evaluated, _ = steps.predict(traced.trace, enough_bytes=0).phases["evaluate"]
        notes.append(
            f"not in the verdict: evaluate() with this eval_dataset would allocate {format_size(evaluated)}. Neither "
            "the arguments nor the script ask for an evaluation"
        )

    parts = traced.of_steps()
    prediction = steps.predict(parts.pop("worst"), notes, enough_bytes).with_compilation(traced.compilation)
    if steps.ledger is None and traced.host is not None:
        prediction = _with_ram(prediction, traced.host, job.gpus)
        if steps.ram_decides and (prediction.host_rss_bytes or 0) > machine.ram_bytes:
            prediction = prediction.with_verdict(machine)

    batches = None
    if traced.batches is not None:
        typical = steps.predict(parts.pop("typical"), (), enough_bytes)
        smaller: dict[str, Prediction] = {}
        if prediction.verdict == "does not fit":  # each takes as long as the prediction itself
            changed = {change: steps.predict(part, (), enough_bytes) for change, part in parts.items()}
            smaller = {change: other for change, other in changed.items() if other.needs_less_than(prediction)}
        batches = BatchNeeds(traced.batches, typical, smaller)
        prediction = prediction.with_notes(batches.sentence(prediction))
    return ScriptPrediction(prediction, job.script, traced.without_trace(), steps.setup, batches)


class _StepPredictor:
    """Predicts traces of some steps of one training."""

    def __init__(self, traced: TracedTraining, job: ScriptJob) -> None:
        engine = traced.engine
        self.setup = _setup(traced, job)
        self.ledger = _engine_ledger(engine, self.setup.sized_job) if engine is not None else None
        self._traced = traced
        self._job = job
        gpu, model, arguments = job.machine.gpu, traced.model, traced.arguments.known()
        written = engine.written if engine is not None else None
        self._warning = emulated_bf16(
            gpu, arguments, dtypes=model.dtypes, trained=model.trained_dtypes, config=written
        )
        # RAM that the user did not name may be another machine's, so it decides only about offloading.
        zero = engine.config.get("zero_optimization", {}) if engine is not None else {}
        sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
        offloads = any(section.get("device") in ("cpu", "nvme") for section in sections)
        offloads |= traced.fsdp is not None and traced.fsdp.cpu_offload
        self.ram_decides = job.ram_is_given or (gpu is not None and gpu.here) or offloads

    def predict(self, trace: Trace, notes: Sequence[str] = (), enough_bytes: int | None = None) -> Prediction:
        """The prediction of a trace. `enough_bytes`: a size that it certainly does not fit."""
        traced, machine, other = self._traced, self._job.machine, self._job.other
        trainer = traced.trainer
        if not is_live(self._job.script):
            trainer = f"{trainer}, as {name_of(self._job.script)} makes it,"
        prediction = from_trace(
            trace,
            traced.device,
            self.setup,
            self.setup.sized_job,
            self.ledger,
            list(notes),
            trainer=trainer,
            libraries=other.libraries if other is not None else None,
            enough_bytes=enough_bytes,
        )
        if self.ledger is not None and not self.ram_decides:
            prediction = prediction.with_verdict(replace(machine, ram_bytes=sys.maxsize))
        return with_vllm(prediction.with_warnings(self._warning, traced.fp16_overflow), traced.vllm, machine)


def _with_ram(prediction: Prediction, host: HostMemory, processes: int) -> Prediction:
    """The prediction with the RAM of all processes of a machine: libraries, the script's own memory, as measured here,
    and the peak of its tensors on the CPU. Each rank loads a separate model."""
    phase, tensors = max(host.tensor_bytes.items(), key=lambda item: item[1])
    others = max(host.of_other_ranks.get(phase, size) for phase, size in host.tensor_bytes.items())
    libraries, own = process_row().size_bytes, host.own_bytes
    whose = f"RAM of {processes} processes, each" if processes > 1 else "RAM"
    note = (
        f"{whose}: {format_gib(libraries)} for Python, torch and CUDA (assumed), {format_gib(own)} of the script's "
        f"own (measured here) and {format_gib(tensors)} of tensors on the CPU at most, in phase {phase}"
    )
    if processes > 1 and others < tensors:
        note += f" ({format_gib(others)} in all but the first)"
    needs = processes * (libraries + own) + tensors + (processes - 1) * others
    return replace(prediction, host_rss_bytes=needs).with_notes(note)


def _setup(traced: TracedTraining, script_job: ScriptJob) -> Setup:
    arguments, model = traced.arguments, traced.model
    micro_batch_size, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    job = Job(
        None, script_job.machine, micro_batch_size, traced.sequence_length or 1,
        gpus=script_job.gpus, nodes=script_job.nodes, accumulation=accumulation,
    )  # fmt: skip
    setup = Setup(preset=PRESET, job=job).put_all(
        "arguments",
        per_device_train_batch_size=(micro_batch_size, "the script's"),
        gradient_accumulation_steps=(accumulation, "the script's"),
        optim=(str(arguments.optim), "the script's"),
    )
    name = model.name if Path(model.name).name else model.kind  # the folder "." has none
    setup = setup.put("model.name", Path(name).name if Path(name).is_absolute() else name, "the script's")
    if traced.sharded:
        setup = setup.put("arguments.fsdp", True, "the script's")
    if traced.engine is not None:
        setup = setup.put("deepspeed.config", traced.engine.config, "the script's")
    allocator = [_allocator({**script_job.environment, **traced.allocator})]
    if traced.memory_fraction is not None:
        # torch.cuda.set_per_process_memory_fraction overrides the variable.
        allocator.append(f"per_process_memory_fraction:{traced.memory_fraction}")
    if text := ",".join(filter(None, allocator)):
        setup = setup.put(f"environment.{VARIABLE}", text, "your environment's, or set by the script")
    return setup


def _engine_ledger(engine: Engine, job: Job) -> Ledger:
    """The memory that DeepSpeed needs for the parameters of the script's model."""
    held = zero_ledger(
        engine.config, facts_from_sizes(engine.frozen or engine.trained), gpus=job.gpus, nodes=job.nodes,
        accumulation=job.accumulation > 1, adapters=[size for size, _ in engine.trained] if engine.frozen else (),
        linear_elements=engine.linear_elements,
    )  # fmt: skip
    return Ledger((*held.rows, process_row(job.gpus)))


def facts_from_sizes(parameters: Sequence[tuple[int, bool]]) -> ModelFacts:
    """The part of a model's facts that DeepSpeed's formulas need."""
    sizes = tuple(size for size, _ in parameters)
    return ModelFacts(
        name="", origin="local", config={}, parameters=sum(sizes), largest_parameter=max(sizes), sizes=sizes,
        decayed=tuple(decayed for _, decayed in parameters), tied=0, layers=0, width=0, vocabulary=0,
        maximum_length=None,
    )  # fmt: skip


def _allocator(environment: Mapping[str, str]) -> str | None:
    """The allocator's settings in the environment."""
    settings = user_settings(environment)
    return settings[1] if settings is not None else None
