"""What torch 2.9 and 2.10 need so that their compiled code is traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu import compiler_earlier
from hf_memkit.prediction.child.gpu.compiler_patches import module_of


def test_backends_get_inputs_in_the_compilations_own_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of dynamic sizes. Would notice: fake tensors that an earlier torch's backends refuse."""
    monkeypatch.setattr(OutputGraph, "example_inputs", OutputGraph.example_inputs)  # to restore it
    compiler_earlier._pass_inputs_in_own_mode()
    modes = []
    sizes = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        tensors = [value for value in inputs if isinstance(value, FakeTensor)]
        modes.append({value.fake_mode for value in tensors} == {TracingContext.get().fake_mode})
        sizes.append(tensors[-1].shape[0])
        return graph.forward

    torch._dynamo.reset()
    with FakeTensorMode():
        compiled = torch.compile(nn.Linear(4, 4), backend=backend)
        for rows in (2, 3):
            compiled(torch.empty(rows, 4))
    assert modes == [True, True]
    assert [type(size) for size in sizes] == [int, torch.SymInt]


def test_tf32_that_fails_in_a_real_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_earlier.refuse_tf32()
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    with pytest.raises(Unmodelled, match=r"set tf32=False, or use torch_compile_backend=aot_eager$"):
        compiler_earlier.refuse_tf32()


@pytest.mark.parametrize(
    "path", ["L['self'].model.layers.0.mlp", "L['self']._modules['model']._modules['layers']._modules['0'].mlp"]
)
def test_modules_are_named_as_torch_writes_their_path(path: str) -> None:
    node = SimpleNamespace(meta={"nn_module_stack": {"mlp": (path, nn.Linear)}})
    assert module_of([node]) == "model.layers.0.mlp"
