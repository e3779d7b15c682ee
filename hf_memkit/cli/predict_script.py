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

from hf_memkit.cli.options import INTERRUPTED, tell
from hf_memkit.cli.printing import print_json, say_to_stderr
from hf_memkit.common.errors import InputError, ScriptFailed

if TYPE_CHECKING:
    from hf_memkit.catalog.environments import Environment
    from hf_memkit.cli.predict_next import NextSetup
    from hf_memkit.cli.predict_options import PredictOptions
    from hf_memkit.prediction.launch_command import Launched
    from hf_memkit.prediction.prediction import Prediction
    from hf_memkit.prediction.running_scripts import ScriptJob
    from hf_memkit.prediction.script_prediction import ScriptPrediction


def predict_script(options: PredictOptions, environment: Mapping[str, str] | None) -> int:
    """Predicts the script, prints the prediction and returns the exit code. `environment`: variables of the script;
    None: those of this process."""
    launched = options.started("predict", environment, options.nodes)
    with contextlib.ExitStack() as running:
        return _predict(options, launched, running)


def _predict(options: PredictOptions, launched: Launched, running: contextlib.ExitStack) -> int:
    """`running` holds the script, which waits at its Trainer until the search has ended."""
    from hf_memkit.cli.predict_answer import batch_sentences, predict_answer, present, write_prediction
    from hf_memkit.common.answer.terminal import show

    script, gpus, nodes = launched.script, launched.gpus or 1, launched.nodes
    try:
        with ended_by_signals() as raise_again:
            from hf_memkit.catalog.environments import find_environment
            from hf_memkit.cli import predict_environments
            from hf_memkit.plan.known_mistakes import known_mistakes
            from hf_memkit.prediction.from_script import predict_waiting
            from hf_memkit.prediction.running_scripts import ScriptJob, name_of, refuse_unreadable
            from hf_memkit.prediction.waiting_script import WaitingScript

            compare_with = options.compare_with
            other = find_environment(compare_with, "--compare-with") if compare_with is not None else None
            refuse_unreadable(script)
            machine = options.machine()
            raise_again()
            name = name_of(script)
            tell(f"{name} runs on this machine up to Trainer.train(). Files that it writes before that stay")
            with _elapsed_time(name):
                given = options.ram is not None
                job = ScriptJob(script, machine, gpus, nodes, launched.environment, ram_is_given=given)
                waiting = running.enter_context(WaitingScript(job, tell))
                training = predict_waiting(waiting)
                mistakes = known_mistakes(training.traced, gpus, nodes, launched)
                prediction = training.prediction.with_warnings(*mistakes)
                fails = prediction.verdict == "does not fit"
                remedies = _remedies(prediction, training) if fails else []
                searches = fails and not remedies and not options.no_search and other is None and nodes == 1
                if not searches:
                    running.close()
                there, why_not = _predict_elsewhere(job, other) if other is not None else (None, "")
            tell("nothing was trained or saved, whatever the script printed")
    except ScriptFailed as error:
        from hf_memkit.plan.known_mistakes import explained

        say_to_stderr(error.text)
        raise explained(error) from error
    except KeyboardInterrupt:
        running.close()
        tell("stopped; no process of the script is left")
        return INTERRUPTED
    if why_not:
        prediction = prediction.with_notes(why_not)

    def search() -> NextSetup | None:
        """The nearest setup that fits; a search is for one machine."""
        if not searches:
            return None
        from hf_memkit.cli.predict_next import next_setup
        from hf_memkit.plan.make_plan import nearest_setup

        return searched(lambda: next_setup(lambda: nearest_setup(waiting)))

    def changes(nearest: NextSetup | None) -> list[str]:
        return [] if remedies else _advice(prediction, training, nearest)

    title = _title(training)
    known = [note for note in prediction.notes if note.startswith("auto_find_batch_size")]
    known += [*batch_sentences(prediction, training.batches), *remedies]
    if options.as_json:
        nearest = search()
        content = prediction.to_json()
        content["request"] = _request_json(training)
        content["try_next"] = nearest.to_json() if nearest is not None else None
        if other is not None:
            content |= predict_environments.as_json(prediction, there, other)
        print_json(content)
        if options.html is not None:
            write_prediction(options.html, predict_answer(prediction, title, [*known, *changes(nearest)]))
    elif other is not None and there is not None:
        show(predict_environments.comparison_answer(prediction, there, other, title), short=options.short)
    else:
        present(prediction, title, known, lambda: changes(search()), short=options.short, html=options.html)
    return 1 if fails else 0


def _predict_elsewhere(job: ScriptJob, other: Environment) -> tuple[Prediction | None, str]:
    """(the prediction with the other environment's libraries or None, why there is none)."""
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
def _elapsed_time(name: str) -> Iterator[None]:
    """Prints the elapsed time to a terminal after 10, 20, 40 … seconds. Whole lines, because the script prints too."""
    if not is_terminal():
        yield
        return
    is_done = threading.Event()

    def print_lines() -> None:
        seconds = wait = _FIRST_S
        while not is_done.wait(wait):
            tell(f"{name} runs: {seconds:.0f} s")
            wait = seconds
            seconds *= 2

    threading.Thread(target=print_lines, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


@contextlib.contextmanager
def ended_by_signals(interrupted: str = "") -> Iterator[Callable[[], None]]:
    """Makes SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that the script's processes are ended first.

    Yields a function that raises the exception again: Python may lose it during an import.

    Args:
        interrupted: message that Ctrl-C prints at once.
    """
    received: list[int] = []

    def leave(number: int, _: FrameType | None = None) -> None:
        received.append(number)
        if interrupted and number == signal.SIGINT:
            os.write(2, f"\nmemkit: {interrupted}\n".encode())  # `print` may be what was interrupted
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def raise_again() -> None:
        for number in received:
            leave(number)

    if threading.current_thread() is not threading.main_thread():
        yield raise_again
        return
    before = {}
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler not in (None, signal.SIG_IGN):
            before[number] = handler
            signal.signal(number, leave)
    try:
        yield raise_again
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


def _advice(prediction: Prediction, training: ScriptPrediction, nearest: NextSetup | None) -> list[str]:
    """The changes that a search found, or generic ones."""
    from hf_memkit.cli.predict_answer import advice

    if nearest is None and training.traced.sharded and prediction.verdict != "fits":
        return [f"Try, in this order: {'; '.join([*training.traced.unused_savings, 'more GPUs'])}."]
    lines = advice(prediction, nearest, "script", training.setup.micro_batch_size)
    if nearest is not None:
        lines.append(f"Its arguments: {nearest.flags}")
    return lines


def _remedies(prediction: Prediction, training: ScriptPrediction) -> list[str]:
    """What to change where a smaller batch does not help; empty if it may help."""
    metrics = next((note for note in prediction.notes if note.startswith("for compute_metrics")), None)
    if prediction.peak_phase == "evaluate" and metrics is not None:
        if "preprocess_logits_for_metrics" in metrics:  # the script may have it already
            return ["Set eval_accumulation_steps=1."]
        return ["Set eval_accumulation_steps=1, or keep less of the predictions: preprocess_logits_for_metrics."]
    if prediction.why.startswith("it needs") and "--ram" in prediction.why:
        loads = 'Load weights as they are stored: from_pretrained(…, dtype="auto").'
        return ["Give the RAM of the machine with the GPU, such as --ram 256GB.", loads]
    return []


def _title(training: ScriptPrediction) -> str:
    from hf_memkit.cli.predict_answer import accumulated, gpus_of
    from hf_memkit.prediction.running_scripts import name_of

    setup = training.setup
    traced = training.traced
    model = traced.model
    name = model.kind
    if setup["model.name"] != model.kind:
        name += f" ({setup['model.name']})"
    parameters = f"{model.parameters:,} parameters"
    if model.trainable_parameters != model.parameters:
        parameters += f", {model.trainable_parameters:,} of them trainable"
    rows = traced.rows or setup.micro_batch_size
    share = f", shared by {traced.ranks_per_batch} GPUs" if traced.ranks_per_batch > 1 else " per GPU"
    batch = f"{rows} × {traced.sequence_length} tokens" if traced.sequence_length else f"a batch of {rows}"
    job = f"{name_of(training.script)}: {traced.trainer}, {name}, {parameters}; {gpus_of(setup)}"
    return f"{job}; {batch}{share}{accumulated(setup)}"


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
