"""Plans of made-up figures, for what is shown of them: what a search finds in them is tested with real scripts."""

from __future__ import annotations

from typing import Any

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import GIB
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import Alternative, SetupCandidate
from hf_memkit.plan.judgement import Judged, judged
from hf_memkit.plan.plan import Plan
from hf_memkit.prediction.prediction import Confidence, Prediction
from hf_memkit.prediction.time.step_time import StepTime

CHECKPOINTING = Alternative(
    "checkpointing", "checkpointing",
    {
        "arguments.activation_checkpointing": True,
        "arguments.activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
)  # fmt: skip
EIGHT_BITS = Alternative(
    "small optimizer", "8-bit AdamW", {"arguments.optim": "adamw_bnb_8bit"}, "nearly the same",
    "optimizer states in 8 bits (bitsandbytes)",
)  # fmt: skip
SDPA = Alternative("attention", "sdpa attention", {"model.attn_implementation": "sdpa"})
ALLOCATOR = Alternative(
    "allocator", "expandable segments", {"environment.PYTORCH_ALLOC_CONF": "expandable_segments:True"}
)
PATCH = Alternative("loss", "fused loss", code='loss = fused("<b>")\nloss.backward()')


def setup(
    size: int, accumulation: int, gib: float, seconds: float | None, *choices: Alternative, gpu: str = "RTX 3090",
    unknown: tuple[str, ...] = (), tokens: int | None = 8192, **known: Any,
) -> Judged:  # fmt: skip
    """A setup that takes so much of the GPU, and so long a step; None: nobody knows."""
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
    ).judged(described_machine(gpu, None, None, None))
    found = judged(SetupCandidate(size, accumulation, choices), prediction)
    if seconds is None:
        return found
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
    run = {"run_seconds": (90 * seconds, 100 * seconds, 130 * seconds), **known}
    return judged(found.candidate, prediction, step_time=step, tokens=tokens, **run)


def plan(own: Judged, *others: Judged, gpu: str = "RTX 3090", **known: Any) -> Plan:
    return Plan(
        name="train.py", machine=described_machine(gpu, None, None, None), gpus=known.pop("gpus", 1), own=own,
        traced=(own, *others), script=known.pop("script", UserScript("train.py")), **known,
    )  # fmt: skip


def usual(gpu: str = "RTX 3090") -> Plan:
    """The script's own does not fit; one with the same result does, a faster one is nearly the same, one needs
    another script."""
    return plan(
        setup(8, 1, 42.8, 1.0, gpu=gpu),
        setup(8, 1, 19.0, 1.4, CHECKPOINTING, gpu=gpu),
        setup(4, 2, 15.0, 1.9, CHECKPOINTING, gpu=gpu),
        setup(8, 1, 18.0, 1.1, EIGHT_BITS, gpu=gpu),
        setup(8, 1, 12.0, 0.5, PATCH, gpu=gpu),
        gpu=gpu,
        left_out={"Liger kernels": "[bold]none[/bold] for this model"},
        excluded={SetupCandidate(2, 4): "8 × 1"},
    )
