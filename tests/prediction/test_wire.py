"""Values that the child writes are read back unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction import wire
from hf_memkit.prediction.trace.request import Case, ScriptRequest
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.trace.work import Operation, Work
from hf_memkit.prediction.traced_training import (
    BatchShapes,
    CallPlace,
    Engine,
    Failed,
    HostMemory,
    Outcome,
    TracedStep,
    TrainerCall,
    Untrained,
    Vllm,
)
from hf_memkit.setup.script_overrides import Overrides
from tests.plan.made_trainings import MADE, changed

WORK = Work([Operation("aten.mm.default", "matmul", "bfloat16", 8, 6, (1, 2, 2, 1))], [0, 0], [(2, "forward")])
FULL = replace(
    changed(
        MADE, arguments__deepspeed={"zero_optimization": {"stage": 2}}, plan__tokens={"typical": None, "worst": 8.0},
        plan__mean={"typical": (1.0, 0.5)}, plan__model__loaded_at=CallPlace("train.py", 3, 7),
        plan__made_at=TrainerCall(CallPlace("train.py", 5, 9), 0, True, ("peft_config",)),
    ),
    trace=Trace([1, -1], [512], [0], [0], [0], ["a"], ["b"], [(2, "forward")], [1], WORK),
    steps=(TracedStep("worst", (0, 2), (0, 2)),),
    optional=(1, 2),
    batches=BatchShapes("8 × 8 tokens", "8 × 4 tokens", "8 × 7 tokens", True),
    engine=Engine({"a": [1, {"b": None}]}, {}, ((5, True), (6, False)), (), 7),
    vllm=Vllm("colocate", 0.5, True, 8),
    host=HostMemory(1, {"load": 2}),
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        Outcome(FULL),
        Outcome(failed=Failed(True, "ValueError", "no", "train.py, line 1", "Traceback")),
        Outcome(untrained=Untrained("text")),
        Case("a", 2, ScriptRequest(UserScript("a.py", False, ("a",)), ".", {}, overrides=Overrides({"bf16": 1}))),
    ],
    ids=["training", "failed", "untrained", "case"],
)  # fmt: skip
def test_what_is_written_is_read_again(value: object) -> None:
    """Would notice: a tuple that comes back as a list, a dataclass as a dictionary."""
    assert wire.loads(type(value), wire.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ["", "{", '{"trace": {}, "about": {}}', '{"training": {"trainer": "Trainer"}}', "[1]"]
)
def test_another_form_is_refused(text: str) -> None:
    """Would notice: half a file, or one of an earlier memkit, taken for a training; an unexpected error."""
    with pytest.raises(ValueError):
        wire.loads(Outcome, text)
