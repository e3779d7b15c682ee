"""A script that waits where it makes its Trainer, and goes on from there once for each set of arguments: until then
its data are tokenised and its model is made, which takes most of its time.

```
script … TrainingArguments(…) … from_pretrained(…) … Trainer(…)          Trainer.__init__
                                                      │ "made": before a     │ "early" has been forked;
                                                      │ subclass prepares    │ "late": after it
```

A request is a line of JSON on a socket, a `ForkRequest`; the answer, a `ForkEnded`, comes when the forked process has
ended, or at once where something has acted on what would change. When the other end closes the socket, this process
ends, with all that it forked.
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

from hf_memkit.common.ended_with_parent import end_with
from hf_memkit.common.socket_paths import short_address
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.libraries.adapters import chunk_losses, give_adapters, made_at, with_adapters
from hf_memkit.prediction.trace.request import EARLY, LATE, ForkEnded, ForkRequest
from hf_memkit.setup.live_arguments import FieldReads, change_fields
from hf_memkit.setup.script_overrides import Overrides


@dataclass(slots=True)
class Forks:
    """The moments at which this process stops, with sockets in `folder`. `begin` makes a forked process one of its
    own, which writes to the path; `reads`: which fields have been read so far; `folder_begins` is called with the
    arguments whose `output_dir` Trainer is about to make."""

    folder: Path
    begin: Callable[[Path], None]
    reads: FieldReads
    folder_begins: Callable[[Any], None]
    _asked: Overrides | None = field(default=None, init=False)
    _prepares: bool = field(default=False, init=False)

    def install(self) -> None:
        """Stops this process where the first Trainer is made."""
        plain = vars(Trainer)["__init__"]
        seen: list[type] = []

        @functools.wraps(plain)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self._asked is None:
                adapter = self._serve(LATE, args, kwargs).adapter
                if adapter:
                    args, kwargs = with_adapters(type(trainer), adapter, args, kwargs)
            plain(trainer, *args, **kwargs)

        def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = object.__new__(cls)
            if not seen:
                seen.append(cls)
                trainer.memkit_made_at = made_at(sys._getframe(1), cls, args, kwargs)
                self._prepares = cls.__init__ is not init  # a subclass, which may prepare data
                if self._prepares and self._forked():
                    adapter = self._serve(EARLY, args, kwargs).adapter
                    if adapter:
                        give_adapters(cls, adapter)
            return trainer

        vars_of: Any = Trainer
        vars_of.__new__ = staticmethod(made)
        vars_of.__init__ = init

    def _forked(self) -> bool:
        """Whether this is the new one of two processes; the other goes on."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork():
            return False
        end_with(parent)
        return True

    def _serve(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Overrides:
        """Waits for requests. Comes back in a process that was forked for one, with its fields."""
        arguments = next((each for each in (*args, *kwargs.values()) if isinstance(each, TrainingArguments)), None)
        self.folder_begins(arguments)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            temporary = self.folder / f"{name}.new"
            with short_address(temporary) as address:
                door.bind(address)
            door.listen(1)
            temporary.rename(self.folder / name)
            connection, _ = door.accept()
        running: dict[int, tuple[int, str]] = {}  # number of the file that tells of its end → (process, path)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        asked = b""
        while True:
            for number, _event in poll.poll():
                if number != connection.fileno():
                    poll.unregister(number)
                    process, path = running.pop(number)
                    os.close(number)
                    _, status = os.waitpid(process, 0)
                    _send(connection, ForkEnded(path, _how(status)))
                    continue
                received = connection.recv(2**16)
                if not received:
                    for process, _path in running.values():
                        os.kill(process, signal.SIGKILL)
                    os._exit(0)
                *lines, asked = (asked + received).split(b"\n")
                for line in lines:
                    request = wire.read(ForkRequest, line.decode())
                    asked_for = request.overrides
                    late = self._prepares and name == LATE and asked_for.adapter
                    if late or self._is_too_late(arguments, asked_for.arguments):
                        _send(connection, ForkEnded(request.result, too_late=True))
                        continue
                    parent = os.getpid()
                    process = os.fork()
                    if process == 0:
                        end_with(parent)
                        connection.close()
                        for watched in running:
                            os.close(watched)
                        # Torch makes its pool of threads anew in a forked process, and two threads that ask for it at
                        # once end the process (torch 2.13: caffe2/utils/threadpool/pthreadpool-cpp.cc).
                        torch.set_num_threads(1)
                        if asked_for.arguments:  # the script has said it all before, in the process that goes on
                            nowhere = os.open(os.devnull, os.O_WRONLY)
                            os.dup2(nowhere, 1)
                            os.dup2(nowhere, 2)
                        self._asked = asked_for
                        if asked_for.loss:
                            chunk_losses()
                        self.begin(Path(request.result))
                        if arguments is not None and asked_for.arguments:
                            change_fields(arguments, asked_for.arguments)
                        return asked_for
                    watched = os.pidfd_open(process)
                    running[watched] = (process, request.result)
                    poll.register(watched, select.POLLIN)

    def _is_too_late(self, arguments: Any, fields: Mapping[str, Any]) -> bool:
        """Whether something has acted on what these fields would change; or it is not known."""
        if not fields:
            return False
        try:
            return arguments is None or bool(self.reads.too_late(arguments, fields))
        except Exception:  # the script made from its first line says what is wrong
            return True


def _send(connection: socket.socket, ended: ForkEnded) -> None:
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(wire.written(ended).encode() + b"\n")


def _how(status: int) -> str | None:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"exit code {code}"
