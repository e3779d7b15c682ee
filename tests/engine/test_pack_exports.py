"""The pack: one variant of each task and of each engine exports a script that runs, and resumes; with `--exhaustive`
every one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from hf_memkit.run.folder import RUN_FILE
from tests.conftest import read_json_lines
from tests.engine.test_pack import PACK, RESIDENT_FIRST, engine, marked, task
from tests.fewer import one_each
from tests.loaded import Loaded

EXPORTED_STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), marked(one_each(RESIDENT_FIRST, task, engine)))
def test_every_export_runs(process: Loaded, tmp_path: Path, name: str, variant: str) -> None:
    command = ["memkit", "recipe", name, "--variant", variant, "--gpus", "1", "--export", "job"]
    exported = process.run([*command, "--max-steps", str(EXPORTED_STEPS)], tmp_path)
    assert exported.returncode == 0, exported.output[-4000:]
    (script,) = (tmp_path / "job").glob("train_*.py")
    written = {path.name for path in script.parent.iterdir()}
    assert written >= {"job.py", "args.yaml"}
    args = yaml.safe_load((script.parent / "args.yaml").read_text())
    parts = [*args.get("model_parts", {}), *args.get("trainer_parts", {})]
    assert written >= {f"{part}.py" for part in parts} and args["arguments"]["output_dir"] == "."
    ran = process.run([script], tmp_path)
    assert ran.returncode == 0, ran.output[-4000:]
    records = read_json_lines(tmp_path / "job" / "memory-rank0.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]
    assert records[-1]["kind"] == "end" and (tmp_path / "job" / "model").is_dir()


ONE_OF_EACH_TASK = (
    "bert-large-on-8gb", "flan-t5-xl-on-24gb", "gpt2-on-16gb", "qwen3-1.7b-on-16gb", "vit-large-on-8gb",
    "whisper-small-on-8gb",
)  # fmt: skip


def test_each_task_has_a_resumed_run() -> None:
    assert sorted(task((name, "")) for name in ONE_OF_EACH_TASK) == sorted({task(case) for case in PACK})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONE_OF_EACH_TASK)
def test_a_resumed_run_equals_a_whole_one(process: Loaded, tmp_path: Path, name: str) -> None:
    """To the last digit. The plain level has the script of images: tests/recipes/test_resuming.py."""
    command = ["memkit", "recipe", name, "--gpus", "1", "--export", "whole", "--max-steps", "4"]
    every_step = ["save_steps=2", "logging_steps=1"]
    exported = process.run([*command, *(word for each in every_step for word in ("--set", each))], tmp_path)
    assert exported.returncode == 0, exported.output[-4000:]
    (script,) = (path.name for path in (tmp_path / "whole").glob("train_*.py"))
    ran = process.run([tmp_path / "whole" / script], tmp_path)
    assert ran.returncode == 0, ran.output[-4000:]
    expected = figures(tmp_path / "whole")
    assert {"loss 3", "loss 4", "eval_loss 4"} <= expected.keys()

    ways: dict[str, list[str | Path]] = {"script": [tmp_path / "script" / script]}
    if name.startswith("vit"):
        ways["run"] = ["memkit", "run", "run", "--resume"]
    for way, resume in ways.items():
        shutil.copytree(tmp_path / "whole", tmp_path / way)
        for later in ("checkpoint-4", "model"):
            shutil.rmtree(tmp_path / way / later)
        run_file = tmp_path / way / RUN_FILE
        run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "status": "interrupted"}))
        resumed = process.run(resume, tmp_path)
        assert resumed.returncode == 0 and "checkpoint-2" in resumed.stdout, resumed.output[-4000:]
        assert figures(tmp_path / way) == expected


def figures(folder: Path) -> dict[str, float]:
    """Losses of the steps after the second, and held out at the end, as the last checkpoint logged them."""
    history = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return {
        f"{key} {entry['step']}": entry[key]
        for entry in history
        for key in ("loss", "eval_loss")
        if key in entry and entry["step"] > 2
    }
