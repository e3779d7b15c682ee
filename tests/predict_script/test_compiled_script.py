"""Scripts with torch_compile: what is traced, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.predict_script.conftest import Predict

_SCRIPT: Final = """
import sys
import torch
import transformers
from transformers import Trainer, TrainingArguments

LLAMA = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=512, use_cache=False,
)
T5 = dict(
    vocab_size=512, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
)
if "t5" in sys.argv:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
else:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
if "twice" in sys.argv:
    class Twice(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            first = super().forward(input_ids=input_ids, labels=labels)
            return {"loss": first.loss + super().forward(input_ids=input_ids.flip(0), labels=labels).loss}

    model = Twice(transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 4}))
    model.gradient_checkpointing_enable()
if "chunked" in sys.argv:
    from hf_memkit.components.chunked_loss import install

    install(model)
if "forward" in sys.argv:
    model.forward = torch.compile(model.forward)
if "in-place" in sys.argv:
    model.compile()
lengths = [64, 96, 100, 128] if "lengths" in sys.argv else [128]
rows = [{"input_ids": torch.arange(length), "labels": torch.arange(length)} for length in lengths * 16]
options = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
arguments = TrainingArguments(
    "out", max_steps=3, per_device_train_batch_size=1 if "lengths" in sys.argv else 4, report_to=[], bf16=True,
    torch_compile="eager" not in sys.argv, use_liger_kernel="liger" in sys.argv, **options
)
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
"""


@pytest.mark.parametrize(
    ("arguments", "capability", "reason"),
    [
        (["torch_compile_mode=reduce-overhead"], (8, 9), "torch_compile_mode=reduce-overhead: CUDA graphs"),
        pytest.param(
            ["torch_compile_mode=reduce_overhead"],
            (8, 9),
            "unknown; did you mean 'reduce-overhead'?",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["torch_compile_backend=cudagraphs"],
            (8, 9),
            "torch_compile_backend=cudagraphs: not traced",
            marks=pytest.mark.slow,
        ),
        ([], (6, 0), "has compute capability 6.0; Triton needs 7.0 or later"),
        (["liger"], (8, 9), "torch_compile with Liger"),
        pytest.param(  # Trainer applies Liger afterwards
            ["eager", "forward", "liger"], (8, 9), "torch_compile with Liger", marks=pytest.mark.slow
        ),
        (
            ["eager", "in-place"],
            (8, 9),
            "LlamaForCausalLM.compile(): a module that is compiled in place is not traced",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused(
    predict: Predict, arguments: list[str], capability: tuple[int, int], reason: str
) -> None:
    failed = predict(_SCRIPT, *arguments, capability=capability).failed
    assert failed is not None and failed.type in ("Unmodelled", "NoKernel", "SettingError") and not failed.by_script
    assert reason in failed.message and "\n" not in failed.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ([], {}),
        (["t5"], {}),  # creates a constant on the GPU
        (["chunked"], {}),  # with Liger's kernel, between two graphs
        (["lengths"], {}),
        (["optim=adamw_torch_8bit"], {}),
        (["eval_strategy=steps"], {}),
        ([], {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}),
    ],
)
def test_a_compiled_script_is_traced(predict: Predict, arguments: list[str], environment: dict[str, str]) -> None:
    compiled, eager = (
        predict(_SCRIPT, *arguments, *more, environment=environment, capability=(8, 9)) for more in ([], ["eager"])
    )
    assert compiled.training is not None and eager.training is not None, compiled.failed
    assert eager.training.compilation is None
    assert compiled.training.compilation is not None and compiled.training.compilation.graphs >= 2
    assert any(note.startswith("compiled by torch ") for note in compiled.training.notes)

    peaks = [sum(outcome.training.of_steps()["worst"].peak().categories.values()) for outcome in (compiled, eager)]
    assert peaks[0] < peaks[1], "compiling saves activations here"


@pytest.mark.slow
def test_a_forward_that_the_script_compiled_is_traced(predict: Predict) -> None:
    """Would notice: hooks inside of it, which end its graph."""
    by_script, by_argument = (predict(_SCRIPT, *words, capability=(8, 9)) for words in (["eager", "forward"], []))
    assert by_script.training is not None and by_argument.training is not None, by_script.failed
    assert by_script.training.compilation == by_argument.training.compilation
    peaks = [each.training.of_steps()["worst"].peak().categories for each in (by_script, by_argument)]
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_one_graph_recomputes_both_calls_of_checkpointed_layers(predict: Predict) -> None:
    """Defect: pytorch#193193 is fixed, and compiling layer by layer saves no memory."""

    def backward_bytes(*more: str, **environment: str) -> int:
        training = predict(_SCRIPT, "twice", *more, environment=environment, capability=(8, 9)).training
        assert training is not None
        step = training.of_steps()["worst"].peak().activations
        return next(size for kind, size in step.items() if kind.startswith("recomputed"))

    compiled = backward_bytes()
    assert compiled > 1.2 * backward_bytes("eager")
    assert compiled > 1.2 * backward_bytes(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION="true")


@pytest.mark.slow
def test_a_compiled_prediction_leaves_no_file(tmp_path: Path) -> None:
    """Inductor writes its code to a folder of temporary files, or to the user's cache."""
    script, temporary, cache = tmp_path / "train.py", tmp_path / "temporary", tmp_path / "cache"
    script.write_text(_SCRIPT)
    temporary.mkdir()
    command = [sys.executable, "-m", "hf_memkit", "predict", str(script), "--gpu", "RTX 4090", "--json"]
    folders = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    environment = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "compiling on this machine, about" in run.stderr, run.stderr
    assert json.loads(run.stdout)["compilation"]["graphs"] >= 2
    assert [path for folder in (temporary, cache) for path in folder.rglob("*") if path.is_file()] == []
