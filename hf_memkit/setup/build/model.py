"""Setup → the model: loaded or built, quantised, its vocabulary padded, its adapters added."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_memkit.catalog.models import gated_message, hub_reachable, quiet_transformers
from hf_memkit.common.errors import RunError
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LOADING_ONLY = ("device_map", "ignore_mismatched_sizes", "use_safetensors")
"""Options of `from_pretrained` that `from_config` does not take: how weights are read."""


def model_options(setup: Setup) -> dict[str, Any]:
    """Keyword arguments for `AutoModel….from_pretrained`, as plain data. `dtype` is a name; an optional
    `quantization_config` has fields of `transformers.BitsAndBytesConfig`."""
    names = ("dtype", "attn_implementation", *LOADING_ONLY)
    options = {name: setup[f"model.{name}"] for name in names if f"model.{name}" in setup}
    if "model.quantization" in setup:
        options["quantization_config"] = setup["model.quantization"]
    return {**options, **setup.get("model.config", {})}


def build_model(
    setup: Setup,
    say: Callable[[str], None],
    *,
    values: Mapping[str, Any] | None = None,
    random_weights: bool | None = None,
) -> PreTrainedModel:
    """The setup's model, with padded vocabulary and adapters.

    Args:
        say: called with each line for the user.
        values: config values that depend on the data, such as the number of labels.
        random_weights: whether to build the model with random weights instead of loading it; None: if its weights are
            unavailable, on a CPU, or if the setup has `model.random_weights`.

    Raises:
        RunError: its weights cannot be loaded.
    """
    import torch
    from transformers import BitsAndBytesConfig

    torch.manual_seed(int(setup.get("arguments.seed", 42)))  # random weights are the same in every run
    with quiet_transformers():
        if random_weights is None:
            random_weights = setup["model.origin"] == "architecture"
            refuse_random_weights(setup)
        options = model_options(setup)
        if "dtype" in options:
            options["dtype"] = getattr(torch, options["dtype"])
        if "quantization_config" in options:
            options["quantization_config"] = BitsAndBytesConfig(**options["quantization_config"])
        options |= values or {}
        model = _built(setup, options, values or {}, say) if random_weights else _loaded(setup, options)
        multiple = setup.get("model.pad_vocabulary_to_multiple_of")
        if multiple:
            # New rows start at the mean of the old ones, so that their probability is close to 0.
            model.resize_token_embeddings(pad_to_multiple_of=multiple)
        if setup.section("adapter"):
            model = add_adapters(model, setup.section("adapter"))
    return model


def model_class(setup: Setup) -> Any:
    """The class that makes and loads the setup's model."""
    import transformers

    return getattr(transformers, setup.get("model.auto_class", "AutoModelForCausalLM"))


def _loaded(setup: Setup, options: dict[str, Any]) -> Any:
    import torch

    if options.get("device_map") == "cuda" and not torch.cuda.is_available():
        raise RunError("low-host-ram loads the weights onto a GPU, and torch sees none here. Remove low-host-ram")
    name = setup["model.name"]
    try:
        # The hub is asked once: otherwise each file waits for its own time-out.
        return model_class(setup).from_pretrained(name, local_files_only=not hub_reachable(), **options)
    except (OSError, ValueError) as error:
        raise RunError(why_not_loaded(name, error)) from error


def why_not_loaded(name: str, error: BaseException) -> str:
    """Message for model weights that cannot be loaded, with the fix."""
    if "gated repo" in str(error).lower():
        return gated_message(name)
    reason = textwrap.shorten(str(error), 300, placeholder=" …").rstrip(".")
    fix = "Give another --model, or a folder written by `save_pretrained`"
    return f"cannot load the weights of {name!r}: {reason}. {fix}"


def refuse_random_weights(setup: Setup) -> None:
    """Refuse to train from random weights on a GPU unless requested."""
    trains_anyway = setup.get("arguments.use_cpu") or "model.random_weights" in setup
    if setup["model.origin"] == "architecture" and not trains_anyway:
        raise RunError(
            f"{setup['model.name']}: its weights cannot be reached. Give a folder that has them, --model FOLDER, or "
            f"train from random weights: --random-weights"
        )


def _built(setup: Setup, options: dict[str, Any], values: Mapping[str, Any], say: Callable[[str], None]) -> Any:
    from transformers import AutoConfig

    architecture = setup["model.architecture"]
    architecture.pop("transformers_version", None)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    for key in {**setup.get("model.config", {}), **values}:
        if key not in LOADING_ONLY:
            setattr(config, key, options.pop(key))
    quantization = options.pop("quantization_config", None)
    for name in LOADING_ONLY:
        options.pop(name, None)
    auto_class = model_class(setup)
    model = auto_class.from_config(config, **options)
    if quantization is not None:
        # from_config ignores a quantisation, silently: only loading quantises.
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            del model
            model = auto_class.from_pretrained(folder, quantization_config=quantization, **options)
    if setup.get("arguments.use_cpu"):
        say("The small model starts from random weights.")
    else:
        name = setup["model.name"]
        say(f"WARNING: training starts from RANDOM weights, not from those of {name}: this is no fine-tuning.")
    return model


def add_adapters(model: Any, options: dict[str, Any]) -> Any:
    """The model with LoRA adapters; `options`: fields of `peft.LoraConfig`."""
    import warnings

    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # PEFT warns that it sets fan_in_fan_out for GPT-2's Conv1D itself, as it should.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        return get_peft_model(model, LoraConfig(**options))
