"""Joining and leaving the processes of a DeepSpeed run.

Joining, because the order matters: TrainingArguments first and kept alive, since transformers holds the config that
makes `from_pretrained` and `from_config` split the weights by a weak reference only; then DeepSpeed's process group;
then the model. On a CPU accelerate starts torch's process group, not DeepSpeed's, and `zero.Init` then takes the job
for one process: "Check batch related parameters. train_batch_size is not equal to … 4 != 2 * 1 * 1".

Leaving, because a run that is done and saved could still abort: "terminate called without an active exception", exit
code -6. When a collective has finished, a thread of torch's gloo backend drops its tensors, and needs Python's global
lock for that. If the interpreter shuts down in that moment, CPython 3.11 ends the thread by unwinding it, which C++
does not allow there. `destroy_process_group()` would join these threads if nobody referred to the group any more, but
every parameter under ZeRO-3 does (deepspeed 0.19.8: runtime/zero/partition_parameters.py, `param.ds_process_group`),
and so do the engine, its optimizer, the context of `zero.Init`, and the default arguments of DeepSpeed's functions if
it was imported when the group was there already (comm/torch.py, `barrier`).
"""

from __future__ import annotations

import gc
import os
import socket
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import TrainingArguments


LAUNCHER_VARIABLES: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip
"""By which a process knows that a launcher has started it, as one of several."""


def join_process_group(arguments: TrainingArguments) -> None:
    """Starts DeepSpeed's communication; nothing happens without DeepSpeed, where it is only predicted, or if it has
    started.

    Comes after `TrainingArguments(deepspeed=…)`, which must be kept, and before the model is made. Where no launcher
    started this process, the variables that one would set are set here, for one process.
    """
    if arguments.deepspeed is None or hasattr(arguments, "memkit_engine"):  # child/libraries/deepspeed_engine.py
        return
    os.environ.update(single_process_environment())
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo" if arguments.use_cpu else None)


def leave_process_group() -> None:
    """Destroys all process groups and waits for the threads that serve them; nothing happens if there are none.

    The last thing a run does: engines and models that used the groups cannot train, evaluate or save afterwards. No
    other process is waited for, so it can be called when one of them has failed.
    """
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    groups = list(distributed.distributed_c10d._world.pg_map)
    distributed.destroy_process_group()
    _let_go(groups)


def _let_go(groups: list[ProcessGroup]) -> None:
    """Takes `groups` out of every dictionary, list, object and default argument that holds one, this list among them.

    With the last reference gone the destructor of a group joins its threads, without the lock that they may wait for
    (torch 2.13: csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    gone = {id(group) for group in groups}
    for holder in gc.get_objects():
        if type(holder) is FunctionType and any(id(value) in gone for value in holder.__defaults__ or ()):
            holder.__defaults__ = tuple(None if id(value) in gone else value for value in holder.__defaults__ or ())
        for held in gc.get_referents(holder):
            if id(held) in gone:
                _clear(holder, gone)
            elif type(held) is dict and not gc.is_tracked(held):  # holds nothing that could refer to other things
                _clear(held, gone)


def _clear(holder: Any, gone: set[int]) -> None:
    if type(holder) is list:
        holder[:] = [None if id(value) in gone else value for value in holder]
        return
    names = holder if type(holder) is dict else getattr(holder, "__dict__", {})
    for name in [name for name, value in names.items() if id(value) in gone]:
        names[name] = None


def single_process_environment() -> dict[str, str]:
    """The variables that a launcher would set, for one process; empty if a launcher did.

    Without them deepspeed.comm looks for MPI: `ModuleNotFoundError: No module named 'mpi4py'`.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
