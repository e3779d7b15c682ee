"""A DeepSpeed preset as a setup: its constants, or sized for a model and a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.models import describe, hub_reachable, refuse_absent, why_no_hub
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError, MissingPackageError, SettingError
from hf_memkit.common.user_files import user_path
from hf_memkit.deepspeed.presets import load
from hf_memkit.deepspeed.sizing import size_preset
from hf_memkit.setup.bf16_on_gpus import emulated_by_setup
from hf_memkit.setup.job import Job, process_row, shortages
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.deepspeed.aio import AioMeasurement


def resolve_deepspeed(request: Request) -> Setup:
    """The preset unchanged, or sized if a model is named; its job has no batch. Refuses options without effect."""
    name = request.deepspeed
    model = request.model
    gpus = request.gpus or 1
    config = load(name)  # an unknown name is reported first
    if request.nvme_path is not None and not request.nvme_path.strip():
        raise InputError("--nvme-path: empty; give a folder")
    path = str(user_path(request.nvme_path)) if request.nvme_path else None
    if model is None:
        given = {
            "--gpu": request.gpu, "--gpu-memory": request.gpu_memory, "--ram": request.ram, "--gpus": gpus > 1,
            "--nodes": request.nodes > 1,
        }  # fmt: skip
        if names := [option for option, value in given.items() if value]:
            raise SettingError(f"{', '.join(names)}: nothing can be computed without --model. Add it, or omit them")
    else:
        refuse_absent(model)

    zero = config.get("zero_optimization", {})
    offloads = [zero.get(part, {}) for part in ("offload_optimizer", "offload_param")]
    swaps = [section for section in offloads if section.get("device") == "nvme"]
    if path is not None and not swaps:
        raise SettingError(
            f"--nvme-path: preset {name!r} does not use the disk. Remove --nvme-path, or choose zero3-infinity"
        )
    notes = []
    if swaps and path is None:
        notes.append("nvme_path is the placeholder /local_nvme. Give yours: --nvme-path FOLDER")
    machine = described_machine(request.gpu, request.gpu_memory, request.ram, path)
    setup = Setup(name, job=Job(None, machine, gpus=gpus, nodes=request.nodes), request=request)
    if model is None:
        notes.append("these are the preset's constants. For buffers computed for your model and machine: --model ID")
        return setup.put("deepspeed.config", load(name, path), "the preset's constants").with_notes(*notes)

    facts = describe(model, use_hub=hub_reachable(), use_built_in=True)
    if facts.origin == "architecture":
        notes.append(f"the shapes of {model} come from memkit's list of well-known models: {why_no_hub()}")
    measured = _measured_aio(path, config, notes) if swaps and path else None
    sized = size_preset(name, facts, machine, nvme_path=path, gpus=gpus, nodes=request.nodes, aio=measured)
    setup = replace(setup, ledger=sized.ledger, job=replace(setup.resolved_for, model=facts))
    setup = setup.put("deepspeed.config", sized.config, "the preset, sized for the model and the machine")
    setup = setup.put("deepspeed.sizes", [choice.to_json() for choice in sized.choices], "computed sizes")
    # Processes are added to DeepSpeed's part of the job; activations are not, because the batch is unknown.
    lacks = shortages(sized.ledger.with_rows([process_row(gpus)]), machine)
    return setup.with_notes(*notes, *sized.notes).with_problems([*filter(None, [emulated_by_setup(setup)]), *lacks])


def _measured_aio(path: str, config: Mapping[str, Any], notes: list[str]) -> AioMeasurement | None:
    """Measured speed of DeepSpeed's reads and writes on this disk; None, with a note, if it cannot be measured."""
    import torch

    from hf_memkit.deepspeed.aio import measure

    if not Path(path).is_dir():
        make = command("mkdir", "-p", path)
        notes.append(f"{path} does not exist, so its speed was not measured. Before you train: {make}")
        return None
    try:
        return measure(path, cpu=not torch.cuda.is_available(), start=config["aio"])
    except MissingPackageError as error:
        notes.append(str(error))
        return None
