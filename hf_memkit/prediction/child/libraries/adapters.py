"""LoRA in a script that trains whole models, or a loss in chunks: what the changed script would give its Trainer.

Where the script makes its first Trainer, its constructor gets `peft_config`, if it takes that (TRL's do), or the model
with adapters; a model gets its loss in chunks where it begins to train. `plan/other_code.py` writes the same into the
script; what that needs to know of the place is noted here too.
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

from hf_memkit.prediction.child.users_code import is_library
from hf_memkit.prediction.traced_training import CallPlace, TrainerCall

CONFIG: Final = "peft_config"


def adapters_from_its_first_line(adapter: Mapping[str, Any]) -> None:
    """The first Trainer that is made from now on gets adapters."""
    seen: list[type] = []

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.append(cls)
            give_adapters(cls, adapter)
        return object.__new__(cls)

    vars_of: Any = Trainer
    vars_of.__new__ = staticmethod(made)


def give_adapters(kind: Any, adapter: Mapping[str, Any]) -> None:
    """The next `kind(…)` is called with adapters. A subclass of the user's is as before by the time its own
    `__init__` runs."""
    plain, own = kind.__init__, "__init__" in vars(kind)

    @functools.wraps(plain)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if own:
            kind.__init__ = plain
        else:
            del kind.__init__
        args, kwargs = with_adapters(kind, adapter, args, kwargs)
        trainer.__init__(*args, **kwargs)

    kind.__init__ = init


def with_adapters(
    kind: Any, adapter: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `kind` is called with in place of these arguments."""
    from peft import LoraConfig

    config = LoraConfig(**adapter)
    if _takes(kind, CONFIG):
        return args, {**kwargs, CONFIG: config}
    at = _model_at(args, kwargs)
    if isinstance(at, int):
        return (*args[:at], _adapted(args[at], config), *args[at + 1 :]), dict(kwargs)
    given = kwargs.get(at) if at is not None else None
    if at == "model_init" and callable(given):

        @functools.wraps(given)  # Trainer looks at its parameters
        def model_init(*trial: Any) -> Any:
            return _adapted(given(*trial), config)

        return args, {**kwargs, at: model_init}
    return args, {**kwargs, at: _adapted(given, config)} if at is not None else dict(kwargs)


def _adapted(model: Any, config: Any) -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if getattr(model, "is_quantized", False):
        # Trainer switches checkpointing on, as its arguments say; this would do it by itself.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, config)


def chunk_losses() -> None:
    """Models that train from now on compute their loss in chunks (`components/chunked_loss.py`)."""
    plain = Trainer.train

    @functools.wraps(plain)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_memkit.components.chunked_loss import install

        install(trainer.model, self_check=False)  # which looks at numbers
        return plain(trainer, *args, **kwargs)

    Trainer.train = train


def made_at(
    frame: types.FrameType | None, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TrainerCall | None:
    """Where a Trainer is made; None: a library makes it."""
    place = place_of(frame)
    if place is None:
        return None
    at = _model_at(args, kwargs)
    given = args[at] if isinstance(at, int) else kwargs.get(at or "")
    takes = tuple(name for name in (CONFIG, "quantization_config") if _takes(kind, name))
    return TrainerCall(place, at, isinstance(given, str), takes)


def place_of(frame: types.FrameType | None) -> CallPlace | None:
    """The call that this frame is at; None: no code of the user's, or nobody knows."""
    if frame is None or is_library(frame.f_code.co_filename):
        return None
    _, line, _, column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if line is None or column is None:
        return None
    return CallPlace(frame.f_code.co_filename, line, column)


def _takes(kind: Any, name: str) -> bool:
    """Whether a constructor has this parameter, or hands all that it does not know to one that has."""
    for each in kind.__mro__:
        own = vars(each).get("__init__")
        if own is None:
            continue
        parameters = inspect.signature(own).parameters.values()
        if any(parameter.name == name for parameter in parameters):
            return True
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return False
    return False


def _model_at(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Which argument is the model: its number, or its name."""
    if kwargs.get("model") is not None:
        return "model"
    numbers = [number for number, each in enumerate(args) if isinstance(each, nn.Module)]
    if numbers:
        return numbers[0]
    if args and isinstance(args[0], str):
        return 0
    named = [name for name, each in kwargs.items() if isinstance(each, nn.Module)]
    if named:
        return named[0]
    return "model_init" if kwargs.get("model_init") is not None else None
