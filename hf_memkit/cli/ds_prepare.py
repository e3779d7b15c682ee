"""A DeepSpeed preset as `memkit ds` shows or writes it: its constants, or sized for a model and a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit.errors import InputError, MissingPackageError, SettingError
from hf_memkit.user_files import user_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_memkit.hardware import Machine
    from hf_memkit.models import ModelFacts
    from hf_memkit.zero.aio import AioMeasurement
    from hf_memkit.zero.sizing import Sized

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A preset as it will be shown or written."""

    config: dict[str, Any]
    model: ModelFacts | None
    sized: Sized | None
    machine: Machine
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"config": self.config, "model": None, "sizes": [], "ledger": None}
        if self.sized is not None and self.model is not None:
            content["model"] = {
                "name": self.model.name,
                "origin": self.model.origin,
                "parameters": self.model.parameters,
                "largest_parameter": self.model.largest_parameter,
            }
            content["sizes"] = [choice.to_json() for choice in self.sized.choices]
            content["ledger"] = self.sized.ledger.to_json()
        return {
            **content,
            "machine": self.machine.to_json(),
            "notes": list(self.notes),
            "problems": list(self.problems),
        }


def prepare(
    name: str, model: str | None, gpu: str | None, gpu_memory: str | None, ram: str | None, gpus: int, nodes: int,
    nvme_path: str | None,
) -> Prepared:  # fmt: skip
    """The preset as it stands, or sized if a model is named. All input is checked before anything is written."""
    from hf_memkit.cli.libraries import quiet_libraries
    from hf_memkit.hardware import described_machine
    from hf_memkit.models import refuse_absent
    from hf_memkit.zero.presets import load

    quiet_libraries()

    config = load(name)  # an unknown name is told first
    if nvme_path is not None and not nvme_path.strip():
        raise InputError("--nvme-path: give a folder")
    path = str(user_path(nvme_path)) if nvme_path else None
    if model is None:
        _refuse_without_model(gpu, gpu_memory, ram, gpus, nodes)
    else:
        refuse_absent(model)
    swaps = [
        section
        for section in (config.get("zero_optimization", {}).get(part, {}) for part in _OFFLOAD)
        if section.get("device") == "nvme"
    ]
    notes = _path_notes(name, path, swaps=bool(swaps))
    machine = described_machine(gpu, gpu_memory, ram, path)
    if model is None:
        for section in swaps:
            section["nvme_path"] = path or section["nvme_path"]
        notes.append("these are the preset's constants; --model M computes every buffer for your model and machine")
        return Prepared(config, None, None, machine, (), tuple(notes))

    from hf_memkit.models import describe, hub_reachable, why_no_hub
    from hf_memkit.zero.sizing import size_preset

    facts = describe(model, use_hub=hub_reachable(), use_built_in=True)
    if facts.origin == "architecture":
        notes.append(f"{why_no_hub()}: the shapes of {model} come from memkit's list of well-known models")
    measured = _measured_aio(path, config, notes) if swaps and path else None
    sized = size_preset(name, facts, machine, nvme_path=path, gpus=gpus, nodes=nodes, aio=measured)
    return Prepared(
        sized.config, facts, sized, machine, tuple(_shortages(sized, machine, gpus)), (*notes, *sized.notes)
    )


_OFFLOAD = ("offload_optimizer", "offload_param")


def _path_notes(name: str, path: str | None, *, swaps: bool) -> list[str]:
    if path is not None and not swaps:
        raise SettingError(f"--nvme-path: preset {name!r} puts nothing on disk; those named zero3-infinity do")
    if swaps and path is None:
        return ["nvme_path is a placeholder, /local_nvme: set it, or give --nvme-path"]
    return []


def _refuse_without_model(gpu: str | None, gpu_memory: str | None, ram: str | None, gpus: int, nodes: int) -> None:
    given = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--ram": ram, "--gpus": gpus > 1, "--nodes": nodes > 1}
    names = [name for name, value in given.items() if value]
    if names:
        raise SettingError(f"{', '.join(names)}: nothing can be computed without --model; add it, or leave them out")


def _measured_aio(path: str, config: Mapping[str, Any], notes: list[str]) -> AioMeasurement | None:
    """What this disk does with DeepSpeed's own reads and writes; None, with a note, if that cannot be measured."""
    import torch

    from hf_memkit.zero.aio import measure

    if not Path(path).is_dir():
        notes.append(f"{path} does not exist here: make it before you train; its speed was not measured")
        return None
    try:
        return measure(path, cpu=not torch.cuda.is_available(), start=config["aio"])
    except MissingPackageError as error:
        notes.append(str(error))
        return None


def _shortages(sized: Sized, machine: Machine, gpus: int) -> list[str]:
    """What the machine lacks for DeepSpeed's part of the job and for the processes; activations come on top."""
    from hf_memkit.job import process_row, shortages

    return shortages(sized.ledger.with_rows([process_row(gpus)]), machine)
