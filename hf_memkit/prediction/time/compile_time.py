"""Time that torch.compile takes: in the first steps of a run, and here in a trace."""

from __future__ import annotations

from typing import Final

from hf_memkit.common.range import ZERO, Range
from hf_memkit.prediction.traced_training import Compilation

_S_PER_CALL: Final = Range(0.02, 0.04, 0.08)
"""Seconds to compile a call of the generated code: dynamo, AOTAutograd, inductor and Triton on all cores, with empty
caches. A training that ran before on this machine takes a few seconds instead.

Chosen so that it contains what was measured, first run minus a run with caches or without compiling:

| training | calls | seconds | a call |
|---|---|---|---|
| GPT-2, H200 with 16 cores, torch 2.11 (benchmarks/gpu.py) | 565 | 34 | 60 ms |
| Llama of 1 B, the same | 913 | 26 | 28 ms |
| Qwen3-8B, torchtune compiling the whole model (meta-pytorch/torchtune#2831) | about 2000 | 150 | 75 ms |
| nanoGPT of 4 layers, torch 2.1 (karpathy/nanoGPT#392) | about 180 | 7 | 39 ms |

Calls of the last two are estimated from the number of layers. Triton's share is small, as its kernels are compiled in
parallel: 4 of 88 s for a vision model (pytorch/pytorch#145447).
"""

_TRACE_S: Final = 3.0
_TRACE_S_PER_PARAMETER: Final = 0.12
"""Seconds to trace a compiled training, and for each of its parameters in addition. Measured with Llama on one core of
an AMD EPYC: a layer of 9 parameters took 1.0 s, one of 23 with LoRA and checkpointing 2.2 s."""


def compile_seconds(compilation: Compilation | None) -> Range:
    """Seconds that the first steps of a run take longer than later ones."""
    return ZERO if compilation is None else _S_PER_CALL.times(compilation.calls)


def trace_seconds(parameters: int) -> float:
    """Seconds to trace a training of a model with so many parameter tensors when it is compiled, for one length of its
    batches."""
    return _TRACE_S + _TRACE_S_PER_PARAMETER * parameters
