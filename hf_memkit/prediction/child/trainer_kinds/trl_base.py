"""Every Trainer of TRL's: what is asked of values when one is made, and how it loads its model."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from transformers import Trainer

from hf_memkit.prediction.child.trainer_kinds.preference import nothing_is_hashed, rows_have_zeros
from hf_memkit.prediction.child.trainer_kinds.vllm import vllm_is_installed


def answer_trl() -> None:
    """From now on a Trainer of TRL's that is made gets these answers."""
    original = Trainer.__init__

    @functools.wraps(original)  # libraries look at its parameters
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if "trl.trainer.utils" in sys.modules:
            nothing_is_hashed()
            rows_have_zeros(type(self))
        if getattr(self.args, "use_vllm", False):
            vllm_is_installed()

    Trainer.__init__ = init


def loads_the_model() -> bool:
    """Whether a Trainer of TRL's is loading the model itself: it chooses "auto" only outside distributed runs, and
    under DeepSpeed None, whatever `model_init_kwargs` say (trl 1.16.0: sft_trainer.py 691, utils.py 1350)."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        in_trl = str(frame.f_globals.get("__name__")).startswith("trl.")
        if in_trl and frame.f_code.co_name == "__init__" and hasattr(frame.f_locals.get("self"), "create_optimizer"):
            return True
        frame = frame.f_back
    return False
