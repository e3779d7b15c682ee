"""The pack: one variant of each task and of each engine exports a script that runs; with `--exhaustive` every one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import read_json_lines
from tests.engine.test_pack import RESIDENT_FIRST, engine, marked, task
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
