"""Python and the packages, against the versions that memkit supports."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_memkit.doctor.check import Check

__all__ = ["checks"]

_GROUP: Final = "Software"
_SHOWN: Final = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets")
_MODULES: Final = {"liger-kernel": "liger_kernel"}
_NUMA: Final = "deepspeed --bind_cores_to_rank needs it"


def checks() -> list[Check]:
    """One check for Python, one for each main package, one for all others, one for the launchers."""
    python, needed = _requirements()
    return [
        _python(python),
        *(_package(needed[name]) for name in _SHOWN if name in needed),
        _others([requirement for name, requirement in needed.items() if name not in _SHOWN]),
        _gpu_extra(),
        *_launchers(),
    ]


def _requirements() -> tuple[SpecifierSet, dict[str, Requirement]]:
    """(versions of Python, name → requirement) of this memkit: from its installed metadata, or from the checkout."""
    try:
        texts = requires("hf-memkit") or []
        python = metadata("hf-memkit")["Requires-Python"]
    except PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        texts, python = project["dependencies"], project["requires-python"]
    found = [Requirement(text) for text in texts]
    # A requirement of an extra has a marker that is false without that extra.
    return SpecifierSet(python), {r.name: r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}


def _python(supported: SpecifierSet) -> Check:
    here = platform.python_version()
    if supported.contains(here):
        return Check(_GROUP, "Python", "ok", f"{here} ({sys.executable})")
    return Check(
        _GROUP, "Python", "missing", f"{here}; memkit supports {supported}", "uv python install 3.12", core=True
    )


def _package(requirement: Requirement) -> Check:
    name, wanted = requirement.name, str(requirement.specifier)
    fix = f'pip install "{name}{wanted}"'
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Check(_GROUP, name, "missing", "not installed", fix, core=True)
    if not requirement.specifier.contains(re.sub(r"\+.*", "", installed), prereleases=True):
        return Check(_GROUP, name, "missing", f"{installed}; memkit supports {wanted}", fix, core=True)
    return Check(_GROUP, name, "ok", f"{installed} ({wanted})")


def _others(requirements: list[Requirement]) -> Check:
    bad = [check for check in map(_package, requirements) if check.status != "ok"]
    if not bad:
        return Check(_GROUP, "other packages", "ok", f"all {len(requirements)} in supported versions")
    packages = " ".join(check.fix.removeprefix("pip install ") for check in bad)
    found = "; ".join(f"{check.name} {check.found}" for check in bad)
    return Check(_GROUP, "other packages", "missing", found, f"pip install {packages}", core=True)


def _gpu_extra() -> Check:
    names = ("bitsandbytes", "liger-kernel", "torchao")
    absent = [name for name in names if importlib.util.find_spec(_MODULES.get(name, name)) is None]
    if not absent:
        return Check(_GROUP, "for a GPU", "ok", ", ".join(f"{name} {version(name)}" for name in names))
    found = f"not installed: {', '.join(absent)}; memkit refuses variants that use them"
    return Check(_GROUP, "for a GPU", "warning", found, f"pip install {' '.join(absent)}")


def _launchers() -> list[Check]:
    """torchrun, deepspeed and accelerate are installed beside the interpreter; a shell needs that folder in PATH."""
    beside = Path(sys.executable).parent
    names = ("torchrun", "deepspeed", "accelerate")
    absent = [name for name in names if shutil.which(name) is None]
    numactl = (
        Check(_GROUP, "numactl", "ok", _NUMA)
        if shutil.which("numactl")
        else Check(_GROUP, "numactl", "warning", f"not installed; only {_NUMA}", "sudo apt-get install numactl")
    )
    if not absent:
        return [Check(_GROUP, "launchers", "ok", ", ".join(names)), numactl]
    installed = all((beside / name).exists() for name in absent)
    fix = f"export PATH={beside}:$PATH" if installed else f"pip install {' '.join(absent)}"
    return [Check(_GROUP, "launchers", "warning", f"not on PATH: {', '.join(absent)}", fix), numactl]
