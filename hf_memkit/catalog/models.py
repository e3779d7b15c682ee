"""What a model is made of, known without loading it: config → shapes on the meta device → counts.

A model is named by a hub ID, a local folder, or an architecture (config values, as a recipe has them). Where the hub
ID is not on disk and the hub cannot be reached, the architecture stands in, and `ModelFacts.origin` says so.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hf_memkit.catalog.architectures import ARCHITECTURES, built_in
from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.user_files import user_path

Origin = Literal["local", "hub", "architecture"]
"""Where the weights come from: a local folder; the hub or its cache; nowhere (built from config values, random)."""

_HUB_TIMEOUT_S = 5.0

_CAUSAL = "AutoModelForCausalLM"


@cache
def hub_reachable() -> bool:
    """Whether the Hugging Face hub answers; asked once a process, within five seconds.

    `HF_HUB_OFFLINE=1` (or `TRANSFORMERS_OFFLINE=1`) means no without asking.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or hub_switched_off():
        return False
    try:
        HfApi().model_info("openai-community/gpt2", timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # any answer of the server counts as reached, whatever it says
        return getattr(error, "response", None) is not None
    return True


def hub_switched_off() -> str:
    """The variables that switch the hub off, as they are set, such as `"HF_HUB_OFFLINE=1"`; empty: none does."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    off = [name for name in names if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}]
    return " and ".join(f"{name}={os.environ[name]}" for name in off)


def why_no_hub() -> str:
    """Why `hub_reachable` said no, as the end of a sentence."""
    off = hub_switched_off()
    return f"the hub is switched off ({off})" if off else "the hub did not answer"


def _instead_of_the_hub() -> str:
    """What to do where a model is neither here nor in the cache, as the end of a message."""
    names = [each.partition("=")[0] for each in hub_switched_off().split(" and ") if each]
    return f"; give a folder with a config.json{', or unset ' * bool(names)}{' and '.join(names)}"


def refuse_absent(name: str, *, known: bool | None = None) -> int | None:
    """Refuses a model that is certainly not there: told at once, without torch, transformers or the hub.

    Args:
        name: hub ID or local folder.
        known: whether its config values are known without the hub; None: if it is a built-in architecture.

    Returns:
        The longest sequence that its positions allow, where a file here or memkit's own list says that.

    Raises:
        InputError: no such folder, no config in it, no hub ID, or not in the cache while the hub is switched off.
    """
    try:
        path = user_path(name)
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"model {name[:80]!r} is not a usable path ({reason}). Give a folder or a hub ID") from None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name!r} has no config.json. Give a folder written by `save_pretrained`")
        return longest_sequence(path / "config.json")
    if path.is_file() or name.startswith((".", "/", "~")):
        what = "is a file" if path.is_file() else "does not exist"
        raise InputError(f"model folder {name!r} {what}; give a folder with a config.json, or a hub ID")
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:
        raise InputError(
            f"model {name!r} is neither a folder here nor a hub ID; write a folder with a config.json, or OWNER/NAME"
        ) from None
    if isinstance(cached, str):
        return longest_sequence(Path(cached))
    architecture = built_in(name) if known is None else None
    if hub_switched_off() and not (known or architecture):
        names = [*ARCHITECTURES, *(each.rpartition("/")[2] for each in ARCHITECTURES)]
        near = did_you_mean(name, names) if built_in(name) is None else ""  # whose weights are wanted here
        raise InputError(
            f"model {name!r} is neither a folder here nor in the cache, and {why_no_hub()}"
            f"{near or _instead_of_the_hub()}"
        )
    if architecture and (hub_switched_off() or "/" not in name or architecture[0].lower() == name.lower()):
        return longest_sequence(architecture[1].config)
    return None


def longest_sequence(config: Path | Mapping[str, Any]) -> int | None:
    """The longest sequence of a config, or of the file that has it; None where it does not say so in plain words."""
    if isinstance(config, Path):
        try:
            config = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    if not isinstance(config, Mapping) or "text_config" in config:
        return None
    # T5's files have n_positions too, and it has no positions.
    found = config.get("n_positions" if config.get("model_type") == "gpt2" else "max_position_embeddings")
    return found if type(found) is int else None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only from transformers' own log, inside the block."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collection inside the block. What importing torch and transformers makes stays, and so do
    the blocks of a replay: looking through it again and again finds nothing, and takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer (`nn.Linear`, or GPT-2's transposed `Conv1D`) of `inputs` × `outputs` weights.

    `head` is true of the layer that makes the logits: neither bitsandbytes nor PEFT's "all-linear" touches it.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    head: bool = False

    @property
    def elements(self) -> int:
        """Elements of its weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelFacts:
    """A model's shapes.

    Attributes:
        name: hub ID or path, as it was given.
        origin: where its weights will come from.
        config: its config values, without those that are None.
        parameters: number of parameters, tied ones once.
        largest_parameter: elements of the largest parameter.
        sizes: elements of every parameter, tied ones once, in the order of the modules.
        decayed: of each, whether Trainer's optimizer applies weight decay to it: it makes two groups, and DeepSpeed
            keeps a flat buffer for each.
        tied: elements that a second module uses under another name (an output layer tied to the word embedding).
        layers, width, vocabulary: number of transformer layers, hidden size, rows of the word embedding.
        maximum_length: longest sequence the positions allow, or None.
        linears: every linear layer, in the order of the modules; empty if not known.
        stacked: elements of parameters with three dimensions or more: the experts of a mixture, kept in one tensor.
        batch_norms: BatchNorm layers, whose output for a sample depends on the others of its micro-batch.
        model_class: the class of transformers, where it is no causal language model.
    """

    name: str
    origin: Origin
    config: Mapping[str, Any] = field(repr=False)
    parameters: int
    largest_parameter: int
    sizes: tuple[int, ...] = field(repr=False)
    decayed: tuple[bool, ...] = field(repr=False)
    tied: int
    layers: int
    width: int
    vocabulary: int
    maximum_length: int | None
    linears: tuple[Linear, ...] = field(default=(), repr=False)
    stacked: int = 0
    batch_norms: int = 0
    model_class: str | None = None

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sizes by parameter group of Trainer's optimizer: with weight decay, then without."""
        pairs = tuple(zip(self.sizes, self.decayed, strict=True))
        groups = (tuple(size for size, decayed in pairs if decayed), tuple(size for size, d in pairs if not d))
        return tuple(group for group in groups if group)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "origin": self.origin,
            "parameters": self.parameters,
            "largest_parameter": self.largest_parameter,
        }


@without_collections()
def describe(
    name: str,
    architecture: Mapping[str, Any] | None = None,
    *,
    use_hub: bool,
    changes: Mapping[str, Any] | None = None,
    use_built_in: bool = False,
    auto_class: str = _CAUSAL,
) -> ModelFacts:
    """The facts of a model. Takes a second and next to no memory, whatever the model's size.

    Args:
        name: hub ID or local folder.
        architecture: config values to build from if `name` cannot be had, with their `model_type`.
        use_hub: whether the hub may be asked.
        changes: config values to change, by the names that all architectures share (`hidden_size`,
            `num_hidden_layers`, `vocab_size` …).
        use_built_in: whether a well-known name may be built from `hf_memkit.catalog.architectures` if it cannot be
            had: enough to size and check, not to train.
        auto_class: the class of transformers that makes the model from its config.

    Raises:
        InputError: there is no such model and no architecture to build it from, or it is of another kind.
    """
    if architecture is None and use_built_in and (known := built_in(name)) is not None:
        architecture = known[1].config
    refuse_absent(name, known=architecture is not None)
    import torch
    import transformers

    causal = auto_class == _CAUSAL
    with quiet_transformers():
        try:
            config, origin = _load_config(name, architecture, use_hub)
            if changes:
                _change(config, changes)
                origin = "architecture"
            with torch.device("meta"):
                model = getattr(transformers, auto_class).from_config(config)
            decodes = not causal and getattr(config, "is_encoder_decoder", False)
            if decodes and getattr(config, "decoder_start_token_id", None) is None:
                raise InputError(
                    f"model {name!r}: its config.json has no decoder_start_token_id. Add the ID of the token that "
                    f"the decoder starts with; for T5 that is pad_token_id"
                )
            text = config.get_text_config() if causal else config
            layers, width = (int(getattr(text, name, 0) or 0) for name in ("num_hidden_layers", "hidden_size"))
            vocabulary = int(getattr(text, "vocab_size", 0) or 0)
        except InputError:
            raise
        except Exception as error:  # config classes raise whatever they like at a wrong value
            raise InputError(f"model {name!r}: {_why_not_built(error, auto_class)}") from None
    decayed_names = _decayed_names(model)
    named = tuple(model.named_parameters())
    sizes = tuple(parameter.numel() for _, parameter in named)
    return ModelFacts(
        name=name,
        origin=origin,
        config={key: value for key, value in config.to_diff_dict().items() if value is not None},
        parameters=sum(sizes),
        largest_parameter=max(sizes),
        sizes=sizes,
        decayed=tuple(name in decayed_names for name, _ in named),
        tied=sum(parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False)) - sum(sizes),
        layers=layers,
        width=width,
        vocabulary=vocabulary,
        maximum_length=getattr(text, "max_position_embeddings", None),
        linears=_linears(model),
        stacked=sum(parameter.numel() for _, parameter in named if parameter.dim() > 2),
        batch_norms=sum("BatchNorm" in type(module).__name__ for module in model.modules()),
        model_class=None if causal else type(model).__name__,
    )


def _why_not_built(error: Exception, auto_class: str) -> str:
    """What transformers says of a config from which it makes no model, and what to do."""
    kind = "causal language model" if auto_class == _CAUSAL else f"model for {auto_class.removeprefix('AutoModelFor')}"
    whole = " ".join(str(error).split())  # the first line alone can be a heading
    if found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", whole):  # then all that it knows
        return f"transformers has no {kind} for a {found[1]}. Give a model that {auto_class} loads"
    said = f"unknown value {whole}" if isinstance(error, KeyError) else textwrap.shorten(whole, 300, placeholder=" …")
    return f"cannot build a {kind} from its config: {said.rstrip('.')}. Correct that value, or give another model"


def _linears(model: Any) -> tuple[Linear, ...]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head, found = getattr(model, "get_output_embeddings", lambda: None)(), []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            outputs, inputs = module.weight.shape
            if isinstance(module, Conv1D):
                inputs, outputs = outputs, inputs
            found.append(Linear(name, inputs, outputs, module.bias is not None, head is module))
    return tuple(found)


_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Source: transformers 5.23.0: trainer.py, `Trainer.get_decay_parameter_names` (whose import takes seconds)."""


def _decayed_names(model: Any) -> set[str]:
    from torch.nn import LayerNorm
    from transformers.trainer_pt_utils import get_parameter_names

    return set(get_parameter_names(model, [LayerNorm], list(_NOT_DECAYED)))


def _change(config: Any, changes: Mapping[str, Any]) -> None:
    """Sets `changes`, and what must follow from them: heads, feed-forward width and token IDs have to go together."""
    for key, value in changes.items():
        setattr(config, key, value)
    if getattr(config, "layer_types", None):  # one word a layer (Qwen3, Gemma and others): config classes compare
        layers = int(config.num_hidden_layers)
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    heads, width = config.num_attention_heads, config.hidden_size
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = min(config.num_key_value_heads, heads)
    if getattr(config, "head_dim", None):
        config.head_dim = width // heads
    if getattr(config, "intermediate_size", None) and "intermediate_size" not in changes:
        config.intermediate_size = 4 * width
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        number = getattr(config, token, None)
        if isinstance(number, int) and number >= getattr(config, "vocab_size", number + 1):
            setattr(config, token, 0)


def of_gated(name: str) -> str:
    """What to do about a model of the hub whose terms nobody here has accepted."""
    return (
        f"model {name!r} is gated: accept its terms on https://huggingface.co/{name}, then log in with `hf auth "
        f"login`; or give a folder with its config.json"
    )


def _load_config(name: str, architecture: Mapping[str, Any] | None, use_hub: bool) -> tuple[Any, Origin]:
    from transformers import AutoConfig

    path = user_path(name)
    if path.is_dir():
        try:
            return AutoConfig.from_pretrained(str(path), local_files_only=True), "local"
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0].rstrip(".")
            fix = "Give a folder written by `save_pretrained`"
            if "does not recognize this architecture" in str(error):
                cause, fix = (
                    cause.partition(" This could")[0].rstrip("."),
                    "Update transformers, or correct its model_type",
                )
            raise InputError(f"model folder {name!r} has no usable config.json: {cause}. {fix}") from None
    try:
        # Whole snapshots only: with a cached config but no cached weights the hub is needed all the same.
        return AutoConfig.from_pretrained(name, local_files_only=not use_hub), "hub"
    except (OSError, ValueError) as error:
        if architecture is not None:
            config_values = dict(architecture)
            return AutoConfig.for_model(config_values.pop("model_type"), **config_values), "architecture"
        if use_hub:
            if "gated repo" in str(error).lower():
                raise InputError(of_gated(name)) from None
            raise InputError(
                f"model {name!r} could not be loaded from the hub: {str(error).splitlines()[0].rstrip('.')}. Give "
                f"another hub ID, or a folder with a config.json"
            ) from None
        raise InputError(
            f"model {name!r} is neither a folder here nor in the cache, and {why_no_hub()}{_instead_of_the_hub()}"
        ) from None
