"""The work of compiled code, and the time to compile it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hf_memkit.common.range import ZERO
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.time.compile_time import compile_seconds
from hf_memkit.prediction.trace.work import Work
from hf_memkit.prediction.traced_training import Compilation
from hf_memkit.prediction.worker import Worker
from tests.prediction.cases import GPT2, LLAMA, traced, traced_training, training
from tests.prediction.compiled_calls_child import ROWS, TOKENS, WIDTH
from tests.prediction.test_prediction import made

pytestmark = pytest.mark.tracing

ROOT: Final = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def small_module() -> Any:
    """What `compiled_calls_child.py` prints."""
    command = [sys.executable, "-m", "tests.prediction.compiled_calls_child"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_a_lookup_moves_the_rows_that_it_reads(small_module: Any) -> None:
    """Defect: a generated kernel gets the whole table as a pointer, and counts all its bytes; or its calls are priced
    as those of eager code."""
    kernels = [(moved, caller) for name, moved, caller in small_module["calls"] if name == "cpp_fused"]

    ids, states, table = 8 * TOKENS, 4 * TOKENS * WIDTH, 4 * ROWS * WIDTH
    forward = ids + states + 2 * states  # reads the rows, writes them for backward, and the result
    backward = ids + 2 * states + table  # reads the gradient and the rows; fills the table's gradient and adds to it
    assert kernels == [(forward, "compiled"), (backward, "compiled")]
    assert small_module["compilation"] == [2, 2]


@pytest.mark.slow
def test_another_torch_is_refused(small_module: Any) -> None:
    """Defect: a version of torch whose private names mean something else gets a wrong prediction. The test of the
    compiler itself is not counted: dynamo saw one frame, that of the module."""
    fails, allocates, moves = small_module["refusals"]
    assert "compiled code fails (TypeError)" in fails
    assert "compiled code allocates [2048, 8192, 8192, 4096, 4096, 4] bytes and keeps " in allocates
    assert "kernels move [1, " in moves
    assert all(f"with torch {torch.__version__}, " in refusal for refusal in small_module["refusals"])
    assert small_module["counters"]["frames"] == {"total": 1, "ok": 1}


@pytest.mark.parametrize(("calls", "measured_s"), [(565, 34), (913, 26)])
def test_the_range_has_what_was_measured(calls: int, measured_s: float) -> None:
    """On an H200 (benchmarks/results/predict-h200.json)."""
    low, middle, high = compile_seconds(Compilation(graphs=2, calls=calls))
    assert low < measured_s < high and low < middle < high


def test_what_is_not_compiled_takes_no_time_and_has_no_key() -> None:
    assert compile_seconds(None) == ZERO
    assert "compilation" not in made().to_json()


def test_json_has_the_compilation() -> None:
    prediction = replace(made(), compilation=Compilation(graphs=2, calls=100))
    content = json.loads(json.dumps(prediction.to_json()))
    assert content["compilation"] == {"graphs": 2, "calls": 100, "seconds": [2.0, 4.0, 8.0]}
    assert Prediction.from_json(content) == prediction


def products(work: Work, span: tuple[int, int]) -> Counter[str]:
    """FLOPs of products in a step, by dtype."""
    found: Counter[str] = Counter()
    for call in work.calls[slice(*span)]:
        operation = work.operations[call]
        if operation.kind == "matmul":
            found[operation.dtype] += operation.flops
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("config", "precision"), [(LLAMA, "bf16"), (GPT2, "fp16")], ids=["llama", "gpt2"])
def test_compiled_products_are_eager_ones(config: dict[str, object], precision: str, worker: Worker) -> None:
    """Defect: products that a backend records twice or not at all, or in another dtype."""
    arguments = {precision: True, "max_steps": 2}
    eager = traced(worker, training(config, **arguments), for_plan=True).work
    assert eager is not None
    expected = products(eager, eager.steps()[-1])
    assert expected.total() > 0
    for backend in ("inductor", "aot_eager", "eager"):
        asked = training(config, **arguments, torch_compile=True, torch_compile_backend=backend)
        compiled = traced_training(worker, asked, for_plan=True)
        work = compiled.trace.work
        assert work is not None
        step = work.steps()[-1]
        assert products(work, step) == expected, backend
        if backend != "inductor":
            assert compiled.compilation is None
            continue
        operations = [work.operations[call] for call in work.calls[slice(*step)]]
        generated = [operation for operation in operations if operation.called_by == "compiled"]
        assert compiled.compilation is not None and compiled.compilation.calls == len(generated)
        kernels = [operation for operation in generated if operation.name.startswith("triton_")]
        assert kernels and all(kernel.moved_bytes for kernel in kernels)
