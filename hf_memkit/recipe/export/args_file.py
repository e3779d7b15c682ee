"""`args.yaml`: a setup as the exported script reads it, every value under its reason.

The sections are the setup's own. What only memkit reads is left out (where a model comes from, which classes the
script names itself), and what was settled here is written as it was settled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hf_memkit.presets.files import reasoned_yaml, with_installed_names
from hf_memkit.recipe.run import RecipeRun
from hf_memkit.recipe.tasks.task import Settings
from hf_memkit.setup import Setup

__all__ = ["CONFIG_FILE", "args_text", "beside", "local_or_hub", "with_reasons"]

CONFIG_FILE: Final = "ds_config.json"

_COMPONENT: Final = re.compile(r"^hf_memkit\.(components|parts)\.")
_LOADED: Final = (
    "name", "dtype", "attn_implementation", "config", "quantization", "device_map", "use_safetensors",
    "ignore_mismatched_sizes", "pad_vocabulary_to_multiple_of",
)  # fmt: skip
_BUILT: Final = ("architecture", "dtype", "attn_implementation", "config", "pad_vocabulary_to_multiple_of")


def args_text(job: RecipeRun, heading: Iterable[str], data: Settings) -> str:
    """The text of the file.

    Args:
        job: whose setup it is.
        heading: the lines that stand above it all.
        data: the section `data`.
    """
    setup = job.setup
    sections = {
        "environment": _environment(job),
        "data": data,
        "model": _model(setup),
        "adapter": with_reasons(setup, "adapter"),
        "model_parts": with_reasons(setup, "model_parts"),
        "arguments": _arguments(setup),
        "optimizer": _optimizer(setup),
        "trainer_parts": with_reasons(setup, "trainer_parts"),
    }
    blocks = ["".join(f"# {line}".rstrip() + "\n" for line in heading)]
    blocks += [f"{name}:\n{reasoned_yaml(found, '  ')}" for name, found in sections.items() if found]
    return "\n".join(blocks)


def beside(path: str) -> str:
    """`module:class`, with the name that a component's file has beside a script."""
    return _COMPONENT.sub("", path)


def local_or_hub(name: str) -> str:
    """A hub ID as it is, a folder by its whole path: the script may start elsewhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def with_reasons(setup: Setup, section: str, names: Iterable[str] | None = None) -> dict[str, tuple[Any, str]]:
    """The section's values with their reasons; of `names`, in their order, if given."""
    found = {
        setting.key.partition(".")[2]: (setting.value, setting.reason)
        for setting in setup.settings
        if setting.key.startswith(f"{section}.")
    }
    return found if names is None else {name: found[name] for name in names if name in found}


def _environment(job: RecipeRun) -> Settings:
    found = with_reasons(job.setup, "environment")
    if job.processes > 1:
        return found  # torchrun says the rest
    if not job.setup.get("arguments.use_cpu"):
        why = "one card: with several in sight Trainer would multiply the batch"
        found["CUDA_VISIBLE_DEVICES"] = ("0", why)
    if "deepspeed.config" in job.setup:
        why = "what a launcher would set, for one process"
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        found |= {name: (value, why) for name, value in one.items()}
        found["MASTER_PORT"] = ("0", "any that is free: two scripts on one machine would both take 29500")
    return found


def _model(setup: Setup) -> Settings:
    if setup["model.origin"] == "architecture" and setup.get("arguments.use_cpu"):
        found = with_reasons(setup, "model", _BUILT)
        values = {name: each for name, each in found["architecture"][0].items() if name != "transformers_version"}
        return {
            **found,
            "architecture": (values, "RANDOM weights: a small model of the same architecture, to rehearse"),
        }
    found = with_reasons(setup, "model", _LOADED)
    name, reason = found["name"]
    return {**found, "name": (local_or_hub(name), reason)}


def _arguments(setup: Setup) -> Settings:
    found = with_installed_names(with_reasons(setup, "arguments"))
    found["output_dir"] = ("run", "checkpoints and the records of memory, beside this file")
    if "deepspeed.config" in setup:
        reason = next(setting.reason for setting in setup.settings if setting.key == "deepspeed.preset")
        found["deepspeed"] = (CONFIG_FILE, reason)
    return found


def _optimizer(setup: Setup) -> Settings:
    found = with_reasons(setup, "optimizer")
    if found:
        path, reason = found["class"]
        found["class"] = (beside(path), reason)
    return found
