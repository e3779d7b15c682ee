"""memkit: make Hugging Face Trainer jobs fit the GPU you have, see where the memory goes, and prove both with numbers.

Names are imported when first used: `import hf_memkit` loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memkit._version import __version__
from hf_memkit.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "MemoryReportCallback": "callback",
        "PresetSetup": "presets",
        "TrainingSetup": "training_setup",
        "attach": "callback",
        "explain_oom": "oom",
        "load_recipe": "recipe.schema",
        "oom_advice": "callback",
        "predict_trainer": "predict",
        "preset": "presets",
    },
)
