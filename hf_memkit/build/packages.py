"""What a setup imports beyond the core dependencies."""

from __future__ import annotations

import importlib.util
from typing import Final

from hf_memkit.errors import MissingPackageError
from hf_memkit.technique import TECHNIQUES
from hf_memkit.training_setup import TrainingSetup

__all__ = ["require_packages"]

_EXTRA: Final = {
    "torchao": "gpu",
    "bitsandbytes": "gpu",
    "liger_kernel": "gpu",
    "apollo_torch": "optimizers",
    "galore_torch": "optimizers",
    "lomo_optim": "optimizers",
}
"""Import name → the extra of hf-memkit that brings it."""


def require_packages(setup: TrainingSetup) -> None:
    """Makes sure that what the setup's techniques import is installed.

    Raises:
        MissingPackageError: a package is missing; names the command that installs it.
    """
    for name in setup.techniques:
        for package in TECHNIQUES[name].packages if name in TECHNIQUES else ():
            if importlib.util.find_spec(package) is None:
                what = f"'hf-memkit[{_EXTRA[package]}]'" if package in _EXTRA else package
                raise MissingPackageError(
                    f"{setup.preset!r} needs {package} (for {name}), which is not installed; run: pip install {what}"
                )
