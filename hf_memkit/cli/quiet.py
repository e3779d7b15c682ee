"""Hides messages of libraries while memkit trains or predicts."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path


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
