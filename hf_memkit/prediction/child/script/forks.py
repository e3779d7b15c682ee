"""Lets a script wait where it creates its Trainer, and continues it in a fork for each set of arguments.

By then its data is tokenized and its model is created, which takes most of its time.

```
script … TrainingArguments(…) … from_pretrained(…) … Trainer(…)          Trainer.__init__
                                                      │ Trainer.__new__:     │ "early" has been forked;
                                                      │ before a subclass    │ "late": after it
                                                      │ prepares             │
```

A request is a line of JSON on a socket, a `ForkRequest`. The answer, a `ForkEnded`, comes when the forked process has
ended, or at once if the script has already used a setting that would change. When the other end closes the socket,
this process and its forks end. A script that computes gradients before it makes its Trainer does not wait.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_memkit.common.ended_with_parent import describe_death, end_with
from hf_memkit.common.socket_paths import short_address
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.libraries.adapters import (
    add_adapters_to_next,
    chunk_losses,
    trainer_call,
    with_adapters,
)
from hf_memkit.prediction.child.output import flush_output
from hf_memkit.prediction.trace.request import EARLY, LATE, ForkEnded, ForkRequest
from hf_memkit.setup.live_arguments import FieldReads, change_fields
from hf_memkit.setup.script_overrides import Overrides


@dataclass(slots=True)
class Forks:
    """The points at which this process waits, with sockets in `folder`."""

    folder: Path
    begin: Callable[[ForkRequest], None]  # starts the trace of a forked process
    reads: FieldReads  # fields that have been read so far
    folder_begins: Callable[[Any], None]  # called with the arguments whose `output_dir` Trainer is about to create
    _overrides: Overrides | None = field(default=None, init=False)
    _prepares: bool = field(default=False, init=False)

    def install(self) -> None:
        """Patches Trainer, so that this process waits where the first one is created."""
        plain = vars(Trainer)["__init__"]
        seen: list[type] = []

        @functools.wraps(plain)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self._overrides is None and not _has_autograd_threads():
                adapter = self._serve(LATE, args, kwargs).adapter
                if adapter:
                    args, kwargs = with_adapters(type(trainer), adapter, args, kwargs)
            plain(trainer, *args, **kwargs)

        def create(cls: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = object.__new__(cls)
            if not seen and not _has_autograd_threads():
                seen.append(cls)
                trainer.memkit_made_at = trainer_call(sys._getframe(1), cls, args, kwargs)
                self._prepares = cls.__init__ is not init  # a subclass, which may prepare data
                parent = os.getpid()
                flush_output()
                if self._prepares and os.fork() == 0:
                    end_with(parent)
                    adapter = self._serve(EARLY, args, kwargs).adapter
                    if adapter:
                        add_adapters_to_next(cls, adapter)
            return trainer

        trainer_class: Any = Trainer
        trainer_class.__new__ = staticmethod(create)
        trainer_class.__init__ = init

    def _serve(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Overrides:
        """Waits for requests. Returns in a process that was forked for one, with its overrides."""
        arguments = next((value for value in (*args, *kwargs.values()) if isinstance(value, TrainingArguments)), None)
        self.folder_begins(arguments)
        connection = _accept(self.folder, name)
        running: dict[int, tuple[int, str]] = {}  # pidfd → (process, path of its result)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        buffer = b""
        while True:
            for number, _event in poll.poll():
                if number != connection.fileno():
                    poll.unregister(number)
                    process, path = running.pop(number)
                    os.close(number)
                    _, status = os.waitpid(process, 0)
                    _send(connection, ForkEnded(path, describe_death(status)))
                    continue
                received = connection.recv(2**16)
                if not received:
                    for process, _path in running.values():
                        os.kill(process, signal.SIGKILL)
                    os._exit(0)
                *lines, buffer = (buffer + received).split(b"\n")
                for line in lines:
                    request = wire.loads(ForkRequest, line.decode())
                    late = self._prepares and name == LATE and request.overrides.adapter
                    if late or self._is_too_late(arguments, request.overrides.arguments):
                        _send(connection, ForkEnded(request.result, too_late=True))
                        continue
                    parent = os.getpid()
                    process = os.fork()
                    if process == 0:
                        end_with(parent)
                        connection.close()
                        for watched in running:
                            os.close(watched)
                        self._continue_with(request, arguments)
                        return request.overrides
                    watched = os.pidfd_open(process)
                    running[watched] = (process, request.result)
                    poll.register(watched, select.POLLIN)

    def _continue_with(self, request: ForkRequest, arguments: Any) -> None:
        """Changes this forked process as requested."""
        # A forked process creates torch's thread pool anew, and two threads that request it at the same time crash the
        # process (torch 2.13: caffe2/utils/threadpool/pthreadpool-cpp.cc).
        torch.set_num_threads(1)
        overrides = self._overrides = request.overrides
        if overrides.arguments or request.micro_batch_size:  # the waiting process has printed the same before
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        if overrides.loss:
            chunk_losses()
        self.begin(request)
        if arguments is not None and overrides.arguments:
            change_fields(arguments, overrides.arguments)

    def _is_too_late(self, arguments: Any, fields: Mapping[str, Any]) -> bool:
        """Whether the script has, or may have, already used a field that these would change."""
        try:
            return bool(fields) and (arguments is None or bool(self.reads.too_late(arguments, fields)))
        except Exception:  # running the script from its first line shows the error
            return True


def _has_autograd_threads() -> bool:
    """Whether a backward pass has started torch's threads for a GPU: a fork of this process could make no other
    (torch 2.13: autograd/engine.cpp, `in_bad_autograd_fork`). The script then trains without waiting."""
    return any(path.read_text().startswith("pt_autograd") for path in Path("/proc/self/task").glob("*/comm"))


def _accept(folder: Path, name: str) -> socket.socket:
    """The connection to the socket of this name, once the other process connects."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        temporary = folder / f"{name}.new"
        with short_address(temporary) as address:
            listener.bind(address)
        listener.listen(1)
        temporary.rename(folder / name)
        return listener.accept()[0]


def _send(connection: socket.socket, ended: ForkEnded) -> None:
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(wire.dumps(ended).encode() + b"\n")
