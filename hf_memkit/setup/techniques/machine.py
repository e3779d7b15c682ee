"""What no setting of the job changes: other processes, RAM and disks. Only advice."""

from __future__ import annotations

from typing import Final

from hf_memkit.setup.techniques.registry import advice

LIMITS: Final = "docker --memory, Slurm --mem, Kubernetes limits.memory"
"""What sets a memory limit."""

advice(
    "other-processes", "machine", {"command": "nvidia-smi"},
    "lists the processes on the GPU: an earlier run, another notebook or a second copy of the model may still hold it",
    "nothing",
    offered={"load": 4, "dispatched": 2, "resume": 1, "else": 1},
)  # fmt: skip
advice(
    "fewer-processes", "machine", {"launch.processes": "fewer on this machine"},
    "each process reads the whole checkpoint, weights and optimizer states, into RAM; with ZeRO or FSDP's "
    "SHARDED_STATE_DICT each reads its share",
    "fewer GPUs; with ZeRO or sharded checkpoints the number of GPUs must stay",
    offered={"host/resume": 1},
)  # fmt: skip
advice(
    "more-ram", "machine", {"command": "more RAM, or a larger memory limit"},
    f"for a limit: {LIMITS}",
    "RAM that others could use",
    offered={"host": 9, "host/merge": 9, "host/else": 9},
)  # fmt: skip
advice(
    "more-ram-for-wsl", "machine",
    {"command": "memory=… in the [wsl2] section of %UserProfile%\\.wslconfig, then wsl --shutdown"},
    "on WSL2 only: Linux gets half of the RAM by default, and CUDA may lock a part of that",
    "less RAM for Windows",
    offered={"host/managed memory": 2, "pinned/DeepSpeed": 2, "pinned/unsloth": 2, "pinned/anything": 3},
)  # fmt: skip
advice(
    "cache-elsewhere", "machine", {"environment.HF_HOME": "a folder on a larger disk"},
    "models, data sets and tokenized rows are cached there (~/.cache/huggingface by default); TMPDIR is another place "
    "that fills",
    "they are downloaded again",
    offered={"disk/load": 1, "disk/data": 1, "disk/anything": 3},
)  # fmt: skip
