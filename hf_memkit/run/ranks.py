"""One process among those that train together: its rank, and communication before there is a process group.

torchrun, accelerate and the DeepSpeed launcher set environment variables for each process, and give all of them a
store (torch:distributed/rendezvous.py, `env://`). The ranks share values and wait for each other through that store. A
single process is a rank among one, for which all of this does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.ended_with_parent import end_with
from hf_memkit.common.errors import MemkitError, RunError

FOLDER_VARIABLE: Final = "MEMKIT_LAUNCH_FOLDER"
"""Variable with a folder that exists as long as a launch. Set only in ranks started by memkit."""

LAUNCHER_VARIABLE: Final = "MEMKIT_LAUNCHER"
"""Variable with the ID of the process that started this rank. Set like `FOLDER_VARIABLE`."""

INTACT: Final = "records and the last checkpoint are intact: continue with --resume"
"""Text of a KeyboardInterrupt that stops a training at once."""

_PATIENCE: Final = timedelta(days=1)
"""Maximum time that ranks wait for one. Preparing data may take hours; if one dies, the launcher ends all sooner."""


MASTER_PORT: Final = 29500
"""torchrun's default (torch:distributed/run.py)."""


@dataclass(frozen=True, slots=True)
class LaunchLayout:
    """The processes of a launch: `gpus` on each of `nodes` machines, one GPU each. `node_rank`: this machine's number,
    from 0. `master_addr` and `master_port` are those of machine 0, for several machines."""

    gpus: int = 1
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = MASTER_PORT

    @property
    def processes(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. The names are torchrun's; `local_rank` is also the number of the
    process's GPU. `launched`: whether a launcher started it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run's files and messages."""
        return self.rank == 0

    @property
    def leads_machine(self) -> bool:
        """Whether this rank does the work that is done once a machine."""
        return self.local_rank == 0

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    def share(self, name: str, value: Any = None) -> Any:
        """Rank 0's `value` (plain JSON data), on every rank. Each name is used once."""
        if self.world_size == 1:
            return value
        if self.is_first:
            self._store.set(name, json.dumps(value))
        return json.loads(self._store.get(name))

    def wait_for_all(self, name: str) -> None:
        """Wait until every rank has called this. Each name is used once."""
        if self.world_size == 1:
            return
        if self._store.add(f"{name}/arrived", 1) == self.world_size:
            self._store.set(f"{name}/complete", "")
        self._store.wait([f"{name}/complete"])

    def leave_together(self) -> None:
        """Last action of ranks: none returns before all have called it, and rank 0, which may host the store, returns
        last. A launcher ends the other ranks when one of them exits with a code other than 0."""
        self.wait_for_all("done")
        if self.world_size == 1:
            return
        if self.is_first:
            self._store.wait(["done/gone"])
        elif self._store.add("done/leaving", 1) == self.world_size - 1:
            self._store.set("done/gone", "")

    @contextlib.contextmanager
    def leader_first(self, name: str) -> Iterator[None]:
        """Run the block on the first rank of each machine, then on the others; all leave together."""
        if not self.leads_machine:
            self.wait_for_all(f"{name} of leaders")
        yield
        if self.leads_machine:
            self.wait_for_all(f"{name} of leaders")
        self.wait_for_all(name)

    @cached_property
    def _store(self) -> Any:
        import torch.distributed as distributed
        from torch.distributed.rendezvous import rendezvous

        try:
            store, _rank, _world_size = next(rendezvous("env://"))
        except (RuntimeError, ValueError, OSError) as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            lost = f"rank {self.rank} cannot reach rank 0 at {place}: {str(error).splitlines()[0]}"
            raise RunError(f"{lost}. Check that rank 0 runs there, and that no firewall closes the port") from error
        store.set_timeout(_PATIENCE)
        return distributed.distributed_c10d.PrefixStore("memkit", store)


def ranks_from_environment(environment: Mapping[str, str] = os.environ) -> Ranks:
    """This process's rank, from a launcher's variables; without a launcher, the only rank. Raises RunError if the
    launcher does not set the number of ranks on this machine."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
        return Ranks()
    world_size = int(environment["WORLD_SIZE"])
    # torchrun and accelerate set LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE (deepspeed: launcher/launch.py).
    local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    if not local_size and world_size > 1:
        raise RunError("RANK and WORLD_SIZE are set, but LOCAL_WORLD_SIZE is not. Start memkit with torchrun")
    local_rank = int(environment["LOCAL_RANK"])
    return Ranks(int(environment["RANK"]), world_size, local_rank, int(local_size or 1), launched=True)


@contextlib.contextmanager
def errors_to_launcher() -> Iterator[None]:
    """In a rank started by memkit, send an error to the launcher, which shows one for all; the rank ends with it."""
    if FOLDER_VARIABLE not in os.environ:
        yield
        return
    # If it is killed: SIGINT, as for Ctrl-C, so that training saves a checkpoint first.
    end_with(int(os.environ[LAUNCHER_VARIABLE]), signal.SIGINT)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        yield
    except Exception as error:
        get_error_handler().record_exception(error)
        for note in getattr(error, "__notes__", ()):  # the error file cannot hold them
            print(note, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: when the interpreter shuts down, libraries would wait for the failed rank, or abort.
        os._exit(error.exit_code if isinstance(error, MemkitError) else 1)


def leave_exit_code(ranks: Ranks, code: int) -> None:
    """Write the run's exit code for the launching memkit. The rank exits with 0: torchrun treats any other code as a
    failure, and ends ranks that are still saving."""
    if ranks.leads_machine:
        (Path(os.environ[FOLDER_VARIABLE]) / "exit-code").write_text(str(code))


def exit_code_of(folder: Path) -> int | None:
    """The code that `leave_exit_code` wrote to `folder`, or None."""
    path = folder / "exit-code"
    return int(path.read_text()) if path.exists() else None
