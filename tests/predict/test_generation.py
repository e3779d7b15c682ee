"""Evaluations that generate: the bound is above what Seq2SeqTrainer holds on real tensors, and not far above."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from hf_memkit.predict.request import Request
from hf_memkit.predict.worker import Worker
from tests.predict.architectures import ARCHITECTURES, request

_BY_NAME: Final = {each.name: each for each in ARCHITECTURES}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    found = Worker(limit_s=300)
    yield found
    found.close()


def asked(architecture: str, settings: dict[str, Any]) -> Request:
    found = request(_BY_NAME[architecture], "plain", "cpu")
    setup = found.setup
    endless = {**setup["model.architecture"], "eos_token_id": None, "forced_eos_token_id": None}
    setup = setup.put("model.architecture", endless, "random weights end early")
    for key, value in {
        "trainer.class": "transformers:Seq2SeqTrainer",
        "trainer.arguments_class": "transformers:Seq2SeqTrainingArguments",
        "arguments.predict_with_generate": True,
        "arguments.per_device_eval_batch_size": 16,
        **settings,
    }.items():
        setup = setup.put(key, value, "a test's")
    return replace(found, setup=setup, evaluate=True)


@pytest.mark.parametrize("architecture", ["t5", "bart", "whisper"])
@pytest.mark.parametrize(("length", "beams", "most"), [(100, 1, 1.1), (60, 3, 2.3)])
def test_the_bound_is_above_the_real_evaluation(
    worker: Worker, architecture: str, length: int, beams: int, most: float
) -> None:
    wanted = asked(architecture, {"arguments.generation_max_length": length, "arguments.generation_num_beams": beams})
    fake = worker.trace(wanted).peaks_by_phase()["evaluate"]
    real = worker.trace(replace(wanted, device="real cpu")).peaks_by_phase()["evaluate"]
    print(architecture, length, beams, fake / real)
    assert real <= fake < most * real


def test_longer_answers_and_more_beams_need_more(worker: Worker) -> None:
    peaks = [
        worker.trace(asked("t5", {"arguments.generation_max_length": length, "arguments.generation_num_beams": beams}))
        .peaks_by_phase()["evaluate"]
        for length, beams in ((20, 1), (200, 1), (200, 4))
    ]  # fmt: skip
    assert peaks == sorted(set(peaks))
