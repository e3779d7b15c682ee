"""Evaluation without all its logits."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique


@technique(
    "loss-only-evaluation",
    saves="the evaluation keeps no predictions: neither logits nor labels of the whole evaluation set",
    costs="compute_metrics is not called; the evaluation reports the loss only",
    not_when="a metric decides which checkpoint is best",
    settings={"arguments.prediction_loss_only": True},
    offered={
        "predictions of an evaluation": 4,
        "evaluate": 5,
        "host/predictions of an evaluation": 3,
        "host/evaluate": 3,
    },
)
def loss_only(setup: Setup) -> Setup:
    """`prediction_loss_only`: Trainer drops the logits of each batch."""
    return setup.put(
        "arguments.prediction_loss_only", True, "the loss is kept, and the logits of the evaluation set are not"
    )


@technique(
    "streamed-metrics",
    saves="Trainer calls compute_metrics after each batch and keeps no predictions (transformers 4.42 and later)",
    costs="compute_metrics must take compute_result and add up its statistics; the allocator's cache is emptied "
    "after every batch",
    not_when="a metric needs all logits, or predict() is called, which always keeps them",
    settings={"arguments.batch_eval_metrics": True},
    offered={
        "predictions of an evaluation": 3,
        "evaluate": 4,
        "host/predictions of an evaluation": 2,
        "host/evaluate": 2,
    },
    unless=("prediction_loss_only",),
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
    saves="with compute_metrics, Trainer keeps all predictions on the GPU until the evaluation ends; this moves "
    "them to RAM every few batches",
    costs="the evaluation waits for these copies, and RAM must hold all predictions (for a language model samples "
    "× tokens × vocabulary)",
    not_when="a metric can be streamed, which keeps them nowhere",
    values={"eval_accumulation": int},
    bounds={"eval_accumulation": (1, None)},
    gpu_only="on a CPU the GPU's memory and RAM are one; a test counts what moves, and when",
    settings={"arguments.eval_accumulation_steps": 16},
    offered={"predictions of an evaluation": 2, "evaluate": 3},
    unless=("prediction_loss_only", "batch_eval_metrics"),
    planned=InPlans("evaluation", "predictions in RAM"),
)
def eval_accumulation(setup: Setup) -> Setup:
    """`eval_accumulation_steps`. Value: `eval_accumulation`, batches between two moves (default 1)."""
    steps = int(setup.resolved_for.values.get("eval_accumulation", 1))
    return setup.put(
        "arguments.eval_accumulation_steps", steps, f"logits move to RAM every {steps} batches of an evaluation"
    )


advice(
    "preprocess-logits", "evaluation",
    {"Trainer.preprocess_logits_for_metrics": "lambda logits, labels: logits.argmax(-1)"},
    saves="Trainer then keeps only what compute_metrics needs, not all logits",
    costs="nothing if the metrics use the predicted classes or tokens",
    offered={
        "predictions of an evaluation": 1, "evaluate": 2, "host/predictions of an evaluation": 1, "host/evaluate": 1,
        "host/after": 3,
    },
    unless=("prediction_loss_only", "preprocess_logits_for_metrics"),
)  # fmt: skip
advice(
    "small-evaluation-batch", "evaluation", {"arguments.per_device_eval_batch_size": "half"},
    saves="evaluation batches have their own size, independent of the training batch size",
    costs="a slower evaluation; the metrics are the same",
    offered={"generation": 2, "evaluate": 1, "after": 2},
    planned=InPlans("evaluation", "evaluation batch", "eval_loss is averaged over other batches"),
)  # fmt: skip
