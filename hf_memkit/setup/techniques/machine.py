"""Other processes, RAM and disks, which no setting of the job changes: only advice."""

from __future__ import annotations

from typing import Final

from hf_memkit.setup.techniques.registry import advice

LIMITS: Final = "docker --memory, Slurm --mem, Kubernetes limits.memory"
"""Settings that limit the RAM of a job."""

advice(
    "other-processes", "machine", {"command": "nvidia-smi"},
    saves="lists the processes on the GPU, such as an earlier run, another notebook or a second copy of the model",
    costs="nothing",
    offered={"load": 4, "dispatched": 2, "resume": 1, "else": 1},
)  # fmt: skip
advice(
    "fewer-processes", "machine", {"launch.processes": "fewer on this machine"},
    saves="each process reads the whole checkpoint, weights and optimizer states, into RAM (with ZeRO or FSDP's "
    "SHARDED_STATE_DICT, only its share)",
    costs="fewer GPUs train; ZeRO and sharded checkpoints need the same number of GPUs as before",
    offered={"host/resume": 1},
)  # fmt: skip
advice(
    "more-ram", "machine", {"command": "more RAM, or a larger memory limit"},
    saves=f"the job can then use more RAM; the settings of a limit are {LIMITS}",
    costs="other jobs have less RAM",
    offered={"host": 9, "host/merge": 9, "host/else": 9},
)  # fmt: skip
advice(
    "more-ram-for-wsl", "machine",
    {"command": "memory=… in the [wsl2] section of %UserProfile%\\.wslconfig, then wsl --shutdown"},
    saves="on WSL2, Linux gets half of the RAM by default, and CUDA can lock only a part of that",
    costs="Windows has less RAM",
    offered={"host/managed memory": 2, "pinned/DeepSpeed": 2, "pinned/unsloth": 2, "pinned/anything": 3},
)  # fmt: skip
advice(
    "cache-elsewhere", "machine", {"environment.HF_HOME": "a folder on a larger disk"},
    saves="models, data sets and tokenized rows are cached there instead of in ~/.cache/huggingface; temporary files "
    "(TMPDIR) can fill a disk too",
    costs="models and data sets are downloaded again",
    offered={"disk/load": 1, "disk/data": 1, "disk/anything": 3},
)  # fmt: skip
