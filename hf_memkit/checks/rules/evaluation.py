"""Evaluation: metrics that are never computed, logits that are held for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.checks.rule import Found, rule
from hf_memkit.checks.subject import Subject
from hf_memkit.techniques.activation_bytes import cache_bytes_of
from hf_memkit.units import format_size

_FOR_METRICS: Final = ("inputs", "loss")


@rule(
    "metrics-never-computed",
    severity="warning",
    why="with prediction_loss_only the logits are dropped before compute_metrics is asked: it is never called",
    fix="delete prediction_loss_only, or the metric",
    source="transformers 5.23.0: trainer.py 3285, 2994, 3050",
    needs_config=False,
    techniques=("loss-only-evaluation", "streamed-metrics"),
)
def metrics_never_computed(subject: Subject) -> Iterator[Found]:
    if subject.argument("prediction_loss_only") is not True:
        return
    metric = str(subject.argument("metric_for_best_model") or "loss")
    if subject.argument("batch_eval_metrics") is True:
        yield Found("batch_eval_metrics", True, argument=True)
    elif metric.removeprefix("eval_") != "loss" and "loss" not in metric:
        # Trainer stops at the first evaluation, whose metrics lack it.
        yield Found("metric_for_best_model", metric, argument=True, severity="error")


@rule(
    "eval-accumulation-ignored",
    severity="warning",
    why="with batch_eval_metrics nothing is kept that could be moved: eval_accumulation_steps is not looked at",
    fix="delete eval_accumulation_steps",
    source="transformers 5.23.0: trainer.py 2993, 3009 (elif)",
    needs_config=False,
    techniques=("eval-accumulation", "streamed-metrics"),
)
def eval_accumulation_ignored(subject: Subject) -> Iterator[Found]:
    steps = subject.argument("eval_accumulation_steps")
    if steps is not None and subject.argument("batch_eval_metrics") is True:
        yield Found("eval_accumulation_steps", steps, argument=True)


@rule(
    "eval-accumulation-without-logits",
    severity="warning",
    why="there are no logits to move, only losses of 4 bytes a sample; the allocator's cache is emptied all the same",
    fix="delete eval_accumulation_steps",
    source="transformers 5.23.0: trainer.py 3009-3016, 3285",
    needs_config=False,
    techniques=("eval-accumulation", "loss-only-evaluation"),
)
def eval_accumulation_without_logits(subject: Subject) -> Iterator[Found]:
    steps = subject.argument("eval_accumulation_steps")
    batches = subject.argument("batch_eval_metrics") is True
    if steps is not None and subject.argument("prediction_loss_only") is True and not batches:
        yield Found("eval_accumulation_steps", steps, argument=True)


@rule(
    "metric-input-unknown",
    severity="warning",
    why="compute_metrics is given nothing of this name, and no one says so",
    fix="write inputs or loss",
    source="transformers 5.23.0: trainer.py 2953-2954, 2996-2997",
    needs_config=False,
)
def metric_input_unknown(subject: Subject) -> Iterator[Found]:
    for name in _names(subject):
        if name not in _FOR_METRICS:
            yield Found("include_for_metrics", name, argument=True)


@rule(
    "inputs-held-for-nothing",
    severity="warning",
    why="Trainer gathers and holds the inputs of the whole evaluation set, also where no metric is computed",
    fix="delete include_for_metrics",
    source="transformers 5.23.0: trainer.py 2952-2969",
    needs_config=False,
    techniques=("loss-only-evaluation",),
)
def inputs_held_for_nothing(subject: Subject) -> Iterator[Found]:
    if "inputs" in _names(subject) and subject.argument("prediction_loss_only") is True:
        yield Found("include_for_metrics", subject.argument("include_for_metrics"), argument=True)


def _names(subject: Subject) -> list[str]:
    value: Any = subject.argument("include_for_metrics") or []
    return [value] if isinstance(value, str) else list(value)


@rule(
    "predict-keeps-everything",
    severity="warning",
    why="predict() keeps the logits of the whole test set whatever batch_eval_metrics says: it has to return them",
    fix="evaluate() on the test set, or give Trainer a preprocess_logits_for_metrics that makes them small",
    source='transformers 5.23.0: trainer.py 2968, 2978, 2983 (description == "Prediction")',
    needs_config=False,
    techniques=("streamed-metrics",),
)
def predict_keeps_everything(subject: Subject) -> Iterator[Found]:
    streamed = subject.argument("batch_eval_metrics") is True and subject.argument("do_predict") is True
    # memkit's own part makes a token id of a row of logits.
    if streamed and not subject.has_setting("trainer_parts.streamed_metrics"):
        yield Found("batch_eval_metrics", True, argument=True)


@rule(
    "full-eval-while-training",
    severity="warning",
    why="it has no effect during training; an evaluate() outside of train() rounds the weights to 16 bits in place, "
    "and what is saved or trained after it has 16 bits",
    fix="delete it: with bf16: true or fp16: true evaluation is autocast anyway",
    source="transformers 5.23.0: trainer.py 2939-2945",
    needs_config=False,
    techniques=("bf16-autocast", "fp16-autocast", "fp32"),
)
def full_eval_while_training(subject: Subject) -> Iterator[Found]:
    strategy = str(subject.argument("eval_strategy", "no")).lower()
    for name in ("bf16_full_eval", "fp16_full_eval"):
        # With DeepSpeed the argument says which type the engine computes in.
        if subject.argument(name) is True and strategy in ("steps", "epoch") and subject.config is None:
            yield Found(name, True, argument=True)


@rule(
    "generation-skipped",
    severity="warning",
    why="nothing is generated where only the loss is asked for",
    fix="delete prediction_loss_only, or predict_with_generate",
    source="transformers 5.23.0: trainer_seq2seq.py, prediction_step",
    needs_config=False,
    techniques=("loss-only-evaluation",),
)
def generation_skipped(subject: Subject) -> Iterator[Found]:
    if subject.argument("predict_with_generate") is True and subject.argument("prediction_loss_only") is True:
        yield Found("predict_with_generate", True, argument=True)


@rule(
    "generation-not-asked-for",
    severity="warning",
    why="evaluations generate only with predict_with_generate: true",
    fix="add predict_with_generate: true, or delete it",
    source="transformers 5.23.0: trainer_seq2seq.py, prediction_step",
    needs_config=False,
)
def generation_not_asked_for(subject: Subject) -> Iterator[Found]:
    for name in ("generation_num_beams", "generation_max_length"):
        value = subject.argument(name)
        if value is not None and subject.argument("predict_with_generate") is not True:
            yield Found(name, value, argument=True)


@rule(
    "generation-cache-too-large",
    severity="error",
    why="keys and values of all beams do not fit on the card",
    fix="lower generation_num_beams or per_device_eval_batch_size",
    source="2 × 2 bytes × batch × beams × tokens × layers × heads × head width; transformers 5.23.0: "
    "generation/utils.py, expand_size",
    needs_config=False,
)
def generation_cache_too_large(subject: Subject) -> Iterator[Found]:
    model, machine = subject.model, subject.machine
    tokens = subject.argument("generation_max_length")
    if model is None or machine is None or machine.gpu is None or not isinstance(tokens, int):
        return
    if subject.argument("predict_with_generate") is not True:
        return
    beams = subject.argument("generation_num_beams") or 1
    batch = subject.argument("per_device_eval_batch_size", 8)
    config: Mapping[str, Any] = model.config
    size = cache_bytes_of(
        config, batch=int(batch), beams=int(beams), tokens=tokens, layers=model.layers, width=model.width
    )
    if size > machine.gpu.usable_bytes:
        yield Found(
            "generation_num_beams" if beams != 1 else "generation_max_length",
            beams if beams != 1 else tokens,
            why=f"{batch} samples × {beams} beams × {tokens} tokens take {format_size(size)} of keys and values, by "
            f"formula, and {machine.gpu.name} has {format_size(machine.gpu.usable_bytes)}",
            argument=True,
        )
