"""Two processes whose last collectives end just before the interpreter shuts down.

    python -m tests.deepspeed.leaving_worker FOLDER REPETITIONS leave|destroy

Each repetition is a fork of this process, which has torch loaded, and shuts down as any Python program does: `leave`
after `leave_process_group`, `destroy` after torch's own `destroy_process_group`. Prints how many pairs had one that
died, and how many processes still had threads of the process group.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as distributed

from hf_memkit.setup.process_group import leave_process_group

KEPT: list[torch.nn.Parameter] = []
COLLECTIVES = 100
"""In flight at the end. Their tensors, of which Python has let go, are dropped by the threads that served them."""


def main(folder: Path, repetitions: int, how: str) -> None:
    died = with_threads = 0
    for repetition in range(repetitions):
        store = folder / f"{how}{repetition}"
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                work(store, rank, how)
                return  # through the whole shutdown of the interpreter
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        died += any(statuses)
        with_threads += sum("gloo" in (folder / f"{store.name}-rank{rank}").read_text() for rank in range(2))
    print(json.dumps({"died": died, "with_threads": with_threads}))


def work(store: Path, rank: int, how: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parameter = torch.nn.Parameter(torch.zeros(8))
    # As DeepSpeed does with every parameter, and somebody keeps the parameters.
    parameter.ds_process_group, parameter.all_gather = distributed.group.WORLD, work
    KEPT.append(parameter)
    # A thread that wants the interpreter's lock gets it after this time; with Python's 5 ms fewer processes die.
    sys.setswitchinterval(10)
    gathered = [torch.empty(16) for _ in range(COLLECTIVES)]
    works = [distributed.all_gather_into_tensor(to, parameter.detach(), async_op=True) for to in gathered]
    del gathered
    while works:
        works.pop().wait()
    if how == "leave":
        leave_process_group()
    else:
        distributed.destroy_process_group()
    (store.parent / f"{store.name}-rank{rank}").write_text(" ".join(thread_names()))


def thread_names() -> list[str]:
    """Of this process, native ones too."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
