"""The child process: results, and behavior when a case fails or dies."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import psutil
import pytest

from hf_memkit.cli.run_folder import FolderOptions, train
from hf_memkit.common.errors import TraceFailed
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.trace.trace import Trace, rounded
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker, close_workers, lent_worker, shared_worker
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.ranks import ranks_from_environment
from tests.prediction.cases import GPT2, LLAMA, facts, traced, training


def bytes_of(trace: Trace, category: str) -> int:
    """Bytes of all storages of a category, whenever they lived."""
    number = CATEGORIES.index(category)  # type: ignore[arg-type]
    return sum(size for size, which in zip(trace.sizes_bytes, trace.category_of, strict=True) if which == number)


@pytest.mark.slow
def test_states_come_out_to_the_byte(worker: Worker) -> None:
    trace = traced(worker, training())
    assert worker.shim_error is None, "the shim works here"
    sizes = facts(GPT2).sizes
    assert bytes_of(trace, "weights") == 4 * sum(sizes)
    assert bytes_of(trace, "gradients") == 2 * 4 * sum(sizes), "one set a step"
    makers = [trace.operations[number] for number in trace.operation_of]
    assert makers.count("cuBLAS workspace") == 2, "forward's, and that of autograd's thread"
    optimizer = trace.at(len(trace.events) - 1).categories["optimizer"]
    assert optimizer == 2 * sum(rounded(4 * size) for size in sizes) + len(sizes) * rounded(4), "moments, and counters"


@pytest.mark.tracing
def test_an_activation_s_backward_is_one_kernel(worker: Worker) -> None:
    """A GPU's kernel makes the gradient alone; torch without CUDA would take it apart, with five temporaries."""
    trace = traced(worker, training(LLAMA))
    (backward,) = (number for number, name in enumerate(trace.operations) if name.startswith("aten.silu_backward"))
    assert trace.operation_of.count(backward) == 2 * LLAMA["num_hidden_layers"]
    assert not any(name.startswith("aten.sigmoid") for name in trace.operations)


@pytest.mark.slow
def test_recomputation_and_accumulation(worker: Worker) -> None:
    few_words = {**GPT2, "vocab_size": 50, "n_layer": 6}
    plain = traced(worker, training(few_words, bf16=True)).peak()
    checkpointed = traced(worker, training(few_words, bf16=True, activation_checkpointing=True)).peak()
    assert 0 < checkpointed.categories["activations"] < plain.categories["activations"] / 2
    assert checkpointed.categories["loss"] < checkpointed.categories["activations"] / 100, "only the loss itself"
    assert plain.categories["weights"] > 1.25 * 4 * sum(facts(few_words).sizes), "fp32, and autocast's 16-bit copies"
    accumulated = traced(worker, training(few_words, bf16=True, gradient_accumulation_steps=8)).peak()
    assert accumulated.categories["gradients"] >= 4 * sum(facts(few_words).sizes) > plain.categories["gradients"]


def test_a_case_that_fails_says_why_and_leaves_the_worker(worker: Worker) -> None:
    setup = training().setup.put("model.class", "NoSuchModel", "a test's")
    with pytest.raises(TraceFailed, match="no model class 'NoSuchModel'") as caught:
        traced(worker, replace(training(), setup=setup))
    assert caught.value.refused and caught.value.kind == "InputError"
    with pytest.raises(TraceFailed, match=r"n_head|divisible") as other:
        traced(worker, training({**GPT2, "n_head": 7}))
    assert not other.value.refused and "Traceback" in other.value.details
    assert traced(worker, training()).events


@pytest.mark.slow
def test_a_process_that_is_killed(worker: Worker) -> None:
    worker.wait()
    assert worker._process is not None
    serving = psutil.Process(worker._process.pid)

    def kill_the_case() -> None:
        while not (cases := serving.children()):
            time.sleep(0.01)
        cases[0].kill()

    killer = threading.Thread(target=kill_the_case, daemon=True)
    killer.start()
    with pytest.raises(TraceFailed, match="SIGKILL") as caught:
        traced(worker, training())
    killer.join()
    assert caught.value.kind == "SIGKILL"
    assert traced(worker, training()).events and worker._process.pid == serving.pid, "only the case died"

    serving.kill()
    serving.wait()
    assert traced(worker, training()).events, "another worker takes its place"


DIES_WRITING = """
import json, sys
print(json.dumps({"ready": True, "shim": None}), flush=True)
for line in sys.stdin:
    with open(json.loads(line)["result"], "w") as file:
        file.write('{"trace": {"events": [1, 2')
    print(json.dumps({"why": "SIGKILL"}), flush=True)
"""


def test_what_a_process_wrote_before_it_died_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: half a file that is read, and its JSON error in place of how the process ended. The moment cannot
    be met from outside, so that another program speaks for the server."""
    monkeypatch.setattr("hf_memkit.common.boot.command", lambda *_, **__: [sys.executable, "-c", DIES_WRITING])
    worker = Worker()
    try:
        with pytest.raises(TraceFailed, match="SIGKILL") as caught:
            traced(worker, training())
        assert caught.value.kind == "SIGKILL"
        assert worker.run(ScriptRequest(UserScript("train.py"), ".", {})) == Outcome(died="SIGKILL")
    finally:
        worker.close()


SERVES = """
import json, os, select, sys, time
print(json.dumps({"ready": True, "shim": None}), flush=True)
for line in sys.stdin:
    with open(json.loads(line)["result"], "w") as file:
        time.sleep(0.02)
        early = select.select([sys.stdin], [], [], 0)[0]
        file.write(json.dumps({"died": f"{os.getpid()} {line.count('wide')} {len(early)}"}))
    print(json.dumps({"why": None}), flush=True)
"""


@pytest.fixture
def own_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers without libraries. Those of other tests stay as they are."""
    monkeypatch.setattr("hf_memkit.common.boot.command", lambda *_, **__: [sys.executable, "-c", SERVES])
    monkeypatch.setattr("hf_memkit.prediction.worker._shared", None)
    monkeypatch.setattr("hf_memkit.prediction.worker._idle", [])
    yield
    close_workers()


@pytest.mark.usefixtures("own_workers")
def test_a_script_s_worker_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: two at once that share one, one that has other variables than the script, one that was closed."""
    request = ScriptRequest(UserScript("train.py"), ".", {})

    def served(worker: Worker) -> int:
        return int((worker.run(request).died or "0").split()[0])

    with lent_worker(None) as one, lent_worker(None) as other:
        first, second = served(one), served(other)
        assert first != second
    with lent_worker(None) as one:
        assert served(one) in (first, second)
        kept = served(one)
        assert [each for each in (first, second) if psutil.pid_exists(each)] == [kept]
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    with lent_worker(None) as one:
        changed = served(one)
        assert changed != kept and not psutil.pid_exists(kept)
        one.close()
    with lent_worker(None) as one, ThreadPoolExecutor(4) as pool:
        assert served(one) != changed
        asked = [replace(request, script=UserScript("wide" * number)) for number in range(1, 9)]
        found = [each.died for each in pool.map(one.run, asked)]
        assert [each.split()[1:] for each in found if each] == [[str(number), "0"] for number in range(1, 9)]
        one.close()


@pytest.mark.usefixtures("own_workers")
def test_workers_have_ended_when_a_recipe_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    request = ScriptRequest(UserScript("train.py"), ".", {})
    with lent_worker(None) as lent:
        workers = [int((each.run(request).died or "").split()[0]) for each in (lent, shared_worker())]
    left = []

    def run(*_: object, **__: object) -> dict[str, str | None]:
        left.extend(each for each in workers if psutil.pid_exists(each))
        return {"status": "finished", "stopped_by": None}

    monkeypatch.setattr("hf_memkit.run.training.run", run)
    assert all(map(psutil.pid_exists, workers))
    assert train(cast(RecipeRun, None), ranks_from_environment(), FolderOptions(as_json=True)) == 0
    assert not left
