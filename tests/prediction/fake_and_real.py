"""One training on fake tensors, and the same on real ones: the child's side of the comparison.

    python -m tests.prediction.fake_and_real [MODULE…]

Each runs in a separate process, forked from this one, which has loaded the libraries and the modules named. A line of
JSON comes in, `{"architecture": …, "setting": …, "kind": "fake" | "real"}`. A line goes out, the answer or
`{"error": …}`.

The real training is what a user writes: the model's class, peft, a plain Trainer. Its memory is what torch's profiler
saw of the CPU's allocator, so that nothing of the tracer is in it; only the names of the phases come from the same
events of Trainer (`PhaseTracker`), as marks in the profile.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_memkit.common.errors import TraceFailed
from hf_memkit.prediction import wire
from hf_memkit.prediction.child import serve
from hf_memkit.prediction.setup_as_script import SetupJob, as_script, trace_of
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.traced_training import Outcome
from tests.prediction.architectures import ARCHITECTURES, MIXTURES, UNSEEN, of_architecture

_LIMIT_S: Final = 600.0
_MARK: Final = "phase ended: "
_MEMORY: Final = "[memory]"
_STOPPED: Final = "recomputation stopped"
_GENERATOR_STATE: Final = 5056
"""Bytes of the state of torch's generator for the CPU, which checkpointing keeps for each layer: on the host, whatever
the GPU is, and made by no operation."""

Peaks = tuple[int, dict[str, int]]
"""The most live bytes, and the most in each phase."""


def peaks(changes: Iterable[int | str]) -> Peaks:
    """Of sizes made (positive) and freed (negative), between names of phases that ended there."""
    live = most = highest = 0
    phases: dict[str, int] = {}
    for change in changes:
        if isinstance(change, str):
            phases[change] = max(phases.get(change, 0), most)
            most = live
            continue
        live += change
        most = max(most, live)
        highest = max(highest, live)
    return highest, phases


def traced(asked: SetupJob, folder: Path) -> dict[str, Any]:
    """Peaks of the training on fake tensors, as its trace has them, but for the rounding that a CPU does not do."""
    result = folder / "result.json"
    with as_script(asked) as script:
        request = ScriptRequest(script, str(Path.cwd()), dict(os.environ), device="cpu")
        why = serve._run_in_fork(functools.partial(_run, request, result), _LIMIT_S)
    trace = trace_of(wire.loads(Outcome, result.read_text()) if result.exists() else Outcome(died=why))
    peak = trace.peak()
    content = wire.dumps(trace, sort_keys=True)
    return {
        **_named(peaks(_changes(trace))),
        "operation": peak.operation,
        "activations": peak.activations,
        "events": len(trace.events),
        "fingerprint": hashlib.sha256(content.encode()).hexdigest(),
    }


def _run(request: ScriptRequest, result: Path) -> None:
    from hf_memkit.prediction.child.script.script import run_script

    run_script(request, result)


def _changes(trace: Trace) -> Iterator[int | str]:
    start = 0
    for end, phase in trace.marks:
        for event in trace.events[start:end]:
            size = trace.sizes_bytes[abs(event) - 1]
            yield size if event > 0 else -size
        start = end
        yield phase


def profiled(asked: SetupJob) -> dict[str, Any]:
    """Peaks of the training on real tensors, as torch's profiler saw the CPU's allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ahead_bytes = _train(asked)
    events = sorted(
        (
            _Event(event.start_ns(), -event.duration_ns(), event.name(), event.nbytes())
            for event in profiler.profiler.kineto_results.events()
        ),
        key=lambda event: event[:2],
    )
    everything = peaks(event.size_bytes for event in events if event.name == _MEMORY)[0]
    most, phases = peaks(_without_scratch(events))
    return {
        "peak_bytes": most - ahead_bytes,
        "phases": {phase: size - ahead_bytes * (phase not in _not_ahead(asked)) for phase, size in phases.items()},
        "peak_with_scratch_bytes": everything - ahead_bytes,
    }


def _not_ahead(asked: SetupJob) -> tuple[str, ...]:
    """Phases whose peak has no batch read ahead: predictions that are kept are most at the last batch."""
    moves = ("arguments.eval_accumulation_steps", "arguments.batch_eval_metrics")
    keeps = asked.metrics and not any(name in asked.setup for name in moves)
    return ("load", "evaluate") if keeps else ("load",)


class _Event(NamedTuple):
    """One of the profile: what ran, or `_MEMORY`: what was made (or, negative, freed)."""

    start_ns: int
    minus_duration_ns: int
    name: str
    size_bytes: int

    @property
    def end_ns(self) -> int:
        return self.start_ns - self.minus_duration_ns


def _without_scratch(events: list[_Event]) -> Iterator[int | str]:
    """Sizes made and freed, and marks, in order; without scratch memory: what one kernel makes and frees again.

    No dispatcher sees that, and none of it is a GPU's: a CPU casts the operands of a sum of bf16 and fp32, and oneDNN
    has scratch whose size follows from the machine's instruction set. Nor is the state of the CPU's generator.
    """
    kernels = _kernels(events)
    kernel_ends = 0
    inside: list[int] = []
    for place, event in enumerate(events):
        if event.start_ns > kernel_ends and inside:
            yield from changes_of_kernel(inside)
            inside = []
        if event.name == _MEMORY and abs(event.size_bytes) == _GENERATOR_STATE:
            continue
        if event.name == _MEMORY:
            if event.start_ns <= kernel_ends:
                inside.append(event.size_bytes)
            else:
                yield event.size_bytes
        elif event.name == _STOPPED:  # what this kernel frees now is its result, not its scratch
            yield from inside
            inside, kernel_ends = [], 0
        elif event.name.startswith(_MARK):
            yield event.name.removeprefix(_MARK)
        elif place in kernels:
            kernel_ends = max(kernel_ends, event.end_ns)
    yield from changes_of_kernel(inside)


def _kernels(events: list[_Event]) -> set[int]:
    """Which events are kernels: operations that are not made of others, and no casts of autocast around one."""
    found: set[int] = set()
    stack: list[tuple[str, int, int]] = []
    for place, event in enumerate(events):
        if not event.name.startswith("aten::"):
            continue
        while stack and stack[-1][1] < event.start_ns:
            stack.pop()
        for other, _, outer in stack:
            if other == event.name:
                found.discard(outer)
        stack.append((event.name, event.end_ns, place))
        if not _is_made_of_others(event.name):
            found.add(place)
    return found


@functools.cache
def _is_made_of_others(operation: str) -> bool:
    import torch

    overloads = [name for name in torch._C._dispatch_get_all_op_names() if name.partition(".")[0] == operation]
    composite = "CompositeImplicitAutograd"
    return all(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, composite)
        for name in overloads
        if not name.endswith("out")
    )


def changes_of_kernel(changes: list[int]) -> list[int]:
    """What of one kernel's `changes` is not made and freed again among them."""
    kept: list[int] = []
    for change in changes:
        if change < 0 and -change in kept:
            del kept[len(kept) - 1 - kept[::-1].index(-change)]
        else:
            kept.append(change)
    return kept


def _named(found: Peaks) -> dict[str, Any]:
    return {"peak_bytes": found[0], "phases": found[1]}


def _train(asked: SetupJob) -> int:
    """Bytes of the batch that accelerate reads ahead: it lies on the host, whatever the GPU is, and is in no trace."""
    import torch
    from torch.utils.data import ConcatDataset
    from transformers import default_data_collator
    from transformers.trainer_callback import PrinterCallback

    from hf_memkit.prediction.child.gpu import fake_gpu
    from hf_memkit.prediction.child.training.at_train import SHORT_AND_QUIET
    from hf_memkit.prediction.child.training.setup_trainer import rows_for
    from hf_memkit.setup.build import build_arguments, prepared_rows, trainer_class

    torch.compile = fake_gpu.torch_compile
    _mark_stopped_recomputations()
    _arrays_are_copies()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        arguments = build_arguments(
            asked.setup, {**SHORT_AND_QUIET, **prepared_rows(asked.setup), "output_dir": folder, "use_cpu": True}
        )
        model = _model(asked)
        rows = rows_for(asked, asked.setup, model)
        train_rows: Any = rows(arguments.train_batch_size, 1024)
        if asked.typical is not None:  # two steps of typical batches, then one of the longest
            size = arguments.train_batch_size
            typical = rows_for(asked, asked.typical, model, asked.typical.sequence_length)
            parts: list[Any] = [typical(size, 2 * size), rows(size, 2 * size)]  # the last batch is only read ahead
            train_rows = ConcatDataset(parts)
            arguments.max_steps = 3
            arguments.train_sampling_strategy = "sequential"
        marks = _marks()
        trainer = trainer_class(asked.setup)(
            model=model,
            args=arguments,
            train_dataset=train_rows,
            data_collator=default_data_collator,
            callbacks=[marks],
            compute_metrics=(lambda prediction, compute_result=True: {}) if asked.metrics else None,
        )
        trainer.remove_callback(PrinterCallback)
        marks.trainer = trainer
        trainer.train()
        size = arguments.eval_batch_size
        if asked.setup["arguments.eval_strategy"] != "no":
            trainer.evaluate(rows(size, size * asked.evaluation_batches))
        marks.mark(marks.phases.phase)
        batch = trainer.data_collator(
            [train_rows[len(train_rows) - 1 - row] for row in range(arguments.train_batch_size)]
        )
        return sum(getattr(value, "nbytes", 0) for value in batch.values())


def _mark_stopped_recomputations() -> None:
    """Checkpointing ends a recomputation by an exception inside its last kernel: it leaves a mark in the profile."""
    from torch.profiler import record_function
    from torch.utils import checkpoint

    def made(self: Exception, *args: object) -> None:
        with record_function(_STOPPED):
            pass

    checkpoint._StopRecomputationError.__init__ = made  # type: ignore[attr-defined]


def _arrays_are_copies() -> None:
    """The arrays of an evaluation lie on the host; a CPU's would share the memory of the tensors they are made of."""
    import torch

    original = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **options: original(self, **options).copy()  # type: ignore[method-assign]


def _model(asked: SetupJob) -> Any:
    import transformers

    setup = asked.setup
    values = setup["model.architecture"]
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = getattr(transformers, setup["model.class"])(config)
    if setup.section("adapter"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**setup.section("adapter")))
    return model


def _marks() -> Any:
    """A callback that leaves a mark in the profile where a phase ends."""
    from torch.profiler import record_function
    from transformers import TrainerCallback

    from hf_memkit.measuring.memory.error_barrier import ErrorBarrier
    from hf_memkit.measuring.memory.hooks import HookSet
    from hf_memkit.measuring.memory.phases import PhaseTracker

    class Marks(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.phases = PhaseTracker(self.mark)

        def mark(self, ended: str) -> None:
            with record_function(f"{_MARK}{ended}"):
                pass

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            root = self.trainer.model_wrapped if args.torch_compile else model  # a hook inside breaks the graph
            self.phases.attach(root, HookSet(root, ErrorBarrier()))
            self.phases.train_begin()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.phases.step_begin()

        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            self.phases.substep_end()

        def on_pre_optimizer_step(self, args: Any, *_: Any, **kwargs: Any) -> None:
            if args.torch_compile:
                gc.collect()  # dynamo keeps the first output in a cycle until Python collects it, whenever that is
            self.phases.pre_optimizer_step()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.phases.step_end()

        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            self.phases.prediction_step()

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            self.phases.evaluate_end()

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            self.phases.save_end()

    return Marks()


def answer_lines() -> None:
    """Answers cases until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    serve._load()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # else each case's collection looks through all of that
    known = {architecture.name: architecture for architecture in (*ARCHITECTURES, *UNSEEN, *MIXTURES)}
    for line in sys.stdin:
        case = json.loads(line)
        asked = of_architecture(known[case["architecture"]], case["setting"])
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_answer(case["kind"], asked, Path(folder))), file=answers, flush=True)


def _answer(kind: str, asked: SetupJob, folder: Path) -> dict[str, Any]:
    if kind == "fake":  # a script ends its process where it fails
        try:
            return traced(asked, folder)
        except TraceFailed as error:
            return {"error": str(error), "kind": error.kind, "traceback": error.details}
    path = folder / "answer.json"
    why = serve._run_in_fork(functools.partial(_into, path, asked), _LIMIT_S)
    return json.loads(path.read_text()) if why is None else {"error": why}


def _into(path: Path, asked: SetupJob) -> None:
    try:
        answer = profiled(asked)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    path.write_text(json.dumps(answer))


if __name__ == "__main__":
    answer_lines()
