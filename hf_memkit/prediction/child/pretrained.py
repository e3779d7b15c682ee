"""`from_pretrained` without weights: the config is read, parameters are shapes, and no file of weights is opened.

What transformers does around it is its own: class, dtype, attention, device map, adapters, missing heads, ties. Of a
model of the hub the config alone is fetched, and where that names no dtype the header of its safetensors.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from hf_memkit.errors import Unmodelled
from hf_memkit.prediction.child.models import quantise_linears
from hf_memkit.prediction.child.real_and_fake import RealAndFake

__all__ = ["weights_are_shapes"]


def weights_are_shapes(boundary: RealAndFake) -> None:
    """Replaces how transformers finds and reads checkpoints, in this process (transformers 5.23.0: modeling_utils.py,
    `_get_resolved_checkpoint_files`, `PreTrainedModel._load_pretrained_model`)."""
    from transformers import modeling_utils
    from transformers.integrations.accelerate import expand_device_map

    resolve = modeling_utils._get_resolved_checkpoint_files

    def resolved(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        name = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
        if name is None or Path(str(name)).is_dir():
            try:
                return resolve(*args, **kwargs)  # type: ignore[no-any-return]
            except OSError:  # no weights there, which nobody reads
                if name is None:
                    raise
                return None, {"dtype": torch.float32}
        return None, {"dtype": _dtype_on_hub(str(name), dict(kwargs.get("download_kwargs") or {}))}

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if load_config.hf_quantizer is not None:
            method = load_config.hf_quantizer.quantization_config.quant_method
            raise Unmodelled(f"{getattr(method, 'value', method)}: of quantised models only 4 bits are modelled")
        if four_bit:
            _in_four_bits(model, four_bit.pop())
        names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
        places = expand_device_map(load_config.device_map, names)
        _made(model, places, load_config.dtype_plan or {}, boundary)
        return _loading_info(), None

    quantizer = modeling_utils.get_hf_quantizer
    four_bit: list[dict[str, Any]] = []  # of the model that is being loaded

    def get_hf_quantizer(config: Any, given: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        asked: Any = given if given is not None else getattr(config, "quantization_config", None)
        options = asked.to_dict() if hasattr(asked, "to_dict") else dict(asked or {})
        if not options.get("load_in_4bit") or options.get("quant_method", "bitsandbytes") != "bitsandbytes":
            return quantizer(config, given, device_map, *args, **kwargs)
        four_bit[:] = [{name: each for name, each in options.items() if name.startswith(_FOUR_BIT_FIELDS)}]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # As its quantizer does where no place is named (quantizers/quantizer_bnb_4bit.py, `update_device_map`).
        return None, config, device_map or {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}

    modeling_utils.get_hf_quantizer = get_hf_quantizer
    modeling_utils._get_resolved_checkpoint_files = resolved
    modeling_utils.PreTrainedModel._load_pretrained_model = staticmethod(load)


_FOUR_BIT_FIELDS: Final = ("load_in_4bit", "bnb_4bit_", "llm_int8_skip_modules")


def _in_four_bits(model: Any, options: dict[str, Any]) -> None:
    """What bitsandbytes makes of a model that has no memory yet, and what PEFT, TRL and Trainer ask of it then."""
    with torch.device("meta"):
        quantise_linears(model, options)
    model.is_quantized = True
    model.quantization_method = "bitsandbytes"
    model.hf_quantizer = SimpleNamespace(is_trainable=True, is_qat_trainable=False, is_serializable=lambda **_: True)


def _made(model: nn.Module, places: dict[str, Any], dtypes: dict[str, torch.dtype], boundary: RealAndFake) -> None:
    """Gives parameters and buffers that are on the meta device their place; what is tied stays tied."""
    kept = _pattern(dtypes)
    made: dict[int, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            path = f"{prefix}.{name}" if prefix else name
            if tensor is None or tensor.device.type != "meta" or name in module._non_persistent_buffers_set:
                continue
            if id(tensor) not in made:
                dtype = kept(path) if tensor.is_floating_point() else None
                shaped = torch.empty_like(tensor, dtype=dtype or tensor.dtype)
                new = boundary.empty_like(shaped, places.get(path, "cpu"))
                if isinstance(tensor, nn.Parameter):  # frozen ones are thawed: core_model_loading.py, 1447
                    new = nn.Parameter(new, new.is_floating_point())
                    vars(new).update(vars(tensor))  # such as how 4 bits are stored
                new._is_hf_initialized = True  # type: ignore[attr-defined]
                made[id(tensor)] = tensor, new  # the old one too: its id must not be given away
            table = module._parameters if name in module._parameters else module._buffers
            table[name] = made[id(tensor)][1]


def _pattern(dtypes: dict[str, torch.dtype]) -> Any:
    """The dtype that a model keeps for a parameter whatever it is loaded in (norms in fp32); None: none."""
    if not dtypes:
        return lambda path: None
    from transformers.core_model_loading import build_glob_alternation

    alternation, by_group, _ = build_glob_alternation(list(dtypes))

    def find(path: str) -> Any:
        found = alternation.search(path)
        return dtypes[by_group[found.lastgroup]] if found else None

    return find


def _loading_info() -> Any:
    from transformers.utils.loading_report import LoadStateDictInfo

    return LoadStateDictInfo(
        missing_keys=set(), unexpected_keys=set(), mismatched_keys=set(),
        error_msgs=[], conversion_errors={}, skipped_pp_keys=set(),
    )  # fmt: skip


def _dtype_on_hub(name: str, options: dict[str, Any]) -> torch.dtype:
    """What most of a checkpoint's weights are stored in, by its safetensors' header; fp32 where there is none."""
    from huggingface_hub import get_safetensors_metadata

    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    with contextlib.suppress(Exception):  # offline, .bin files
        counts = get_safetensors_metadata(name, revision=options.get("revision"), token=options.get("token"))
        largest = max(counts.parameter_count.items(), key=lambda pair: pair[1])[0]
        return names.get(str(largest), torch.float32)
    return torch.float32
