"""Join and leave the processes of a DeepSpeed run.

Join in this order: TrainingArguments, which must stay alive, because transformers keeps only a weak reference to the
config that makes `from_pretrained` split the weights; DeepSpeed's process group; the model. On a CPU accelerate starts
torch's process group, and `zero.Init` then assumes one process ("train_batch_size is not equal to … 4 != 2 * 1 * 1").

Leave, or a finished run can abort with exit code -6: "terminate called without an active exception". A thread of
torch's gloo backend needs Python's global lock to free tensors; if the interpreter shuts down then, CPython 3.11
unwinds the thread, which C++ forbids. `destroy_process_group()` joins these threads only if nothing refers to the
group. Every parameter under ZeRO-3 does (deepspeed 0.19.8: runtime/zero/partition_parameters.py), and so do the
engine, its optimizer, and default arguments of DeepSpeed's functions (comm/torch.py, `barrier`).
"""

from __future__ import annotations

import gc
import os
import socket
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import TrainingArguments


LAUNCHER_VARIABLES: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip
"""Variables that show that a launcher started this process, as one of several."""


def join_process_group(arguments: TrainingArguments) -> None:
    """Start DeepSpeed's communication, unless DeepSpeed is unused, only predicted, or already started. Without a
    launcher this sets its variables, for one process."""
    if arguments.deepspeed is None or hasattr(arguments, "memkit_engine"):  # child/libraries/deepspeed_engine.py
        return
    os.environ.update(single_process_environment())
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo" if arguments.use_cpu else None)


def leave_process_group() -> None:
    """Destroy all process groups and join their threads. Engines and models that used them are useless afterwards.
    It does not wait for other processes, so that it can be called after one of them has failed."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    groups = list(distributed.distributed_c10d._world.pg_map)
    distributed.destroy_process_group()
    # Remove the groups from every dictionary, list, object and default argument, including this list. With the last
    # reference gone a group's destructor joins its threads, without the lock that they may need (torch 2.13:
    # csrc/distributed/c10d/ProcessGroupGloo.cpp).
    gone = {id(group) for group in groups}
    for holder in gc.get_objects():
        if type(holder) is FunctionType and any(id(value) in gone for value in holder.__defaults__ or ()):
            holder.__defaults__ = tuple(None if id(value) in gone else value for value in holder.__defaults__ or ())
        for held in gc.get_referents(holder):
            if id(held) in gone:
                _clear(holder, gone)
            elif type(held) is dict and not gc.is_tracked(held):  # has no values that refer to other objects
                _clear(held, gone)


def _clear(holder: Any, gone: set[int]) -> None:
    if type(holder) is list:
        holder[:] = [None if id(value) in gone else value for value in holder]
        return
    names = holder if type(holder) is dict else getattr(holder, "__dict__", {})
    for name in [name for name, value in names.items() if id(value) in gone]:
        names[name] = None


def single_process_environment() -> dict[str, str]:
    """The variables that a launcher would set, for one process; empty if a launcher did. Without them deepspeed.comm
    looks for MPI: `ModuleNotFoundError: No module named 'mpi4py'`."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
