"""What a setup imports beyond the core dependencies."""

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
"""Import name → the settings, as `key=value`, that have it imported, besides an optimizer."""


def needed_packages(setup: Setup) -> dict[str, str]:
    """`{import name: technique}` of what the setup's techniques import for the settings that it still has: what the
    user replaced is among them no more."""
    settings = [f"{setting.key}={setting.value}" for setting in setup.settings]
    optimizers = [setup.get("optimizer.class"), setup.get("arguments.optim")]
    stepping = {package for name in optimizers if name for package in find_optimizer(str(name)).packages}

    def used(package: str) -> bool:
        pattern = _USED_BY.get(package)
        return package in stepping or (pattern is not None and any(re.match(pattern, each) for each in settings))

    return {
        package: name
        for name in setup.techniques
        for package in (TECHNIQUES[name].packages if name in TECHNIQUES else ())
        if used(package)
    }


def _of_trainer(trainer: str) -> dict[str, str]:
    """The package of a Trainer that is not transformers' own."""
    package = trainer.partition(":")[0].partition(".")[0]
    return {} if package == "transformers" else {package: trainer.partition(":")[2]}


def require_packages(setup: Setup) -> None:
    """Refuses a setup whose techniques import what is not installed, with the command that installs it."""
    missing = missing_package(setup)
    if missing is not None:
        raise MissingPackageError(f"{setup.preset!r} needs {missing}")


def missing_package(setup: Setup) -> str | None:
    """What the setup's techniques import and is not installed, with the command that installs it; or None."""
    trainer = str(setup.get("trainer.class", "transformers:Trainer"))
    for package, name in {**needed_packages(setup), **_of_trainer(trainer)}.items():
        if importlib.util.find_spec(package) is None:
            return f"{package} (for {name}), which is not installed; run: {install_command(package)}"
    return None
