"""The DeepSpeed presets in `ds_configs/`: complete JSON files; `index.yaml` with each preset's audience, requirements,
savings and costs; and the `accelerate launch` config that starts a script with one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, Field

from hf_memkit.common import resources
from hf_memkit.common.errors import MissingPackageError


def load(name: str, nvme_path: str | None = None) -> dict[str, Any]:
    """The DeepSpeed preset `name`, with `nvme_path` as its folder for swap files. Raises InputError if unknown."""
    config: dict[str, Any] = json.loads(resources.find("ds_configs", name).read_text(encoding="utf-8"))
    for section in config.get("zero_optimization", {}).values():
        if nvme_path is not None and isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = nvme_path
    return config


class PresetInfo(BaseModel):
    """One entry of the index.

    Attributes:
        saves, costs: compared with plain training on one GPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str  # the JSON file's stem
    summary: str  # one line
    audience: str = Field(alias="for")  # users that it suits
    saves: str
    costs: str
    gpus: int = Field(default=1, ge=1)  # minimum number of GPUs at which it is useful
    deepspeed: str | None = None  # specifier of the versions that run it; None: every supported one
    packages: tuple[str, ...] = ()  # further packages that it needs
    not_on_cpu: str | None = None  # why it needs a GPU; None: it also runs on a CPU

    def runs_on(self, deepspeed_version: str) -> bool:
        """Whether this version of DeepSpeed supports the preset."""
        return self.deepspeed is None or SpecifierSet(self.deepspeed).contains(deepspeed_version, prereleases=True)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


@cache
def preset_index() -> Mapping[str, PresetInfo]:
    """Every preset of `ds_configs/`, in the order of the index."""
    path = resources.folder("ds_configs") / "index.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: PresetInfo.model_validate({"name": name, **entry}) for name, entry in content.items()}


def refuse_other_deepspeed(name: str) -> None:
    """Raise MissingPackageError if the installed DeepSpeed no longer runs the preset; names the versions that do."""
    info = preset_index()[name]
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        return
    if not info.runs_on(installed):
        raise MissingPackageError(
            f"preset {name!r} needs deepspeed{info.deepspeed}, but {installed} is installed, which no longer has this "
            f'optimizer; run: pip install "deepspeed{info.deepspeed}" {" ".join(info.packages)}'.rstrip()
        )


def accelerate_config(deepspeed_file: str, *, stage: int, gpus: int = 1, nodes: int = 1) -> dict[str, Any]:
    """The file that `accelerate config` would write (accelerate 1.15: commands/config/config_args.py,
    `ClusterConfig`).

    `deepspeed_file` is relative to the folder that accelerate is started in. At stage 3 the model is split while it is
    loaded. With `deepspeed_config_file` accelerate refuses `mixed_precision`, accumulation and offload, which belong
    in the JSON and TrainingArguments (accelerate: utils/dataclasses.py, `DeepSpeedPlugin`).
    """
    deepspeed: dict[str, Any] = {"deepspeed_config_file": deepspeed_file, "zero3_init_flag": stage == 3}
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": deepspeed,
        "distributed_type": "DEEPSPEED",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": gpus * nodes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if nodes > 1:
        # `standard` starts processes on this machine only, as torchrun does; DeepSpeed's default needs pdsh and ssh.
        deepspeed["deepspeed_multinode_launcher"] = "standard"
        content |= {"main_process_ip": "SET-TO-THE-FIRST-MACHINE", "main_process_port": 29500}
    return content
