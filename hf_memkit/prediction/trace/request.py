"""Requests to the child process as plain data, sent as JSON (`wire.py`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from hf_memkit.common.user_script import UserScript
from hf_memkit.setup.script_overrides import Overrides

Device = Literal["cuda", "cpu", "real cpu"]
"""Fake tensors on a (fake) GPU; fake tensors on the CPU; real tensors on the CPU, for comparison in tests."""

LIVE: Final = "hf_memkit.prediction.child.training.live_trainer"
"""Module that replaces a script to predict a live Trainer."""

SETUP: Final = "hf_memkit.prediction.child.training.setup_trainer"  # module that replaces a script to predict a setup

TORCHRUN: Final = "TORCHELASTIC_RUN_ID"
"""The variable that shows a script that torchrun (or `accelerate launch`, with its code) started it, as one rank."""

EARLY: Final = "early"
LATE: Final = "late"
"""Names of the sockets on which a script waits: before a subclass of Trainer has prepared anything, and after
(`child/script/forks.py`)."""


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A script to run until its first training, which is traced.

    Attributes:
        micro_batch_size: rows per GPU from `train()` on, instead of the script's own: the size that
            `auto_find_batch_size` would find.
        forks: folder of sockets: the script waits there when it creates its Trainer, and continues in a fork for each
            set of arguments (`child/script/forks.py`).
        began: when the prediction began; it protects files that existed then. Further runs of the script, for the
            same prediction, have the same.
        lengths_of: columns whose lengths in the worst and a typical batch are returned instead of a trace.
    """

    script: UserScript  # with its arguments
    folder: str  # working directory
    environment: dict[str, str]
    device: Device = "cuda"  # of its tensors
    capability: tuple[int, int] = (8, 0)  # CUDA compute capability of the GPU, which decides which kernels run
    capacity_bytes: int = 80 * 2**30  # memory that the GPU reports
    gpu_name: str = "NVIDIA A100-SXM4-80GB"
    worst_batch: bool = True  # trace the worst and a typical batch; False: the first batches of the script's loader
    stdin: int | None = None  # file descriptor that it reads input from; None: no input
    processes: int = 1  # total ranks, one GPU each
    per_node: int = 1  # ranks per machine
    micro_batch_size: int | None = None
    overrides: Overrides | None = None  # settings that replace the script's own (`script_overrides.py`)
    forks: str | None = None
    for_plan: bool = False  # also record operations (`Trace.work`) and the facts for plans (`PlanFacts`)
    lengths_of: tuple[str, ...] = ()
    began: float = field(default_factory=time.time)

    @property
    def is_rank(self) -> bool:
        """Whether a launcher starts the script as a rank; with torchrun it may be the only one."""
        alone = TORCHRUN in self.environment and self.script.target not in (LIVE, SETUP)
        return self.processes > 1 or alone


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Settings with which a waiting script continues, without options of models.

    Attributes:
        result: file for its result.
        for_plan, micro_batch_size: as in `ScriptRequest`.
    """

    result: str
    overrides: Overrides
    for_plan: bool = True
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class ForkEnded:
    """How the process of this `result` died; None if it did not. `too_late`: the script had already used a setting
    that would change, so no process started."""

    result: str
    died: str | None = None
    too_late: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A job for the child process: a script, or a launcher's command to parse, and where it would be typed."""

    result: str  # file for the result, in a separate folder
    files: int = 0  # file descriptors sent with it: none, or a script's standard input and output
    script: ScriptRequest | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """A command as parsed by its launcher's or front end's parser (`child/script/read_launch.py`); as `Launched`."""

    script: UserScript = field(default_factory=lambda: UserScript(""))
    at: int = 0  # index of the script's word
    gpus: int | None = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    is_launcher: bool = True
    command: tuple[str, ...] = ()  # the command that a front end starts; empty: the command itself
    error: str = ""  # why nothing would start
