"""What memkit prints besides answers, and the messages of libraries that it hides."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from hf_memkit.cli.environment import command_line
from hf_memkit.common.commands import command
from hf_memkit.common.secrets import masked, masked_json


def say(line: str) -> None:
    """Prints a line, however long, without secrets."""
    print(masked(line), flush=True)


def say_to_stderr(line: str) -> None:
    print(masked(line), file=sys.stderr)


def silent(line: str) -> None:
    """Prints nothing: for ranks other than the first."""


def print_json(content: Any) -> None:
    """Prints JSON without secrets. It has no NaN and no infinity: these become texts."""
    print(json.dumps(_json(masked_json(content)), indent=2, allow_nan=False))


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    is_plain = isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def typed_command() -> str:
    """The command that was typed, to paste; empty if memkit was called from Python."""
    return command("memkit", *command_line) if command_line else ""


def quiet_libraries() -> None:
    """Hides messages that a user of memkit cannot act on. Must run before the libraries are imported, because they
    read environment variables then."""
    os.environ.setdefault("DS_LOG_LEVEL", "error")  # read when deepspeed is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data loader forks
    if not Path("/dev/nvidiactl").exists():
        # Training on the CPU: waiting threads that spin make a busy machine several times slower. Read by OpenMP when
        # torch is imported, so it cannot wait until the setup is known.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it guesses it
    for logger in ("torchao", "torch.utils._pytree", "accelerate", "bitsandbytes"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    # DeepSpeed and torch disagree about names of collectives, at every call.
    warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
