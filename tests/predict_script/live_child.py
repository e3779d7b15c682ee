"""Runs a script up to `Trainer.train()`, and predicts there the Trainer that it has made, as a notebook does.

python -m tests.predict_script.live_child RESULT {script | -m module} arguments…
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_memkit import predict_trainer
from hf_memkit.common.user_script import UserScript


def main(result: str, *command: str) -> None:
    written = Path(result).absolute()

    def train(trainer: Any, *_: Any, **__: Any) -> None:
        found = predict_trainer(trainer, gpu_memory="24GB")
        written.write_text(json.dumps({phase: allocated for phase, (allocated, _) in found.phases.items()}))
        os._exit(0)

    Trainer.train = train  # type: ignore[method-assign, assignment]
    is_module = command[0] == "-m"
    target, *arguments = command[is_module:]
    UserScript(target, is_module, tuple(arguments)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
