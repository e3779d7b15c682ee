"""`--calibrate`: real products and launches on the CPU, a real file, real records."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memkit.errors import InputError
from hf_memkit.gpu_rates import rates_of
from hf_memkit.hardware import Machine, named_gpu, this_machine
from hf_memkit.memory.records import SCHEMA
from hf_memkit.plan.calibrate import calibrate, calibrate_by_run, factors_of, measured_probes
from hf_memkit.plan.calibration import Calibration, cache_file, store, stored, torch_version
from hf_memkit.plan.pricing import Pricing, priced
from hf_memkit.planned_run import PlannedRun
from hf_memkit.prediction.operation_time import OperationSeconds
from hf_memkit.prediction.work import Operation, Work
from hf_memkit.rates import Figure, GpuRates
from hf_memkit.script_overrides import Overrides
from tests.plan.made_plans import plan, setup

L4 = named_gpu("L4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "memkit" / "calibration.json"


def kept(**factors: float) -> Calibration:
    return Calibration("L4", "", torch_version(), factors, "a test", "2026-01-31")


@pytest.mark.slow
def test_what_is_measured_is_what_a_plan_takes(cache: Path) -> None:
    """Finds: a factor upside down, probes that record nothing, a file that is not read back."""
    tflops = {"float32": Figure(0.05, "a CPU")}
    slow = GpuRates(
        tflops, tflops, Figure(20, "a CPU"), Figure(10, "a CPU"), Figure(10, "a CPU"), None, Figure(2, "a CPU")
    )
    probes = measured_probes("cpu")
    assert [each["kind"] for each in probes] == [*["matmul"] * 3, *["memory"] * 2, "host"]
    found = factors_of(probes, slow, 8.0, likely=50)
    assert set(found) == {"matmul", "memory", "host"} and all(0.02 <= each <= 50 for each in found.values())
    # With its factor a product takes as long as was measured, in the median of three.
    with_factor = OperationSeconds(slow, 8.0, found)
    ratios = [each["seconds"] / with_factor.of(*Work.from_json(each["work"]).operations) for each in probes[:3]]
    assert sorted(ratios)[1] == pytest.approx(1, rel=1e-3)
    assert store(kept(**{kind: min(max(each, 0.1), 10) for kind, each in found.items()})) == cache == cache_file()
    read, warnings = stored(L4)
    assert read is not None and not warnings and read.factors.keys() == found.keys()


def test_a_plan_for_that_gpu_takes_them_and_says_so(cache: Path) -> None:
    store(kept(matmul=2.0, host=1.5))
    store(Calibration("T4", "", torch_version(), {"memory": 1.2}, "a test", "2026-01-31"))
    found, warnings = stored(L4)  # of the two its own
    assert found is not None and not warnings
    machine = Machine(L4, 1 << 36, 1 << 38, "/", 8)
    pricing = Pricing.of(machine)
    assert (
        pricing.calibration is not None
        and pricing.calibration.said() == "calibrated 2026-01-31 by a test: matmul × 2, host × 1.5"
    )
    size = 8192
    product = Operation("aten.mm.default", "matmul", "bfloat16", 2 * size**3, 6 * size**2, (1, size, size, size))
    work = Work([product], [0] * 9, [(8, "backward"), (9, "optimizer")])
    facts: dict[str, Any] = {"arguments": {"optim": "adamw_torch"}}
    about = {"work_steps": [("worst", 0, 9)], "tokens": {}, "deepspeed": None, "plan": facts}
    with_it, without = (
        priced(setup(8, 1, 12.0, None), work, about, each, gpus=1, accumulation=1).step_time
        for each in (pricing, replace(pricing, calibration=None))
    )
    assert with_it is not None and without is not None
    assert with_it.rests_on[0].startswith("calibrated 2026-01-31") and without.rests_on == with_it.rests_on[1:]
    assert with_it.seconds[1] == pytest.approx(2 * without.seconds[1], rel=0.02)
    assert stored(named_gpu("A10G")) == (None, ())


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "null", '{"version": 2}', '{"version": 1, "calibrations": 1}', "[" * 100_000,
        json.dumps({"version": 1, "calibrations": [{"gpu": "L4"}]}),
        *(
            json.dumps({"version": 1, "calibrations": [{
                "gpu": "L4", "driver": "", "torch": "", "how": "", "when": "", "factors": {kind: factor},
            }]})
            for kind, factor in (("matmul", 1e9), ("matmul", float("nan")), ("matmul", "x"), ("speed", 1))
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_not_used(cache: Path, content: str) -> None:
    """Finds: a traceback at every plan, times by a factor that nobody measured, a stranger's file that is lost."""
    cache.parent.mkdir()
    cache.write_text(content)
    found, (warning,) = stored(L4)
    assert found is None and str(cache) in warning and "\n" not in warning and "memkit plan --calibrate" in warning
    store(kept(matmul=1.1))
    assert stored(L4)[0] == kept(matmul=1.1)
    assert cache.with_suffix(".unreadable").read_text() == content


def test_another_torch_is_another_calibration() -> None:
    store(Calibration("L4", "", "1.0", {"matmul": 1.1}, "a test", "2026-01-31"))
    found, (warning,) = stored(L4)
    assert found is None and "it is for torch 1.0, and this is" in warning


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match="--calibrate: this machine has no GPU"):
        calibrate()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_within_a_minute() -> None:
    begin = time.monotonic()
    found, _ = calibrate()
    assert set(found.factors) == {"matmul", "memory", "attention", "transfer", "host"}
    assert time.monotonic() - begin < 90 and stored(this_machine().gpu) == (found, ())


def test_factors_that_no_gpu_has_are_refused() -> None:
    product = Operation("aten.mm.default", "matmul", "bfloat16", 2 * 4096**3, 6 * 4096**2, (1, 4096, 4096, 4096))
    rates = rates_of("L4")
    assert rates is not None
    probe = {"kind": "matmul", "name": "", "work": Work([product], [0]).to_json(), "seconds": 60.0}
    with pytest.raises(InputError, match="Another process"):
        factors_of([probe], rates, 8.9)


def records(folder: Path, *, steps: int = 12, prediction: dict[str, Any] | None = None, **hardware: Any) -> Path:
    """Of a run whose steps take 600 ms, the first and those that were watched longer."""
    run = {
        "kind": "run", "rank": 0, "world_size": 1, "prediction": prediction or {},
        "hardware": {"device_type": "cuda", "device_name": "NVIDIA L4", **hardware},
        "versions": {"torch": torch_version()}, "arguments": {"per_device_train_batch_size": 4},
    }  # fmt: skip
    lines: list[dict[str, Any]] = [run]
    for step in range(1, steps + 1):
        watched = {"categories": {}} if step <= 3 else {}
        lines.append({"kind": "step", "step": step, "steps": 1, "step_time_ms": 900 if watched else 600, **watched})
    lines.append({"kind": "end", "status": "finished"})
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"schema": SCHEMA, "time": 1.0, **line}) + "\n" for line in lines)
    (folder / "memory-rank0.jsonl").write_text(text)
    return folder


PREDICTED = {"step_time_ms": [400.0, 500.0, 700.0], "setup": "4 × 2, checkpointing"}


def test_a_run_calibrates_what_its_plan_has_predicted(tmp_path: Path) -> None:
    """Finds: steps that were watched counted in; a second calibration by the same run that multiplies the first."""
    for _ in range(2):
        found, path = calibrate_by_run(records(tmp_path / "run", prediction=PREDICTED))
        assert found.factors == {"all": 1.2} and found.gpu == "L4" and path == cache_file()
        assert found.how == "the steps of run (4 × 2, checkpointing)"
        read, _ = stored(L4)
        assert read == found and set(read.of_kinds().values()) == {1.2}
    # Of a plan that was calibrated: with its factors and this one it takes as long as was measured.
    best = setup(8, 1, 12.0, 0.5)
    about = plan(best, time_factors={"matmul": 1.1, "all": 1.2}).file()["about"]
    found, _ = calibrate_by_run(
        records(tmp_path / "run", prediction=PlannedRun("plan", Overrides(), about).prediction)
    )
    assert found.factors == {"matmul": 1.1, "all": 1.44} and found.how == "the steps of run (8 × 1)"
    assert found.of_kinds()["matmul"] == pytest.approx(1.1 * 1.44)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"prediction": {}},
            "have no predicted step time. Record a run with a plan: memkit plan train.py --write plan.yaml",
        ),
        ({"prediction": PREDICTED, "steps": 7}, "4 of its steps can be used, 5 are needed"),
        ({"prediction": PREDICTED, "device_type": "cpu"}, "ran on cpu, not on a GPU"),
        ({"prediction": {"step_time_ms": 20.0}}, "took 30 times as long as predicted"),
    ],
)
def test_a_run_that_tells_nothing_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=r"--calibrate .*run: ") as refused:
        calibrate_by_run(records(tmp_path / "run", **given))
    assert words in str(refused.value) and not cache_file().exists()
