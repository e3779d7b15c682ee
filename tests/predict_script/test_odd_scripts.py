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
    "all in a thread": f"""
def main():
    assert (torch.ones(3).to("cuda") + torch.ones(3, device="cuda")).is_cuda
    model = tiny().cuda()
    trainer(model).train()
{_THREAD.format("main")}""",
    "closed output": "sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2); trainer(tiny()).train()",
    "a double of json": "json.dumps = lambda *args, **options: 'double'; trainer(tiny()).train()",
}


@pytest.mark.parametrize("way", [pytest.param("train() in a thread", marks=pytest.mark.slow), *list(ODD)[1:]])
def test_it_is_predicted(predict: Predict, way: str) -> None:
    outcome = predict(f"import json, os, threading\n{TINY}\n{ODD[way]}\n")
    assert outcome.training is not None and outcome.training.steps, outcome


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
