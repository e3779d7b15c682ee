"""A compiled training allocates the same on fake tensors, with kernels that do nothing, as on real ones.

On a CPU inductor generates C++ in place of Triton. So this proves what the trace rests on (dynamo, AOTAutograd, the
partitioner, inductor's plan of buffers, its wrapper), and not which operations Triton fuses on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.tensor import TensorVariable

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu import compiler, compiler_patches, fake_gpu
from hf_memkit.prediction.child.gpu.compiler_patches import private, split_graphs
from hf_memkit.prediction.child.gpu.compiler_speed import break_at_hook
from hf_memkit.prediction.child.libraries.deepspeed_engine import prepare_compiling
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.trace.trace import ZEROS
from tests.prediction.fake_and_real_child import Child

QUICK: Final = (
    pytest.param("llama", "compiled, aot_eager", marks=pytest.mark.tracing),
    pytest.param("vit", "compiled, aot_eager", marks=pytest.mark.slow),
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
    assert fake["activations"].get(ZEROS, 0) == zeros[architecture]


@pytest.mark.slow
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
    step = tracer.finish("backward").peak().activations
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


def test_nothing_is_compiled_where_torch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(1, 1)
    assert fake_gpu._compiled(module, disable=True) is module
    with torch._dynamo.config.patch(disable=True):  # TORCH_COMPILE_DISABLE, read when torch is imported
        assert fake_gpu._compiled(module) is module
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert fake_gpu._compiled(module) is module


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.first(x).relu()
        result: torch.Tensor = self.second(inner).relu()
        return result


@pytest.mark.parametrize(
    ("rows", "width", "columns", "dtype", "pads"),
    [
        (8192, 768, 50257, torch.bfloat16, True),  # GPT-2's logits, as an H200 padded them
        (8192, 768, 50257, torch.float32, False),
        (8192, 768, 3, torch.bfloat16, False),  # moves more than it computes
    ],
)
def test_large_products_in_16_bits_are_padded(
    rows: int, width: int, columns: int, dtype: torch.dtype, pads: bool
) -> None:
    left, right = (torch.empty(*size, dtype=dtype, device="meta") for size in ((rows, width), (width, columns)))
    assert compiler_patches._pads(None, left, right) is pads


def test_quantised_weights_are_refused() -> None:
    """Would notice: graphs that end at each such layer, which a real run does not have."""
    bnb = pytest.importorskip("bitsandbytes")
    for layer in (bnb.nn.Linear4bit(8, 8, device="meta"), bnb.nn.Linear8bitLt(8, 8, device="meta")):
        with pytest.raises(Unmodelled, match="torch_compile with bitsandbytes' 4-bit or 8-bit weights"):
            compiler.refuse_modules(nn.Sequential(layer))


def test_stage_3_ends_graphs_at_every_module() -> None:
    """Would notice: one graph for the whole model, which keeps less for backward than a real run."""
    for stage, count in ((2, 1), (3, 4)):
        model = _Model(2)
        with torch._dynamo.config.patch(optimize_ddp=True):  # restores it
            prepare_compiling(model, {"zero_optimization": {"stage": stage}})
        assert len(_operations_of_graphs(model, torch.ones(1, 2))) == count
    with pytest.raises(Unmodelled, match=r"compile\.deepcompile=true in the DeepSpeed JSON"):
        prepare_compiling(model, {"compile": {"deepcompile": True}})


def test_graphs_are_split_as_by_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's own wrapper, in a group of one process."""
    model, inputs = _Model(600), torch.ones(1, 600)  # 1.4 MiB a layer
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = _operations_of_graphs(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1), inputs)
    finally:
        dist.destroy_process_group()
    assert len(expected) == 2 and expected != _operations_of_graphs(model, inputs)

    monkeypatch.setattr(OutputGraph, "__init__", OutputGraph.__init__)  # to restore it
    split_graphs()
    monkeypatch.setattr(compiler_patches, "bucket_bytes", [2**20])
    assert _operations_of_graphs(model, inputs) == expected


class _Outer(nn.Module):
    """Calls a language model that is trained with an adapter and checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LanguageModel().requires_grad_(False)
        self.inner.embed.register_forward_hook(make_inputs_require_grads)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(tokens, with_logits=False)[0]
        return 2 * loss


def make_inputs_require_grads(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """The hook of transformers."""
    output.requires_grad_(True)


def test_graphs_break_at_the_hook_of_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against dynamo, which traces each function to its end before; without gradients it breaks nothing."""

    def graphs() -> list[list[list[str]]]:
        made = []
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                made.append(_operations_of_graphs(_Outer(), torch.arange(80)))
        return made

    expected = graphs()
    assert [len(each) for each in expected] == [3, 1]

    monkeypatch.setattr(TensorVariable, "method_requires_grad_", TensorVariable.method_requires_grad_)  # to restore it
    break_at_hook()
    assert graphs() == expected


def _operations_of_graphs(model: nn.Module, inputs: torch.Tensor) -> list[list[str]]:
    """The operations of each graph that torch.compile makes."""
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(inputs)
    return graphs
