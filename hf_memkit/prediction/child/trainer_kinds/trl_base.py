"""All Trainers of TRL: patches when one is created, and how it loads its model."""

from __future__ import annotations

import functools
import sys
import traceback
from typing import Any

from transformers import Trainer

from hf_memkit.prediction.child.trainer_kinds.preference import patch_reference
from hf_memkit.prediction.child.trainer_kinds.vllm import patch_vllm


def patch_trl() -> None:
    """Installs the patches of TRL when one of its Trainers is created."""
    original = Trainer.__init__

    @functools.wraps(original)  # libraries inspect its parameters
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if "trl.trainer.utils" in sys.modules:
            patch_reference(type(self))
        if getattr(self.args, "use_vllm", False):
            patch_vllm()

    Trainer.__init__ = init


def is_loading_model() -> bool:
    """Whether a Trainer of TRL is loading its model. It chooses device_map="auto" only outside distributed runs, and
    None under DeepSpeed, for any `model_init_kwargs` (trl 1.16.0: sft_trainer.py 691, utils.py 1350)."""
    return any(
        str(frame.f_globals.get("__name__")).startswith("trl.")
        and frame.f_code.co_name == "__init__"
        and hasattr(frame.f_locals.get("self"), "create_optimizer")
        for frame, _ in traceback.walk_stack(sys._getframe(1))
    )
