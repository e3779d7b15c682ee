"""Builds the DeepSpeed operators that tests use: `python -m tests.operators`. Minutes the first time, then nothing.

`scripts/test --slow` calls it while tests without the marker `operators` run, so that none of those with it spends its
time limit on a compiler. A test that is run by itself builds what it needs.
"""

from __future__ import annotations

from typing import Final

from hf_memkit.deepspeed import ops

EVERY_OPERATOR: Final = ("deepspeed_shm_comm", "cpu_adam", "pin_memory", "async_io")

if __name__ == "__main__":
    ops.build(EVERY_OPERATOR, print, cpu=True)
