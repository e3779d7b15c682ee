"""Runs every proof in this one process, and prints a JSON line: rule → {"wrong": "" or what went wrong, "fails": how
the library fails in it, "refusals": for each error whether there was a model by then, "asserts": its own assertions}.

Starting Python with torch, transformers and DeepSpeed takes six seconds; the proofs themselves take little. Tests call
this as a program; by hand: `python -m tests.checks.proofs [--engine] [RULE…]`. Without `--engine` there is no process
group of DeepSpeed's, which needs a compiled operator.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import os
import sys
import traceback
from pathlib import Path

from hf_memkit.deepspeed import ops
from hf_memkit.setup.process_group import single_process_environment
from tests.operators import EVERY_OPERATOR


def main(wanted: list[str]) -> None:
    # At most the instructions of most CPUs: with those for fp16, DeepSpeed trains in fp16 without a GPU.
    os.environ.update(single_process_environment(), DS_ACCELERATOR="cpu", ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")
    if "--engine" in wanted:
        wanted.remove("--engine")
        ops.build(EVERY_OPERATOR, print, cpu=True)
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    from tests.checks.real import PARAMETERS_MADE
    from tests.checks.registry import PROOFS, REFUSALS

    for path in sorted(Path(__file__).parent.glob("proofs_*.py")):
        importlib.import_module(f"tests.checks.{path.stem}")

    _skip_waiting()
    results = {}
    for rule in [rule for rule in PROOFS if not wanted or rule in wanted]:
        wrong = ""
        REFUSALS.clear()
        PARAMETERS_MADE[0] = 0
        try:
            PROOFS[rule].run()
        except BaseException as error:
            wrong = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        results[rule] = {
            "wrong": wrong,
            "fails": PROOFS[rule].fails,
            "refusals": [*REFUSALS],
            "asserts": inspect.getsource(inspect.unwrap(PROOFS[rule].run)).count("assert "),
        }
        print(f"{rule}: {wrong[:300]}", file=sys.stderr)
    print("PROOFS " + json.dumps(results), flush=True)


def _skip_waiting() -> None:
    """DeepSpeedCPUAdam asks the system for its CPU, a second each time; the collector walks all imported modules."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    gc.freeze()


if __name__ == "__main__":
    main(sys.argv[1:])
