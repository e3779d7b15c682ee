"""Facts about a model without loading its weights: config → shapes on the meta device → counts.

A model is named by a hub ID or a local folder, or described by an architecture (config values, as in a recipe). The
architecture is used if the hub ID is not on disk and the hub is unreachable; `ModelFacts.origin` records that.
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
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.user_files import user_path

Origin = Literal["local", "hub", "architecture"]
"""Source of the weights: a local folder; the hub or its cache; none (built from config values, random)."""

_HUB_TIMEOUT_S = 5.0  # assumed

_CAUSAL = "AutoModelForCausalLM"


@cache
def hub_reachable() -> bool:
    """Whether the Hugging Face hub answers within five seconds. Each process asks once, and not at all with
    `HF_HUB_OFFLINE=1` or `TRANSFORMERS_OFFLINE=1`."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or hub_switched_off():
        return False
    try:
        HfApi().model_info("openai-community/gpt2", timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # any response of the server counts, also an error
        return getattr(error, "response", None) is not None
    return True


def hub_switched_off() -> str:
    """The variables that switch the hub off, as set, such as `"HF_HUB_OFFLINE=1"`; empty if none."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    off = [name for name in names if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}]
    return " and ".join(f"{name}={os.environ[name]}" for name in off)


def why_no_hub() -> str:
    """Reason why `hub_reachable` is false, as the end of a sentence."""
    off = hub_switched_off()
    return f"the hub is switched off ({off})" if off else "the hub did not answer"


def _absent_message(name: str, near: str = "") -> str:
    """Message for a model that is neither here nor in the cache; `near`: another name to propose instead of a fix."""
    fix = "; give a folder with a config.json"
    if switched_off := hub_switched_off():
        fix += f", or unset {re.sub('=[^ ]*', '', switched_off)}"
    sizes = (
        f". Its sizes alone are known: {command('memkit', 'predict', '--model', name)}"
        if built_in(name) is not None
        else ""
    )
    return f"model {name!r} is neither a folder here nor in the cache, and {why_no_hub()}{near or fix}{sizes}"


def refuse_absent(name: str, *, known: bool | None = None) -> int | None:
    """Refuse a model that cannot exist, at once: without torch, transformers or the hub.

    Args:
        name: hub ID or local folder.
        known: whether its config values are known without the hub; None: look for a built-in architecture.

    Returns:
        Maximum sequence length in tokens that its positions allow; None if no local file or built-in list has it.

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
        problem = "is a file" if path.is_file() else "does not exist"
        raise InputError(f"model folder {name!r} {problem}; give a folder with a config.json, or a hub ID")

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
        names = [*ARCHITECTURES, *(hub_id.rpartition("/")[2] for hub_id in ARCHITECTURES)]
        near = did_you_mean(name, names) if built_in(name) is None else ""  # its weights are needed here
        raise InputError(_absent_message(name, near))
    if architecture and (hub_switched_off() or "/" not in name or architecture[0].lower() == name.lower()):
        return longest_sequence(architecture[1].config)
    return None


def longest_sequence(config: Path | Mapping[str, Any]) -> int | None:
    """Maximum sequence length in a config or config file; None if it has no plain entry."""
    if isinstance(config, Path):
        try:
            config = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    if not isinstance(config, Mapping) or "text_config" in config:
        return None
    # T5's configs have n_positions too, but T5 has no positions.
    length = config.get("n_positions" if config.get("model_type") == "gpt2" else "max_position_embeddings")
    return length if type(length) is int else None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show only errors in transformers' log inside the block."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection inside the block. It takes a sixth of the time of importing torch and transformers,
    and of a replay, although nearly all their objects survive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer: `nn.Linear`, or GPT-2's transposed `Conv1D`.

    Attributes:
        inputs, outputs: its weight has inputs × outputs elements.
        head: whether it computes the logits; neither bitsandbytes nor PEFT's "all-linear" changes such a layer.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    head: bool = False

    @property
    def elements(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelFacts:
    """A model's shapes.

    Attributes:
        name: hub ID or path, as given.
        origin: source of its weights.
        config: its config values except None.
        parameters: number of parameters, tied ones once.
        largest_parameter: elements of the largest parameter.
        sizes: elements of every parameter, tied ones once, in module order.
        decayed: for each parameter, whether Trainer's optimizer applies weight decay to it. Parameters with and
            without form two groups, and DeepSpeed keeps a flat buffer for each.
        tied: elements that a second module shares (an output layer tied to the word embedding).
        layers, width, vocabulary: number of transformer layers, hidden size, rows of the word embedding.
        maximum_length: maximum sequence length in tokens that the positions allow, or None.
        linears: every linear layer, in module order; empty if unknown.
        stacked: elements of parameters with three dimensions or more, such as experts in one tensor.
        batch_norms: number of BatchNorm layers, whose output for a sample depends on the rest of its micro-batch.
        model_class: class in transformers; None for a causal language model.
        module_classes: names of the classes of its modules; empty if unknown, or if its config names another class of
            model, such as the encoder and decoder of which this is the decoder.
        layer_classes: those that FSDP wraps by default, in transformers' `_no_split_modules`, also if the model has no
            such module.
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
    module_classes: frozenset[str] = field(default=frozenset(), repr=False)
    layer_classes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Parameter sizes in the parameter groups of Trainer's optimizer: with weight decay, then without."""
        pairs = tuple(zip(self.sizes, self.decayed, strict=True))
        groups = (tuple(size for size, decays in pairs if decays is wanted) for wanted in (True, False))
        return tuple(group for group in groups if group)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "origin", "parameters", "largest_parameter")}


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
    """The facts of a model of any size, in a second and with little memory.

    Args:
        name: hub ID or local folder.
        architecture: config values with `model_type`, used if `name` is unavailable.
        use_hub: whether to ask the hub.
        changes: config values to change, by the names that all architectures share (`hidden_size`,
            `num_hidden_layers`, `vocab_size` …).
        use_built_in: whether to use `hf_memkit.catalog.architectures` for a well-known model that is unavailable:
            enough for sizes and checks, not for training.
        auto_class: class of transformers that makes the model from its config.

    Raises:
        InputError: there is no such model and no architecture, or it is of another kind.
    """
    if architecture is None and use_built_in and (built_in_model := built_in(name)) is not None:
        architecture = built_in_model[1].config
    refuse_absent(name, known=architecture is not None)
    import torch
    import transformers
    from transformers.trainer_pt_utils import get_parameter_names

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
            layers = int(getattr(text, "num_hidden_layers", 0) or 0)
            width = int(getattr(text, "hidden_size", 0) or 0)
            vocabulary = int(getattr(text, "vocab_size", 0) or 0)
        except InputError:
            raise
        except Exception as error:  # config classes raise errors of any type for wrong values
            raise InputError(f"model {name!r}: {_why_not_built(error, auto_class)}") from None

    decayed_names = set(get_parameter_names(model, [torch.nn.LayerNorm], list(_NOT_DECAYED)))
    named = tuple(model.named_parameters())
    sizes = tuple(parameter.numel() for _, parameter in named)
    is_named = not config.architectures or type(model).__name__ in config.architectures
    with_shared = sum(parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False))
    return ModelFacts(
        name=name,
        origin=origin,
        config={key: value for key, value in config.to_diff_dict().items() if value is not None},
        parameters=sum(sizes),
        largest_parameter=max(sizes),
        sizes=sizes,
        decayed=tuple(name in decayed_names for name, _ in named),
        tied=with_shared - sum(sizes),
        layers=layers,
        width=width,
        vocabulary=vocabulary,
        maximum_length=getattr(text, "max_position_embeddings", None),
        linears=_linears(model),
        stacked=sum(parameter.numel() for _, parameter in named if parameter.dim() > 2),
        batch_norms=sum("BatchNorm" in type(module).__name__ for module in model.modules()),
        model_class=None if causal else type(model).__name__,
        module_classes=frozenset(type(module).__name__ for module in model.modules()) if is_named else frozenset(),
        layer_classes=tuple(sorted(model._no_split_modules or ())) if is_named else (),
    )


def _why_not_built(error: Exception, auto_class: str) -> str:
    """Message for a config from which transformers builds no model."""
    kind = "causal language model" if auto_class == _CAUSAL else f"model for {auto_class.removeprefix('AutoModelFor')}"
    text = " ".join(str(error).split())  # the first line alone can be a heading
    # transformers' message continues with a long list of classes.
    if unrecognized := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", text):
        return f"transformers has no {kind} for a {unrecognized[1]}. Give a model that {auto_class} loads"
    reason = textwrap.shorten(text, 300, placeholder=" …")
    if isinstance(error, KeyError):
        reason = f"unknown value {text}"
    return f"cannot build a {kind} from its config: {reason.rstrip('.')}. Correct that value, or give another model"


def _linears(model: Any) -> tuple[Linear, ...]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            rows, columns = module.weight.shape
            inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
            linears.append(Linear(name, inputs, outputs, module.bias is not None, head is module))
    return tuple(linears)


_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of parameter names without weight decay, copied because importing Trainer takes seconds (transformers
5.23.0: trainer.py, `Trainer.get_decay_parameter_names`)."""


def _change(config: Any, changes: Mapping[str, Any]) -> None:
    """Apply `changes`, and adapt the values that depend on them: heads, feed-forward width and token IDs."""
    for key, value in changes.items():
        setattr(config, key, value)
    # An entry for each layer (Qwen3, Gemma and others): config classes check the count.
    if getattr(config, "layer_types", None):
        layers = int(config.num_hidden_layers)
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    heads = config.num_attention_heads
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = min(config.num_key_value_heads, heads)
    if getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // heads
    if getattr(config, "intermediate_size", None) and "intermediate_size" not in changes:
        config.intermediate_size = 4 * config.hidden_size
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        number = getattr(config, token, None)
        if isinstance(number, int) and number >= getattr(config, "vocab_size", number + 1):
            setattr(config, token, 0)


def gated_message(name: str) -> str:
    """Message for a gated model on the hub whose terms this user has not accepted."""
    return (
        f"model {name!r} is gated: accept its terms on https://huggingface.co/{name}, then log in with `hf auth "
        f"login`; or give a folder with its config.json"
    )


def own_code_message(name: str) -> str:
    """Message for a model whose config is a class in its repository."""
    predict = command("memkit", "predict", "--model", name, "--trust-remote-code")
    return f"model {name!r} comes with its own code, which memkit does not run. Read it, then allow it: {predict}"


def _load_config(name: str, architecture: Mapping[str, Any] | None, use_hub: bool) -> tuple[Any, Origin]:
    from transformers import AutoConfig

    path = user_path(name)
    if path.is_dir():
        try:
            # Without trust_remote_code transformers would ask on the terminal whether to run the model's code.
            return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False), "local"
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):
                raise InputError(own_code_message(name)) from None
            cause = str(error).splitlines()[0].rstrip(".")
            fix = "Give a folder written by `save_pretrained`"
            if "does not recognize this architecture" in str(error):
                cause = cause.partition(" This could")[0].rstrip(".")
                fix = "Update transformers, or correct its model_type"
            raise InputError(f"model folder {name!r} has no usable config.json: {cause}. {fix}") from None
    try:
        # Whole snapshots only: with a cached config but no cached weights the hub is still needed.
        return AutoConfig.from_pretrained(name, local_files_only=not use_hub, trust_remote_code=False), "hub"
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(own_code_message(name)) from None
        if architecture is not None:
            config_values = dict(architecture)
            return AutoConfig.for_model(config_values.pop("model_type"), **config_values), "architecture"
        if use_hub:
            if "gated repo" in str(error).lower():
                raise InputError(gated_message(name)) from None
            raise InputError(
                f"model {name!r} could not be loaded from the hub: {str(error).splitlines()[0].rstrip('.')}. Give "
                f"another hub ID, or a folder with a config.json"
            ) from None
        raise InputError(_absent_message(name)) from None
