"""What is asked of the child process: a script, and the GPU that it is for. Plain data, passed as JSON (`wire.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from hf_memkit.common.user_script import UserScript
from hf_memkit.setup.script_overrides import Overrides

Device = Literal["cuda", "cpu", "real cpu"]
"""Fake tensors on a (fake) GPU; fake tensors on the CPU; real tensors on the CPU, which the tests compare with."""

LIVE: Final = "hf_memkit.prediction.child.training.live_trainer"
"""The module that runs instead of a script to predict the objects of a process."""

SETUP: Final = "hf_memkit.prediction.child.training.setup_trainer"
"""The module that runs instead of a script to predict a setup."""

EARLY: Final = "early"
LATE: Final = "late"
"""Names of the sockets at which a script waits: before a subclass of Trainer has prepared anything, and after
(`child/script/forks.py`)."""


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
        overrides: settings in the place of the script's own (`script_overrides.py`).
        forks: a folder: the script waits there where it makes its Trainer, and goes on once for each set of arguments
            (`child/script/forks.py`).
        for_plan: whether what is computed is recorded too (`Trace.work`), and what plans have to know (`PlanFacts`).
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
    overrides: Overrides | None = None
    forks: str | None = None
    for_plan: bool = False
    lengths_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A script that waits is to go on with these, without options of models; `result`: as of a `Case`."""

    result: str
    overrides: Overrides


@dataclass(frozen=True, slots=True)
class ForkEnded:
    """How the process of this `result` died, None if it did not; `too_late`: something had acted on what would change,
    so that none began."""

    result: str
    died: str | None = None
    too_late: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """What the process is given to do, one at a time: a script, or a launcher's command to read, where it would be
    typed. `result`: the file that tells what came of it, in a folder of its own; `files`: how many are sent beside it:
    none, or a script's standard input and where it writes."""

    result: str
    files: int = 0
    script: ScriptRequest | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """What a launcher's or a front end's own parser makes of a command (`child/script/read_launch.py`); as a
    `Launched`. `at`: the number of the script's word; `command`: which a front end starts (empty: it is the command
    that was read); `error`: why nothing starts."""

    script: UserScript = field(default_factory=lambda: UserScript(""))
    at: int = 0
    gpus: int | None = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    is_launcher: bool = True
    command: tuple[str, ...] = ()
    error: str = ""
