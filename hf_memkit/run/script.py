"""A user's script with a memory report. In: the script. Out: what it does without memkit, and the records, page,
summary and advice of every Trainer that it makes.

The process is the script's. Neither torch nor transformers is imported before the script does: what it puts into
`os.environ` in its first lines (HF_HOME, CUDA_VISIBLE_DEVICES …) acts as it does without memkit. So the two classes of
transformers that are changed are changed at the moment they have been imported:

- `Trainer.__init__` attaches a MemoryReportCallback at its end;
- with a plan, its arguments and models are made with the plan's settings (`planned.py`);
- `TrainingArguments.__post_init__`, where DeepSpeed is asked for, names stale build locks, and without a launcher sets
  what a launcher would set for one process.

memkit's messages go to standard error, on one rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common import boot, user_script
from hf_memkit.common.ended_with_parent import ends_with_this
from hf_memkit.common.user_script import UserScript
from hf_memkit.common.when_imported import when_imported
from hf_memkit.run.planned import PlannedRun

_MPI_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Set by mpirun for each process; then DeepSpeed finds the others through mpi4py, and not through the environment."""


class ScriptRun:
    """One run of a script in this process.

    Args:
        script: which, with its arguments.
        options: those of MemoryReportCallback, for each Trainer of the script that has none.
        plan: settings that take the place of the script's, if any.
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
        """Makes the process the script's, up to its first line; an InputError where there is no such module."""
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
        """Runs it. What it raises comes through, and Python shows it without memkit's frames; a SystemExit with 2 for
        a plan with a field that the script's arguments do not have."""
        assert self._code is not None, "prepare() comes first"
        process = os.getpid()
        try:
            exec(self._code, vars(sys.modules["__main__"]))
        except SystemExit as left:
            if left.code in (None, 0):
                self._end(process)
            raise
        except BaseException as error:
            if self._plan is not None and error is self._plan.refused:
                _say(f"error: {self._plan.name}: {error}")
                raise SystemExit(error.exit_code) from None
            _hide_memkit()
            if isinstance(error, KeyboardInterrupt) and process == os.getpid():
                self._say_where_the_records_are()
            raise
        self._end(process)

    def _end(self, process: int) -> None:
        if process != os.getpid():  # a process that the script forked
            return
        if not self._made_trainer:
            _say(f"{self.script} made no Trainer: nothing was recorded")
        if self._set_environment:
            from hf_memkit.setup.process_group import leave_process_group

            with contextlib.suppress(Exception):  # else a run that is done could still abort; see there
                leave_process_group()

    def _say_where_the_records_are(self) -> None:
        """Of a run that Ctrl-C has ended, whose page is not written."""
        if self._folder is not None and any(self._folder.glob("memory-rank*.jsonl")):
            _say(f"interrupted. Its records, as a page: memkit report {shlex.quote(str(self._folder))} --html FILE")

    def _report_of_trainers(self, trainer: types.ModuleType) -> None:
        plain = trainer.Trainer.__init__

        @functools.wraps(plain)
        def with_report(trainer: Any, *args: Any, **kwargs: Any) -> None:
            plain(trainer, *args, **kwargs)
            self._made_trainer = True
            try:
                self._attach(trainer)
            except Exception as error:
                _say(f"warning: cannot record this Trainer: {type(error).__name__}: {error}")

        trainer.Trainer.__init__ = with_report

    def _attach(self, trainer: Any) -> None:
        from hf_memkit.measuring.callback.callback import MemoryReportCallback, attach

        if not any(isinstance(other, MemoryReportCallback) for other in trainer.callback_handler.callbacks):
            attach(trainer, **self._options)
        self._folder = Path(self._options.get("output_dir") or trainer.args.output_dir)

    def _prepare_for_deepspeed(self, training_args: types.ModuleType) -> None:
        plain = training_args.TrainingArguments.__post_init__

        @functools.wraps(plain)
        def with_environment(arguments: Any, *args: Any, **kwargs: Any) -> None:
            by_accelerate = is_on(os.environ.get("ACCELERATE_USE_DEEPSPEED"))
            if (arguments.deepspeed or by_accelerate) and not self._asked_for_deepspeed:
                self._asked_for_deepspeed = True
                self._set_environment = _set_environment_of_one_process()
                _name_stale_locks()
            plain(arguments, *args, **kwargs)

        training_args.TrainingArguments.__post_init__ = with_environment


def predicted(script: UserScript) -> dict[str, Any] | None:
    """What the script will need, as `memkit predict --json` says it in a process of its own; None if it cannot be
    predicted, or on a rank that is not the first."""
    if os.environ.get("RANK", "0") != "0":
        return None
    command = boot.command(*_words(script, "--json", "--no-search"))
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=ends_with_this()
    )
    if not ran.stdout.startswith("{"):
        _say("no prediction (the error is above); running the script without it")
        return None
    found: dict[str, Any] = json.loads(ran.stdout)
    if found["verdict"] is None:
        _say(f"predicted, for no GPU; for a verdict: {shlex.join(['memkit', *_words(script, '--gpu', 'NAME')])}")
    else:
        _say(f"predicted: {found['verdict']}: {found['why']}")
    if found["verdict"] == "does not fit":
        _say(f"to find a setup of the same batch that fits: {shlex.join(['memkit', *_words(script)])}")
    return found


def _words(script: UserScript, *options: str) -> list[str]:
    """How memkit is asked for the prediction of a run like this one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    sizes = {"--gpus": local, "--nodes": max(1, world // local)}
    several = [word for name, value in sizes.items() if value > 1 for word in (name, str(value))]
    target = ["-m", script.target] if script.is_module else [script.target]
    return ["predict", *options, *several, *target, "--", *script.arguments]


def _say(words: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in words.splitlines():
            print(f"memkit: {line}", file=sys.stderr, flush=True)


def _set_environment_of_one_process() -> bool:
    """Sets it where DeepSpeed could not find it out: without a launcher, mpirun and mpi4py. True if it was set."""
    if any(name in os.environ for name in _MPI_SIZES) or importlib.util.find_spec("mpi4py") is not None:
        return False
    from hf_memkit.setup.process_group import single_process_environment

    variables = single_process_environment()
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if variables:
        _say(f"DeepSpeed without a launcher: one process (RANK=0, WORLD_SIZE=1, port {os.environ['MASTER_PORT']})")
    return bool(variables)


def _name_stale_locks() -> None:
    """Of this machine, and so by its first process."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    from hf_memkit.deepspeed import ops

    for lock in ops.stale_locks(ops.extension_roots()):
        print(
            f"memkit: warning: {lock}: a stale lock, left by a killed build of DeepSpeed's operators. If this run "
            f"hangs, stop it and type: rm {lock}",
            file=sys.stderr,
            flush=True,
        )


def _hide_memkit() -> None:
    """Has Python, which is about to show the exception that ends the script, show the script's frames only."""
    # Not within the hook: an import may call `exec` with a text (dataclasses do), by which Python forgets that Ctrl-C
    # has ended the script, and exits with 1 (CPython 3.11: Python/pythonrun.c, `run_eval_code_obj`).
    from hf_memkit.measuring.callback import oom_watch

    files = (__file__, user_script.__file__, oom_watch.__file__)  # of the last the link in Ctrl-C's chain
    show = sys.excepthook

    def without_memkit(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        own = _own(traceback, files)
        show(kind, error.with_traceback(own), own)

    sys.excepthook = without_memkit


def _own(traceback: TracebackType | None, memkit: tuple[str, ...]) -> TracebackType | None:
    """What stands below this module's first frame in the traceback, without frames of the files of `memkit`."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    begin = files.index(__file__) if __file__ in files else 0
    own = [entry for entry, file in zip(entries[begin:], files[begin:], strict=True) if file not in memkit]
    for entry, after in itertools.pairwise([*own, None]):
        if entry is not None:
            entry.tb_next = after
    return own[0] if own else None
