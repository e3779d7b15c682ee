"""Evaluations that hold no logits: the same numbers, and bytes counted inside a real evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from hf_memkit import preset
from hf_memkit.common.errors import SettingError
from hf_memkit.components import streamed_metrics
from hf_memkit.components.pad_batches import PadBatches
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import VOCABULARY, causal_model

SAMPLES, BATCH, TOKENS = 10, 4, 16


class Held(TrainerCallback):
    """The bytes that an evaluation holds after each of its batches, read from the loop itself: what is still a tensor
    (on a GPU it would be on the GPU), and what was moved to RAM."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.arrays: list[int] = []

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "evaluation_loop":
            frame = frame.f_back
        assert frame is not None
        held = [frame.f_locals[name] for name in ("all_preds", "all_labels", "all_inputs")]
        self.tensors.append(sum(_bytes(one.tensors) for one in held))
        self.arrays.append(sum(_bytes(one.arrays) for one in held))


def _bytes(held: Any) -> int:
    if held is None:
        return 0
    if isinstance(held, list | tuple):
        return sum(map(_bytes, held))
    return int(held.nbytes)


def samples(length: int | None = TOKENS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(SAMPLES):
        ids = torch.randint(3, VOCABULARY, (length or 5 + number,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def token_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The ordinary metric, from all logits."""
    actual, labels = prediction.predictions, prediction.label_ids
    actual = (actual.argmax(-1) if actual.ndim == 3 else actual)[:, :-1]
    counted = labels[:, 1:] != -100
    return {"token_accuracy": float((actual == labels[:, 1:])[counted].mean())}


Evaluate = Callable[..., tuple[dict[str, float], Held]]


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    def run(
        options: dict[str, Any] | None = None, data: Any = None, **arguments: Any
    ) -> tuple[dict[str, float], Held]:
        held = Held()
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
            per_device_eval_batch_size=BATCH, **arguments,
        )  # fmt: skip
        trainer = Trainer(
            model=causal_model(), args=args, eval_dataset=data or samples(), data_collator=PadBatches(1),
            callbacks=[held], **(options or {}),
        )  # fmt: skip
        metrics = trainer.evaluate()
        return {name: metrics[name] for name in ("eval_loss", "eval_token_accuracy") if name in metrics}, held

    return run


def streaming(**arguments: Any) -> dict[str, Any]:
    made: dict[str, Any] = streamed_metrics.trainer_options(
        model=causal_model(), processing_class=None, arguments=SimpleNamespace(batch_eval_metrics=True, **arguments)
    )
    return made


LOGITS = 4 * TOKENS * VOCABULARY
"""Bytes of one sample's logits in fp32."""
LABELS = 8 * TOKENS


@proves("same-result", "loss-only-evaluation")
@proves("memory", "loss-only-evaluation")
def test_loss_only_gives_the_same_loss_and_holds_nothing(evaluate: Evaluate) -> None:
    everything, held = evaluate({"compute_metrics": token_accuracy})
    alone, nothing = evaluate({"compute_metrics": token_accuracy}, prediction_loss_only=True)
    assert alone == {"eval_loss": everything["eval_loss"]}
    assert held.tensors[-1] == SAMPLES * (LOGITS + LABELS)
    assert nothing.tensors == [0, 0, 0] and nothing.arrays == [0, 0, 0]


@proves("same-result", "streamed-metrics")
@proves("memory", "streamed-metrics")
@pytest.mark.parametrize("length", [TOKENS, None])
def test_streamed_accuracy_is_the_accuracy_and_holds_nothing(evaluate: Evaluate, length: int | None) -> None:
    data = samples(length)
    model = causal_model()
    with torch.no_grad():  # right now and then: some labels are what the model says
        for row in data[::2]:
            row["labels"] = model(row["input_ids"][None]).logits[0].argmax(-1).roll(1)
    expected, _ = evaluate({"compute_metrics": token_accuracy}, data)
    assert 0.3 < expected["eval_token_accuracy"] < 0.7
    actual, held = evaluate(streaming(), data, batch_eval_metrics=True)
    assert actual == pytest.approx(expected, abs=1e-12)
    assert held.tensors == [0, 0, 0] and held.arrays == [0, 0, 0]


@pytest.mark.parametrize("length", [TOKENS, None])
def test_a_metric_of_one_s_own_can_be_streamed(evaluate: Evaluate, length: int | None) -> None:
    data = samples(length)
    expected, _ = evaluate({"compute_metrics": token_accuracy}, data)
    own = {
        "compute_metrics": streamed_metrics.streamed(token_accuracy),
        "preprocess_logits_for_metrics": streamed_metrics.most_likely,
    }
    for _ in range(2):  # nothing of the first evaluation is left in the second
        assert evaluate(own, data, batch_eval_metrics=True)[0] == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="predictions are logits"):
        evaluate({"compute_metrics": streamed_metrics.streamed(token_accuracy)}, data, batch_eval_metrics=True)


def test_streaming_that_would_do_nothing_is_refused() -> None:
    for arguments, output in (
        ({"batch_eval_metrics": False}, "batch_eval_metrics=False"),
        ({"batch_eval_metrics": True, "prediction_loss_only": True}, "prediction_loss_only=True"),
    ):
        with pytest.raises(ValueError, match=output):
            streamed_metrics.trainer_options(
                model=causal_model(), processing_class=None, arguments=SimpleNamespace(**arguments)
            )


def test_classes_are_not_shifted() -> None:
    metric = streamed_metrics.TokenAccuracy(shift=False)
    assert metric(EvalPrediction(torch.tensor([1, 2]), torch.tensor([1, 1])), compute_result=False) == {}
    done = metric(EvalPrediction(np.array([3]), np.array([3])), compute_result=True)
    assert done == {"token_accuracy": pytest.approx(2 / 3)}
    assert metric(EvalPrediction(np.array([3]), np.array([0])), compute_result=True) == {"token_accuracy": 0.0}


@proves("same-result", "eval-accumulation")
def test_moved_logits_give_the_same_metric_and_leave_the_device(evaluate: Evaluate) -> None:
    expected, held = evaluate({"compute_metrics": token_accuracy})
    actual, moved = evaluate({"compute_metrics": token_accuracy}, eval_accumulation_steps=1)
    assert actual == expected
    sizes = [4 * (LOGITS + LABELS), 4 * (LOGITS + LABELS), 2 * (LOGITS + LABELS)]  # of three batches
    assert held.tensors == np.cumsum(sizes).tolist() and held.arrays == [0, 0, 0]
    assert moved.tensors == sizes and moved.arrays == [0, *np.cumsum(sizes)[:2]]


def test_settings_and_a_value_that_is_none() -> None:
    put = {
        name: TECHNIQUES[name](Setup("x", job=gpt2_job(None)))
        for name in ("loss-only-evaluation", "streamed-metrics", "eval-accumulation")
    }
    assert put["loss-only-evaluation"].arguments == {"prediction_loss_only": True}
    assert put["streamed-metrics"].arguments == {"batch_eval_metrics": True}
    assert put["eval-accumulation"].arguments == {"eval_accumulation_steps": 1}
    with pytest.raises(SettingError, match="eval_accumulation=0"):
        preset("eval-accumulation", values={"eval_accumulation": 0})
