"""What stands below `train()` in a script: an evaluation, adapters that are merged, the final save. It goes on as it
did above, with parameters that are shapes, and its allocations are stretches of the same trace.

By then losses and metrics are made up (NaN), so that nothing may come of them:

| the script | what happens |
|---|---|
| saves a model, a tokenizer, a config | into a folder that is removed; `from_pretrained` finds it there |
| opens a file to write, makes a folder | the same |
| pushes to the hub | nothing |
| evaluates | the worst batches are traced, once; metrics are NaN |
| writes otherwise, removes, starts a process, connects to others | it ends there; a note names the line |
| asks for values, trains again, raises | the same |
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_memkit.prediction.child.read_only import only_these_change
from hf_memkit.prediction.child.real_and_fake import RealAndFake
from hf_memkit.prediction.child.tracer import StorageTracer
from hf_memkit.prediction.child.users_code import MEMKIT, is_library, line_of
from hf_memkit.terms import Phase

__all__ = ["AfterTrain", "Ended", "Stretches"]

_PYTHON: Final = str(Path(os.__file__).parent)
"""The folder of Python's own library."""

_LIMIT_S: Final = 60
"""For what stands below `train()`."""

_NAN: Final = float("nan")

Evaluates = Callable[..., None]


class Ended(BaseException):
    """The script goes no further. No `except Exception` of its own keeps it."""


class Stretches:
    """Phases after the steps: `after`, and others within it."""

    def __init__(self, tracer: StorageTracer) -> None:
        self._tracer = tracer
        self._phase: Phase = "after"

    @contextlib.contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Within it everything belongs to `phase`, which is in the trace even if nothing is made."""
        outer, self._phase = self._phase, phase
        self.end(outer)
        try:
            yield
        finally:
            self._tracer.ended(phase)
            self._phase = outer

    def end(self, phase: Phase = "after") -> None:
        """What has happened since the last boundary was `phase`, if anything was made."""
        marks, events = self._tracer.trace.marks, self._tracer.trace.events
        done, before = marks[-1]
        self._tracer.ended(phase if any(event > 0 for event in events[done:]) else before, on_host=phase)


class AfterTrain:
    """From the first `train()` to the script's end.

    Args:
        tracer: goes on recording.
        boundary: what is real and what is fake; None: all is real, and what is written is written.
        evaluates: makes an evaluation of a Trainer, with a data set of its own or None, within the context that is
            given.
        folder: what is written comes to lie there. Whoever gave it removes it.
    """

    def __init__(
        self,
        tracer: StorageTracer,
        boundary: RealAndFake | None,
        evaluates: Evaluates,
        folder: Path,
    ) -> None:
        self._tracer, self._boundary, self._evaluates = tracer, boundary, evaluates
        self._stretches = Stretches(tracer)
        self._nowhere = _Nowhere(folder)

    def begin(self, trainer: Any) -> TrainOutput:
        """What `train()` gives. From here on the script is on its own."""
        self._tracer.default = "other"
        self._name_phases()
        self._enter()
        if self._boundary is not None:
            _nothing_is_pushed()
            self._nowhere.install()
            _limited()
        steps = trainer.args.max_steps if trainer.args.max_steps > 0 else trainer.state.global_step
        names = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss")
        return TrainOutput(steps, _NAN, _Metrics(dict.fromkeys((*names, "epoch"), _NAN)))

    def end(self, error: BaseException | None) -> Iterator[str]:
        """Notes on what was left out."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._nowhere.leave()
        self._stretches.end()
        if self._boundary is None:
            self._leave()
        if error is None or isinstance(error, SystemExit):
            return
        place = line_of(error.__traceback__)
        said = str(error) if isinstance(error, Ended) else f"{type(error).__name__}: {error}"
        first = (said.strip().splitlines() or [""])[0][:200]
        yield f"what stands below train() is predicted up to {place or 'a line of a library'}: {first}"

    def _enter(self) -> None:
        if self._boundary is None:
            self._tracer.__enter__()
        else:
            self._boundary.enter_again()

    def _leave(self) -> None:
        if self._boundary is None:
            self._tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self._boundary.leave()

    def _traced(self) -> contextlib.AbstractContextManager[Any]:
        """As within the training: every tensor is fake, and values are made up."""
        return self._tracer if self._boundary is None else self._boundary.all_fake()

    def _name_phases(self) -> None:
        own = {"evaluate": Trainer.evaluate, "predict": Trainer.predict}

        def traced(trainer: Any, dataset: Any, name: str) -> None:
            now = {name: getattr(Trainer, name) for name in own}
            with self._stretches.of("evaluate"):
                _put(own)
                self._leave()
                try:
                    self._evaluates(trainer, dataset, self._traced, predicts=name == "predict")
                finally:
                    self._enter()
                    _put(now)

        @functools.wraps(Trainer.evaluate)
        def evaluate(trainer: Any, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
            traced(trainer, eval_dataset, "evaluate")
            return _Metrics({f"{kwargs.get('metric_key_prefix', 'eval')}_loss": _NAN, "epoch": _NAN})

        @functools.wraps(Trainer.predict)
        def predict(trainer: Any, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
            traced(trainer, test_dataset, "predict")
            if self._boundary is None:
                self._leave()  # all batches, where the worst have been traced
                try:
                    return own["predict"](trainer, test_dataset, *args, **kwargs)
                finally:
                    self._enter()
            raise Ended("predict() gives values, and a prediction has none")

        def again(*_: Any, **__: Any) -> None:
            raise Ended("a second train() is not predicted")

        _put({"evaluate": evaluate, "predict": predict, "train": again})
        # What they write and say is made up.
        _put(dict.fromkeys(("create_model_card", "log_metrics", "save_metrics", "save_state"), _nothing))
        self._within(Trainer, "save_model", "save")
        tuners = _module("peft.tuners.tuners_utils")
        for kind in _with_subclasses(*_savers()):
            self._within(kind, "save_pretrained", "save")
        for kind in _with_subclasses(*([tuners.BaseTuner] if tuners is not None else [])):
            for name in ("merge_and_unload", "merge_adapter"):
                self._within(kind, name, "merge")

    def _within(self, kind: type, name: str, phase: Phase) -> None:
        method = vars(kind).get(name)
        if method is None:
            return

        @functools.wraps(method)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self._stretches.of(phase):
                return method(*args, **kwargs)

        setattr(kind, name, within)


def _put(methods: Mapping[str, Any]) -> None:
    for name, method in methods.items():
        setattr(Trainer, name, method)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Metrics(dict[str, float]):
    """Whatever is asked for is not known."""

    def __missing__(self, name: str) -> float:
        return _NAN


def _module(name: str) -> Any:
    """If it has been imported."""
    return sys.modules.get(name)


def _savers() -> list[type]:
    """Classes whose `save_pretrained` writes weights."""
    found = [_module("transformers.modeling_utils").PreTrainedModel]
    peft = _module("peft.peft_model")
    return [*found, peft.PeftModel] if peft is not None else found


def _with_subclasses(*kinds: type) -> list[type]:
    """Each may have a method of its own."""
    found: dict[type, None] = {}
    left = list(kinds)
    while left:
        if (kind := left.pop()) not in found:
            found[kind] = None
            left += type.__subclasses__(kind)
    return list(found)


def _nothing_is_pushed() -> None:
    """What would tell of a training that never was."""
    import huggingface_hub
    from transformers.utils import hub

    _put({"push_to_hub": _nothing})
    hub.PushToHubMixin.push_to_hub = lambda *args, **kwargs: ""
    for name in dir(huggingface_hub.HfApi):
        if name.startswith(("upload_", "create_", "delete_", "update_", "move_", "super_squash")):
            setattr(huggingface_hub.HfApi, name, _never)


def _never(*args: Any, **kwargs: Any) -> None:
    raise Ended("it would change a repository on the hub")


def _limited() -> None:
    """The script ends after so many seconds, even where it hears no signal: the steps' result is written by then."""

    def late(*_: Any) -> None:
        raise Ended(f"it goes on for more than {_LIMIT_S} s")

    if threading.current_thread() is threading.main_thread():  # no other hears signals
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    watchdog = threading.Timer(_LIMIT_S + 10, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()


# ---- nothing is left behind ----

_CHANGES: Final[Mapping[str, tuple[int, ...]]] = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "shutil.rmtree": (0,),
    "shutil.move": (0, 1), "shutil.copyfile": (1,), "shutil.make_archive": (0,), "sqlite3.connect": (0,),
}  # fmt: skip
"""Audit events of Python that change files, and which of their arguments are paths (library/audit_events)."""

_STARTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"})
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Nowhere:
    """A folder in which everything that is written comes to lie, each at its own path below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        self._active = True

    def leave(self) -> None:
        """From here on what is written is written."""
        self._active = False

    def install(self) -> None:
        Path(self._folder).mkdir()
        sys.dont_write_bytecode = True
        tempfile.tempdir = self._folder
        self._functions()
        for kind in _with_subclasses(*self._classes()):
            self._save_here(kind)
            self._load_from_here(kind)
        save = Trainer.save_model

        def save_model(trainer: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            return save(trainer, self.path(output_dir or trainer.args.output_dir), *args, **kwargs)

        Trainer.save_model = save_model
        sys.addaudithook(self._audit)  # names the line, and cannot be caught
        only_these_change([Path(self._folder).parent, "/dev", *_caches()])
        for kind in (socket.socket, ssl.SSLSocket):
            for name in ("send", "sendall", "sendto", "sendmsg"):
                setattr(kind, name, self._sent(getattr(kind, name)))

    def _sent(self, method: Any) -> Any:
        """A connection that is open already."""

        @functools.wraps(method)
        def sent(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if self._active and connection.family != socket.AF_UNIX and not _asks_the_hub():
                raise Ended("it sends to another machine")
            return method(connection, *args, **kwargs)

        return sent

    def path(self, path: Any) -> str:
        """Where it is written; an absolute path stays below the folder."""
        found = str(Path(path).resolve())
        return found if self._is_inside(found) or not self._active else self._folder + found

    def _is_inside(self, path: str) -> bool:
        return path == self._folder or path.startswith((f"{self._folder}/", "/dev/", "/proc/self/"))

    def _written(self, path: Any) -> Any:
        """Where it is read: what was written here, or what is there."""
        if isinstance(path, str | os.PathLike) and Path(found := self.path(path)).exists():
            return found
        return path

    def _functions(self) -> None:
        opens, makes = builtins.open, os.mkdir

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, str | os.PathLike) and self._active:
                if set(mode) & set("wax+") and not self._is_cache(os.fspath(file)):
                    file = self.path(file)
                    Path(file).parent.mkdir(parents=True, exist_ok=True)
                else:
                    file = self._written(file)
            return opens(file, mode, *args, **kwargs)

        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if not self._active or self._is_cache(os.fspath(path)) or kwargs.get("dir_fd") is not None:
                return makes(path, *args, **kwargs)
            found = Path(self.path(path))
            if not found.is_dir():
                found.parent.mkdir(parents=True, exist_ok=True)
                makes(found, *args, **kwargs)

        builtins.open = io.open = opened
        os.mkdir = mkdir

    @staticmethod
    def _classes() -> list[Any]:
        from transformers import configuration_utils, feature_extraction_utils, image_processing_base, processing_utils
        from transformers.generation.configuration_utils import GenerationConfig
        from transformers.modeling_utils import PreTrainedModel
        from transformers.models.auto import auto_factory, configuration_auto, processing_auto, tokenization_auto
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        peft_model, config, auto = map(_module, ("peft.peft_model", "peft.config", "peft.auto"))
        return [
            PreTrainedModel, PreTrainedTokenizerBase, GenerationConfig, auto_factory._BaseAutoModelClass,
            configuration_auto.AutoConfig, processing_auto.AutoProcessor, tokenization_auto.AutoTokenizer,
            configuration_utils.PreTrainedConfig, feature_extraction_utils.FeatureExtractionMixin,
            image_processing_base.ImageProcessingMixin, processing_utils.ProcessorMixin,
            *([peft_model.PeftModel, config.PeftConfigMixin, auto._BaseAutoPeftModel] if peft_model else []),
        ]  # fmt: skip

    def _save_here(self, kind: Any) -> None:
        method = vars(kind).get("save_pretrained")
        if method is None:
            return

        @functools.wraps(method)
        def save_pretrained(saved: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            folder = self.path(save_directory)
            Path(folder).mkdir(parents=True, exist_ok=True)
            kwargs.pop("push_to_hub", None)
            return method(saved, folder, *args, **kwargs)

        kind.save_pretrained = save_pretrained

    def _load_from_here(self, kind: Any) -> None:
        method = vars(kind).get("from_pretrained")
        if not isinstance(method, classmethod):
            return
        function = method.__func__

        @functools.wraps(function)
        def from_pretrained(of: Any, *args: Any, **kwargs: Any) -> Any:
            names = {name: self._written(each) for name, each in kwargs.items() if name.endswith(("_path", "_id"))}
            return function(of, *map(self._written, args), **{**kwargs, **names})

        kind.from_pretrained = classmethod(from_pretrained)

    @staticmethod
    def _is_cache(path: str) -> bool:
        found = str(Path(path).resolve())
        return any(found.startswith(f"{each}/") for each in _caches())

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and (flags or 0) & _WRITES:
                self._refuse_outside(path)
        elif event in _CHANGES:
            for number in _CHANGES[event]:
                if isinstance(arguments[number], str | bytes | os.PathLike):
                    self._refuse_outside(arguments[number])
        elif event in _STARTS:
            if not _is_asked_by_library():  # accelerate asks `nvidia-smi`
                raise Ended("it starts a process")
        elif event == "socket.connect" and not _asks_the_hub():
            raise Ended("it connects to another machine")

    def _refuse_outside(self, path: Any) -> None:
        name = os.fsdecode(path)
        if not (self._is_inside(str(Path(name).resolve())) or self._is_cache(name)):
            raise Ended(f"it would change {name}")


def _caches() -> tuple[str, ...]:
    """Folders of the hub's and of datasets' own files, which hold nothing made up."""
    from huggingface_hub import constants

    return constants.HF_HOME, constants.HF_HUB_CACHE


def _is_asked_by_library() -> bool:
    """Whether the innermost caller outside of Python's own library is an installed one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT, _PYTHON)) or "-packages" in file:
            return is_library(file)
        frame = frame.f_back
    return False


def _asks_the_hub() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if "huggingface_hub" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
