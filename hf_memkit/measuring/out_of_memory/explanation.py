"""Explains an out-of-memory error from a message, a log or a run's records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TextIO

from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.common.answer.answer import Answer, AnswerBlock, Changes, Code, Facts, Item, Lines
from hf_memkit.common.answer.safe_text import printable, sentence
from hf_memkit.common.answer.terminal import plain
from hf_memkit.common.commands import command
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory.advice import changes_for, changes_for_run, grows_with_the_batch
from hf_memkit.measuring.out_of_memory.cause import Verdict, for_job, judge
from hf_memkit.measuring.out_of_memory.change import Change, item_of_change
from hf_memkit.measuring.out_of_memory.compiled import compiling_needs
from hf_memkit.measuring.out_of_memory.engine_failures import Failure
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob, requested_sentence
from hf_memkit.measuring.out_of_memory.known_messages import NOT_OF_THE_JOB, Cause
from hf_memkit.measuring.out_of_memory.message import OomMessage, show
from hf_memkit.measuring.out_of_memory.messages import LoggedError, find_messages, most_telling, parse_message
from hf_memkit.measuring.out_of_memory.other_names import job_of
from hf_memkit.measuring.out_of_memory.patterns import FORMS
from hf_memkit.measuring.out_of_memory.run_view import ACTIVATION_PHASES, RunView
from hf_memkit.measuring.out_of_memory.surroundings import Command, Surroundings
from hf_memkit.measuring.out_of_memory.traceback import TracebackFacts
from hf_memkit.measuring.record_types import ModulesRecord, OomRecord, RunRecord, StepRecord

_SIZES: Final = {
    "requested": "requested", "free": "free on the GPU", "capacity": "total on the GPU",
    "allowed": "allowed by the cap", "allocated": "allocated by PyTorch", "reserved": "reserved by PyTorch",
    "cached": "cached (reserved − allocated)", "private_pools": "in private pools",
    "process": "this process, in total", "other": "other Metal buffers", "limit": "hardware limit",
    "resident": "RAM of the process", "used": "RAM in use", "total": "RAM in total",
}  # fmt: skip
"""Sizes of a message → their labels."""

_NO_GPU: Final = {"tpu": "TPU", "npu": "NPU", "hpu": "HPU", "mlu": "MLU", "neuron": "NeuronCore"}

_KILLS: Final = {
    *(form.name for form in FORMS if form.ends), "dataloader-killed", "dataloader-exited", "pool-killed"
}  # fmt: skip
"""Forms that report a killed process."""

_LISTED: Final = 5
"""Maximum number of further messages in the text; the JSON has all of them."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An out-of-memory error, explained.

    Attributes:
        error: the message that is explained; None if the text has no known message.
        verdict: the cause; None without an error.
        others: the other messages of the log.
        changes: what to change, with measured savings if there are records.
        job: where it failed, from the records: `step`, `phase`, `rank`, `tokens` and the prediction.
        fitted: whether the changes start from the user's arguments.
        next_steps: memkit commands for this job.
        failure: the row of an error that is not about memory.
    """

    error: LoggedError | None
    verdict: Verdict | None = None
    others: tuple[LoggedError, ...] = ()
    changes: tuple[Change, ...] = ()
    job: Mapping[str, Any] | None = None
    fitted: bool = False
    next_steps: tuple[str, ...] = ()
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        failure = self.failure
        return {
            "found": self.error.to_json() if self.error is not None else None,
            "verdict": self.verdict.to_json() if self.verdict is not None else None,
            "others": [other.to_json() for other in self.others],
            "changes": [change.to_json() for change in self.changes],
            "job": dict(self.job) if self.job is not None else None,
            "next": list(self.next_steps),
            "failure": {"rule": failure.rule or None, "source": failure.source} if failure is not None else None,
        }

    def text(self, width: int = 100) -> str:
        """The explanation as lines of at most `width` characters, safe for a terminal."""
        return plain(self.answer(), width).rstrip("\n")

    def answer(self) -> Answer:
        """What `memkit explain` shows: what happened, the cause, what helps and what to type next."""
        if self.error is None or self.verdict is None:
            nothing = "No known message found. Give the whole log, or the full text of the error."
            return Answer(title="Out of memory", verdict=nothing)
        first = f"{_sentence(self.error)}{self._where(self.error)}."
        title = "Out of memory" if self.failure is None else "Failed training"
        return Answer(title=title, verdict=first, state="bad", blocks=tuple(self._blocks(self.error)))

    def _blocks(self, error: LoggedError) -> Iterator[AnswerBlock]:
        assert self.verdict is not None
        yield Lines([error.message.quote] if self.failure is not None else list(_allocation(error.trace)))
        yield Facts(list(_figures(error.message)))
        yield Lines([f"Cause: {self.verdict.cause}"], "strong")
        yield Lines([sentence(self.verdict.why)])
        for title, remedies in {
            "Fixes for this cause": self.verdict.settings,
            "What will not help": self.verdict.no_help,
        }.items():
            if remedies:
                yield Changes([Item(sentence(each.reason), each.assignment) for each in remedies], heading=title)
        if self.changes:
            seen = error.trace
            known = self.job is not None or self.fitted or (seen.place or seen.phase) is not None
            heading = "What to change" if known else "Generic fixes"
            yield Changes([item_of_change(each) for each in self.changes], numbered=True, heading=heading)

        if self.failure is not None:
            yield Lines(list(_about_failure(self.failure)), "note")
        job = self.job or {}
        of_batch = self.verdict.cause == "size" and job.get("phase") in ACTIVATION_PHASES
        if of_batch and (job.get("step") or 0) > _FIRST_STEPS:
            yield Lines([_WORST_BATCH])
        if self.next_steps:
            yield Code("", self.next_steps, heading="What to type next")
        if self.job is None and self.changes:
            yield Lines([_WITH_CALLBACK, *([] if self.fitted else [_WITH_ARGUMENTS])])
        prediction = job.get("prediction")
        if prediction and "peak_allocated_gib" in prediction:
            yield Lines([f"Predicted peak of this job: {prediction['peak_allocated_gib']:.2f} GiB allocated."])
        if self.others:
            others = [(_line(each), printable(each.message.quote)) for each in self.others[:_LISTED]]
            yield Facts(others, heading="Also in this log")
        if len(self.others) > _LISTED:
            yield Lines([f"and {len(self.others) - _LISTED} more: --json lists them all"])

    def headline(self) -> str:
        """What failed and the cause, on one line."""
        if self.error is None or self.verdict is None:
            return "no known message"
        return f"{_sentence(self.error)}{self._where(self.error)}: {self.verdict.cause}"

    def _where(self, error: LoggedError) -> str:
        if self.job is not None:
            parts = [f"in {self.job['phase']}"] if self.job.get("phase") else []
            parts += [f"{name} {self.job[name]}" for name in ("step", "rank") if self.job.get(name) is not None]
            if self.job.get("longest_sequence"):
                parts.append(f"with sequences of {self.job['longest_sequence']} tokens")
            return f" ({', '.join(parts)})" if parts else ""
        phase = f", in {error.phase}" if error.phase is not None else ""
        return f" ({_line(error, ', after training' if error.phase == 'after' else phase)})"


_FIRST_STEPS: Final = 2
"""Optimizer states exist from the end of the first step: the second needs what every later one needs."""

_WORST_BATCH: Final = (
    "Earlier steps fit, so this batch was probably larger. `memkit predict SCRIPT -- ARGUMENTS` finds the largest "
    "batch in your data before you train."
)

_WITH_CALLBACK: Final = (
    "To measure how many GiB each change saves, record the job: `memkit run SCRIPT -- ARGUMENTS`, or "
    "callbacks=[MemoryReportCallback()] in the Trainer. Then run `memkit explain OUTPUT_DIR`."
)
_WITH_ARGUMENTS: Final = "`memkit explain --args FILE` adapts these changes to your arguments (YAML or JSON)."


def _allocation(trace: TracebackFacts) -> Iterator[str]:
    """What the traceback shows about the allocation."""
    if trace.place is not None:
        library = f" ({trace.library})" if trace.library is not None else ""
        frame = f", in {trace.frame}" if trace.frame is not None else ""
        yield f"The allocation was for: {trace.place}{library}{frame}."
    if trace.in_use:
        yield f"In use, by the traceback: {', '.join(sorted(trace.in_use))}."


def _figures(message: OomMessage) -> Iterator[tuple[str, str]]:
    """The sizes that the message names."""
    name = _NO_GPU.get(message.device_type or "", "GPU")
    for key, label in _SIZES.items():
        if (size := getattr(message, f"{key}_bytes")) is not None:
            yield label.replace("GPU", name), show(size)


def _about_failure(failure: Failure) -> Iterator[str]:
    """The keys in accelerate's YAML, the rule that finds the mistake, and the source."""
    if any(fix.key == "arguments.fsdp_config" for fix in failure.fixes):
        yield "In the YAML of accelerate launch these keys begin with fsdp_, such as fsdp_version."
    if failure.rule:
        yield f"The rule {failure.rule} of memkit check finds this before the model loads."
    yield f"Source: {failure.source}."


def explain_oom(text: str | TextIO, arguments: Mapping[str, Any] | None = None) -> Explanation:
    """Explains the out-of-memory error in a message or a log.

    Knows the messages of torch (since 1.0; CUDA, ROCm, XPU, MPS, CPU), cuBLAS, cuDNN, NCCL, bitsandbytes, DeepSpeed,
    Triton, vLLM, TensorFlow and JAX, and logs of a process that the system killed. Reads nothing from this machine.

    Args:
        text: the message or log; or a file opened with `newline=""`, which is read in bounded memory.
        arguments: the job's TrainingArguments and script arguments, from which the changes then start.

    Returns:
        The explanation. `error` is None if the text has no known message. Sizes are bytes in `error.message` and GiB
        in `verdict.figures`.

    >>> print(explain_oom(str(error)).text())
    """
    seen = Surroundings()
    errors = list(_of_engines(find_messages(text, seen.see_block), seen))
    chosen = most_telling(errors)
    if chosen is None:
        return Explanation(None)
    others = tuple(error for error in errors if error is not chosen)
    if seen.rocm and chosen.message.form == "cuda-raw":
        chosen = replace(chosen, message=replace(chosen.message, device_type="rocm"))
    if chosen.message.form == "bitsandbytes" and "paged optimizer" in chosen.trace.in_use:
        managed = replace(chosen.message, form="bitsandbytes-managed", memory="host", device_type=None)
        chosen = replace(chosen, message=managed)

    command = seen.command
    if (failure := Failure.of(chosen.message.form, chosen.trace)) is not None:
        verdict = Verdict(failure.cause, failure.why, failure.fixes)
        return Explanation(chosen, verdict, others, next_steps=_checks(command, failure), failure=failure)
    script = chosen.trace.script
    if script is not None and (command is None or (command.target and not command.runs(script))):
        command = Command(script)
    if arguments is None and command is not None:
        arguments = command.values() or None
    job = job_of(arguments or {})
    if seen.compiling_given_up:
        job = replace(job, moment={"compilation": {"given_up": 1}})
    failed = FailedJob(chosen.message, chosen.trace, job, seen.platform)
    tensor = failed.requested_tensor
    if tensor is not None and failed.trace.place is None:
        failed = replace(failed, trace=replace(failed.trace, place=tensor.place))

    message = failed.message
    trace = failed.trace
    verdict = judge(
        message,
        allocator_settings=seen.allocator,
        watermark=seen.watermark,
        samples=failed.samples,
        grows=grows_with_the_batch(trace),
        growing=trace.place == "predictions of an evaluation",
        assertion=seen.assertion,
    )
    verdict = for_job(verdict, failed.job, seen.platform)
    if tensor is not None:
        verdict = replace(verdict, why=f"{requested_sentence(message, tensor)} {verdict.why}")
    elif failed.large_without_frame:
        verdict = replace(verdict, why=f"{verdict.why} {_LARGE_REQUEST}")
    verdict = _add_compiling(verdict, failed)
    return Explanation(
        replace(chosen, trace=trace),
        verdict,
        others,
        changes_for(failed, verdict.cause),
        fitted=arguments is not None,
        next_steps=_next(command, failed, verdict.cause, seen.processes),
    )


def _of_engines(errors: list[LoggedError], seen: Surroundings) -> Iterator[LoggedError]:
    """The errors without those of engines that this job does not use."""
    for error in errors:
        if error.message.memory == "none":
            if seen.fsdp:
                error = replace(error, trace=replace(error.trace, in_use=error.trace.in_use | {"FSDP"}))
            if Failure.of(error.message.form, error.trace) is None:
                continue
        yield error


def _checks(ran: Command | None, failure: Failure) -> tuple[str, ...]:
    """The command that finds the mistake in the job's files."""
    if not failure.rule:
        return ()
    file = ran.option("config_file") if ran is not None else ""
    files = (file, "--args") if file else ()
    return (command("memkit", "check", *files, "ARGUMENTS.yaml"),)


def _add_compiling(verdict: Verdict, failed: FailedJob) -> Verdict:
    """The verdict with what torch.compile needs in addition."""
    needs = compiling_needs(failed)
    return replace(verdict, why=f"{sentence(verdict.why)} {needs}") if needs else verdict


_LARGE_REQUEST: Final = (
    "In forward and backward, a single request of this size is nearly always logits or attention scores."
)

_PREDICTABLE: Final = ("size", "fragmentation", "cap", "context and libraries", "host memory", "another process")


def _next(command: Command | None, failed: FailedJob, cause: Cause, processes: int) -> tuple[str, ...]:
    """Commands that predict and plan the job, which memkit can do on NVIDIA GPUs. `processes`: by the log."""
    message = failed.message
    if command is None or not command.target:
        return ()
    if message.device_type not in (None, "cuda") or message.form in NOT_OF_THE_JOB:
        return ()
    without_sizes = cause == "unknown" and message.memory == "device"
    if (cause not in _PREDICTABLE and not without_sizes) or failed.trace.place == "merged adapters":
        return ()
    gpu = ""
    if message.capacity_bytes is not None:  # the size on the GPU's box, such as 24GB
        capacity = message.capacity_bytes / GIB
        boxes = sorted({gpu.box_gb for gpu in KNOWN_GPUS.values() if capacity <= gpu.box_gb <= 1.12 * capacity})
        gpu = f"{boxes[0] if boxes else math.ceil(capacity)}GB"
    verbs = ("predict", "plan") if message.memory == "device" else ("predict",)
    return tuple(command.memkit_command(verb, gpu, processes) for verb in verbs)


def explain_records(run: RunRecord, oom: OomRecord, *, modules: ModulesRecord | None = None) -> Explanation:
    """Explains an `oom` record, with changes for that job and their measured savings."""
    message = from_record(oom)
    job = RunView(run, oom)
    phase = oom.get("phase")
    verdict = judge(
        message,
        allocator_settings=job.hardware.get("allocator_settings"),
        samples=oom.get("samples") or None,
        grows=phase not in ("load", "save", "optimizer"),
        own=run.get("host", {}).get("pid"),
        torch=job.version("torch"),
    )
    verdict = _add_compiling(for_job(verdict, job), FailedJob(message, TracebackFacts(phase=phase), job, ranked=True))
    changes = changes_for_run(run, oom, message, verdict.cause, modules, phase)
    return Explanation(LoggedError(message, 1, None), verdict, (), tuple(changes), _job(run, oom))


def explain_killed(run: RunRecord, last: StepRecord, why: str, *, in_ram: bool) -> Explanation:
    """Explains a training whose records end early without an error.

    Args:
        why: how they end.
        in_ram: whether they show that host RAM ran out; otherwise the cause is `unknown`.
    """
    message = OomMessage("sigkill", "the system", "host", printable(why, 600), pid=run.get("host", {}).get("pid"))
    cause: Cause = "host memory" if in_ram else "unknown"
    changes = changes_for_run(run, last, message, cause) if in_ram else []
    verdict = Verdict(cause, f"{why.rstrip('.')}.", judge(message).settings)
    return Explanation(LoggedError(message, 1), verdict, (), tuple(changes), _job(run, last))


def from_record(oom: OomRecord) -> OomMessage:
    """The message of an `oom` record: from the error's text, or from the counters if the text has no sizes."""
    text = oom.get("error", "")
    parsed = parse_message(text) or parse_message(f"{oom.get('error_type')}: {text}")
    bare = ("torch-device", "torch-device-bare")
    if parsed is not None and (parsed.requested_bytes is not None or parsed.form not in bare):
        return parsed
    names = ("requested", "free", "capacity", "allocated", "reserved", "process")
    counters: Mapping[str, Any] = oom
    sizes: dict[str, Any] = {
        f"{name}_bytes": round(counters[f"{name}_gib"] * GIB) for name in names if f"{name}_gib" in counters
    }
    quote = printable(f"{oom.get('error_type') or 'error'}: {text}", 600) if parsed is None else parsed.quote
    return OomMessage("torch-device", "PyTorch", "device", quote, "cuda", **sizes)


def _job(run: RunRecord, moment: Mapping[str, Any]) -> dict[str, Any]:
    names = ("step", "phase", "micro_batch", "samples", "tokens", "longest_sequence")
    values = {name: moment.get(name) for name in names}
    values |= {"rank": run.get("rank"), "prediction": run.get("prediction")}
    return {name: value for name, value in values.items() if value is not None}


def _line(error: LoggedError, phase: str = "") -> str:
    rank = f", rank {error.rank}" if error.rank is not None else ""
    times = f", {error.count} times" if error.count > 1 else ""
    return f"line {error.line}{rank}{phase}{times}"


def _sentence(error: LoggedError) -> str:
    message = error.message
    if (failure := Failure.of(message.form, error.trace)) is not None:
        return failure.what
    if message.form == "accelerate-batch":
        return "The search for a batch size that fits reached zero"
    if message.form in _KILLS:
        who = f"Process {message.pid}" if message.pid is not None else "A process"
        return f"{who} was killed and raised no error"
    if message.memory == "kernel":
        return f"{message.library} could not start a kernel"
    what = {
        "device": "on the GPU", "host": "in RAM", "pinned": "in page-locked RAM", "shared memory": "in /dev/shm",
        "disk": "on disk", "none": "",
    }[message.memory]  # fmt: skip
    if message.memory == "device":
        name = _NO_GPU.get(message.device_type or "", "GPU")
        what = f"on the {name}" if message.device is None else f"on {name} {message.device}"
    size = show(message.requested_bytes) if message.requested_bytes is not None else "memory"
    return f"{message.library} could not allocate {size} {what}"
