"""Cases of the rules about activation checkpointing: see `cases.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.checks import Subject
from tests.checks.case import MACHINE, ON_CPU, SMALL, Case, Cases

_SWITCH, _OPTIONS = "activation_checkpointing", "activation_checkpointing_kwargs"
_DEEP = replace(
    SMALL, name="deep", layers=48, width=64, config={"model_type": "gpt2", "n_head": 1, "resid_pdrop": 0.1}
)
_DRY = replace(_DEEP, config={"model_type": "gpt2", "n_head": 1, "resid_pdrop": 0.0})
_SELECTIVE = "model_parts.checkpoint_selective"


def _on(options: dict[str, Any] | None = None, /, **more: Any) -> Subject:
    """Checkpointing switched on with these options."""
    return Subject(arguments={_SWITCH: True} | ({} if options is None else {_OPTIONS: options}), **more)


def _part(key: str, options: dict[str, Any], arguments: dict[str, Any] | None = None, **more: Any) -> Subject:
    return Subject(arguments=arguments or {}, settings={key: options}, **more)


_SURE = {"use_reentrant": False}
_AGAIN = {"use_reentrant": True}
_DDP = {_SWITCH: True, "ddp_find_unused_parameters": True}

_BY_FSDP = {"fsdp": True, "fsdp_config": {_SWITCH: True}}

_LAUNCHED = Subject(
    launcher={"distributed_type": "FSDP", "fsdp_config": {f"fsdp_{_SWITCH}": True}}, launcher_file="acc.yaml"
)

CASES: Cases = {
    "checkpointing-two-names": [
        Case("gradient_checkpointing", Subject(arguments={"gradient_checkpointing": True, _SWITCH: False}),
             Subject(arguments={"gradient_checkpointing": True})),
        Case("gradient_checkpointing_kwargs",
             Subject(arguments={_SWITCH: True, _OPTIONS: _SURE, "gradient_checkpointing_kwargs": {"offload": True}}),
             Subject(arguments={_SWITCH: True, _OPTIONS: _SURE, "gradient_checkpointing_kwargs": _SURE})),
    ],
    "checkpointing-options-without-switch": [
        Case(_OPTIONS, Subject(arguments={_OPTIONS: _SURE}), _on(_SURE)),
        Case(_OPTIONS, Subject(arguments={_OPTIONS: _SURE, _SWITCH: False}),
             _part(_SELECTIVE, {}, {_OPTIONS: _SURE, _SWITCH: False})),
        Case(_OPTIONS, Subject(arguments={_OPTIONS: _SURE, _SWITCH: False, "max_length": 1024}),
             Subject(arguments={_OPTIONS: _SURE, "max_length": 1024})),
        Case("gradient_checkpointing_kwargs",
             Subject(arguments={"gradient_checkpointing_kwargs": _SURE, "block_size": 1024}),
             Subject(arguments={"gradient_checkpointing_kwargs": _SURE, "use_peft": True, "lora_r": 8})),
    ],
    "checkpointing-reentrant-unset": [
        Case(_OPTIONS, _on({"preserve_rng_state": True}), _on({**_SURE, "preserve_rng_state": True})),
        Case(_OPTIONS, _on({"use_reentrant": None}), _on({"every_n_layers": 2})),
    ],
    "checkpointing-reentrant-inputs": [
        Case(_OPTIONS, _on(_AGAIN), _on(_SURE)),
        Case(_OPTIONS, _on(_AGAIN, machine=MACHINE), _on(_AGAIN, model=SMALL)),
        *(Case(_OPTIONS, Subject(arguments={_SWITCH: True, _OPTIONS: _AGAIN, "image_column_name": "image"}),
               Subject(arguments={_SWITCH: True, _OPTIONS: _AGAIN, **script}))
          for script in ({"block_size": 1024}, {"max_seq_length": 128}, {"dataset_text_field": "text"})),
    ],
    "checkpointing-reentrant-ddp": [
        Case(_OPTIONS, Subject(arguments={**_DDP, _OPTIONS: _AGAIN}), Subject(arguments={**_DDP, _OPTIONS: _SURE})),
        Case(_OPTIONS, Subject(arguments={**_DDP, _OPTIONS: _AGAIN}, gpus=2),
             Subject(arguments={**_DDP, _OPTIONS: _AGAIN}, gpus=1)),
        Case(_OPTIONS, Subject(arguments={**_DDP, _OPTIONS: _AGAIN, "block_size": 512}),
             Subject(arguments={**_DDP, _OPTIONS: _AGAIN, "fsdp": "full_shard"})),
    ],
    "checkpointing-masks-differ": [
        Case(_OPTIONS, _on({**_SURE, "preserve_rng_state": False}, model=_DEEP),
             _on({**_SURE, "preserve_rng_state": False}, model=_DRY)),
        Case(f"fsdp_config.{_SWITCH}", Subject(arguments=_BY_FSDP, model=_DEEP),
             Subject(arguments=_BY_FSDP, model=_DRY)),
        Case(f"fsdp_config.{_SWITCH}", Subject(arguments=_BY_FSDP, model=_DEEP),
             Subject(arguments={**_BY_FSDP, "fsdp_config": {_SWITCH: False}}, model=_DEEP)),
    ],
    "checkpointing-and-fsdp": [
        *(Case(_SWITCH, Subject(arguments={_SWITCH: True, "fsdp": True, "fsdp_config": twice}),
               Subject(arguments={_SWITCH: False, "fsdp": True, "fsdp_config": twice}))
          for twice in ({_SWITCH: True}, {_SWITCH: "True"}, {f"fsdp_{_SWITCH}": True})),
        *(Case("gradient_checkpointing", replace(_LAUNCHED, arguments={"gradient_checkpointing": True, "fsdp": fsdp}),
               replace(_LAUNCHED, arguments={"gradient_checkpointing": False, "fsdp": fsdp}))
          for fsdp in (None, True)),
        Case(f"fsdp_config.{_SWITCH}",
             Subject(arguments={"max_length": 9, "fsdp": True, "fsdp_config": {_SWITCH: True}}),
             Subject(arguments={"max_length": 9, "fsdp": True, "fsdp_config": {_SWITCH: False}})),
    ],
    "every-nth-of-few": [
        Case(_OPTIONS, _on({**_SURE, "every_n_layers": 25}, model=_DEEP),
             _on({**_SURE, "every_n_layers": 24}, model=_DEEP)),
        Case(_OPTIONS, _on({**_SURE, "every_n_layers": 0}), _on({**_SURE, "every_n_layers": 1})),
    ],
    "checkpointing-part-overruled": Case(_SWITCH, _part(_SELECTIVE, {}, {_SWITCH: True}),
                                         _part(_SELECTIVE, {}, {_SWITCH: False})),
    "checkpointing-function": Case(_OPTIONS, _on({**_SURE, "context_fn": print}), _on({**_SURE, "debug": False})),
    "offload-without-accelerator": Case(_OPTIONS, _on({**_SURE, "offload": True}, machine=ON_CPU),
                                        _on({**_SURE, "offload": True}, machine=MACHINE)),
    "checkpointing-unknown-option": [
        Case(f"{_OPTIONS}.every_n_layer", _on({**_SURE, "every_n_layer": 2}), _on({**_SURE, "every_n_layers": 2})),
        Case(f"{_OPTIONS}.ofload", _on({**_SURE, "ofload": True}), _on({**_SURE, "early_stop": False})),
    ],
    "cache-with-checkpointing": [
        Case("use_cache", Subject(arguments={_SWITCH: True, "use_cache": True}),
             Subject(arguments={"use_cache": True})),
        Case("use_cache", _part(_SELECTIVE, {}, {"use_cache": True}), _part(_SELECTIVE, {})),
    ],
    "checkpointing-parts-compiled": [
        Case(_SELECTIVE, _part(_SELECTIVE, {}, {"torch_compile": True}), _part(_SELECTIVE, {})),
        Case(_SELECTIVE, _part(_SELECTIVE, {}, {"torch_compile_backend": "inductor"}),
             _part("model_parts.checkpoint_offload", {"pin_memory": False}, {"torch_compile": True})),
    ],
    "checkpointing-unsupported-model": [
        Case(_SWITCH, _on(_SURE, model=replace(SMALL, config={"model_type": "xlnet"})), _on(_SURE, model=SMALL)),
        Case(_SELECTIVE, _part(_SELECTIVE, {}, model=replace(SMALL, config={"model_type": "ctrl"})),
             _part(_SELECTIVE, {}, model=SMALL)),
    ],
}  # fmt: skip
