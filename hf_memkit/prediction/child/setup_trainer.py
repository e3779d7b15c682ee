"""The Trainer of a setup, made here as a script would make it: for those who want a setup to go the way of scripts.

In: a file with a `TraceRequest` and a number of rows, which mean nothing.

    python -m hf_memkit.prediction.child.setup_trainer FILE
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from hf_memkit import compat
from hf_memkit.prediction.child.generation import arguments_class, generation_config
from hf_memkit.prediction.child.models import build_fake_model
from hf_memkit.prediction.child.training import made_trainer, rows_for
from hf_memkit.prediction.trace_request import TraceRequest
from hf_memkit.train import prepared_rows, trainer_class

__all__ = ["setup_trainer"]


def setup_trainer(path: Path) -> Any:
    """The Trainer that the file asks for."""
    content = json.loads(path.read_text())
    request = TraceRequest.from_json(content["request"])
    setup = request.setup
    own = {
        "output_dir": tempfile.gettempdir(), "report_to": [], "push_to_hub": False, "hub_model_id": None,
        **generation_config(setup), **prepared_rows(setup),
    }  # fmt: skip
    kind = arguments_class(setup, trainer_class(setup)) or TrainingArguments
    values = {**setup.arguments, "deepspeed": setup.get("deepspeed.config"), **own}
    arguments: Any = kind(**compat.to_installed_arguments(values))
    model = build_fake_model(setup, trust_remote_code=request.trust_remote_code)
    make = rows_for(request, setup, model)
    rows = make(arguments.train_batch_size, content["rows"])
    evaluates = str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy)) != "no"
    evaluated = make(arguments.eval_batch_size, 2 * arguments.eval_batch_size) if evaluates else None
    return made_trainer(request, setup, model, arguments, rows, TrainerCallback(), evaluated)


if __name__ == "__main__":
    setup_trainer(Path(sys.argv[1])).train()
