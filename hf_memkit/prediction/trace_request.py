"""What is asked of the child process: a script, and the GPU that it is for. Plain data, passed as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from hf_memkit.user_script import UserScript

Device = Literal["cuda", "cpu", "real cpu"]
"""Fake tensors on a (fake) GPU; fake tensors on the CPU; real tensors on the CPU, which the tests compare with."""

LIVE: Final = "hf_memkit.prediction.child.live_trainer"
"""The module that runs instead of a script to predict the objects of a process."""

SETUP: Final = "hf_memkit.prediction.child.setup_trainer"
"""The module that runs instead of a script to predict a setup."""

EARLY: Final = "early"
LATE: Final = "late"
"""Names of the sockets at which a script waits: before a subclass of Trainer has prepared anything, and after
(`child/forks.py`)."""


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """One script to run; its first training is traced.

    Attributes:
        script: which, with its arguments.
        folder, environment: the ones it would be started in.
        device: where its tensors lie.
        capability: the GPU's CUDA compute capability: it decides which kernels run.
        capacity_bytes: what the GPU says of its memory.
        gpu_name: what the GPU calls itself.
        worst_batch: whether the worst and a usual batch are traced; False: those that the script's loader gives first.
        stdin: number of the file that it reads answers from; None: it gets none.
        processes, per_node: ranks in all, one GPU each, and those of one machine.
        micro_batch_size: rows per GPU from `train()` on, instead of the script's own: those that
            `auto_find_batch_size` would find.
        overrides: settings in the place of the script's own (`script_overrides.py`), as JSON.
        forks: a folder: the script waits there where it makes its Trainer, and goes on once for each set of arguments
            (`child/forks.py`).
        work: whether what is computed is recorded too (`Trace.work`).
        lengths_of: nothing is traced; asked is how long these columns of the worst and of a usual batch are.
    """

    script: UserScript
    folder: str
    environment: dict[str, str]
    device: Device = "cuda"
    capability: tuple[int, int] = (8, 0)
    capacity_bytes: int = 80 * 2**30
    gpu_name: str = "NVIDIA A100-SXM4-80GB"
    worst_batch: bool = True
    stdin: int | None = None
    processes: int = 1
    per_node: int = 1
    micro_batch_size: int | None = None
    overrides: Mapping[str, Any] | None = None
    forks: str | None = None
    work: bool = False
    lengths_of: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        script = {name: getattr(self.script, name) for name in ("target", "is_module", "arguments")}
        return {**{name: getattr(self, name) for name in self.__slots__}, "script": script}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        values = {name: content[name] for name in cls.__slots__}
        script = content["script"]
        values["script"] = UserScript(script["target"], script["is_module"], tuple(script["arguments"]))
        values["capability"] = tuple(content["capability"])
        return cls(**values)
