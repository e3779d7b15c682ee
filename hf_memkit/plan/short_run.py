"""Runs a few steps of a script's training: the process that `memkit plan --verify` starts on this machine's GPU.

```
verify.py ─> python -m hf_memkit.plan.short_run REQUEST ─> the script with the plan's settings (as `memkit run --plan`)
                                                            └─ its first train(): 3 steps with the worst batch, 4 with
                                                               its own loader, an evaluation, a save; then it exits
```

REQUEST is a JSON file: `target`, `is_module` and `arguments` of the script, the `plan` file, the folders `records` and
`output`, the `result` file, and whether it `saves`. Code of the script below `train()` does not run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.library_versions import CALLBACKS_OF_LIBRARIES
from hf_memkit.common.user_script import UserScript
from hf_memkit.common.when_imported import when_imported
from hf_memkit.run.planned import PlannedRun
from hf_memkit.run.ranks import errors_to_launcher
from hf_memkit.run.script import ScriptRun

WORST_STEPS: Final = 3
"""The first step creates the optimizer's states; the third has other batches that may be the worst. The callback
measures these three steps in detail, which takes time (measuring/memory/recorder.py), so none of them is timed."""

OWN_STEPS: Final = 4
"""Steps with batches of the script's own loader. They are timed, with the time to load the batches."""

STEPS: Final = WORST_STEPS + OWN_STEPS

_REMOVED_CALLBACKS: Final = ("EarlyStoppingCallback", "ProgressCallback", "PrinterCallback")
"""Callbacks of libraries that are removed: the first needs metrics that a short run lacks, the others print."""


def main(path: str) -> None:
    """Runs the request in the file `path`. Raises SystemExit(0) after the training, and the script's own errors."""
    request = json.loads(Path(path).read_text())
    script = UserScript(request["target"], request["is_module"], tuple(request["arguments"]))
    options = {"output_dir": Path(request["records"]), "log": "none", "summary": False, "html": False}
    run = ScriptRun(script, options, PlannedRun.read(request["plan"]))
    short = _ShortTraining(Path(request["output"]), Path(request["result"]), saves=request["saves"])
    when_imported("transformers.trainer", short.install)
    with errors_to_launcher():
        run.prepare()
        run.run()


class _ShortTraining:
    """Replaces the script's first `train()` by a short training.

    Args:
        output: folder for a checkpoint.
        result: file for the stage reached and the measurements; rank 0 writes it.
        saves: whether the disk has room for a checkpoint.
    """

    def __init__(self, output: Path, result: Path, *, saves: bool) -> None:
        self._output, self._file, self._saves = output, result, saves
        self._result: dict[str, Any] = {"stage": "script", "notes": []}
        self._enter("script")

    def install(self, trainer: types.ModuleType) -> None:
        train = trainer.Trainer.train

        @functools.wraps(train)
        def short(trainer: Any, *args: Any, ignore_keys_for_eval: Any = None, **kwargs: Any) -> None:
            self._prepare(trainer)
            self._enter("steps")
            train(trainer, ignore_keys_for_eval=ignore_keys_for_eval)
            self._enter("done")
            _leave()
            raise SystemExit(0)

        trainer.Trainer.train = short

    def _enter(self, stage: str) -> None:
        """Records the stage in the result file, so that it is known if the process dies."""
        self._result["stage"] = stage
        if os.environ.get("RANK", "0") == "0":
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self._result))
            new.replace(self._file)

    def _prepare(self, trainer: Any) -> None:
        self._enter("batches")
        arguments = trainer.args
        evaluates = trainer.eval_dataset is not None and _is_on(arguments.eval_strategy)
        saves = self._saves and _is_on(arguments.save_strategy)
        self._result |= {"evaluated": False if evaluates else None, "saved": False if saves else None}
        for name, value in _short_arguments(arguments, str(self._output), evaluates, saves).items():
            if hasattr(arguments, name):
                object.__setattr__(arguments, name, value)
        self._result["notes"] += _remove_callbacks(trainer)
        from hf_memkit.prediction.child.trainer_kinds.online import learns_from_answers

        if learns_from_answers(trainer):
            self._result["notes"].append("batches are the first of the script's loader: the model generates them")
        else:
            loader = self._loader(trainer)
            trainer.get_train_dataloader = lambda: loader
        if evaluates:
            self._shorten_evaluation(trainer)
        trainer.add_callback(_step_timer(self._result, self._enter))

    def _loader(self, trainer: Any) -> Any:
        """A loader: the worst batch in the first steps, then the script's own; of the same length on each rank."""
        from hf_memkit.prediction.child.training.batch_shapes import shape_of
        from hf_memkit.prediction.child.training.batches import chosen_batches
        from hf_memkit.prediction.child.training.traced_batches import Loader, on_host

        own = trainer.get_train_dataloader()
        try:
            chosen = chosen_batches(on_host(trainer.get_train_dataloader()))  # a second loader: `on_host` changes it
        except Exception as error:  # the script may train without it
            message = (str(error).splitlines() or [""])[0][:200]
            self._result["notes"].append(
                f"batches are the first of the script's loader: the worst was not found ({message})"
            )
            return own
        self._result["worst"] = shape_of(chosen.worst)
        self._result["notes"].append(f"the worst batch is {chosen.description}")
        micro_batches = int(trainer.args.gradient_accumulation_steps)
        steps = [*[[chosen.worst, *chosen.others]] * (WORST_STEPS - 1), list(chosen.others) or [chosen.worst]]
        worst = [batch for step in steps for batch in itertools.islice(itertools.cycle(step), micro_batches)]
        return _WorstFirst(Loader(worst, trainer.args, None), own, STEPS * micro_batches)

    def _shorten_evaluation(self, trainer: Any) -> None:
        """Evaluates on the worst batch of each data set, twice."""
        from hf_memkit.prediction.child.training.evaluations import largest_batch
        from hf_memkit.prediction.child.training.traced_batches import Loader

        loader_of, evaluate = trainer.get_eval_dataloader, trainer.evaluate

        def short_loader(*args: Any, **kwargs: Any) -> Any:
            return Loader([largest_batch(loader_of(*args, **kwargs), worst=True)] * 2, trainer.args, None)

        def short_evaluate(*args: Any, **kwargs: Any) -> Any:
            self._enter("evaluation")
            try:
                return evaluate(*args, **kwargs)
            except Exception as error:
                # A metric or Trainer of the script that needs all rows says nothing about the setup. With several
                # processes the others would wait for this one.
                if _is_out_of_memory(error) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    raise
                message = (str(error).splitlines() or [""])[0][:200]
                self._result["notes"].append(
                    f"the evaluation failed with two batches instead of all ({type(error).__name__}: {message})"
                )
                self._result["evaluated"] = None
                return {}

        trainer.get_eval_dataloader, trainer.evaluate = short_loader, short_evaluate


class _WorstFirst:
    """The script's data loader with other batches in front.

    Args:
        first: the batches in front.
        own: the script's loader; it starts again if it has too few batches.
        count: number of all batches.
    """

    def __init__(self, first: Any, own: Any, count: int) -> None:
        self._first, self._own, self._count = first, own, count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        endless = itertools.chain.from_iterable(itertools.repeat(self._own))
        return itertools.islice(itertools.chain(self._first, endless), self._count)


def _short_arguments(arguments: Any, output: str, evaluates: bool, saves: bool) -> dict[str, Any]:
    def strategy(name: str, on: bool) -> Any:
        return type(getattr(arguments, name))("steps" if on else "no")

    return {
        "output_dir": output,
        "max_steps": STEPS,
        "num_train_epochs": 1,
        "eval_strategy": strategy("eval_strategy", evaluates),
        "save_strategy": strategy("save_strategy", saves),
        "logging_strategy": strategy("logging_strategy", False),
        "eval_steps": STEPS,
        "save_steps": STEPS,
        "eval_delay": 0,
        "eval_on_start": False,
        "logging_first_step": False,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "auto_find_batch_size": False,
        "resume_from_checkpoint": None,
        "restore_callback_states_from_checkpoint": False,
        "push_to_hub": False,
        "report_to": [],
        "disable_tqdm": True,
    }


def _is_on(strategy: Any) -> bool:
    return str(getattr(strategy, "value", strategy)) != "no"


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _remove_callbacks(trainer: Any) -> Iterator[str]:
    """Removes the script's callbacks, which may write files, send data or stop training; yields a note for each."""
    for callback in list(trainer.callback_handler.callbacks):
        kind = type(callback)
        own = not kind.__module__.startswith(CALLBACKS_OF_LIBRARIES)
        if (
            own
            or kind.__name__ in _REMOVED_CALLBACKS
            or kind.__module__ == "transformers.integrations.integration_utils"
        ):
            trainer.callback_handler.callbacks.remove(callback)
        if own:
            yield f"callback {kind.__name__} was not called"


def _step_timer(result: dict[str, Any], enter: Callable[[str], None]) -> Any:
    """A callback that times the steps, waiting for the GPU, and records the stage."""
    from transformers import TrainerCallback

    times: list[float] = []

    class StepTimer(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
        def __init__(self) -> None:
            self._begin = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begin = _now(args)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(_now(args) - self._begin)
            result["step_times_s"] = times
            enter("steps")

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if result["evaluated"] is False:
                result["evaluated"] = True
            enter("save")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            result["saved"] = True

    return StepTimer()


def _now(arguments: Any) -> float:
    import torch

    if arguments.device.type == "cuda":
        torch.cuda.synchronize(arguments.device)
    return time.perf_counter()


def _leave() -> None:
    """Waits for the other ranks and leaves the process group."""
    import torch.distributed as distributed

    from hf_memkit.setup.process_group import leave_process_group

    with contextlib.suppress(Exception):
        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()
        leave_process_group()


if __name__ == "__main__":
    from hf_memkit.plan import short_run  # the script replaces this module as `__main__`

    short_run.main(sys.argv[1])
