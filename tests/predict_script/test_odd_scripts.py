"""Scripts that do to their own process what Python allows are predicted, or get a line that is true."""

from __future__ import annotations

import io
import sys

import pytest

from hf_memkit.prediction.child.output import flush_output, say
from tests.predict_script.conftest import Predict
from tests.predict_script.test_command import TINY

_THREAD = "thread = threading.Thread(target={}); thread.start(); thread.join()"
ODD = {
    "train() in a thread": f"t = trainer(tiny())\n{_THREAD.format('t.train')}",
    "all in a thread": _THREAD.format("lambda: trainer(tiny()).train()"),
    "closed output": "sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2); trainer(tiny()).train()",
    "a double of json": "json.dumps = lambda *args, **options: 'double'; trainer(tiny()).train()",
}


@pytest.fixture(scope="module")
def events() -> list[int]:
    """Numbers of traced events, filled by the tests."""
    return []


@pytest.mark.parametrize("way", ODD)
def test_it_is_the_same_training(predict: Predict, events: list[int], way: str) -> None:
    outcome = predict(f"import json, os, threading\n{TINY}\n{ODD[way]}\n")
    assert outcome.training is not None, outcome
    events.append(len(outcome.training.trace.events))
    assert set(events) == {events[0]}


def test_a_script_that_predicts_itself_is_named(predict: Predict) -> None:
    outcome = predict(f"{TINY}\nimport hf_memkit\nhf_memkit.predict_trainer(trainer(tiny()), gpu='T4')\n")
    assert outcome.failed is not None and outcome.failed.type == "InputError"
    assert outcome.failed.message.startswith("predict_trainer() in a script that memkit predicts")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_memkit_prints_beside_closed_output(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    if stream is not None:
        stream.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    say("a line")
    flush_output()
