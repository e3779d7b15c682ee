"""memkit: make Hugging Face Trainer jobs fit the GPU you have, see where the memory goes, and prove both with numbers.

Names are imported when first used: `import hf_memkit` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_memkit._version import __version__

if TYPE_CHECKING:
    from hf_memkit.callback import MemoryReportCallback, attach, oom_advice
    from hf_memkit.oom import explain_oom
    from hf_memkit.predict import predict_trainer
    from hf_memkit.presets import PresetSetup, preset
    from hf_memkit.recipe.schema import load_recipe
    from hf_memkit.training_setup import TrainingSetup

__all__ = [
    "MemoryReportCallback",
    "PresetSetup",
    "TrainingSetup",
    "__version__",
    "attach",
    "explain_oom",
    "load_recipe",
    "oom_advice",
    "predict_trainer",
    "preset",
]

_MODULE = {
    "MemoryReportCallback": "hf_memkit.callback",
    "PresetSetup": "hf_memkit.presets",
    "TrainingSetup": "hf_memkit.training_setup",
    "attach": "hf_memkit.callback",
    "explain_oom": "hf_memkit.oom",
    "load_recipe": "hf_memkit.recipe.schema",
    "oom_advice": "hf_memkit.callback",
    "predict_trainer": "hf_memkit.predict",
    "preset": "hf_memkit.presets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return __all__
