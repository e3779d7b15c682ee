"""Runs a user's script as on a machine with the requested GPU until its first `train()`, traces that and ends the
process.

No line below `train()` runs, not even in `finally`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import transformers
from transformers import Trainer

from hf_memkit.common.errors import MemkitError, Unmodelled
from hf_memkit.components import packed_batches
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.gpu.fsdp import uneven_heads
from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.libraries.adapters import add_adapters_to_first_trainer, chunk_losses
from hf_memkit.prediction.child.libraries.checkpoints import refuse_checkpoint
from hf_memkit.prediction.child.libraries.library_rules import refuse_missing_kernels, unmodelled_shapes
from hf_memkit.prediction.child.output import flush_output
from hf_memkit.prediction.child.script.file_guards import OlderFiles, redirect_writes
from hf_memkit.prediction.child.script.forks import Forks
from hf_memkit.prediction.child.script.notices import notices
from hf_memkit.prediction.child.script.output_folder import RECORD, MadeFiles, record_output_folder
from hf_memkit.prediction.child.script.own_loops import OwnLoop, OwnLoops
from hf_memkit.prediction.child.script.refuse_training_processes import (
    refuse_forked_training,
    refuse_training_processes,
)
from hf_memkit.prediction.child.script.replacements import (
    ABOVE_TRAIN,
    AT_TRAIN,
    ON_A_GPU,
    TracedScript,
    install_replacements,
)
from hf_memkit.prediction.child.tracer.kernel_rules import learn_use_counts
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.training.at_train import traced_training
from hf_memkit.prediction.child.training.batches import lengths_of_batches
from hf_memkit.prediction.child.training.evaluations import EvaluationCall, Evaluations
from hf_memkit.prediction.child.training.given_settings import given_arguments
from hf_memkit.prediction.child.training.library_evaluations import LibraryEvaluations
from hf_memkit.prediction.child.user_code import MEMKIT, is_library, line_in_traceback, users_line
from hf_memkit.prediction.trace.request import LIVE, SETUP, ForkRequest, ScriptRequest
from hf_memkit.prediction.traced_training import Failed, Outcome, Untrained
from hf_memkit.setup.live_arguments import latest_creation, on_creation, watch_reads
from hf_memkit.setup.process_group import LAUNCHER_VARIABLES
from hf_memkit.setup.script_overrides import Overrides, install
from hf_memkit.setup.setup import Setup


def run_script(request: ScriptRequest, result: Path) -> None:
    """Runs the script and writes its result; does not return if the script calls `train()`."""
    _set_up_process(request)
    # The code that torch.compile writes is removed with the result: it is of no use in the user's own cache.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(result.parent / "inductor")
    run = _ScriptRun(request, result)
    run.prepare()
    run.out.write(run.until_end())


class _ScriptRun:
    """A run of a script, and the objects that take part in it."""

    def __init__(self, request: ScriptRequest, result: Path) -> None:
        on_gpu = request.device == "cuda"
        self.out = _Result(result)
        self._request = request
        self._tracer = StorageTracer(
            "cuda" if on_gpu else "cpu", request.capability if on_gpu else None, work=request.for_plan
        )
        self._boundary = RealAndFake(self._tracer) if request.device != "real cpu" else None
        self._evaluations = Evaluations(worst=request.worst_batch)
        self._loops = OwnLoops()
        self._library_evaluations: LibraryEvaluations | None = None  # None: all tensors are real
        self._differences: list[str] = []  # notes on overrides that the script does not use as they are

    def prepare(self) -> None:
        """Replaces functions of libraries before the script's first line."""
        overrides = self._request.overrides or Overrides()
        on_creation()  # so that `describe_training` knows what the script gave
        if self._request.overrides is not None:
            install(overrides, on_difference=self._differences.append)
        if overrides.adapter:
            add_adapters_to_first_trainer(overrides.adapter)

        if self._boundary is not None:
            script = TracedScript(self._request, self._boundary)
            if script.on_gpu:
                install_replacements(ON_A_GPU, script)
            learn_use_counts(in_a_fork=self._request.forks is not None)
            install_replacements(ABOVE_TRAIN, script)
        refuse_training_processes(self.out.end, self.out.owner)
        made = MadeFiles(self.out.path.with_name(RECORD))
        folder_begins = record_output_folder(made)
        OlderFiles(self._request.began, self.out.end, made).install()

        if self._boundary is not None:
            self._loops.install()
            self._library_evaluations = LibraryEvaluations(self._boundary, self._evaluations.notes, redirect_writes)
            self._library_evaluations.install()
        self._replace_train()
        if overrides.loss:
            chunk_losses()
        if self._request.forks is not None:
            Forks(Path(self._request.forks), self._begin_in_fork, watch_reads(), folder_begins).install()

    def _begin_in_fork(self, request: ForkRequest) -> None:
        self.out.begin(Path(request.result))
        self._request = replace(self._request, micro_batch_size=request.micro_batch_size, for_plan=request.for_plan)
        if not request.for_plan:
            self._tracer.stop_recording_work()

    def until_end(self) -> Outcome:
        """Runs the script; returns the outcome of one that does not call `train()`."""
        raised: BaseException | None = None
        try:
            with self._boundary or contextlib.nullcontext():
                self._request.script.run()
        except BaseException as error:
            raised = error

        place = self._loops.place
        if isinstance(raised, OwnLoop) or (place and isinstance(raised, SystemExit | Unmodelled | None)):
            return Outcome(failed=Failed(False, OwnLoop.__name__, str(OwnLoop()), place, ""))
        if raised is not None and not isinstance(raised, SystemExit):
            return _failure(raised)
        code = raised.code if raised is not None else None
        return Outcome(untrained=Untrained(code if isinstance(code, int | None) else str(code)))

    def _replace_train(self) -> None:
        """Replaces `Trainer.train`, which traces the training and ends the process, and evaluations before it, whose
        values would be made up."""
        original = Trainer.train

        @functools.wraps(original)
        def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
            if not self.out.is_mine():
                refuse_forked_training(self.out.end)
            if resume_from_checkpoint:
                object.__setattr__(trainer.args, "resume_from_checkpoint", resume_from_checkpoint)
            rows = self._request.micro_batch_size
            if rows is not None:  # as late as Trainer sets it, because the script may still change it
                object.__setattr__(trainer.args, "per_device_train_batch_size", rows)
                object.__setattr__(trainer.args, "auto_find_batch_size", False)
                trainer._train_batch_size = trainer.args.train_batch_size
            try:
                refuse_checkpoint(trainer, resume_from_checkpoint)
                outcome = self._traced(trainer, original)
            except Exception as error:
                is_library = isinstance(error, RuntimeError) and not isinstance(error, MemkitError)
                uneven = uneven_heads(trainer) if is_library else ""
                outcome = _failure(Unmodelled(uneven).with_traceback(error.__traceback__) if uneven else error)
            self.out.end(outcome)

        def remember(call: EvaluationCall) -> Any:
            redirect_writes()
            return self._evaluations.remember(call)

        Trainer.train = train
        self._evaluations.answer = remember
        self._evaluations.install()

    def _traced(self, trainer: Any, train: Callable[[Any], Any]) -> Outcome:
        """The outcome of the training that begins now; `train`: the original `Trainer.train`."""
        self._evaluations.answer = None
        self._loops.watches = False
        if self._library_evaluations is not None:
            self._library_evaluations.in_training = True

        request, boundary = self._request, self._boundary
        if request.lengths_of and boundary is not None:
            boundary.leave()
            return Outcome(lengths=lengths_of_batches(trainer.get_train_dataloader(), request.lengths_of))
        if self._tracer.host is not None:
            self._tracer.host.training_begins()
        fake: contextlib.AbstractContextManager[Any] = self._tracer
        if boundary is not None:
            boundary.leave()
            fake = _all_fake(request, boundary, trainer)
        training = traced_training(
            trainer, train, self._tracer, fake, self._evaluations, worst=request.worst_batch, for_plan=request.for_plan
        )
        notes = (*training.notes, *self._differences)
        return Outcome(replace(training, device=request.device, notes=notes, notices=notices()))


class _Result:
    """Result file, in a temporary folder that also holds this process's other files."""

    def __init__(self, path: Path) -> None:
        self.begin(path)

    def begin(self, path: Path) -> None:
        """Makes `path` the result file, and this process its owner."""
        self.path, self._process = path, os.getpid()
        tempfile.tempdir = str(path.with_name("temporary"))  # removed with its contents
        Path(tempfile.tempdir).mkdir()

    def is_mine(self) -> bool:
        """Whether this process owns the result; the script may fork others."""
        return os.getpid() == self._process

    def owner(self) -> tuple[int, Path]:
        """The process that owns the result, and its path."""
        return self._process, self.path

    def write(self, content: Outcome) -> None:
        """Writes the result; a process forked by the script exits."""
        if not self.is_mine():
            os._exit(1)
        self._put(content)

    def _put(self, content: Outcome) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}")
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600)  # `open` may be redirected (file_guards.py)
        with os.fdopen(number, "w") as file:
            file.write(wire.dumps(content))
        temporary.replace(self.path)

    def end(self, content: Outcome) -> NoReturn:
        """Writes the result and ends the script, in any of its processes and threads."""
        self._put(content)
        flush_output()
        if not self.is_mine():
            os.kill(self._process, signal.SIGKILL)
        os._exit(0)


def _set_up_process(request: ScriptRequest) -> None:
    """Sets the folder, environment and standard input with which the script would start."""
    os.environ.clear()
    # The asking process may be a rank; the request says whether the traced training is one (`other_ranks.py`).
    omitted = set(LAUNCHER_VARIABLES) if request.device != "real cpu" else set()
    if request.script.target not in (LIVE, SETUP):  # `deepspeed_engine.py` reads and removes it
        omitted.discard("ACCELERATE_USE_DEEPSPEED")
    os.environ.update({name: value for name, value in request.environment.items() if name not in omitted})
    os.environ.update({"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"})
    os.chdir(request.folder)
    if packages := request.environment.get("PYTHONPATH"):
        sys.path[1:1] = [path or request.folder for path in packages.split(os.pathsep)]
    torch.set_num_threads(1)
    if request.stdin is not None:
        os.dup2(request.stdin, 0)
        os.close(request.stdin)
        sys.stdin = os.fdopen(0, closefd=False)


@contextlib.contextmanager
def _all_fake(request: ScriptRequest, boundary: RealAndFake, trainer: Any) -> Iterator[None]:
    """Context in which the training is traced."""
    # Hides messages of libraries about tensors without memory, and about saves that write nothing.
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    setup = _setup_of(trainer)
    refuse_missing_kernels(setup)
    install_replacements(AT_TRAIN, TracedScript(request, boundary, setup))
    with unmodelled_shapes(), boundary.all_fake():
        yield


def _setup_of(trainer: Any) -> Setup:
    """The settings that patches of libraries need: optimizer, Liger, packing, attention."""
    arguments, why = trainer.args, "the script's"
    setup = Setup(preset="script").put("arguments.optim", str(getattr(arguments.optim, "value", arguments.optim)), why)
    if trainer.optimizer_cls_and_kwargs is not None:
        kind = trainer.optimizer_cls_and_kwargs[0]
        setup = setup.put("optimizer.class", f"{kind.__module__}:{kind.__qualname__}", why)
    if type(trainer.data_collator).__module__ == packed_batches.__name__:
        setup = setup.put("trainer_parts.packed_batches", {}, why)
    for name in ("use_liger_kernel", "packing"):
        if getattr(arguments, name, False):
            setup = setup.put(f"arguments.{name}", True, why)
    attention = getattr(getattr(trainer.model, "config", None), "_attn_implementation", None)
    return setup.put("model.attn_implementation", attention, why) if isinstance(attention, str) else setup


_LONGEST_MESSAGE: Final = 300


def _failure(error: BaseException) -> Outcome:
    """The error as the user sees it: memkit's own in a line, the script's as its traceback."""
    by_script = not isinstance(error, MemkitError)
    cause = error if by_script else error.__cause__ or error
    place = line_in_traceback(cause.__traceback__) or users_line()  # the second: caught where the script calls train()
    message = " ".join(str(error).split()) if by_script else str(error)
    if by_script and len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE].rstrip()} …"
    text = _users_traceback(error) if by_script else "".join(traceback.format_exception(error))[-4000:]
    failed = Failed(by_script, type(error).__name__, message, place, text)
    if by_script and (latest := latest_creation()) is not None:
        kind, record = latest
        arguments = given_arguments(kind, record.given.get)
        failed = replace(failed, arguments=arguments, refused_arguments=not record.after_init)
    return Outcome(failed=failed)


def _users_traceback(error: BaseException) -> str:
    """The traceback from the script's first frame on, without memkit's frames."""
    printed = traceback.TracebackException.from_exception(error)
    seen: traceback.TracebackException | None = printed
    while seen is not None:
        frames = [frame for frame in seen.stack if not frame.filename.startswith(MEMKIT)]
        first = next((number for number, frame in enumerate(frames) if not is_library(frame.filename)), 0)
        seen.stack = traceback.StackSummary.from_list(frames[first:])
        seen = seen.__cause__ or seen.__context__
    return "".join(printed.format())
