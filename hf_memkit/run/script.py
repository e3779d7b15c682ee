"""Run a user's script unchanged, with a memory report for each Trainer that it makes.

memkit imports neither torch nor transformers before the script does, so that the script can still set environment
variables such as HF_HOME and CUDA_VISIBLE_DEVICES. When the script imports transformers, memkit changes it:

- `Trainer.__init__` attaches a MemoryReportCallback at its end, and lets this Trainer's `train` refuse a checkpoint of
  which Trainer would lose weights.
- With a plan, arguments and models get the plan's settings (`planned.py`).
- `TrainingArguments.__post_init__` with DeepSpeed reports stale build locks. Without a launcher, it sets a launcher's
  variables for one process.

memkit's messages go to standard error, on one rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common import boot, user_script
from hf_memkit.common.commands import command
from hf_memkit.common.ended_with_parent import ends_with_this
from hf_memkit.common.secrets import masked
from hf_memkit.common.user_script import UserScript
from hf_memkit.common.when_imported import when_imported
from hf_memkit.run.planned import PlannedRun

_MPI_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Set by mpirun for each process; DeepSpeed then finds the others through mpi4py, not through the environment."""


class ScriptRun:
    """One run of a script in this process.

    Args:
        script: the script with its arguments.
        options: options of MemoryReportCallback, for each Trainer of the script without one.
        plan: settings that replace the script's, if any.
    """

    def __init__(self, script: UserScript, options: Mapping[str, Any], plan: PlannedRun | None = None) -> None:
        self.script = script
        self._options = dict(options)
        self._plan = plan
        self._code: types.CodeType | None = None
        self._made_trainer = False
        self._folder: Path | None = None  # of the records
        self._asked_for_deepspeed = False
        self._set_environment = False

    def prepare(self) -> None:
        """Set up the process for the script. Raises InputError if there is no such module."""
        when_imported("transformers.trainer", self._report_of_trainers)
        when_imported("transformers.training_args", self._prepare_for_deepspeed)
        if self._plan is not None:
            self._plan.install(self.script.name, _say)
        boot.take_back()
        try:
            self._code = self.script.take_over()
        except BaseException:
            _hide_memkit()
            raise

    def run(self) -> None:
        """Run the script. Its exceptions are not caught, and Python shows them without memkit's frames. Raises
        SystemExit: with code 2 for a plan with a field that the script's arguments lack."""
        assert self._code is not None, "prepare() comes first"
        process = os.getpid()
        try:
            exec(self._code, vars(sys.modules["__main__"]))
        except SystemExit as exit:
            if exit.code in (None, 0):
                self._end(process)
            raise
        except BaseException as error:
            if self._plan is not None and error is self._plan.refused:
                _say(f"error: {self._plan.name}: {error}")
                raise SystemExit(error.exit_code) from None
            _hide_memkit()
            if isinstance(error, KeyboardInterrupt) and process == os.getpid():
                self._say_where_records_are()
            raise
        self._end(process)

    def _say_where_records_are(self) -> None:
        if self._folder is not None and any(self._folder.glob("memory-rank*.jsonl")):
            report = command("memkit", "report", self._folder, "--html", "FILE")
            _say(f"interrupted. To see the memory until then, type: {report}")

    def _end(self, process: int) -> None:
        """Last messages of the script's process; `process` is its ID."""
        if process != os.getpid():  # a process that the script forked
            return
        if not self._made_trainer:
            _say(f"{self.script} made no Trainer, so no memory was recorded")
        if self._set_environment:
            from hf_memkit.setup.process_group import leave_process_group

            with contextlib.suppress(Exception):  # a finished run could still abort: see process_group.py
                leave_process_group()

    def _report_of_trainers(self, trainer: types.ModuleType) -> None:
        plain = trainer.Trainer.__init__

        @functools.wraps(plain)
        def with_report(trainer: Any, *args: Any, **kwargs: Any) -> None:
            plain(trainer, *args, **kwargs)
            self._made_trainer = True
            try:
                self._attach(trainer)
            except Exception as error:
                _say(f"warning: this training is not recorded: {type(error).__name__}: {error}")

        trainer.Trainer.__init__ = with_report

    def _attach(self, trainer: Any) -> None:
        from hf_memkit.measuring.callback.callback import MemoryReportCallback, attach

        if not any(isinstance(other, MemoryReportCallback) for other in trainer.callback_handler.callbacks):
            attach(trainer, **self._options)
        self._folder = Path(self._options.get("output_dir") or trainer.args.output_dir)
        _refuse_lost_weights(trainer)

    def _prepare_for_deepspeed(self, training_args: types.ModuleType) -> None:
        plain = training_args.TrainingArguments.__post_init__

        @functools.wraps(plain)
        def with_environment(arguments: Any, *args: Any, **kwargs: Any) -> None:
            by_accelerate = is_on(os.environ.get("ACCELERATE_USE_DEEPSPEED"))
            if (arguments.deepspeed or by_accelerate) and not self._asked_for_deepspeed:
                self._asked_for_deepspeed = True
                self._set_environment = _set_environment_of_one_process()
                _report_stale_locks()
            plain(arguments, *args, **kwargs)

        training_args.TrainingArguments.__post_init__ = with_environment


def _refuse_lost_weights(trainer: Any) -> None:
    """Make this Trainer's `train` end the script where Trainer would lose weights of a checkpoint."""
    from transformers import Trainer

    from hf_memkit.measuring.callback.lost_weights import asked_checkpoint, why_not_resumed, why_not_the_best

    plain = trainer.train

    @functools.wraps(plain)
    def train(*args: Any, **kwargs: Any) -> Any:
        why = ""
        reads = (type(trainer)._load_from_checkpoint, type(trainer)._load_best_model)
        if reads != (Trainer._load_from_checkpoint, Trainer._load_best_model):
            return plain(*args, **kwargs)  # as Sentence Transformers does
        with contextlib.suppress(Exception):  # of a damaged checkpoint, which Trainer refuses
            asked = kwargs.get("resume_from_checkpoint", args[0] if args else None)
            checkpoint = asked_checkpoint(trainer.args, asked)
            why = why_not_resumed(trainer.model, checkpoint) if checkpoint is not None else ""
            why = why or why_not_the_best(trainer.model, trainer.args)
        if why:
            _say(f"error: {why}")
            raise SystemExit(1)
        return plain(*args, **kwargs)

    trainer.train = train


def predict_script(script: UserScript) -> dict[str, Any] | None:
    """The script's prediction as JSON, from `memkit predict` in a separate process. None if the script cannot be
    predicted, and on ranks other than the first."""
    if os.environ.get("RANK", "0") != "0":
        return None
    words = boot.command(*_predict_arguments(script, "--json", "--no-search"))
    output = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=ends_with_this()
    ).stdout
    if not output.startswith("{"):
        _say("no prediction, because of the error above. The script runs now")
        return None

    prediction: dict[str, Any] = json.loads(output)
    verdict = prediction["verdict"]
    if verdict is None:
        with_gpu = command("memkit", *_predict_arguments(script, "--gpu", "NAME"))
        _say(f"predicted, but without a GPU to compare with. To see whether it fits, type: {with_gpu}")
    else:
        _say(f"predicted: {verdict}: {prediction['why']}")
    if verdict == "does not fit":
        search = command("memkit", *_predict_arguments(script))
        _say(f"to find a setup with the same batch that fits, type: {search}")
    return prediction


def _predict_arguments(script: UserScript, *options: str) -> list[str]:
    """Arguments of memkit for the prediction of this run."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    gpus = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    nodes = world_size // gpus
    sizes = ["--gpus", str(gpus)] if gpus > 1 else []
    sizes += ["--nodes", str(nodes)] if nodes > 1 else []
    target = ["-m", script.target] if script.is_module else [script.target]
    return ["predict", *options, *sizes, *target, "--", *script.arguments]


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in masked(text).splitlines():
            print(f"memkit: {line}", file=sys.stderr, flush=True)


def _set_environment_of_one_process() -> bool:
    """Set a launcher's variables if DeepSpeed finds none: no launcher, mpirun or mpi4py. Returns whether it did."""
    if any(name in os.environ for name in _MPI_SIZES) or importlib.util.find_spec("mpi4py") is not None:
        return False
    from hf_memkit.setup.process_group import single_process_environment

    variables = single_process_environment()
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if variables:
        _say(f"DeepSpeed without a launcher: one process (RANK=0, WORLD_SIZE=1, port {os.environ['MASTER_PORT']})")
    return bool(variables)


def _report_stale_locks() -> None:
    """Report this machine's stale locks, on its first process."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    from hf_memkit.deepspeed import ops

    for lock in ops.stale_locks(ops.extension_roots()):
        cause = f"{lock}: a stale lock: a build of DeepSpeed's operators was killed"
        fix = f"If this run hangs, stop it and type: {command('rm', lock)}"
        print(f"memkit: warning: {cause}. {fix}", file=sys.stderr, flush=True)


def _hide_memkit() -> None:
    """Make Python show the exception that ends the script without memkit's frames."""
    # Not within the hook: an import may call `exec` with a text (dataclasses do), by which Python forgets that Ctrl-C
    # has ended the script, and exits with 1 (CPython 3.11: Python/pythonrun.c, `run_eval_code_obj`).
    from hf_memkit.measuring.callback import oom_watch

    files = (__file__, user_script.__file__, oom_watch.__file__)  # oom_watch handles Ctrl-C
    show = sys.excepthook

    def show_without_memkit(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        entries = []
        while traceback is not None:
            entries.append(traceback)
            traceback = traceback.tb_next
        places = [entry.tb_frame.f_code.co_filename for entry in entries]
        if __file__ in places:
            del entries[: places.index(__file__)]  # what called this module

        own: TracebackType | None = None
        for entry in reversed(entries):
            if entry.tb_frame.f_code.co_filename not in files:
                entry.tb_next = own
                own = entry
        show(kind, error.with_traceback(own), own)

    sys.excepthook = show_without_memkit
