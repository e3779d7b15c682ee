"""Packages that a setup imports beyond the core dependencies."""

from __future__ import annotations

import importlib.util
import re
from typing import Final

from hf_memkit.catalog.optimizers import find_optimizer, install_command
from hf_memkit.common.errors import MissingPackageError
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES

_USED_BY: Final = {
    "bitsandbytes": r"model\.quantization=",
    "flash_attn": r"model\.attn_implementation=flash_attention",
    "liger_kernel": r"arguments\.use_liger_kernel=True",
    "peft": r"adapter\.",
    "torchao": r"trainer_parts\.cpu_offload_optimizer=",
}
"""Import name → the settings, as `key=value`, that import it; optimizers are separate."""


def needed_packages(setup: Setup) -> dict[str, str]:
    """Import name → technique, for packages that the setup imports; settings that the user replaced do not count."""
    settings = [f"{setting.key}={setting.value}" for setting in setup.settings]
    optimizers = [setup.get("optimizer.class"), setup.get("arguments.optim")]
    stepping = {package for name in optimizers if name for package in find_optimizer(str(name)).packages}

    used = {package for package, pattern in _USED_BY.items() if any(re.match(pattern, text) for text in settings)}
    techniques = [TECHNIQUES[name] for name in setup.techniques if name in TECHNIQUES]
    needed = ((package, technique.name) for technique in techniques for package in technique.packages)
    return {package: name for package, name in needed if package in stepping | used}


def require_packages(setup: Setup) -> None:
    """Refuse a setup that imports a package that is not installed; names the command that installs it."""
    missing = missing_package(setup)
    if missing is not None:
        raise MissingPackageError(f"{setup.preset!r} needs {missing}")


def missing_package(setup: Setup) -> str | None:
    """The first missing package of the setup, with the command that installs it; or None."""
    module, _, trainer = str(setup.get("trainer.class", "transformers:Trainer")).partition(":")
    needed = needed_packages(setup)
    if (trainer_package := module.partition(".")[0]) != "transformers":
        needed[trainer_package] = trainer
    for package, name in needed.items():
        if importlib.util.find_spec(package) is None:
            return f"{package} (for {name}), which is not installed; run: {install_command(package)}"
    return None
