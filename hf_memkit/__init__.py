"""memkit: make Hugging Face Trainer jobs fit the GPU you have, see where the memory goes, and prove both with numbers.

Names are imported when first used: `import hf_memkit` loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memkit._version import __version__
from hf_memkit.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_memkit.checks import check
    from hf_memkit.measuring.callback.callback import MemoryReportCallback, attach
    from hf_memkit.measuring.callback.oom_watch import oom_advice
    from hf_memkit.measuring.out_of_memory import explain_oom
    from hf_memkit.prediction import predict, predict_script, predict_trainer
    from hf_memkit.presets import PresetSetup
    from hf_memkit.recipes.resolve import predict_recipe, preset
    from hf_memkit.recipes.schema import load_recipe
    from hf_memkit.setup.setup import Setup

__all__ = [
    "MemoryReportCallback",
    "PresetSetup",
    "Setup",
    "__version__",
    "attach",
    "check",
    "explain_oom",
    "load_recipe",
    "oom_advice",
    "predict",
    "predict_recipe",
    "predict_script",
    "predict_trainer",
    "preset",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "MemoryReportCallback": "measuring.callback.callback",
        "PresetSetup": "presets",
        "Setup": "setup.setup",
        "attach": "measuring.callback.callback",
        "check": "checks",
        "explain_oom": "measuring.out_of_memory",
        "load_recipe": "recipes.schema",
        "oom_advice": "measuring.callback.oom_watch",
        "predict": "prediction",
        "predict_recipe": "recipes.resolve",
        "predict_script": "prediction",
        "predict_trainer": "prediction",
        "preset": "recipes.resolve",
    },
)
