"""The YAML of `accelerate launch`: the config that memkit takes it for is the real one, and what is said of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hf_memkit.checks import check_file
from hf_memkit.checks.accelerate_files import deepspeed_config
from hf_memkit.cli import main
from tests.conftest import ROOT

DEEPSPEED: Final[dict[str, Any]] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 4,
}  # fmt: skip
CONFIGS: Final[tuple[tuple[dict[str, Any], dict[str, Any], str], ...]] = (
    ({}, {}, "no"),
    ({"zero_stage": 3, "zero3_save_16bit_model": True, "gradient_accumulation_steps": 4}, {"bf16": True}, "no"),
    ({"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}, {}, "fp16"),
    ({"zero_stage": 2, "gradient_clipping": 0.5, "offload_optimizer_device": "none"}, {"bf16": True}, "fp16"),
    ({"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/data"}, {}, "bf16"),
)
"""Sections of the YAML; arguments of Trainer; the YAML's precision."""

REAL: Final = """
import json, sys
from tests.checks.accelerate_launch import trained_with
made = lambda content, arguments: trained_with(content, **arguments).deepspeed_plugin.deepspeed_config
print("MADE " + json.dumps([made(*each) for each in json.load(sys.stdin)]))
"""


@pytest.mark.slow
def test_the_config_is_the_one_that_the_launcher_and_trainer_make() -> None:
    given = [
        ({**DEEPSPEED, "deepspeed_config": section, "mixed_precision": precision}, arguments)
        for section, arguments, precision in CONFIGS
    ]
    ran = subprocess.run(
        [sys.executable, "-c", REAL], input=json.dumps(given), text=True, capture_output=True, cwd=ROOT
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("MADE ")]
    assert lines, ran.stderr[-3000:]
    for real, (content, arguments) in zip(json.loads(lines[0].removeprefix("MADE ")), given, strict=True):
        del real["steps_per_print"]  # what DeepSpeed prints
        real["fp16"].pop("auto_cast", None)
        zero = real["zero_optimization"]
        for name in ("offload_optimizer", "offload_param"):
            if zero[name]["device"] == "none":  # as if it were not there
                del zero[name]
            elif zero[name]["nvme_path"] is None:
                del zero[name]["nvme_path"]
        if zero["stage"] != 3:
            del zero["stage3_gather_16bit_weights_on_model_save"]
        assert deepspeed_config(content, arguments) == real


def problems_of(
    folder: Path, content: dict[str, Any], arguments: dict[str, Any] | None = None
) -> list[tuple[str, str, str]]:
    (folder / "acc.yaml").write_text(yaml.safe_dump(content))
    if arguments is not None:
        (folder / "args.yaml").write_text(yaml.safe_dump(arguments))
    problems = check_file(folder / "acc.yaml", None if arguments is None else folder / "args.yaml")
    return [(each.rule, each.key, each.severity) for each in problems]


ARGUMENTS: Final[dict[str, Any]] = {"output_dir": "out", "bf16": True, "gradient_accumulation_steps": 2}


def test_the_yaml_is_compared_with_the_arguments(tmp_path: Path) -> None:
    section = {"zero_stage": 3, "zero3_save_16bit_model": True, "gradient_accumulation_steps": 4}
    content = {**DEEPSPEED, "deepspeed_config": section}
    mismatch = ("trainer-mismatch", "deepspeed_config.gradient_accumulation_steps", "error")
    assert problems_of(tmp_path, content, ARGUMENTS) == [mismatch]
    assert ("hard-coded", "deepspeed_config.gradient_accumulation_steps", "hint") in problems_of(tmp_path, content)
    less = {key: value for key, value in ARGUMENTS.items() if key != "bf16"}
    assert ("trainer-mismatch", "mixed_precision", "error") in problems_of(tmp_path, content, less)
    del section["gradient_accumulation_steps"]
    assert problems_of(tmp_path, content, ARGUMENTS) == []
    section["zero3_save_16bit_model"] = False
    assert ("no-weights-saved", "deepspeed_config.zero3_save_16bit_model") in {
        (rule, key) for rule, key, _ in problems_of(tmp_path, content, ARGUMENTS)
    }


def test_the_json_that_it_names_is_checked_with_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 9}, "gradient_accumulation_steps": 4}')
    content = {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    problems = problems_of(tmp_path, content, ARGUMENTS)
    assert ("accelerate-key-beside-json", "mixed_precision", "error") in problems
    assert ("trainer-mismatch", "gradient_accumulation_steps", "error") in problems


def test_advice_that_needs_a_json_names_it(tmp_path: Path) -> None:
    """Would notice: a key that the YAML cannot have, and two findings about one path."""
    section = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump({**DEEPSPEED, "deepspeed_config": section}))
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({**ARGUMENTS, "optim": "adamw_bnb_8bit"}))
    (replaced,) = [
        each for each in check_file(tmp_path / "acc.yaml", tmp_path / "args.yaml") if each.rule == "optimizer-replaced"
    ]
    assert "in a DeepSpeed JSON (deepspeed_config_file)" in replaced.fix
    section |= {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/data"}
    problems = problems_of(tmp_path, {**DEEPSPEED, "deepspeed_config": section}, ARGUMENTS)
    assert [rule for rule, key, _ in problems if "nvme" in rule or "offload_optimizer" in key] == [
        "accelerate-nvme-path"
    ]


def test_one_file_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump({**DEEPSPEED, "zero_stage": 3}))
    assert main(["check", str(tmp_path / "no.json"), str(tmp_path / "acc.yaml")]) == 2
    output = capsys.readouterr()
    assert "accelerate-unknown-key" in output.out and "no.json" in output.err


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "multi_gpu", "single_gpu", "fsdp1", "fsdp2"])
def test_trl_s_own_are_right(tmp_path: Path, name: str) -> None:
    trl = pytest.importorskip("trl")
    content = yaml.safe_load((Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml").read_text())
    arguments = {"output_dir": "out", "bf16": True, "model_name_or_path": "x"}
    assert [each for each in problems_of(tmp_path, content, arguments) if each[2] != "hint"] == []


def test_a_script_that_prepares_presets_reads_what_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ds", "copy", "zero3-offload", str(tmp_path / "ds.json"), "--accelerate"]) == 0
    capsys.readouterr()
    (written,) = tmp_path.glob("*accelerate*.yaml")
    assert main(["check", str(written)]) == 0
