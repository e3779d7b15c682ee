"""Prints as JSON what a small compiled module calls on fake tensors of the CPU, and how a torch whose private names
mean something else is refused.

    python -m tests.prediction.compiled_calls_child

It runs in a separate process, because dynamo and inductor stay patched.
"""

from __future__ import annotations

import json

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu import compiler_patches
from hf_memkit.prediction.child.gpu.compiler import compilation, compile_module, verify
from hf_memkit.prediction.child.tracer.tracer import StorageTracer

ROWS = 1000
WIDTH = 64
TOKENS = 32


class Lookup(nn.Module):
    """An embedding and an activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.table(ids)
        return states * torch.sigmoid(states)


def refusal(owner: object, name: str, value: object) -> str:
    """How the compiler is refused, if this attribute of torch or of its patches has another value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    torch.compiler.reset()
    try:
        verify.__wrapped__(torch.compile, "inductor")
    except Unmodelled as error:
        return str(error)
    finally:
        setattr(owner, name, original)
    return ""


def main() -> None:
    tracer = StorageTracer("cpu", work=True)
    with FakeTensorMode(), tracer:
        compiled = compile_module(torch.compile, Lookup())
        ids = torch.zeros(TOKENS, dtype=torch.long)
        compiled(ids).sum().backward()
    assert tracer.recorder is not None
    work = tracer.recorder.work
    rows = [work.operations[call] for call in work.calls]
    compiled_code = compilation()
    assert compiled_code is not None
    wrapper = compiler_patches.private("torch._inductor.codegen.wrapper.PythonWrapperCodegen")
    allocate = wrapper.make_allocation
    kernels = compiler_patches.private("torch._inductor.async_compile.AsyncCompile")
    counters = compiler_patches.private("torch._dynamo.utils.counters")
    print(
        json.dumps(
            {
                "calls": [[row.name, row.moved_bytes, row.called_by] for row in rows],
                "compilation": [compiled_code.graphs, compiled_code.calls],
                "counters": {name: dict(counts) for name, counts in counters.items()},
                "refusals": [
                    refusal(kernels, "cpp_pybinding", lambda *args: None),
                    refusal(wrapper, "make_allocation", lambda *args: f"{allocate(*args)}.clone()"),
                    refusal(compiler_patches, "moved_bytes", lambda *args: "1"),
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
