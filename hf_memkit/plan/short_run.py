"""A script's training, cut to a few steps, in a process of its own: what `--verify` starts on the machine's GPU.

```
verify.py ─> python -m hf_memkit.plan.short_run REQUEST ─> the script with the plan's settings (as `memkit run --plan`)
                                                            └─ where it calls train(): 3 steps of the worst batch, 4 of
                                                               its own loader's, an evaluation, a save; then it ends
```

The request is a JSON file: `target`, `is_module` and `arguments` of the script, the `plan` file, `records` and
`output` folders, the file of the `result`, and whether it `saves`. What the script does below `train()` is not done.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.library_versions import CALLBACKS_OF_LIBRARIES
from hf_memkit.common.user_script import UserScript
from hf_memkit.common.when_imported import when_imported
from hf_memkit.run.planned import PlannedRun
from hf_memkit.run.ranks import errors_to_launcher
from hf_memkit.run.script import ScriptRun

WORST_STEPS: Final = 3
"""The optimizer's states exist from the end of the first on; the third has other batches that may be the worst. The
callback watches these three closely, which takes time (measuring/memory/recorder.py), so none of them is timed."""

OWN_STEPS: Final = 4
"""Of the script's own loader; these are timed, with what it takes to put the batches together."""

STEPS: Final = WORST_STEPS + OWN_STEPS

_NOT_CALLED: Final = ("EarlyStoppingCallback", "ProgressCallback", "PrinterCallback")
"""Of the libraries' callbacks: the first wants metrics that are not kept, the others draw."""


def main(path: str) -> None:
    """Runs it; the script's own errors come through. A SystemExit with 0 when all is done."""
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
    """The first `train()` of the script.

    Args:
        output: where a checkpoint may be written.
        result: the file that tells how far it came; rank 0 writes it.
        saves: whether there is room for a checkpoint.
    """

    def __init__(self, output: Path, result: Path, *, saves: bool) -> None:
        self._output, self._file, self._saves = output, result, saves
        self._found: dict[str, Any] = {"stage": "script", "notes": []}
        self._tell("script")

    def install(self, trainer: types.ModuleType) -> None:
        train = trainer.Trainer.train

        @functools.wraps(train)
        def short(trainer: Any, *args: Any, ignore_keys_for_eval: Any = None, **kwargs: Any) -> None:
            self._prepare(trainer)
            self._tell("steps")
            train(trainer, ignore_keys_for_eval=ignore_keys_for_eval)
            self._tell("done")
            _leave()
            raise SystemExit(0)

        trainer.Trainer.train = short

    def _tell(self, stage: str) -> None:
        self._found["stage"] = stage
        if os.environ.get("RANK", "0") == "0":
            beside = self._file.with_suffix(".new")
            beside.write_text(json.dumps(self._found))
            beside.replace(self._file)

    def _prepare(self, trainer: Any) -> None:
        self._tell("batches")
        arguments = trainer.args
        evaluates = trainer.eval_dataset is not None and _is_on(arguments.eval_strategy)
        saves = self._saves and _is_on(arguments.save_strategy)
        self._found |= {"evaluated": False if evaluates else None, "saved": False if saves else None}
        for name, value in _short_arguments(arguments, str(self._output), evaluates, saves).items():
            if hasattr(arguments, name):
                object.__setattr__(arguments, name, value)
        self._found["notes"] += _own_callbacks_alone(trainer)
        from hf_memkit.prediction.child.trainer_kinds.online import learns_from_answers

        if learns_from_answers(trainer):
            self._found["notes"].append("batches are the first of the script's loader: the model generates them")
        else:
            loader = self._loader(trainer)
            trainer.get_train_dataloader = lambda: loader
        if evaluates:
            self._shorten_evaluation(trainer)
        trainer.add_callback(_watch(self._found, self._tell))

    def _loader(self, trainer: Any) -> Any:
        """The worst batch for the first steps, then the script's own loader; of as many on each rank."""
        from hf_memkit.prediction.child.training.batch_shapes import shape_of
        from hf_memkit.prediction.child.training.batches import chosen_batches
        from hf_memkit.prediction.child.training.traced_batches import Loader, on_host

        own = trainer.get_train_dataloader()
        try:
            chosen = chosen_batches(on_host(trainer.get_train_dataloader()))  # another: this one is changed
        except Exception as error:  # what cannot be looked at may train all the same
            said = (str(error).splitlines() or [""])[0][:200]
            self._found["notes"].append(
                f"batches are the first of the script's loader: the worst was not found ({said})"
            )
            return own
        self._found["worst"] = shape_of(chosen.worst)
        self._found["notes"].append(f"the worst batch is {chosen.description}")
        micro_batches = int(trainer.args.gradient_accumulation_steps)
        steps = [*[[chosen.worst, *chosen.others]] * (WORST_STEPS - 1), list(chosen.others) or [chosen.worst]]
        worst = [each for step in steps for each in itertools.islice(itertools.cycle(step), micro_batches)]
        return _WorstFirst(Loader(worst, trainer.args, None), own, STEPS * micro_batches)

    def _shorten_evaluation(self, trainer: Any) -> None:
        """Two batches, the worst of each data set."""
        from hf_memkit.prediction.child.training.evaluations import largest_batch
        from hf_memkit.prediction.child.training.traced_batches import Loader

        loader_of, evaluate = trainer.get_eval_dataloader, trainer.evaluate

        def short_loader(*args: Any, **kwargs: Any) -> Any:
            return Loader([largest_batch(loader_of(*args, **kwargs), worst=True)] * 2, trainer.args, None)

        def tried(*args: Any, **kwargs: Any) -> Any:
            self._tell("evaluation")
            try:
                return evaluate(*args, **kwargs)
            except Exception as error:
                # A metric, or a Trainer of the script's, that wants all rows says nothing of the setup. With several
                # processes the others would wait.
                if _is_out_of_memory(error) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    raise
                said = (str(error).splitlines() or [""])[0][:200]
                self._found["notes"].append(
                    f"the evaluation failed with two batches instead of all ({type(error).__name__}: {said})"
                )
                self._found["evaluated"] = None
                return {}

        trainer.get_eval_dataloader, trainer.evaluate = short_loader, tried


class _WorstFirst:
    """A data loader that begins with other batches; all else is the script's own.

    Args:
        first: those batches.
        own: the script's loader; from its begin again where it has too few.
        count: of batches in all.
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
        again = itertools.chain.from_iterable(itertools.repeat(self._own))
        return itertools.islice(itertools.chain(self._first, again), self._count)


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


def _own_callbacks_alone(trainer: Any) -> Iterator[str]:
    """Takes away the script's callbacks, which may write, send or stop, and names them."""
    for each in list(trainer.callback_handler.callbacks):
        kind = type(each)
        own = not kind.__module__.startswith(CALLBACKS_OF_LIBRARIES)
        if own or kind.__name__ in _NOT_CALLED or kind.__module__ == "transformers.integrations.integration_utils":
            trainer.callback_handler.callbacks.remove(each)
        if own:
            yield f"callback {kind.__name__} was not called"


def _watch(found: dict[str, Any], tell: Callable[[str], None]) -> Any:
    """A callback that times steps and says how far it is. It waits for the GPU, which this process may."""
    from transformers import TrainerCallback

    times: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
        def __init__(self) -> None:
            self._begin = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begin = _now(args)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(_now(args) - self._begin)
            found["step_times_s"] = times
            tell("steps")

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if found["evaluated"] is False:
                found["evaluated"] = True
            tell("save")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["saved"] = True

    return Watch()


def _now(arguments: Any) -> float:
    import torch

    if arguments.device.type == "cuda":
        torch.cuda.synchronize(arguments.device)
    return time.perf_counter()


def _leave() -> None:
    """When all ranks are done."""
    import torch.distributed as distributed

    from hf_memkit.setup.process_group import leave_process_group

    with contextlib.suppress(Exception):
        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()
        leave_process_group()


def request_of(script: UserScript, paths: Mapping[str, Path], *, saves: bool) -> dict[str, Any]:
    """What `main` reads. `paths`: of `plan`, `records`, `output` and `result`."""
    return {
        "target": script.target,
        "is_module": script.is_module,
        "arguments": list(script.arguments),
        **{name: str(path) for name, path in paths.items()},
        "saves": saves,
    }


if __name__ == "__main__":
    from hf_memkit.plan import short_run  # this module becomes the script's `__main__`

    short_run.main(sys.argv[1])
