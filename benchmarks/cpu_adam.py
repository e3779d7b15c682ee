"""DeepSpeedCPUAdam against the formula for it: bytes a parameter over the RAM bandwidth of this host.

    python -m benchmarks.cpu_adam

Prints, for one thread and for all cores, the seconds of a step over 2^26 parameters in fp32 and its ratio to the
formula of `hf_memkit.deepspeed.traffic`: 28 bytes a parameter over `measured_host()`. The first use compiles the
operator.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Final

from hf_memkit.catalog.host_rates import measured_host
from hf_memkit.deepspeed import ops

_PARAMETERS: Final = 1 << 26
_BYTES_A_PARAMETER: Final = 28
_STEPS: Final = 9


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    ops.build(("cpu_adam",), print, cpu=True)
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    host = measured_host()
    weights = torch.nn.Parameter(torch.ones(_PARAMETERS))
    weights.grad = torch.full_like(weights, 1e-3)
    optimizers = {
        "DeepSpeedCPUAdam": DeepSpeedCPUAdam([weights]),
        "torch.optim.AdamW": torch.optim.AdamW([weights]),
        "torch.optim.AdamW, fused": torch.optim.AdamW([weights], fused=True),
    }
    for threads in sorted({1, host.cores}):
        torch.set_num_threads(threads)  # OpenMP's too
        gb_per_s = min(host.ram_gb_per_s.value, threads * host.core_gb_per_s.value)
        formula = _BYTES_A_PARAMETER * _PARAMETERS / 1e9 / gb_per_s
        for name, optimizer in optimizers.items():
            seconds = []
            for _ in range(_STEPS):
                start = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
            likely = statistics.median(seconds[2:])
            print(
                f"{name}, {threads} threads: {likely:.4f} s, {likely / formula:.2f} of the formula "
                f"({formula:.4f} s at {gb_per_s:.1f} GB/s); {1e9 / _PARAMETERS * likely:.3f} s a billion parameters"
            )


if __name__ == "__main__":
    main()
