"""What is checked about the GPU before training, and what an out-of-memory error becomes; without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from hf_memkit.catalog.hardware import has_kernels, torch_with_kernels, use_one_gpu
from hf_memkit.cli import main
from hf_memkit.measuring.memory.records import read_records


@pytest.mark.parametrize(
    ("capability", "architectures", "instead"),
    [
        ((8, 0), ["sm_75", "sm_80", "sm_90"], None),
        ((8, 9), ["sm_80"], None),  # binaries run on a later minor version
        ((7, 0), ["sm_75", "sm_80"], "an older CUDA"),  # a V100, and a torch without it
        ((12, 0), ["sm_90", "compute_90"], None),  # PTX is compiled for what is newer
        ((12, 0), ["sm_80", "sm_90a"], "a newer CUDA"),
        ((9, 0), ["sm_90a"], None),
    ],
)
def test_whether_torch_has_kernels_for_a_gpu(
    capability: tuple[int, int], architectures: list[str], instead: str | None
) -> None:
    """Would notice: a torch for an older CUDA recommended for a GPU that is too new."""
    assert has_kernels(capability, architectures) is (instead is None)
    assert instead is None or instead in torch_with_kernels(capability, architectures)


def test_one_gpu_is_left_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    for before, after in (("2,3", "2"), ("GPU-abc", "GPU-abc"), ("", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        use_one_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after


@pytest.mark.parametrize("when", ["before the first step", "in a step"])
def test_out_of_memory_is_one_line_with_advice(
    when: str, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the error itself is made up here: a CPU has none."""

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has …")

    monkeypatch.setattr(transformers.Trainer, "train" if when == "before the first step" else "training_step", fails)
    monkeypatch.chdir(tmp_path)
    command = ["recipe", "gpt2-on-16gb", "--variant", "lora", "--data", str(text_file), "--output", "run", "--json"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    (number,) = (n for n, line in enumerate(lines) if line.startswith("memkit: error: "))
    error, after = lines[number], lines[number + 1 :]
    assert "1.53 GiB" in error and re.search(r"--sequence-length \d+\b", error) and out == ""
    assert "memkit: error: out of memory" in error and ("in step 1" in error) is (when == "in a step")
    records = Path("run/memory-rank0.jsonl")
    assert records.exists() is (when == "in a step")
    if records.exists():
        kinds = [record["kind"] for record in read_records(records)]
        assert kinds[-2:] == ["oom", "end"] and any("memkit explain" in line for line in after)
