"""Every argument that is named is one of the installed libraries'."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
from trl import GRPOConfig

from hf_memkit.measuring.out_of_memory import suggest
from hf_memkit.measuring.out_of_memory.advice import change_for
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.message import Memory, OomMessage
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.traceback import Feature, TracebackFacts
from hf_memkit.setup.techniques.registry import CATALOGUE
from tests.measuring.out_of_memory.test_oom_changes import oom, run

_OF_OTHERS = ("arguments.vllm_gpu_memory_utilization", "arguments.generation_max_length")  # TRL's, Seq2Seq's


def test_every_argument_that_is_named_exists_in_transformers() -> None:
    records = [
        run(), run(arguments={"optim": "adamw_torch", "bf16": False}, model_type="llama"),
        run(engine="FullyShardedDataParallel"),
        run(arguments={"optim": "adamw_bnb_8bit"}),
        run(arguments={"dataloader_num_workers": 4, "dataloader_pin_memory": True}),
        run(hardware={"allocator_settings": "expandable_segments:True"}), run(hardware={"device_name": "Tesla T4"},
                                                                               arguments={"bf16": False}),
    ]  # fmt: skip
    moments = [oom(phase, cause=cause) for phase in ("forward", "backward", "optimizer", "evaluate", "save", "load")
               for cause in ("size", "fragmentation", "host memory")]  # fmt: skip
    changes = [change for record in records for moment in moments for change in suggest(record, moment, limit=99)]
    small = run(trainable_parameters=10_000_000, arguments={"optim": "adamw_torch"})
    changes += suggest(small, {**oom("optimizer"), "categories": {"weights_gib": 20.0}})
    of_transformers = set(get_args(Feature)) - {"diffusers"}  # whose scripts have other arguments
    used = [frozenset[Feature]({each}) for each in of_transformers] + [frozenset[Feature]()]
    for memory in get_args(Memory):
        for in_use in used:
            failed = FailedJob(OomMessage("x", "PyTorch", memory), TracebackFacts(in_use=in_use), RunView({}, {}))
            of_rows = [change_for(row, failed) for row in CATALOGUE.values() if row.settings and row.offered]
            changes += [change for change in of_rows if change is not None]
    changes = [change for change in changes if change.key not in _OF_OTHERS]
    named = {change.key.removeprefix("arguments.") for change in changes if change.key.startswith("arguments.")}
    classes = (TrainingArguments, GRPOConfig)  # vLLM's arguments are TRL's
    assert named and named <= {field.name for each in classes for field in dataclasses.fields(each) if field.init}
    optimizers = {change.value for change in changes if change.key == "arguments.optim"}
    assert optimizers <= {name.value for name in OptimizerNames} and optimizers
    assert not any(re.search(r"\bsaves?\b.*\d+ ?%", f"{change.reason} {change.cost}") for change in changes)
