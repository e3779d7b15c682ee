"""A trace with remembered results is the trace that torch's own fake tensors give, event by event."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from hf_memkit.prediction.setup_as_script import SetupJob
from tests.prediction.architectures import ARCHITECTURES, of_architecture
from tests.prediction.cases import GPT2, LLAMA, training

pytestmark = pytest.mark.tracing

ROOT: Final = Path(__file__).resolve().parents[2]
_BY_NAME: Final = {each.name: each for each in ARCHITECTURES}


def _with(asked: SetupJob, settings: Mapping[str, Any]) -> SetupJob:
    setup = asked.setup
    for key, value in settings.items():
        setup = setup.put(key, value, "a test's")
    return replace(asked, setup=setup)


ON_CPU: Final = "on the CPU"

CASES: Final[Mapping[str, SetupJob]] = {
    "decoder, recomputed, 8-bit AdamW": _with(
        training({**GPT2, "n_embd": 256}, bf16=True, gradient_checkpointing=True),
        {"optimizer.class": "hf_memkit.components.low_bit_adamw:AdamW8bit", "optimizer.block_size": 256},
    ),
    # More parameters than a list may have that is looked through: fused steps and norms of all of them.
    "decoder of many layers": training({**GPT2, "n_layer": 18}, bf16=True),
    "decoder of many layers, foreach": training({**GPT2, "n_layer": 18}, optim="adamw_torch"),
    "decoder, chunked loss": _with(training(LLAMA), {"model_parts.chunked_loss": {"chunk_tokens": 32}}),
    "LoRA": of_architecture(_BY_NAME["llama"], "lora"),
    "encoder and decoder": of_architecture(_BY_NAME["t5"], "checkpointing"),
    "convolutions": of_architecture(_BY_NAME["convnext"], "bf16"),
    "autocast": of_architecture(_BY_NAME["bert"], "bf16"),
    "Adafactor": of_architecture(_BY_NAME["gemma2"], "accumulation"),
    ON_CPU: of_architecture(_BY_NAME["whisper"], "plain"),
    "AdamW of bitsandbytes": training(LLAMA, optim="adamw_bnb_8bit", fp16=True),
}


FEW: Final = ("decoder, recomputed, 8-bit AdamW",)


@pytest.fixture(scope="module")
def traces(request: pytest.FixtureRequest) -> dict[str, tuple[dict[str, Any], dict[str, Any], float]]:
    wanted = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.prediction.fast_fakes_child"],
        input=json.dumps([(CASES[name].to_json(), "cpu" if name == ON_CPU else "cuda") for name in wanted]),
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(zip(wanted, json.loads(ran.stdout), strict=True))


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow if name in FEW else pytest.mark.exhaustive]) for name in CASES],
)
def test_the_trace_is_torch_s_own(traces: dict[str, Any], case: str) -> None:
    fast, slow, share = traces[case]
    assert len(slow["events"]) > 500
    for name, expected in slow.items():
        assert fast[name] == expected, name
    assert share > 0.5, "most of it was remembered, or nothing is compared"
