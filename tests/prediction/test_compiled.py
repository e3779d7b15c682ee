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
from hf_memkit.prediction.child.gpu.compiler_patches import private
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.trace.trace import ZEROS
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
    zeros = {"llama": 4 * 128 * 384 * 4, "vit": 0}  # tokens × vocabulary; few classes need no zeros at the peak
    assert fake["step"].get(ZEROS, 0) == zeros[architecture]


@pytest.mark.parametrize(("architecture", "setting"), QUICK)
def test_compiled_training_is_equal(child: Child, architecture: str, setting: str) -> None:
    _assert_same_bytes(*(child.ask(architecture, setting, kind) for kind in ("fake", "real")), 0)


class LanguageModel(nn.Module):
    """Returns its loss, and its logits if they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 8)
        self.head = nn.Linear(8, 500)

    def forward(self, tokens: torch.Tensor, with_logits: bool) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.embed(tokens))
        loss = nn.functional.cross_entropy(logits, tokens)
        return (loss, logits) if with_logits else (loss,)


@pytest.mark.parametrize("with_logits", [True, False])
def test_zeros_for_the_gradient_of_unused_logits_are_named(with_logits: bool) -> None:
    """Would notice: a torch that makes no zeros, or zeros that are counted for a loss without logits."""
    tracer = StorageTracer("cpu")
    tracer.default = "loss"
    tokens = torch.arange(80)
    torch._dynamo.reset()
    with tracer:
        loss, *_ = torch.compile(LanguageModel(), backend="aot_eager")(tokens, with_logits)
        tracer.end_phase("forward")
        loss.backward()
    torch._dynamo.reset()
    step = tracer.finish("backward").peak().step
    assert step[ZEROS] == (80 * 500 * 4 + 256 if with_logits else 0)
    assert len(step) == 2 + with_logits


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
        private("torch._inductor.no_such_module.name")


def test_a_torch_without_the_door_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compiler.TorchDispatchMode, "ignore_compile_internals")
    with pytest.raises(Unmodelled, match=r"the trace needs torch 2\.9 or later; this is"):
        compiler._refuse({})
