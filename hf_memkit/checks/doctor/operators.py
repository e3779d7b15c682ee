"""DeepSpeed's C++ operators: which are built, whether the others can be, and stale locks of killed builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from hf_memkit.checks.doctor.check import Check
from hf_memkit.common.commands import command
from hf_memkit.deepspeed import ops

_GROUP: Final = "DeepSpeed operators"

_USED_FOR: Final = {
    "deepspeed_shm_comm": "every DeepSpeed run on a CPU",
    "cpu_adam": "optimizer in RAM or on NVMe",
    "pin_memory": "NVMe",
    "async_io": "NVMe",
}


def checks() -> list[Check]:
    """One check for the build tools, one for each operator, one for each stale lock."""
    try:
        version("deepspeed")
    except PackageNotFoundError:
        return []  # the software checks report it
    import torch

    cpu = not torch.cuda.is_available()
    folder = ops.extensions_folder(cpu=cpu)
    names = [name for name in _USED_FOR if cpu or name != "deepspeed_shm_comm"]
    built = [name for name in names if (folder / name / f"{name}.so").exists()]
    results = [_tools_check(cpu=cpu, needed=len(built) < len(names))]
    for name in names:
        use = _USED_FOR[name]
        finding = f"not built yet: the first run that needs it builds it in {folder}; for {use}"
        if name in built:
            results.append(Check(_GROUP, name, "ok", f"built; for {use}"))
        elif packages := ops.missing_tools((name,), cpu=cpu):
            fix = f"sudo apt-get install {' '.join(packages)}"
            results.append(Check(_GROUP, name, "missing", f"cannot be built; for {use}", fix))
        else:
            results.append(Check(_GROUP, name, "ok", finding))
    for lock in ops.stale_locks(ops.extension_roots()):
        finding = f"{lock}: left by a killed build; no process holds it, and the next build waits forever"
        results.append(Check(_GROUP, "stale build lock", "warning", finding, command("rm", lock)))
    return results


def _tools_check(*, cpu: bool, needed: bool) -> Check:
    packages = ops.missing_tools(("async_io",), cpu=cpu)
    ninja = shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()
    tools = "g++, Python.h, ninja, libaio.h" + ("" if cpu else ", nvcc")
    fixes = [f"sudo apt-get install {' '.join(packages)}"] if packages else []
    fixes += [] if ninja else ["pip install ninja"]
    if not fixes:
        compiler = os.environ.get("CXX", "g++")
        version = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True).stdout
        return Check(_GROUP, "to build them", "ok", f"{tools} ({compiler} {version.strip()})")
    absent = ", ".join([*packages, *([] if ninja else ["ninja"])])
    # On a GPU torch compiles the 8-bit optimizer's step with the same compiler.
    core = not cpu and bool({"g++", "python3-dev"} & set(packages))
    if needed or core:
        return Check(_GROUP, "to build them", "missing", f"not installed: {absent}", "; ".join(fixes), core)
    finding = f"not installed: {absent}; all operators are already built"
    return Check(_GROUP, "to build them", "warning", finding, "; ".join(fixes))
