"""What memkit prints besides answers, and the messages of libraries that it hides."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any, Final

from hf_memkit.cli.environment import command_line

_SECRET: Final = re.compile(r"(?i)^-.*(token|secret|password|api_?key)")


def say(line: str) -> None:
    """Prints a line as it is, however long."""
    print(line, flush=True)


def say_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def silent(line: str) -> None:
    """Prints nothing: for ranks other than the first."""


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def typed_command() -> str:
    """The command that was typed, without passwords and tokens; empty if memkit was called from Python."""
    words = list(command_line)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if _SECRET.match(option) and value:
            words[place] = f"{option}{equals}…"
        elif _SECRET.match(word) and place + 1 < len(words):
            words[place + 1] = "…"
    return shlex.join(["memkit", *words]) if words else ""


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
