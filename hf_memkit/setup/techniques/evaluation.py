"""Evaluation without all its logits."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import technique


@technique(
    "loss-only-evaluation",
    family="evaluation",
    saves="the logits and labels of the whole evaluation set",
    costs="nothing but the loss is reported: compute_metrics is not called",
    not_when="a metric decides which checkpoint is best",
)
def loss_only(setup: Setup) -> Setup:
    """`prediction_loss_only`: Trainer drops the logits of each batch."""
    return setup.put(
        "arguments.prediction_loss_only", True, "the loss is kept, and the logits of the evaluation set are not"
    )


@technique(
    "streamed-metrics",
    family="evaluation",
    saves="the logits of the whole evaluation set: a batch at a time is reduced to what the metric needs",
    costs="the allocator's cache is emptied after every batch of an evaluation",
    not_when="a metric needs all logits, or predict() is called: it keeps them whatever is set",
)
def streamed_metrics(setup: Setup) -> Setup:
    """`batch_eval_metrics` with a token accuracy that is summed over batches; your own metric can be streamed too."""
    return setup.put(
        "arguments.batch_eval_metrics", True, "the metric gets one batch at a time, and nothing is kept"
    ).put(
        "trainer_parts.streamed_metrics", {},
        "token accuracy from two sums; logits become token ids before they are gathered",
    )  # fmt: skip


@technique(
    "eval-accumulation",
    family="evaluation",
    saves="the logits of the evaluation set on the GPU: they move to RAM every few batches",
    costs="the same bytes in RAM, a copy each time, and the allocator's cache emptied with it",
    not_when="a metric can be streamed, which keeps them nowhere",
    values={"eval_accumulation": int},
    bounds={"eval_accumulation": (1, None)},
    gpu_only="on a CPU the GPU's memory and RAM are one; a test counts what moves, and when",
)
def eval_accumulation(setup: Setup) -> Setup:
    """`eval_accumulation_steps`. Value: `eval_accumulation`, batches between two moves (default 1)."""
    steps = int(setup.resolved_for.values.get("eval_accumulation", 1))
    return setup.put(
        "arguments.eval_accumulation_steps", steps, f"logits move to RAM every {steps} batches of an evaluation"
    )
