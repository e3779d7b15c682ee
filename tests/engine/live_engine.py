"""Watches what a DeepSpeed engine holds while it trains."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_memkit.common.terms import Place
from hf_memkit.deepspeed.engine_tensors import engine_tensors


class LiveEngine(TrainerCallback):  # type: ignore[misc]
    """`held`: the most bytes of each (place, term) in any backward pass, before any step and after it."""

    def __init__(self, trainer: Any) -> None:
        self.held: dict[tuple[Place, str], int] = {}
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        engine = self._trainer.deepspeed
        layer = next(module for module in engine.module.modules() if type(module).__name__ == "GPT2Block")
        layer.register_full_backward_pre_hook(lambda *_: self._look())
        step = engine.optimizer.step

        def looking_step(*arguments: Any, **options: Any) -> Any:
            self._look()
            return step(*arguments, **options)

        engine.optimizer.step = looking_step

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._look()

    def _look(self) -> None:
        engine = self._trainer.deepspeed
        seen: set[int] = set()  # memory that two terms share counts with the first one
        for term, tensors in engine_tensors(engine.optimizer, engine.module).items():
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            size = sum(nbytes for place, nbytes in storages.items() if place not in seen)
            seen |= storages.keys()
            if size:
                self.held[term] = max(self.held.get(term, 0), size)
