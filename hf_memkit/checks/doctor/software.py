"""Python and the packages, against the versions that memkit supports."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_memkit.catalog.library_versions import OLDEST
from hf_memkit.checks.doctor.check import Check
from hf_memkit.common import boot
from hf_memkit.common.commands import command

_GROUP: Final = "Software"
_FURTHER: Final = {"deepspeed": "presets with ZeRO", "peft": "adapters", "datasets": "recipes"}
"""Optional library → its purpose, beyond the libraries of every training (`OLDEST`)."""
_MODULES: Final = {"liger-kernel": "liger_kernel"}
_NUMA: Final = "deepspeed --bind_cores_to_rank needs it"


def checks() -> list[Check]:
    """One check for Python, one for each library that trains, one for memkit's own, one for the launchers."""
    python, trains, own = _requirements()
    return [
        _python(python),
        *(_package(trains[name], _FURTHER.get(name, "")) for name in (*OLDEST, *_FURTHER) if name in trains),
        _others(own),
        _gpu_extra(),
        *_launchers(),
    ]


def _requirements() -> tuple[SpecifierSet, dict[str, Requirement], list[Requirement]]:
    """Versions of Python; name → requirement of training libraries; requirements of memkit: from the metadata of
    memkit's environment, or from the checkout."""
    distribution = next(iter(distributions(name="hf-memkit", path=[*boot.places(), *sys.path])), None)
    if distribution is not None:
        requirements = [Requirement(text) for text in distribution.requires or ()]
        python = distribution.metadata["Requires-Python"]
        # A requirement of an extra has a marker that is false without that extra.
        own = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
        trains = [one for one in requirements if one.marker is not None and one.marker.evaluate({"extra": "train"})]
    else:
        project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        python = project["requires-python"]
        own = [Requirement(text) for text in project["dependencies"]]
        trains = [Requirement(text) for text in project["optional-dependencies"]["train"]]
    by_name = {requirement.name: requirement for requirement in trains}
    return SpecifierSet(python), by_name, [] if boot.places() else own


def _python(supported: SpecifierSet) -> Check:
    here = platform.python_version()
    if supported.contains(here):
        return Check(_GROUP, "Python", "ok", f"{here} ({sys.executable})")
    finding = f"{here}; memkit supports {supported}"
    return Check(_GROUP, "Python", "missing", finding, "uv python install 3.12", core=True)


def _package(requirement: Requirement, needed_by: str = "") -> Check:
    """`needed_by`: its purpose, if optional."""
    name = requirement.name
    wanted = str(requirement.specifier)
    fix = f'pip install "{name}{wanted}"'
    try:
        installed = version(name)
    except PackageNotFoundError:
        if needed_by:
            return Check(_GROUP, name, "warning", f"not installed; only {needed_by} need it", fix)
        return Check(_GROUP, name, "missing", "not installed", fix, core=True)
    if not requirement.specifier.contains(re.sub(r"\+.*", "", installed), prereleases=True):
        return Check(_GROUP, name, "missing", f"{installed}; memkit supports {wanted}", fix, core=True)
    return Check(_GROUP, name, "ok", f"{installed} ({wanted})")


def _others(requirements: list[Requirement]) -> Check:
    bad = [check for check in map(_package, requirements) if check.status != "ok"]
    if not requirements:
        return Check(_GROUP, "memkit's own", "ok", f"in {boot.places()[0]}")
    if not bad:
        return Check(_GROUP, "memkit's own", "ok", f"all {len(requirements)} in supported versions")
    packages = " ".join(check.fix.removeprefix("pip install ") for check in bad)
    finding = "; ".join(f"{check.name} {check.finding}" for check in bad)
    return Check(_GROUP, "memkit's own", "missing", finding, f"pip install {packages}", core=True)


def _gpu_extra() -> Check:
    names = ("bitsandbytes", "liger-kernel", "torchao")
    absent = [name for name in names if importlib.util.find_spec(_MODULES.get(name, name)) is None]
    if not absent:
        return Check(_GROUP, "for a GPU", "ok", ", ".join(f"{name} {version(name)}" for name in names))
    finding = f"not installed: {', '.join(absent)}; memkit refuses variants that use them"
    return Check(_GROUP, "for a GPU", "warning", finding, f"pip install {' '.join(absent)}")


def _launchers() -> list[Check]:
    """torchrun, deepspeed and accelerate are installed next to the interpreter; a shell needs that folder in PATH."""
    scripts_folder = Path(sys.executable).parent
    names = ("torchrun", "deepspeed", "accelerate")
    absent = [name for name in names if shutil.which(name) is None]
    numactl = (
        Check(_GROUP, "numactl", "ok", _NUMA)
        if shutil.which("numactl")
        else Check(_GROUP, "numactl", "warning", f"not installed; only {_NUMA}", "sudo apt-get install numactl")
    )
    if not absent:
        return [Check(_GROUP, "launchers", "ok", ", ".join(names)), numactl]
    installed = all((scripts_folder / name).exists() for name in absent)
    packages = ["torch" if name == "torchrun" else name for name in absent]
    fix = f"export PATH={command(scripts_folder)}:$PATH" if installed else f"pip install {' '.join(packages)}"
    return [Check(_GROUP, "launchers", "warning", f"not on PATH: {', '.join(absent)}", fix), numactl]
