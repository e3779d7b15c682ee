"""`memkit predict SCRIPT`: predicts an unchanged training script."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hf_memkit.cli.options import tell
from hf_memkit.cli.printing import print_json
from hf_memkit.common.errors import InputError, ScriptFailed

if TYPE_CHECKING:
    from hf_memkit.catalog.environments import Environment
    from hf_memkit.cli.predict_next import NextSetup
    from hf_memkit.cli.predict_options import PredictOptions
    from hf_memkit.prediction.from_script import ScriptPrediction
    from hf_memkit.prediction.prediction import Prediction
    from hf_memkit.prediction.running_scripts import ScriptJob


def predict_script(options: PredictOptions, environment: Mapping[str, str] | None) -> int:
    """Predicts the script, prints the prediction and returns the exit code. `environment`: as for `started`."""
    launched = options.started("predict", environment, options.nodes)
    script, gpus, nodes = launched.script, launched.gpus or 1, launched.nodes
    from hf_memkit.cli.predict_answer import batch_sentences, predict_answer, present, write_prediction
    from hf_memkit.common.answer.terminal import show

    given_ram = options.ram is not None
    try:
        with ended_by_signals() as ended:
            from hf_memkit.catalog.environments import find_environment
            from hf_memkit.cli import predict_environments
            from hf_memkit.prediction.from_script import predict_job
            from hf_memkit.prediction.running_scripts import ScriptJob, name_of, refuse_unreadable

            compare_with = options.compare_with
            other = find_environment(compare_with, "--compare-with") if compare_with is not None else None
            refuse_unreadable(script)
            machine = options.machine()
            ended()
            name = name_of(script)
            tell(f"{name} runs on this machine up to Trainer.train(); files that it writes before stay")
            with _status(name):
                job = ScriptJob(script, machine, gpus, nodes, launched.environment, ram_is_given=given_ram)
                training = predict_job(job)
                prediction = training.prediction
                there, why = _compared(job, other) if other is not None else (None, "")
            tell("nothing was trained or saved, also if the script printed otherwise")
    except ScriptFailed as error:
        print(error.text, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        tell("stopped; no process of the script is left")
        return 130  # a shell's code after Ctrl-C: 1 means that it does not fit
    if why:
        prediction = prediction.with_notes(why)

    def instead() -> NextSetup | None:
        if options.no_search or prediction.verdict != "does not fit" or other is not None or _remedies(prediction):
            return None
        if nodes > 1:  # a plan is for one machine
            return None
        from hf_memkit.cli.predict_next import next_setup
        from hf_memkit.plan.make_plan import PlanRequest, nearest_setup

        wanted = PlanRequest(gpus=gpus, environment=launched.environment, ram_is_given=given_ram)
        return searched(lambda: next_setup(lambda: nearest_setup(script, machine, wanted)))

    known = [note for note in prediction.notes if note.startswith("auto_find_batch_size")]
    known += [*batch_sentences(prediction, training.batches), *_remedies(prediction)]
    title = _title(training)
    if options.as_json:
        nearest = instead()
        asked = {"request": _request_json(training), "try_next": nearest.to_json() if nearest else None}
        beside = predict_environments.as_json(prediction, there, other) if other is not None else {}
        print_json({**prediction.to_json(), **asked, **beside})
        if options.html is not None:
            changes = [*known, *_advice(prediction, training, nearest)]
            write_prediction(options.html, predict_answer(prediction, title, changes))
    elif other is not None and there is not None:
        show(predict_environments.comparison_answer(prediction, there, other, title), short=options.short)
    else:
        present(
            prediction, title, known, lambda: _advice(prediction, training, instead()), short=options.short,
            html=options.html,
        )  # fmt: skip
    return 1 if prediction.verdict == "does not fit" else 0


def _compared(job: ScriptJob, other: Environment) -> tuple[Prediction | None, str]:
    """(the prediction with the other environment's libraries, why there is none)."""
    from hf_memkit.prediction.from_script import predict_job

    tell(f"predicting with the libraries of {other.python}, to compare")
    try:
        return predict_job(replace(job, other=other)).prediction, ""
    except InputError as error:
        return None, f"not compared with {other.python}: {error}"


_FIRST_S: Final = 10.0


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


@contextlib.contextmanager
def _status(name: str) -> Iterator[None]:
    """Prints the elapsed time to a terminal in whole lines, which leave the script's own output as it is."""
    if not is_terminal():
        yield
        return
    done = threading.Event()

    def lines() -> None:
        seconds, wait = _FIRST_S, _FIRST_S
        while not done.wait(wait):
            tell(f"{name} runs: {seconds:.0f} s")
            seconds, wait = 2 * seconds, seconds

    threading.Thread(target=lines, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def ended_by_signals(interrupted: str = "") -> Iterator[Callable[[], None]]:
    """SIGTERM raises an exception, as Ctrl-C does, so that the script's processes are ended first.

    Yields a function that raises it again, because Python may lose it during an import. `interrupted`: message that is
    printed at once on Ctrl-C."""
    came: list[int] = []

    def leave(number: int, _: FrameType | None = None) -> None:
        came.append(number)
        if interrupted and number == signal.SIGINT:
            os.write(2, f"\nmemkit: {interrupted}\n".encode())  # `print` may be what was interrupted
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def again() -> None:
        for number in came:
            leave(number)

    if threading.current_thread() is not threading.main_thread():
        yield again
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, leave)
    try:
        yield again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_T = TypeVar("_T")


def searched(find: Callable[[], _T | None], what: str = "the nearest setup of the same batch that does") -> _T | None:
    """The result of `find`, a search for something that fits; None also if Ctrl-C ends it."""
    tell(f"it does not fit: looking for {what} (Ctrl-C to skip)")
    try:
        with ended_by_signals():
            return find()
    except KeyboardInterrupt:
        return None


def _advice(prediction: Prediction, training: ScriptPrediction, instead: NextSetup | None) -> list[str]:
    """The changes that need a search."""
    from hf_memkit.cli.predict_answer import advice

    if _remedies(prediction):
        return []
    change = advice(prediction, instead, "script", training.setup.micro_batch_size)
    return [*change, f"Its arguments: {instead.flags}"] if instead is not None else change


def _remedies(prediction: Prediction) -> list[str]:
    """What to change if a smaller batch does not help."""
    if prediction.verdict != "does not fit":
        return []
    kept = next((note for note in prediction.notes if note.startswith("for compute_metrics")), None)
    if prediction.peak_phase == "evaluate" and kept is not None:
        less = "preprocess_logits_for_metrics" not in kept  # the script may have it already
        other = ", or keep less of the predictions: preprocess_logits_for_metrics" if less else ""
        return [f"Set eval_accumulation_steps=1{other}."]
    if prediction.why.startswith("it needs") and "--ram" in prediction.why:
        loads = 'Load weights as they are stored: from_pretrained(…, dtype="auto").'
        return ["Give the RAM of the machine with the GPU, such as --ram 256GB.", loads]
    return []


def _title(training: ScriptPrediction) -> str:
    from hf_memkit.cli.predict_answer import accumulated, gpus_of
    from hf_memkit.prediction.running_scripts import name_of

    setup, traced, model = training.setup, training.traced, training.traced.model
    name = setup["model.name"]
    named = model.kind if name == model.kind else f"{model.kind} ({name})"
    parameters = f"{model.parameters:,} parameters"
    if model.trainable_parameters != model.parameters:
        parameters += f", {model.trainable_parameters:,} of them trainable"
    rows = traced.rows or setup.micro_batch_size
    shape = f"{rows} × {traced.sequence_length} tokens" if traced.sequence_length else f"a batch of {rows}"
    return (
        f"{name_of(training.script)}: {traced.trainer}, {named}, {parameters}; {gpus_of(setup)}; "
        f"{shape} per GPU{accumulated(setup)}"
    )


def _request_json(training: ScriptPrediction) -> dict[str, Any]:
    from hf_memkit.cli.predict_answer import batches_json

    setup, traced = training.setup, training.traced
    job = setup.resolved_for
    return {
        "script": training.script.target,
        "is_module": training.script.is_module,
        "arguments": list(training.script.arguments),
        "trainer": traced.trainer,
        "model": setup["model.name"],
        "model_class": traced.model.kind,
        "parameters": traced.model.parameters,
        "trainable_parameters": traced.model.trainable_parameters,
        "optimizer": traced.arguments.optim,
        "gpu": job.machine.gpu.to_json() if job.machine.gpu else None,
        "gpus": job.gpus,
        "nodes": job.nodes,
        "micro_batch_size": setup.micro_batch_size,
        "rows": traced.rows,
        "sequence_length": traced.sequence_length,
        "accumulation": setup.accumulation,
        "batches": batches_json(training.batches),
    }
