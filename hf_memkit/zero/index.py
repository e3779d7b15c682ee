"""`ds_configs/index.yaml`: for whom each DeepSpeed preset is, what it needs, what it saves and costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, Field

from hf_memkit import resources
from hf_memkit.errors import MissingPackageError

__all__ = ["PresetInfo", "preset_index", "refuse_other_deepspeed"]


class PresetInfo(BaseModel):
    """One entry of the index.

    Attributes:
        name: the JSON file's stem.
        summary: one line.
        for_whom: who should take it.
        saves, costs: against plain training on one card.
        gpus: cards from which it makes sense.
        deepspeed: specifier of the versions that run it; None: every supported one.
        packages: what must be installed besides.
        not_on_cpu: why it does not run without a GPU; None: it does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    summary: str
    for_whom: str = Field(alias="for")
    saves: str
    costs: str
    gpus: int = Field(default=1, ge=1)
    deepspeed: str | None = None
    packages: tuple[str, ...] = ()
    not_on_cpu: str | None = None

    def runs_on(self, deepspeed_version: str) -> bool:
        """Whether this version of DeepSpeed still has what the preset asks for."""
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
    """Refuses a preset that the installed DeepSpeed no longer runs.

    Raises:
        MissingPackageError: names the versions that do.
    """
    info = preset_index()[name]
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        return
    if not info.runs_on(installed):
        raise MissingPackageError(
            f"preset {name!r} needs deepspeed{info.deepspeed}, and {installed} is installed, which has no such "
            f'optimizer any more; run: pip install "deepspeed{info.deepspeed}" {" ".join(info.packages)}'.rstrip()
        )
