"""Plans with made-up figures, for tests of their ranking and rendering. Other tests plan real scripts."""

from __future__ import annotations

from typing import Any

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import GIB
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import Candidate, Choice
from hf_memkit.plan.judgement import Judgement, judge_prediction
from hf_memkit.plan.plan import Plan
from hf_memkit.prediction.prediction import Confidence, Prediction
from hf_memkit.prediction.time.step_time import StepTime

CHECKPOINTING = Choice(
    "checkpointing", "checkpointing",
    {
        "arguments.activation_checkpointing": True,
        "arguments.activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
)  # fmt: skip
EIGHT_BITS = Choice(
    "small optimizer", "8-bit AdamW", {"arguments.optim": "adamw_bnb_8bit"}, "nearly the same",
    "optimizer states in 8 bits (bitsandbytes)",
)  # fmt: skip
SDPA = Choice("attention", "sdpa attention", {"model.attn_implementation": "sdpa"})
ALLOCATOR = Choice("allocator", "expandable segments", {"environment.PYTORCH_ALLOC_CONF": "expandable_segments:True"})
PATCH = Choice("loss", "fused loss", code='loss = fused("<b>")\nloss.backward()')


def setup(
    size: int, accumulation: int, gib: float, seconds: float | None, *choices: Choice, gpu: str = "RTX 3090",
    unknown: tuple[str, ...] = (), tokens: int | None = 8192, **fields: Any,
) -> Judgement:  # fmt: skip
    """A judged setup that needs `gib` on the GPU and takes `seconds` per step; None: its time is unknown."""
    peak, outside = int(gib * GIB) - GIB // 2, GIB // 2
    prediction = Prediction(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=(peak, peak),
        outside_allocator_bytes=outside,
        smallest_cap_bytes=peak,
        phases={},
        categories={**dict.fromkeys(CATEGORIES, 0), "weights": peak},
        peak_phase="backward",
        peak_operation="",
        peak_module="",
        confidence=Confidence("trace", "two steps"),
        source="nothing",
    ).with_verdict(described_machine(gpu, None, None, None))
    candidate = Candidate(size, accumulation, choices)
    if seconds is None:
        return judge_prediction(candidate, prediction)
    step = StepTime(
        seconds=(0.9 * seconds, seconds, 1.3 * seconds),
        by_phase={"forward": 0.3 * seconds, "backward": 0.7 * seconds},
        forward_s=0.3 * seconds,
        backward_s=0.7 * seconds,
        optimizer_s=0.0,
        by_kind={},
        bound_by_launches=0.0,
        unknown=unknown,
        rests_on=("bf16: 71 TFLOPS (measured)",),
    )
    fields = {"run_seconds": (90 * seconds, 100 * seconds, 130 * seconds), **fields}
    return judge_prediction(candidate, prediction, step_time=step, tokens=tokens, **fields)


def plan(own: Judgement, *others: Judgement, gpu: str = "RTX 3090", **fields: Any) -> Plan:
    return Plan(
        name="train.py", machine=described_machine(gpu, None, None, None), own=own, traced=(own, *others),
        **{"gpus": 1, "script": UserScript("train.py"), **fields},
    )  # fmt: skip


def typical_plan(gpu: str = "RTX 3090") -> Plan:
    """A plan in which the script's own setup does not fit. Two with the same result fit, a faster one has nearly the
    same result, and the fastest needs a change of code."""
    return plan(
        setup(8, 1, 42.8, 1.0, gpu=gpu),
        setup(8, 1, 19.0, 1.4, CHECKPOINTING, gpu=gpu),
        setup(4, 2, 15.0, 1.9, CHECKPOINTING, gpu=gpu),
        setup(8, 1, 18.0, 1.1, EIGHT_BITS, gpu=gpu),
        setup(8, 1, 12.0, 0.5, PATCH, gpu=gpu),
        gpu=gpu,
        left_out={"Liger kernels": "[bold]none[/bold] for this model"},
        excluded={Candidate(2, 4): "8 × 1"},
    )
