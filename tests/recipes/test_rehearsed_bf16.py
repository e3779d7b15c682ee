"""A CPU without bf16 instructions: bf16 is stored, products are computed in fp32, and the rehearsal reports that.

oneDNN held back to AVX2 is such a CPU, also where the machine's own has the instructions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memkit.components.fp32_products import _ROUNDED, Fp32Products
from hf_memkit.measuring.report.load import load_run
from hf_memkit.measuring.report.target import target_of
from tests.conftest import Memkit, read_json_lines

HELD_BACK = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
aten = torch.ops.aten


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def attention() -> tuple[torch.Tensor, ...]:
    return bf16(2, 3, 16, 8), bf16(2, 3, 16, 8), bf16(2, 3, 16, 8)


def attention_backward() -> Any:
    q, k, v = attention()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(bf16(2, 3, 16, 8), q, k, v, out, lse, 0.0, True)


PRODUCTS: dict[Any, Callable[[], Any]] = {
    aten.mm.default: lambda: bf16(8, 16) @ bf16(16, 8),
    aten.addmm.default: lambda: torch.addmm(bf16(8), bf16(8, 16), bf16(16, 8)),
    aten.bmm.default: lambda: torch.bmm(bf16(3, 8, 16), bf16(3, 16, 8)),
    aten.baddbmm.default: lambda: torch.baddbmm(bf16(3, 8, 8), bf16(3, 8, 16), bf16(3, 16, 8), alpha=0.5),
    aten.convolution.default: lambda: torch.conv1d(bf16(2, 4, 16), bf16(6, 4, 3), bf16(6)),
    aten.convolution_backward.default: lambda: aten.convolution_backward(
        bf16(2, 6, 14), bf16(2, 4, 16), bf16(6, 4, 3), [6], [1], [0], [1], False, [0], 1, [True, True, False]
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda: aten._scaled_dot_product_flash_attention_for_cpu(
        *attention(), 0.0, True
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}


@pytest.mark.parametrize("operation", _ROUNDED, ids=str)
def test_a_product_is_that_of_torchs_own_kernel(operation: Any) -> None:
    """Catches a result of another dtype (the next operation then fails, or memory doubles), and a wrong argument."""
    results = []
    for mode in (None, Fp32Products()):
        torch.manual_seed(0)
        if mode is None:
            product = PRODUCTS[operation]()
        else:
            with mode:
                product = PRODUCTS[operation]()
        results.append((product,) if isinstance(product, torch.Tensor) else product)
    for own, ours in zip(*results, strict=True):
        assert (own is None) == (ours is None)
        if own is not None:
            assert ours.dtype == own.dtype and ours.shape == own.shape
            torch.testing.assert_close(ours, own, rtol=2**-6, atol=2**-5)


def test_other_dtypes_are_left_alone() -> None:
    with Fp32Products():
        assert (torch.ones(2, 2).double() @ torch.ones(2, 2).double()).dtype == torch.float64
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


class Kernels(TorchDispatchMode):
    """Notes the dtypes of the factors that each product's kernel gets."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[Any, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ROUNDED:
            self.dtypes[func] = {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operation", _ROUNDED, ids=str)
def test_a_kernel_multiplies_in_fp32(operation: Any) -> None:
    """On a CPU without bf16 instructions a kernel that gets bf16 is many times slower."""
    with Kernels() as kernels, Fp32Products():
        PRODUCTS[operation]()
    assert kernels.dtypes[operation] == {torch.float32}


@pytest.mark.slow
def test_a_rehearsal_says_what_it_does_not_compute_in(memkit: Memkit, tmp_path: Path) -> None:
    """… and has the same losses as on a CPU with more instructions and threads."""
    command = ["recipe", "gpt2-on-16gb", "--variant", "resident", "--max-steps", "12", "--output"]
    ran = memkit(*command, "run", env={**HELD_BACK, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert sum(line.startswith("bf16: ") for line in ran.stdout.splitlines()) == 1
    content = json.loads((tmp_path / "run" / "memkit-run.json").read_text())
    assert memkit(*command, "here", env={"OMP_NUM_THREADS": "2"}).returncode == 0
    here = json.loads((tmp_path / "here" / "memkit-run.json").read_text())["result"]
    for loss in ("held_out_loss_before", "held_out_loss"):
        assert content["result"][loss] == pytest.approx(here[loss], abs=0.005)
    reasons = {each["key"]: each["reason"] for each in content["not_rehearsed"]}
    assert "products are computed in fp32" in reasons["model.dtype"]
    assert {each["key"]: each["value"] for each in content["setup"]["settings"]}["model.dtype"] == "bfloat16"
    (run,) = (each for each in read_json_lines(tmp_path / "run" / "memory-rank0.jsonl") if each["kind"] == "run")
    settings = {each["key"]: each["reason"] for each in run["facts"]["setup"]}
    assert settings["trainer_parts.fp32_products"] == reasons["model.dtype"]
    assert run["weights_dtypes"].keys() == {"bfloat16"}
    target = target_of(load_run(tmp_path / "run"))
    assert target is not None and target.needs_gib > 1 and target.phases["backward"] > 1, "what the report shows"
    assert content["target_prediction"] == run["facts"]["target_prediction"] and content["prediction"] is None
