"""What `traffic.py` says is sent, and what two ranks of DistributedDataParallel and DeepSpeed hand to collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.deepspeed import ops
from hf_memkit.deepspeed.traffic import StepTraffic, ddp_traffic, zero_traffic
from tests.conftest import ROOT
from tests.engine.preset_cases import with_precision
from tests.engine.swap_traffic_driver import WIDE, swapping
from tests.engine.tiny_training import MODEL
from tests.engine.traffic_driver import CASES, Case
from tests.operators import EVERY_OPERATOR

pytestmark = [pytest.mark.operators, pytest.mark.alone]

Counted = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    folder = tmp_path_factory.mktemp("traffic")
    ops.build(EVERY_OPERATOR, print, cpu=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "-m", "tests.engine.traffic_driver", str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: Counted = json.loads((folder / "traffic.json").read_text())
    return found


def model_of(case: Case) -> ModelFacts:
    return describe("traffic/tiny", MODEL | {"n_layer": case.layers}, use_hub=False)


def predicted(case: Case) -> StepTraffic:
    if case.config is None:
        return ddp_traffic(model_of(case), gpus=2, gradient_bytes=4)
    config = with_precision(case.config, bf16=case.bf16)
    traffic = zero_traffic(config, model_of(case), gpus=2, accumulation=case.accumulation, recomputes=case.recomputes)
    assert traffic is not None
    return traffic


_WHOLE = {  # of what one of two ranks sends in a ring
    "all-reduce": ("all_reduce", 1),
    "reduce of": ("reduce", 2),
    "reduce-scatter": ("reduce_scatter_tensor", 2),
    "all-gather": ("all_gather_into_tensor", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_collectives_are_given_what_is_predicted(counted: Counted, name: str) -> None:
    """To the byte, all of them and no others; but stage 3 keeps whole parameters, and the formula elements."""
    found: dict[str, float] = {}
    for row in predicted(CASES[name]).rows:
        if row.link == "gpus":
            (kind,) = (kind for kind in _WHOLE if row.name.startswith(kind))
            collective, factor = _WHOLE[kind]
            found[collective] = found.get(collective, 0) + factor * row.moved_bytes
    within = 0.03 if "none kept" in name or "some kept" in name else 0
    assert found == pytest.approx(counted[name], rel=within, abs=0)


def test_a_disk_reads_and_writes_what_is_predicted(tmp_path: Path) -> None:
    """ZeRO-Infinity in one process. Would notice: a moment, a gradient or a pass that is not counted, or is twice."""
    ops.build(EVERY_OPERATOR, print, cpu=True)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(ops.extensions_folder(cpu=True)),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.engine.swap_traffic_driver", str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    model = describe("traffic/wide", WIDE, use_hub=False)
    traffic = zero_traffic(with_precision(swapping("disk"), bf16=False), model, accumulation=2)
    assert traffic is not None
    moved = {link: sum(row.moved_bytes for row in traffic.rows if row.link == link) for link in ("read", "write")}
    assert moved == pytest.approx(json.loads((tmp_path / "swaps.json").read_text()), rel=0.01)
