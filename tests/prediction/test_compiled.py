"""A compiled training allocates the same on fake tensors, with kernels that do nothing, as on real ones.

On a CPU inductor generates C++ in place of Triton. So this proves what the trace rests on (dynamo, AOTAutograd, the
partitioner, inductor's plan of buffers, its wrapper), and not which operations Triton fuses on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import nn

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu import compiler
from hf_memkit.prediction.child.libraries.deepspeed_engine import _prepare_compiling
from tests.prediction.fake_and_real_child import Child

QUICK: Final = (
    pytest.param("llama", "compiled, aot_eager", marks=pytest.mark.tracing),
    ("vit", "compiled, aot_eager"),
)
"""One layer, without inductor, whose C++ takes a compiler half a minute."""

SLOW: Final = (
    ("llama", "compiled", 0),
    ("gpt2", "compiled", 48),  # with dropout
    ("bert", "compiled, bf16", 0),
    ("vit", "compiled", 0),
    ("mixtral", "compiled", 0),
    ("llama", "compiled, lora", 112),
    ("gpt2", "compiled, checkpointing", 48),  # which repeats dropout
    ("llama", "compiled, two lengths", 0),
)
"""Architecture, setting, and bytes that the real training has on the host in addition, and a trace does not have:
AOTAutograd keeps the number of a multiplication in 8 bytes, such as the scaling of each of LoRA's 14 parts."""

LOSS_BYTES: Final = 16
"""Further numbers on the host in a phase below the peak, such as the loss that is logged."""


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child("torch._dynamo", "torch._inductor.compile_fx") as started:
        started.ask("gpt2", "plain", "fake")  # loads the libraries
        yield started


@pytest.mark.parametrize(("architecture", "setting"), QUICK)
def test_compiled_training_is_traced(child: Child, architecture: str, setting: str) -> None:
    """Also spares the next test half of its time: the child keeps its answers."""
    fake = child.ask(architecture, setting, "fake")
    assert "error" not in fake, fake
    assert fake["phases"]["data"] < fake["phases"]["forward"], "activations decide"


@pytest.mark.parametrize(("architecture", "setting"), QUICK)
def test_compiled_training_is_equal(child: Child, architecture: str, setting: str) -> None:
    _assert_same_bytes(*(child.ask(architecture, setting, kind) for kind in ("fake", "real")), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "setting", "on_host"), SLOW)
def test_training_compiled_by_inductor_is_equal(child: Child, architecture: str, setting: str, on_host: int) -> None:
    fake, real = (child.ask(architecture, setting, kind) for kind in ("fake", "real"))
    _assert_same_bytes(fake, real, on_host)
    eager = child.ask(architecture, setting.removeprefix("compiled").removeprefix(", ") or "plain", "fake")
    assert fake["peak_bytes"] != eager["peak_bytes"], "nothing was compiled"


def _assert_same_bytes(fake: dict[str, Any], real: dict[str, Any], on_host: int) -> None:
    """The peaks are equal: of the training, and of its phases (after forward, in backward, after the optimizer)."""
    assert "error" not in fake and "error" not in real, (fake, real)
    assert real["peak_bytes"] - fake["peak_bytes"] == on_host, (fake, real)
    for phase in ("data", "forward", "backward", "optimizer"):
        further = real["phases"][phase] - fake["phases"][phase] - on_host
        assert 0 <= further <= LOSS_BYTES, (phase, fake, real)


def test_a_torch_without_a_private_name_is_refused() -> None:
    with pytest.raises(Unmodelled, match=r"torch \S+ has no torch\._inductor\.no_such_module\.name, which"):
        compiler._private("torch._inductor.no_such_module.name")


def test_a_torch_without_the_door_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compiler.TorchDispatchMode, "ignore_compile_internals")
    with pytest.raises(Unmodelled, match=r"the trace needs torch 2\.9 or later; this is"):
        compiler._refuse({})


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.first(x).relu()
        result: torch.Tensor = self.second(inner).relu()
        return result


def test_stage_3_ends_graphs_at_every_module() -> None:
    """Would notice: one graph for the whole model, which keeps less for backward than a real run."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for stage, count in ((2, 1), (3, 4)):
        graphs.clear()
        torch._dynamo.reset()
        model = _Model()
        _prepare_compiling(model, {"zero_optimization": {"stage": stage}})
        torch.compile(model, backend=backend)(torch.ones(1, 2))
        assert len(graphs) == count
    with pytest.raises(Unmodelled, match=r"compile\.deepcompile=true in the DeepSpeed JSON"):
        _prepare_compiling(model, {"compile": {"deepcompile": True}})
