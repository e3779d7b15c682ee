"""Runs every proof in this one process, and prints a JSON line: rule → "" or what went wrong.

Starting Python with torch, transformers and DeepSpeed takes six seconds; the proofs themselves take little. Tests call
this as a program; by hand: `python -m tests.check.proofs [RULE…]`.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from hf_memkit.zero import ops
from hf_memkit.zero.launch import single_process_environment
from tests.operators import EVERY_OPERATOR


def main(wanted: list[str]) -> None:
    os.environ.update(single_process_environment(), DS_ACCELERATOR="cpu")
    ops.build(EVERY_OPERATOR, print, cpu=True)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    from tests.check.registry import PROOFS

    for path in sorted(Path(__file__).parent.glob("proofs_*.py")):
        importlib.import_module(f"tests.check.{path.stem}")

    _skip_waiting()
    results = {}
    for rule in wanted or PROOFS:
        started = time.monotonic()
        try:
            PROOFS[rule]()
            results[rule] = ""
        except BaseException as error:
            results[rule] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{rule}: {time.monotonic() - started:.1f} s {results[rule][:300]}", file=sys.stderr)
    print("PROOFS " + json.dumps(results), flush=True)


def _skip_waiting() -> None:
    """DeepSpeedCPUAdam asks the system for its CPU, a second each time; the collector walks all imported modules."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    gc.freeze()


if __name__ == "__main__":
    main(sys.argv[1:])
