"""Differences of earlier library versions; the rest of the child process uses today's transformers and torch.

Each difference is detected from an attribute of the library; the versions are for information.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from hf_memkit.common.when_imported import when_imported

RUNS_COPIES: Final = not hasattr(torch._C, "_ensureCUDADeviceGuardSet")
"""Whether fake mode copies real tensors to other devices (torch 2.8: _subclasses/fake_tensor.py, `_dispatch_impl`)."""

FLASH_CHECKS: Final = ("_flash_attn_import_error", "_flash_attn_2_can_dispatch", "_flash_attn_3_can_dispatch")
"""Methods of a model that raise if flash attention is unavailable: today's, and those up to 5.1."""


class LoadingOptions(NamedTuple):
    """How `from_pretrained` loads a model."""

    device_map: Any
    quantizer: Any
    kept_dtype: Callable[[str], torch.dtype | None]  # of a parameter in any model dtype, such as fp32 for norms
    ignores_sizes: bool  # parameters whose size differs from the checkpoint's are created anew
    mapping: Any  # renamings and conversions of the checkpoint's names; None if this version does them elsewhere


def loading_options(model: Any, load_config: Any, options: Mapping[str, Any]) -> LoadingOptions:
    """Reads the arguments of `_load_pretrained_model` (transformers: modeling_utils.py)."""
    if "keep_in_fp32_regex" in options:  # 4.57; `load_config` is the model's name there
        pattern = options["keep_in_fp32_regex"]

        def kept_dtype(path: str) -> torch.dtype | None:
            return torch.float32 if pattern is not None and pattern.search(path) else None

        ignores = bool(options.get("ignore_mismatched_sizes"))
        return LoadingOptions(options.get("device_map"), options.get("hf_quantizer"), kept_dtype, ignores, None)
    plan = load_config.dtype_plan if hasattr(load_config, "dtype_plan") else getattr(model, "dtype_plan", None)
    return LoadingOptions(
        load_config.device_map, load_config.hf_quantizer, _by_name(plan or {}),
        load_config.ignore_mismatched_sizes, load_config.weight_mapping or (),
    )  # fmt: skip


def _by_name(dtypes: Mapping[str, torch.dtype]) -> Callable[[str], torch.dtype | None]:
    if not dtypes:
        return lambda path: None
    from transformers.core_model_loading import build_glob_alternation

    alternation, by_group, _ = build_glob_alternation(list(dtypes))

    def kept_dtype(path: str) -> torch.dtype | None:
        match = alternation.search(path)
        return dtypes[by_group[match.lastgroup]] if match else None

    return kept_dtype


def loading_result(model: Any, mismatched: set[tuple[str, Any, Any]]) -> Any:
    """The result of `_load_pretrained_model` without missing weights. `mismatched`: (name, the checkpoint's shape, the
    model's). transformers raises for them later; for 4.57 this function does."""
    from transformers import modeling_utils

    try:
        from transformers.utils.loading_report import LoadStateDictInfo as Info  # since 5.1
    except ImportError:
        Info = getattr(modeling_utils, "LoadStateDictInfo", None)  # in 5.0
    if Info is None:
        if mismatched:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model).__name__}:\n\t"
                + "\n\t".join(
                    f"size mismatch for {name}: {tuple(stored)} in the checkpoint, {tuple(own)} in the model"
                    for name, stored, own in sorted(mismatched)
                )
            )
        return model, [], [], [], None, []
    empty: dict[str, Any] = {
        "missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": mismatched, "error_msgs": [],
        "conversion_errors": {}, "skipped_pp_keys": set(), "disk_offload_index": None,
    }  # fmt: skip
    names = [field.name for field in dataclasses.fields(Info)]
    info = Info(**{name: empty[name] for name in names})
    return info if "disk_offload_index" in names else (info, None)


def expanded_device_map(device_map: Any, names: list[str]) -> Mapping[str, Any]:
    """Parameter → its device."""
    try:
        from transformers.integrations.accelerate import expand_device_map
    except ImportError:  # 4.57, where None is not accepted
        from transformers.modeling_utils import expand_device_map

        device_map = device_map or {}
    expanded: Mapping[str, Any] = expand_device_map(device_map, names)
    return expanded


def no_init_weights() -> contextlib.AbstractContextManager[None]:
    """Within it models are created without initialising values."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # 4.57
        from transformers.modeling_utils import no_init_weights
    context: contextlib.AbstractContextManager[None] = no_init_weights()
    return context


def patch_init_empty_weights() -> None:
    """Replaces accelerate's `init_empty_weights`, which copies a parameter's attributes and fails on those of fake
    tensors (accelerate 1.11: big_modeling.py, `register_empty_parameter`)."""
    from transformers import modeling_utils

    def watch(module: Any) -> None:
        if hasattr(module, "init_empty_weights"):
            module.init_empty_weights = lambda *args, **kwargs: torch.device("meta")

    if hasattr(modeling_utils, "init_empty_weights"):
        modeling_utils.init_empty_weights = _empty_parameters
        when_imported("transformers.integrations.bitsandbytes", watch)


@contextlib.contextmanager
def _empty_parameters(include_buffers: bool | None = None) -> Iterator[None]:
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        original(self, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def quantized_parameter(quantizer: Any, model: Any, path: str, weight: torch.Tensor) -> nn.Parameter:
    """The parameter that the quantizer creates from a weight, on the weight's device."""
    with torch.no_grad():
        if not hasattr(quantizer, "get_quantize_ops"):  # 4.57
            quantizer.create_quantized_param(model, weight, path, weight.device)
            made = {}
        else:
            convert = quantizer.get_quantize_ops().convert
            made = convert({path: [weight]}, model=model, full_layer_name=path, missing_keys=set())
    parameter: nn.Parameter = made[path] if path in made else model.get_parameter(path)
    return parameter


def flash_attention_table() -> Mapping[Any, dict[str, Any]]:
    """Version needs of flash attention (transformers: modeling_flash_attention_utils.py); empty up to 5.1."""
    from transformers import modeling_flash_attention_utils

    return getattr(modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})


def hub_kernel_loader() -> str:
    """The function of transformers/integrations/hub_kernels.py that loads attention from the hub."""
    from transformers.integrations import hub_kernels

    names = ("load_and_register_attn_kernel", "load_and_register_kernel")  # the second in 4.57
    return next(name for name in names if hasattr(hub_kernels, name))


def extend_mask(model: Any, before: Mapping[str, Any], after: dict[str, Any], tokens: int) -> None:
    """Extends the mask of generated text by `tokens`, where `_update_model_kwargs_for_generation` always adds one."""
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    if before.get(name) is None or after.get(name) is None:
        return
    mask = after[name]
    left = before[name].shape[-1] + tokens - mask.shape[-1]
    if left > 0:
        after[name] = torch.cat([mask, mask.new_ones((*mask.shape[:-1], left))], dim=-1)


_LOOP_OPTIONS: Final = ("synced_gpus", "streamer")


def split_loop_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `_sample` for its turns, and the others, which transformers 4.57 also passes by name."""
    turns = {name: value for name, value in options.items() if name not in _LOOP_OPTIONS}
    return turns, {name: value for name, value in options.items() if name in _LOOP_OPTIONS}


def first_turn(model: Any, input_ids: torch.Tensor, generation_config: Any, options: dict[str, Any]) -> Any:
    """The turn of `generate` that reads the prompt."""
    if hasattr(model, "_prefill"):
        return model._prefill(input_ids, generation_config, options)
    # transformers 4.57.6: generation/utils.py, `_sample`.
    options.update(model._get_initial_cache_position(input_ids.shape[1], input_ids.device, options))
    return model(**model.prepare_inputs_for_generation(input_ids, **options), return_dict=True)


def later_inputs(model: Any, input_ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The model's inputs in any turn but the first."""
    if "cache_position" not in options:  # its counterpart up to 5.1
        options = {**options, "next_sequence_length": 1 if options["use_cache"] else None}
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(input_ids, **options)
    return inputs


def max_cache_length(layer: Any) -> int:
    """Tokens that fit into a cache's layer; 0 or less if it grows."""
    maximum = getattr(layer, "get_max_length", None) or layer.get_max_cache_shape  # up to 5.16
    return int(maximum())
