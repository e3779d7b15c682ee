"""Script jobs, the report and a front end with earlier libraries. memkit lies outside of these environments, as for
its users; `scripts/older_environments` makes them, and CI calls it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import typer

from hf_memkit.common import boot
from hf_memkit.common.user_script import UserScript
from hf_memkit.measuring.memory.records import read_records, steps
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.worker import Worker
from tests.conftest import ROOT
from tests.predict_script.conftest import prepared
from tests.predict_script.test_jobs import EXACT, by_phase, check_job, started
from tests.predict_script.test_network import WRITES, check_writes, online_request, serving

pytestmark = pytest.mark.older

JOBS: Final = {
    "oldest": ("causal_lm_from_scratch", "sentiment", "summarization", "trl_sft_lora", "trl_dpo_lora", "qlora"),
    "front-end": ("causal_lm_from_scratch", "summarization", "trl_sft_packing_eval", "lora_merge", "qlora"),
}
"""Environment → its jobs: full and with adapters, with an evaluation, one that generates, TRL's trainers, 4 bits."""


def python_of(environment: str) -> str:
    found = ROOT / ".compat" / environment / "bin" / "python"
    assert found.exists(), "run scripts/older_environments"
    return str(found)


@pytest.fixture(scope="module", params=list(JOBS))
def environment(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def older_worker(environment: str) -> Iterator[Worker]:
    made = Worker(python=python_of(environment))
    yield made
    made.close()


@pytest.fixture(scope="module")
def older_folder(environment: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data, saved by these libraries: earlier ones do not read what later ones save."""
    return prepared(tmp_path_factory.mktemp("jobs"), python_of(environment), "--text")


def memkit(python: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`memkit WORDS` in that environment, with what memkit prints with."""
    variables = {
        **os.environ, "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
        boot.PLACE: boot.place_of(typer.__file__), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = boot.command(*words, python=python)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


def recorded(folder: Path) -> list[int]:
    return [step["step"] for step in steps(read_records(folder / "memory-rank0.jsonl"))]


def test_each_phase_of_a_job_allocates_what_is_predicted(
    environment: str, older_worker: Worker, older_folder: Path, tmp_path: Path
) -> None:
    """Would notice: another version's way of loading, quantising, generating or calling back that is not followed."""
    for name in JOBS[environment]:
        (tmp_path / name).mkdir()
        check_job(older_worker, older_folder, tmp_path / name, name)


def test_nothing_is_sent_with_the_hub_client_of_requests(tmp_path: Path) -> None:
    # Without the fixture: pytest takes it for the one of the next test, whose only parameter is also its first.
    with serving() as server, contextlib.closing(Worker(python=python_of("oldest"))) as worker:
        check_writes(worker.run(online_request(server, tmp_path, WRITES)), server)


def test_a_run_has_its_report(environment: str, older_folder: Path, tmp_path: Path) -> None:
    script, _ = started(older_folder, tmp_path / "out", "causal_lm_from_scratch", on_cpu=True)
    ended = memkit(python_of(environment), tmp_path, "run", script.target, "--", *script.arguments)
    assert ended.returncode == 0, ended.stderr
    assert "Finished after step 2" in ended.stderr and recorded(tmp_path / "out") == [1, 2]


@pytest.mark.parametrize("environment", ["front-end"], scope="module")
def test_a_front_end_is_predicted_and_trains_with_a_report(
    environment: str, older_worker: Worker, older_folder: Path, tmp_path: Path
) -> None:
    """ms-swift's own command, which starts a separate Python. Would notice: a command that is not followed, a trace
    that is another training than the front end's, a run without a report."""
    turns = [("user", "Hello"), ("assistant", "Good morning to you")]
    row = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (tmp_path / "chats.jsonl").write_text(f"{row}\n" * 40)
    options = {
        "model": older_folder / "models" / "llama-tiny", "model_type": "llama", "template": "dummy",
        "dataset": tmp_path / "chats.jsonl", "tuner_type": "lora", "output_dir": "out", "max_steps": 3,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 128,
        "torch_dtype": "float32", "report_to": "none", "eval_strategy": "no", "split_dataset_ratio": 0,
        "check_model": "false",  # else it asks ModelScope, and waits for the answer
    }  # fmt: skip
    words = ["swift", "sft", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    python = python_of(environment)
    predicted = memkit(python, tmp_path, "predict", "--gpu", "T4", "--json", "--", *words)
    assert predicted.returncode == 0, predicted.stderr
    found = json.loads(predicted.stdout)
    assert found["verdict"] == "fits" and found["request"]["script"].endswith("swift/cli/sft.py")
    script = UserScript(found["request"]["script"], arguments=tuple(words[2:]))
    real, traced = (
        older_worker.run(ScriptRequest(script, str(tmp_path), dict(os.environ), device=device, worst_batch=False))
        for device in ("real cpu", "cpu")
    )
    trained, expected = by_phase(real), by_phase(traced)
    for phase in ("forward", "backward", "optimizer", "save"):
        assert expected[phase] == pytest.approx(trained[phase], rel=EXACT), phase
    ended = memkit(python, tmp_path, "run", "--records", "records", "--", *words)
    assert ended.returncode == 0, ended.stderr
    assert "Finished after step 3" in ended.stderr and recorded(tmp_path / "records") == [1, 2, 3]
