"""Builds the setup of a model with Trainer's defaults, for predictions without a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.catalog.architectures import built_in
from hf_memkit.catalog.models import (
    ModelFacts,
    Origin,
    describe,
    gated_message,
    hub_reachable,
    own_code_message,
    quiet_transformers,
    refuse_absent,
)
from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.common.user_files import parsed, user_path
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from transformers import PretrainedConfig


TRAINER_DEFAULTS: Final = "trainer-defaults"  # name of the setup with only the user's arguments

_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
"""Suffixes of class names of causal language models in transformers (`config.architectures`)."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as its config describes it."""

    name: str  # hub ID or folder, as given
    origin: Origin  # where its weights would come from
    config: Mapping[str, Any]  # its config values that are not None
    maximum_length: int | None  # longest sequence that its positions allow; None: not specified
    facts: ModelFacts | None  # its shapes, if requested and if it is a causal language model of transformers
    own_code: bool = False  # whether its classes come with the model instead of transformers
    model_class: str | None = None  # class that its config names, unless it is a causal language model


def describe_model(
    name: str, *, trust_remote_code: bool = False, use_hub: bool | None = None, shapes: bool = True
) -> ModelDescription:
    """Describes a model of any kind that transformers knows, from its config without loading weights. Raises
    InputError if there is no such model, its config contradicts itself, or it needs a login or its own code.

    Args:
        name: hub ID, local folder, or the name of a built-in architecture.
        trust_remote_code: whether code that comes with the model may run.
        use_hub: whether to ask the hub. Default: if it answers.
        shapes: whether to determine its shapes, which takes a second.
    """
    refuse_absent(name)
    from transformers import AutoConfig

    use_hub = hub_reachable() if use_hub is None else use_hub
    folder = user_path(name)
    origin: Origin = "local" if folder.is_dir() else "hub"
    try:
        with quiet_transformers():
            # trust_remote_code is always passed, because transformers would ask on the terminal.
            config = AutoConfig.from_pretrained(
                str(folder) if origin == "local" else name,
                local_files_only=origin == "local" or not use_hub,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:  # config classes raise any error for a wrong value
        if "trust_remote_code" in str(error):
            raise InputError(own_code_message(name)) from None
        if "gated repo" in str(error).lower():
            raise InputError(gated_message(name)) from None
        known = built_in(name) if origin == "hub" else None
        if known is None:
            facts = describe(name, use_hub=use_hub)  # raises with the reason
            return ModelDescription(name, facts.origin, facts.config, facts.maximum_length, facts)
        config, origin = AutoConfig.for_model(**known[1].config), "architecture"
    return describe_config(config, name, origin, shapes=shapes, use_hub=use_hub)


def describe_config(
    config: PretrainedConfig, name: str, origin: Origin, *, shapes: bool = True, use_hub: bool = False
) -> ModelDescription:
    """Describes the model of a config, of a class of transformers or of the model's own code. Raises InputError if the
    config contradicts itself, or is not causal and names no class.

    Args:
        name: hub ID, folder, or any other name with `origin` "architecture".
        origin: where its weights would come from.
        shapes, use_hub: whether to determine its shapes, which takes a second, and to ask the hub for them.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = {key: value for key, value in config.to_diff_dict().items() if value is not None}
    classes = [str(name) for name in values.get("architectures") or ()]
    own_code = not type(config).__module__.startswith("transformers.")
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not own_code
    causal = causal and (not classes or any(name.endswith(_CAUSAL) for name in classes))
    if not (causal or own_code or classes):
        raise InputError(
            f"model {name!r} ({config.model_type}) is not a causal language model, and its config names no class; "
            f'write it into config.json: "architectures": ["…"]'
        )
    facts = None
    if causal and shapes:
        given = values if origin == "architecture" else None  # the given config, not the hub's under its name
        facts = describe(name, given, use_hub=use_hub and given is None)
    return ModelDescription(
        name=name,
        origin=origin,
        config=values,
        maximum_length=getattr(config.get_text_config(), "max_position_embeddings", None),
        facts=facts,
        own_code=own_code,
        model_class=None if causal or own_code else classes[0],
    )


def refuse_precision(arguments: Mapping[str, Any]) -> None:
    """Refuses fields of TrainingArguments with two precisions. Raises SettingError if bf16 and fp16 are both set."""
    if arguments.get("bf16") is True and arguments.get("fp16") is True:
        raise SettingError("bf16 and fp16: TrainingArguments takes at most one of them; omit one")


def setup_of_arguments(arguments: Mapping[str, Any]) -> Setup:
    """A setup with only the user's fields of TrainingArguments. Raises SettingError if arguments conflict."""
    refuse_precision(arguments)
    setup = Setup(preset=TRAINER_DEFAULTS)
    for name, value in arguments.items():
        setup = setup.put(f"arguments.{name}", value, "yours")
    return setup


def default_setup(model: ModelDescription, arguments: Mapping[str, Any]) -> Setup:
    """Trainer's defaults with the user's fields of TrainingArguments, under today's names.

    A DeepSpeed config among them (a path or its content) becomes the setup's own.

    Raises:
        InputError: the DeepSpeed config cannot be read.
        SettingError: an argument contradicts another one.
    """
    own = dict(arguments)
    deepspeed = own.pop("deepspeed", None)
    setup = setup_of_arguments(own)
    if deepspeed is not None:
        setup = setup.put("deepspeed.config", _deepspeed(deepspeed), "yours")
    return with_class(setup.put_model(model.name, model.origin, model.config), model)


def with_class(setup: Setup, model: ModelDescription) -> Setup:
    """The setup with the class of a model that is not a causal language model."""
    if model.model_class is None:
        return setup
    return setup.put("model.class", model.model_class, "the class that its config names")


def _deepspeed(given: Any) -> Any:
    if isinstance(given, Mapping):
        return dict(given)
    try:
        return parsed(str(given), json.loads, user_path(str(given)).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"deepspeed={given!r}: cannot be read ({error.strerror}); give a DeepSpeed JSON") from None
    except ValueError as error:
        raise InputError(f"deepspeed={given!r}: not JSON ({error}); fix the file") from None
