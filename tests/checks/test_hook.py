"""The hook of `.pre-commit-hooks.yaml`, run by the real pre-commit in a separate repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_memkit.deepspeed.presets import load
from tests.conftest import ROOT

MANIFEST = ROOT / ".pre-commit-hooks.yaml"


def hook() -> dict[str, Any]:
    (result,) = yaml.safe_load(MANIFEST.read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("deepspeed_configs/zero3_bf16.json", True),
        ("examples/deepspeed/ds_z3_config.json", True),
        ("configs/DeepSpeed.json", True),
        ("deepspeed/data/train.json", False),
        ("ds_salaries.json", False),
        ("ds_config.yaml", False),
    ],
)
def test_the_hook_takes_files_named_after_deepspeed(path: str, taken: bool) -> None:
    assert (re.search(hook()["files"], path) is not None) is taken


@pytest.mark.slow
def test_pre_commit_runs_it(tmp_path: Path) -> None:
    """With the entry and the pattern of the manifest; `language: python` would install PyTorch once more."""
    done = subprocess.run([sys.executable, "-m", "pre_commit", "validate-manifest", str(MANIFEST)])
    assert done.returncode == 0
    entry = hook()["entry"].replace("memkit", f"{sys.executable} -m hf_memkit", 1)
    local = {"repo": "local", "hooks": [hook() | {"language": "system", "entry": entry}]}
    (tmp_path / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [local]}))
    good, bad = tmp_path / "ds_config_good.json", tmp_path / "configs" / "ds_config_bad.json"
    bad.parent.mkdir()
    good.write_text(json.dumps(load("zero2")))
    bad.write_text(json.dumps(load("zero2") | {"zero_optimization": {"stage": 5}}))
    (tmp_path / "package.json").write_text("[1]")  # memkit could not read it
    home = {"PRE_COMMIT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | home

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    for command in (("git", "init", "-q"), ("git", "add", "ds_config_good.json", "configs", "package.json")):
        assert run(*command).returncode == 0
    refused = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    assert refused.returncode == 1 and "1 error in " in refused.stdout, refused.stdout + refused.stderr
    assert "configs/ds_config_bad.json: zero_optimization.stage" in refused.stdout
    bad.write_text(good.read_text())
    passed = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    assert passed.returncode == 0, passed.stdout + passed.stderr
