"""Names in libraries and in the standard library that memkit has replaced in this process."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import hf_memkit

_MEMKIT = str(Path(hf_memkit.__file__).parent)
_LIBRARIES = {
    "accelerate", "bitsandbytes", "builtins", "datasets", "httpx", "httpx2", "huggingface_hub", "io",
    "multiprocessing", "os", "peft", "posix", "requests", "safetensors", "shutil", "sqlite3", "subprocess", "tempfile",
    "threading", "tokenizers", "torch", "transformers", "triton", "trl",
}  # fmt: skip


def replaced_names() -> set[str]:
    replaced = set()
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.partition(".")[0] not in _LIBRARIES:
            continue
        for key, value in list(vars(module).items()):
            if _is_memkits(value):
                replaced.add(f"{name}.{key}")
            elif isinstance(value, type):
                owner = f"{value.__module__}.{value.__qualname__}"
                replaced |= {f"{owner}.{own}" for own, each in list(vars(value).items()) if _is_memkits(each)}
    return replaced


def _is_memkits(value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__.startswith("hf_memkit.")
    if type(value).__module__.startswith("hf_memkit."):
        return True
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    function = value.fget if isinstance(value, property) else value
    return isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(_MEMKIT)
