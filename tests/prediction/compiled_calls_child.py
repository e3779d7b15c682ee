"""Prints what a small compiled module calls on fake tensors of the CPU, as JSON: `[[name, bytes, caller], …]`.

    python -m tests.prediction.compiled_calls_child

It runs in a separate process, because dynamo and inductor stay patched.
"""

from __future__ import annotations

import json

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memkit.prediction.child.gpu.compiler import compilation, compile_module
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
    print(
        json.dumps(
            {
                "calls": [[row.name, row.moved_bytes, row.called_by] for row in rows],
                "compilation": [compiled_code.graphs, compiled_code.calls],
            }
        )
    )


if __name__ == "__main__":
    main()
