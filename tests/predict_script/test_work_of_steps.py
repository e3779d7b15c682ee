"""The work of a script's steps, and which calls belong to which step."""

from __future__ import annotations

import itertools

from hf_memkit.catalog.gpu_rates import RATES
from hf_memkit.prediction.time.step_time import step_time
from hf_memkit.prediction.trace.work import Work
from tests.predict_script.conftest import Predict

TRAIN = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=512, vocab_size=128))
rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in [32] * 63 + [512]]
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=8, report_to="none",
    save_strategy="no")
Trainer(model, arguments, train_dataset=rows).train()
"""


def flops(work: Work, begin: int, end: int) -> int:
    return sum(work.operations[call].flops for call in work.calls[begin:end])


def test_the_usual_and_the_worst_step_are_told_apart(predict: Predict) -> None:
    """Defect: calls of one step counted with the next, or the bounds of storages taken for those of calls."""
    found = predict(TRAIN, for_plan=True)
    work, steps = found.training.trace.work, found.training.steps
    of_kind = {step.kind: step.calls for step in steps}
    typical, worst = flops(work, *of_kind["typical"]), flops(work, *of_kind["worst"])
    assert typical > 0 and worst > 8 * typical  # sixteen times the tokens
    assert all(first.calls[1] == second.calls[0] for first, second in itertools.pairwise(steps))
    price = [
        step_time(work, RATES["T4"], capability=7.5, span=of_kind[kind], micro_batches=8)
        for kind in ("typical", "worst")
    ]
    assert price[0].seconds[1] < price[1].seconds[1]
    assert set(price[1].by_phase) >= {"forward", "backward", "optimizer"} and not price[1].unknown


def test_work_is_not_recorded_unless_it_is_asked_for(predict: Predict) -> None:
    found = predict(TRAIN)
    assert found.training.trace.work is None and found.training.plan is None
