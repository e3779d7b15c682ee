"""One step of an 8-bit layer as on a GPU, with real and with fake tensors on the CPU; prints what both made and freed.

python -m tests.predict_script.eight_bits_child      # [[size or "-", …], [size or "-", …]], in bytes
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import bitsandbytes as bnb
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memkit.prediction.child.gpu.fake_gpu import patch_module_apply
from hf_memkit.prediction.child.libraries.library_rules import assume_few_outliers
from hf_memkit.prediction.child.tracer.kernel_rules import learn_use_counts
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.gpu_memory import OUTLIER_COLUMNS

ROWS, INPUTS, OUTPUTS = 48, 64, 96


def step(context: contextlib.AbstractContextManager[Any]) -> list[int | str]:
    tracer = StorageTracer("cpu")
    with context:
        weight = torch.zeros(OUTPUTS, INPUTS) + 0.01
        layer = bnb.nn.Linear8bitLt(INPUTS, OUTPUTS, has_fp16_weights=False, threshold=6.0, device="meta")
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
        layer.bias = torch.nn.Parameter(torch.zeros(OUTPUTS))
        layer.eval()
        inputs = torch.ones(2, ROWS // 2, INPUTS)
        inputs[..., :OUTLIER_COLUMNS] = 7.0
        inputs.requires_grad_()
        with tracer:
            layer(inputs).float().pow(2).sum().backward()
    return [tracer.trace.sizes_bytes[event - 1] if event > 0 else "-" for event in tracer.trace.events]


def main() -> None:
    learn_use_counts()
    real = step(contextlib.nullcontext())
    patch_module_apply()
    assume_few_outliers()
    fake = step(FakeTensorMode(allow_non_fake_inputs=True))
    print(json.dumps([real, fake]))


if __name__ == "__main__":
    main()
