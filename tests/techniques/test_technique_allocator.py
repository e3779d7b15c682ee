"""Options of the allocator's variable: combined, read as torch reads them, kept where they are the user's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_memkit import preset
from hf_memkit.common.errors import SettingError
from hf_memkit.setup.job import Job
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.allocator import (
    _KNOWN,
    OLD_VARIABLES,
    VARIABLE,
    options,
    problems_of,
    set_allocator,
    too_late,
    user_settings,
)
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.techniques.jobs import gpt2_job

KEY = f"environment.{VARIABLE}"


def applied(*names: str, **values: object) -> Setup:
    job: Job = gpt2_job(None, values=values)
    setup = Setup(preset="allocator", job=job)
    for name in names:
        setup = TECHNIQUES[name](setup)
    return setup


def test_options_stand_side_by_side_in_one_variable() -> None:
    setup = applied("max-split-size", "garbage-collection-threshold", max_split_size_mb=256)
    assert setup[KEY] == "max_split_size_mb:256,garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"
    (setting,) = setup.settings
    assert "256 MiB" in setting.reason and "80 %" in setting.reason
    twice = applied("max-split-size", "max-split-size", max_split_size_mb=64)
    assert twice[KEY] == "max_split_size_mb:64"
    assert applied("expandable-segments")[KEY] == "expandable_segments:True"


@pytest.mark.parametrize(("name", "value"), [("max_split_size_mb", 19), ("garbage_collection_threshold", 1.0)])
def test_what_torch_refuses_is_no_value_of_a_preset(name: str, value: float) -> None:
    technique = "max-split-size" if name.startswith("max") else "garbage-collection-threshold"
    setup = applied(technique, **{name: value})
    with pytest.raises(SettingError, match=f"{name}={value} must be"):
        preset(technique, values={name: value})
    with pytest.raises(ValueError, match=r"must be >= 20|set it in \(0.0, 1.0\)"):
        torch._C._accelerator_setAllocatorSettings(setup[KEY])


def test_every_known_option_is_one_of_torch_s() -> None:
    """Against the headers and the parser of the installed torch: an option that it dropped, or has new, fails here."""
    folder = Path(torch.__file__).parent / "include" / "c10"
    cuda = (folder / "cuda" / "CUDAAllocatorConfig.h").read_text()
    keys = cuda[cuda.index("getKeys()") :].split("return keys", 1)[0]
    of_cuda = set(re.findall(r'"(\w+)"', re.sub(r'"\s*\n?\s*"', "", keys)))
    parser = (folder.parents[1] / "lib" / "libc10.so").read_bytes()
    of_all = {name for name in _KNOWN if name not in of_cuda}
    assert of_cuda <= set(_KNOWN)
    # Short strings stand in the library whole or, where the compiler moves them in registers, in their first bytes.
    assert all(name[:16].encode() in parser for name in of_all), of_all


def test_text_is_read_as_torch_reads_it() -> None:
    text = " max_split_size_mb : 128 ,roundup_power2_divisions:[256:1,>:4],"
    assert options(text) == {"max_split_size_mb": "128", "roundup_power2_divisions": "[256:1,>:4]"}
    assert problems_of(text) == []
    torch._C._accelerator_setAllocatorSettings(applied("garbage-collection-threshold")[KEY])
    assert problems_of("garbage_collection_threshold:0.8"), "only where the process has a limit"
    assert [name for name, _, _ in problems_of("a:1,expandable_segments:yes,max_split_size_mb:")] == [
        "a", "expandable_segments", "max_split_size_mb",
    ]  # fmt: skip


READ = """
import json, os, sys, torch
for given in json.loads(sys.argv[1]):
    if os.fork() == 0:  # each case reads in a process that has torch and has not read yet
        os.environ.update(given)
        print(torch._C._accelerator_getAllocatorSettings(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_torch_reads_the_variable_at_first_use_and_the_old_names_first() -> None:
    cuda, hip = OLD_VARIABLES
    given = [
        {VARIABLE: "max_split_size_mb:64"},
        {VARIABLE: "max_split_size_mb:64", cuda: "max_split_size_mb:32"},
        {VARIABLE: "max_split_size_mb:64", hip: "max_split_size_mb:128"},
        {VARIABLE: "max_split_size_mb:64", hip: "max_split_size_mb:128", cuda: "max_split_size_mb:32"},
    ]
    clean = {key: value for key, value in os.environ.items() if key not in (VARIABLE, *OLD_VARIABLES)}
    command = [sys.executable, "-c", READ, json.dumps(given)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    read = done.stdout.split()
    assert read == ["max_split_size_mb:64", "max_split_size_mb:32", "max_split_size_mb:128", "max_split_size_mb:32"]
    assert [user_settings(case) for case in given] == [
        (VARIABLE, read[0]), (cuda, read[1]), (hip, read[2]), (cuda, read[3]),
    ]  # fmt: skip


def test_the_user_s_own_variable_is_kept_and_said() -> None:
    output: list[str] = []
    users = {OLD_VARIABLES[0]: "max_split_size_mb:64"}
    assert not set_allocator("expandable_segments:True", output.append, users)
    assert VARIABLE not in users and "ALLOC_CONF=max_split_size_mb:64 overrides" in output[0]
    same = {VARIABLE: "expandable_segments: True"}
    assert set_allocator("expandable_segments:True", output.append, same) and len(output) == 1
    empty: dict[str, str] = {}
    assert set_allocator("expandable_segments:True", output.append, empty) and len(output) == 1
    assert empty == {VARIABLE: "expandable_segments:True"}


def test_after_cuda_started_it_is_too_late_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_late("expandable_segments:True") == ""  # torch is imported here, and that is fine
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**21)
    output: list[str] = []
    nothing: dict[str, str] = {}
    assert not set_allocator("expandable_segments:True", output.append, nothing) and nothing == {}
    assert "before Python starts" in output[0] and "_accelerator_setAllocatorSettings" in output[0]
    assert "Set it before Python starts" in too_late("backend:cudaMallocAsync")


STARTED = """
import torch
from hf_memkit.setup.techniques.allocator import set_allocator
torch.cuda.is_initialized, torch.cuda.memory_reserved = lambda: True, lambda: 0
assert set_allocator("expandable_segments:True", print, {})
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.slow
def test_before_the_first_tensor_it_is_not_too_late_though_cuda_has_started() -> None:
    """Defect, seen on an H200: a recipe that asks for the GPU's name before it sets the variable lost its option."""
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["expandable_segments:True"]


def test_a_preset_s_arguments_set_the_variable_before_they_start_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (VARIABLE, *OLD_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is set here ends here
    setup = preset("max-split-size", values={"max_split_size_mb": 64})
    setup.training_arguments(str(tmp_path))
    assert os.environ[VARIABLE] == "max_split_size_mb:64" and "allocator" not in capsys.readouterr().out
    other = preset("expandable-segments")
    other.training_arguments(str(tmp_path))
    assert os.environ[VARIABLE] == "max_split_size_mb:64"
    assert "ALLOC_CONF=max_split_size_mb:64 overrides" in capsys.readouterr().out
