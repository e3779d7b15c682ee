"""Nothing is left behind by a script whose results are made up: no file, no process, no message to anybody.

| the script | what happens |
|---|---|
| saves a model, a tokenizer, a config | into a folder that is removed; `from_pretrained` finds it there |
| opens a file to write, makes a folder | the same; `open` finds it there |
| writes otherwise, removes | `Ended`, with what it would change; other code than Python's gets the system's error |
| starts a process, connects to others than the hub, changes a repository | `Ended` |
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import errno
import functools
import io
import os
import posix
import shutil
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import huggingface_hub
from huggingface_hub import constants
from transformers import Trainer
from transformers.utils import hub

from hf_memkit.prediction.child.older_libraries import config_class
from hf_memkit.prediction.child.read_only import only_these_change
from hf_memkit.prediction.child.users_code import MEMKIT, is_library, users_line


class Ended(BaseException):
    """The script goes no further. No `except Exception` of its own keeps it.

    Attributes:
        all: every one that was raised: its line, and why.
    """

    all: Final[list[tuple[str, str]]] = []

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.all.append((users_line(), why))


def with_subclasses(*kinds: type) -> list[type]:
    """Each may have a method of its own."""
    found: dict[type, None] = {}
    left = list(kinds)
    while left:
        if (kind := left.pop()) not in found:
            found[kind] = None
            left += type.__subclasses__(kind)
    return list(found)


def keep_what_was_there() -> None:
    """What a script removes stays, if it was there before: a run would begin with an empty folder, and a prediction is
    no run. Making a folder again that stays is no error."""
    began, stays = time.time() - _CLOCK_S, set[str]()

    def keeping(function: Any) -> Any:
        @functools.wraps(function)
        def unless_older(path: Any, *args: Any, **kwargs: Any) -> Any:
            line = _asked_by_user()
            if line is None or kwargs.get("dir_fd") is not None or not _is_older(path, began):
                return function(path, *args, **kwargs)
            if Nowhere.is_installed:
                raise Ended(f"it would change {os.fsdecode(path)}")
            stays.add(str(Path(path).resolve()))
            said = f"memkit: {line}: {os.fsdecode(path)} kept: a prediction removes no file that was there before"
            print(said, file=sys.stderr, flush=True)

        return unless_older

    make = os.mkdir

    @functools.wraps(make)
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(path, *args, **kwargs)
        except FileExistsError:
            if str(Path(path).resolve()) not in stays:
                raise

    for name in ("remove", "unlink"):
        _replace(name, keeping(getattr(os, name)))
    _replace("mkdir", mkdir)
    shutil.rmtree = keeping(shutil.rmtree)


_CLOCK_S: Final = 0.01
"""By so much a file system's clock may be late: a tick of the kernel."""


def _replace(name: str, function: Any) -> None:
    """A function of the system, also where pickle looks for it."""
    setattr(os, name, function)
    setattr(posix, name, function)


def _is_older(path: Any, began: float) -> bool:
    """Whether a file was there, or one in a folder."""
    found = Path(os.fsdecode(path))
    try:
        if not found.is_dir() or found.is_symlink():
            return found.lstat().st_ctime < began
        return any(each.lstat().st_ctime < began for each in found.rglob("*") if not each.is_dir())
    except OSError:
        return False


def _asked_by_user() -> str | None:
    """`"train.py, line 12"`, if the first caller outside Python's own library is the user's; None: a library asks."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT, _PYTHON)) or "-packages" in file:
            return None if is_library(file) else f"{Path(file).name}, line {line}"
    return None


_PYTHON: Final = str(Path(os.__file__).parent)
"""The folder of Python's own library."""


def nothing_is_pushed() -> None:
    """Models, tokenizers and Trainers of a prediction are not what a run would push."""
    for kind in (Trainer, hub.PushToHubMixin):  # libraries read its docstring and signature (Unsloth: save.py)
        kind.push_to_hub = functools.wraps(kind.push_to_hub)(lambda *args, **kwargs: "")


_CHANGES: Final[Mapping[str, tuple[int, ...]]] = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "shutil.rmtree": (0,),
    "shutil.move": (0, 1), "shutil.copyfile": (1,), "shutil.make_archive": (0,), "sqlite3.connect": (0,),
}  # fmt: skip
"""Audit events of Python that change files, and which of their arguments are paths (library/audit_events)."""

_WITHIN: Final = frozenset({"os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"})
"""Those whose last argument is the descriptor of a folder."""

_STARTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"})
_ASKED: Final = frozenset({"nvidia-smi", "ldconfig", "uname", "lscpu"})
"""Programs that libraries ask about the machine."""
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Nowhere:
    """A folder in which everything that is written comes to lie, each at its own path below it.

    Args:
        folder: is made. The folder that it is in belongs to this process alone, and is removed.

    Attributes:
        is_installed: whether nothing may be left behind.
    """

    is_installed = False

    def __init__(self, folder: Path) -> None:
        self.move(folder)

    def move(self, folder: Path) -> None:
        """Takes another folder, before anything is written."""
        self._folder = str(folder.resolve())
        self._own = str(folder.resolve().parent)

    def redirect(self) -> None:
        """From here on a file that Python opens to write is in the folder."""
        if not Path(self._folder).is_dir():
            Path(self._folder).mkdir()
            self._functions()

    def install(self) -> None:
        """From here on nothing is left behind."""
        self.redirect()
        Nowhere.is_installed = True
        sys.dont_write_bytecode = True
        for kind in with_subclasses(*self._classes()):
            self._save_here(kind)
            self._load_from_here(kind)
        save = Trainer.save_model

        def save_model(trainer: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            return save(trainer, self.path(output_dir or trainer.args.output_dir), *args, **kwargs)

        Trainer.save_model = save_model
        sys.addaudithook(self._audit)  # names the line, and cannot be caught
        only_these_change([self._own, "/dev", *_caches()])
        _posixsubprocess.fork_exec = _no_process  # multiprocessing's way, which raises no event
        _the_hub_is_only_read()
        for kind in (socket.socket, ssl.SSLSocket):
            for name in ("send", "sendall", "sendto", "sendmsg"):
                setattr(kind, name, self._sent(getattr(kind, name)))

    def _sent(self, method: Any) -> Any:
        """A connection that is open already."""

        @functools.wraps(method)
        def sent(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if connection.family != socket.AF_UNIX and not _asks_the_hub():
                raise Ended("it sends to another machine")
            return method(connection, *args, **kwargs)

        return sent

    def path(self, path: Any) -> str:
        """Where it is written; an absolute path stays below the folder."""
        found = str(Path(path).resolve())
        return found if self._is_inside(found) else self._folder + found

    def _is_inside(self, path: str) -> bool:
        return path == self._own or path.startswith((f"{self._own}/", "/dev/", "/proc/self/"))

    def _written(self, path: Any) -> Any:
        """Where it is read: what was written here, or what is there."""
        if isinstance(path, str | os.PathLike) and Path(found := self.path(path)).exists():
            return found
        return path

    def _functions(self) -> None:
        opens, makes = builtins.open, os.mkdir

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, str | os.PathLike):
                if set(mode) & set("wax+") and not self._is_cache(os.fspath(file)):
                    file = self.path(file)
                    Path(file).parent.mkdir(parents=True, exist_ok=True)
                else:
                    file = self._written(file)
            return opens(file, mode, *args, **kwargs)

        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if self._is_cache(os.fspath(path)) or kwargs.get("dir_fd") is not None:
                return makes(path, *args, **kwargs)
            found = Path(self.path(path))
            if not found.is_dir():
                found.parent.mkdir(parents=True, exist_ok=True)
                makes(found, *args, **kwargs)

        builtins.open = io.open = opened
        os.mkdir = mkdir

    @staticmethod
    def _classes() -> list[Any]:
        from transformers import feature_extraction_utils, image_processing_base, processing_utils
        from transformers.generation.configuration_utils import GenerationConfig
        from transformers.modeling_utils import PreTrainedModel
        from transformers.models.auto import auto_factory, configuration_auto, processing_auto, tokenization_auto
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        peft_model, config, auto = map(_module, ("peft.peft_model", "peft.config", "peft.auto"))
        return [
            PreTrainedModel, PreTrainedTokenizerBase, GenerationConfig, auto_factory._BaseAutoModelClass,
            configuration_auto.AutoConfig, processing_auto.AutoProcessor, tokenization_auto.AutoTokenizer,
            config_class(), feature_extraction_utils.FeatureExtractionMixin,
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
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and (flags or 0) & _WRITES:
                self._refuse_outside(path)
        elif event in _CHANGES:
            folder = arguments[-1] if event in _WITHIN and isinstance(arguments[-1], int) else -1
            for number in _CHANGES[event]:
                if isinstance(arguments[number], str | bytes | os.PathLike):
                    self._refuse_outside(arguments[number], folder)
        elif event in _STARTS:
            program = os.fsdecode(arguments[0] or arguments[1][0]) if arguments else ""
            if Path(program).name not in _ASKED:
                raise Ended("it starts a process")
        elif event == "socket.connect" and not _asks_the_hub():
            raise Ended("it connects to another machine")

    def _refuse_outside(self, path: Any, folder: int = -1) -> None:
        """`folder`: the descriptor of the one that the path is in; -1: the working directory."""
        name = os.fsdecode(path)
        if folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)  # noqa: PTH118, PTH115
        if not (self._is_inside(str(Path(name).resolve())) or self._is_cache(name)):
            raise Ended(f"it would change {name}")


def _no_process(*args: Any, **kwargs: Any) -> NoReturn:
    raise Ended("it starts a process")


def _module(name: str) -> Any:
    """If it has been imported."""
    return sys.modules.get(name)


def _caches() -> Iterator[str]:
    """Folders of the hub's and of datasets' own files, which hold nothing made up; none that the script works in."""
    names = ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")
    modules = (constants, _module("datasets.config"), _module("transformers.dynamic_module_utils"))
    for found in {str(getattr(module, name, "")) for module in modules for name in names}:
        if found and not Path.cwd().is_relative_to(Path(found).resolve()):
            yield str(Path(found).resolve())


_HUB: Final = str(Path(huggingface_hub.__file__).parent) + os.sep
_READS: Final = ("GET", "HEAD", "OPTIONS")


def _the_hub_is_only_read() -> None:
    """Whatever asks: what changes a repository is another kind of request (https://huggingface.co/docs/hub/api)."""
    for module in filter(None, map(_module, ("httpx", "httpx2"))):
        for kind in (module.Client, module.AsyncClient):
            kind.send = _reading(kind.send)


def _reading(send: Any) -> Any:
    @functools.wraps(send)
    def sent(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.method not in _READS and "/paths-info/" not in request.url.path:
            raise Ended(f"it would change what is on {request.url.host}")
        return send(client, request, *args, **kwargs)

    return sent


def _asks_the_hub() -> bool:
    return any(frame.f_code.co_filename.startswith(_HUB) for frame, _ in traceback.walk_stack(sys._getframe(1)))
