"""Adds LoRA, or a loss in chunks, to a script that lacks it, as a plan's changed script would.

When the script creates its first Trainer, the constructor gets `peft_config`, if it accepts that (TRL's do), or the
model with adapters; a model gets its loss in chunks when it begins to train. `plan/other_code.py` writes the same
changes into the script; the places that it needs are recorded here.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from torch import nn
from transformers import Trainer

from hf_memkit.prediction.child.user_code import is_library
from hf_memkit.prediction.traced_training import CallPlace, TrainerCall

CONFIG: Final = "peft_config"


def add_adapters_to_first_trainer(adapter: Mapping[str, Any]) -> None:
    """Adds adapters to the first Trainer that is created from now on."""
    seen: list[type] = []

    def create(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.append(cls)
            add_adapters_to_next(cls, adapter)
        return object.__new__(cls)

    trainer_class: Any = Trainer
    trainer_class.__new__ = staticmethod(create)


def add_adapters_to_next(kind: Any, adapter: Mapping[str, Any]) -> None:
    """Adds adapters to the next `kind(…)`. A user's subclass is restored before its own `__init__` runs."""
    plain, overrides_init = kind.__init__, "__init__" in vars(kind)

    @functools.wraps(plain)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if overrides_init:
            kind.__init__ = plain
        else:
            del kind.__init__
        args, kwargs = with_adapters(kind, adapter, args, kwargs)
        trainer.__init__(*args, **kwargs)

    kind.__init__ = init


def with_adapters(
    kind: Any, adapter: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which to call `kind` instead of these."""
    from peft import LoraConfig

    config = LoraConfig(**adapter)
    if _takes(kind, CONFIG):
        return args, {**kwargs, CONFIG: config}
    model = _model_argument(args, kwargs)
    if isinstance(model, int):
        return (*args[:model], _adapted(args[model], config), *args[model + 1 :]), dict(kwargs)
    given = kwargs.get(model) if model is not None else None
    if model == "model_init" and callable(given):

        @functools.wraps(given)  # Trainer inspects its parameters
        def model_init(*trial: Any) -> Any:
            return _adapted(given(*trial), config)

        return args, {**kwargs, model: model_init}
    return args, {**kwargs, model: _adapted(given, config)} if model is not None else dict(kwargs)


def _adapted(model: Any, config: Any) -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if getattr(model, "is_quantized", False):
        # Trainer enables checkpointing as its arguments say; this function would enable it always.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, config)


def chunk_losses() -> None:
    """Lets models that train from now on compute their loss in chunks (`components/chunked_loss.py`)."""
    plain = Trainer.train

    @functools.wraps(plain)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_memkit.components.chunked_loss import install

        install(trainer.model, self_check=False)  # the check needs values
        return plain(trainer, *args, **kwargs)

    Trainer.train = train


def trainer_call(
    frame: types.FrameType | None, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TrainerCall | None:
    """The call that creates a Trainer; None if a library makes it."""
    place = call_place(frame)
    if place is None:
        return None
    model = _model_argument(args, kwargs)
    given = args[model] if isinstance(model, int) else kwargs.get(model or "")
    takes = tuple(name for name in (CONFIG, "quantization_config") if _takes(kind, name))
    return TrainerCall(place, model, isinstance(given, str), takes)


def call_place(frame: types.FrameType | None) -> CallPlace | None:
    """The call that this frame is executing; None if it is library code or the position is unknown."""
    if frame is None or is_library(frame.f_code.co_filename):
        return None
    _, line, _, column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if line is None or column is None:
        return None
    return CallPlace(frame.f_code.co_filename, line, column)


def _takes(kind: Any, name: str) -> bool:
    """Whether a constructor has this parameter, or passes unknown ones on to a constructor that has it."""
    for base in kind.__mro__:
        own = vars(base).get("__init__")
        if own is None:
            continue
        parameters = inspect.signature(own).parameters.values()
        if any(parameter.name == name for parameter in parameters):
            return True
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return False
    return False


def _model_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Index or name of the argument that is the model."""
    if kwargs.get("model") is not None:
        return "model"
    numbers = [number for number, value in enumerate(args) if isinstance(value, nn.Module)]
    if numbers:
        return numbers[0]
    if args and isinstance(args[0], str):
        return 0
    named = [name for name, value in kwargs.items() if isinstance(value, nn.Module)]
    if named:
        return named[0]
    return "model_init" if kwargs.get("model_init") is not None else None
