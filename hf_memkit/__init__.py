"""memkit: make Hugging Face Trainer jobs fit the GPU you have, see where the memory goes, and prove both with numbers.

Names are imported when first used: `import hf_memkit` loads neither torch nor transformers.
"""

# Imports only `_version`: with `python -m hf_memkit` Python would still take any other file from the current folder.
from hf_memkit._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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

_MODULES = {
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
}
"""Public name → the module that has it."""


def __getattr__(name: str) -> "Any":
    from hf_memkit.common.lazy_names import lazy_names

    return lazy_names(__name__, _MODULES)[0](name)


def __dir__() -> "list[str]":
    return sorted(__all__)
