"""A preset as `memkit preset` shows or writes it: resolved for a model and a card, with the user's own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.errors import InputError, SettingError
from hf_memkit.user_files import user_path

if TYPE_CHECKING:
    from hf_memkit.presets import PresetSetup
    from hf_memkit.presets.files import ArgumentFile

__all__ = ["Asked", "Prepared", "prepare"]

_NVME: Final = "memkit-nvme"


@dataclass(frozen=True)
class Asked:
    """What the command line says; names as its options."""

    name: str
    model: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    ram: str | None = None
    gpus: int = 1
    nodes: int = 1
    batch_size: int | None = None
    sequence_length: int | None = None
    nvme_path: str | None = None
    settings: Sequence[str] = ()
    args: str | None = None
    script: str = "trainer"
    techniques: Sequence[str] = ()


@dataclass(frozen=True)
class Prepared:
    """The setup, what the user's own file and `--set` hold, under today's names, and the techniques named beside."""

    setup: PresetSetup
    own: Mapping[str, Any]
    script: str
    notes: tuple[str, ...]
    techniques: tuple[str, ...] = ()

    def file(self, deepspeed: str = "") -> ArgumentFile:
        """The file of arguments; `deepspeed` is the path of the DeepSpeed JSON, where there is one."""
        from hf_memkit.presets.files import argument_file

        made = argument_file(
            self.setup, own=self.own, replaced=self.setup.replaced, script=self.script, deepspeed=deepspeed
        )
        return replace(made, notes=(*made.notes, *self.notes))


def prepare(asked: Asked) -> Prepared:
    """The preset, resolved. All input is checked before anything is written.

    Raises:
        InputError: something that was asked for does not exist, or has no sense.
        SettingError: values that contradict each other, or would have no effect; all are listed.
    """
    from hf_memkit.cli.libraries import quiet_libraries
    from hf_memkit.cli.own_arguments import is_field, read_file, read_settings
    from hf_memkit.hardware import this_machine
    from hf_memkit.presets import compose, preset
    from hf_memkit.presets.outside import LENGTH_NAMES, SCRIPTS

    quiet_libraries()
    techniques = compose(asked.name, asked.techniques)  # an unknown name is told first
    if asked.script not in SCRIPTS:
        raise InputError(f"--for {asked.script}: unknown; one of {', '.join(SCRIPTS)}")
    kinds = {key: kind for one in techniques for key, kind in one.values.items()}
    values, set_here = read_settings(asked.settings, kinds)
    own, notes = read_file(asked.args) if asked.args else ({}, [])
    own |= set_here
    fields = {name: value for name, value in own.items() if is_field(name)}
    model, length = asked.model, asked.sequence_length
    if length is None:
        key = next((key for key in LENGTH_NAMES if type(own.get(key)) is int), None)
        if key is not None:
            length = own[key]
            notes.append(f"sequences of {length} tokens: your {key}")
    if model is None and own.get("model_name_or_path"):
        model = _model_of_file(str(own["model_name_or_path"]), notes)
    _refuse_without_model(asked, model)
    setup = preset(
        asked.name,
        model=model,
        gpu=asked.gpu,
        gpu_memory=asked.gpu_memory,
        ram=asked.ram,
        global_batch_size=asked.batch_size,
        sequence_length=length,
        gpus=asked.gpus,
        nodes=asked.nodes,
        techniques=asked.techniques,
        values=values,
        arguments=fields,
        nvme_path=_NVME if asked.nvme_path is None else _folder(asked.nvme_path),
    )
    if model is not None and not (asked.gpu or asked.gpu_memory) and this_machine(".").gpu is None:
        notes.append("no GPU here and none named (--gpu, --gpu-memory): one with bf16 is assumed, of any size")
    return Prepared(setup, own, asked.script, tuple(notes), tuple(asked.techniques))


def _model_of_file(name: str, notes: list[str]) -> str | None:
    """The model that the user's file names, if memkit can look at it."""
    from hf_memkit.models import describe, hub_reachable

    try:
        describe(name, use_hub=hub_reachable(), use_built_in=True)
    except InputError as error:
        notes.append(f"the model of your file cannot be looked at, so nothing is computed for it: {error}")
        return None
    notes.append(f"computed for the model of your file, {name}")
    return name


def _refuse_without_model(asked: Asked, model: str | None) -> None:
    given = {"--ram": asked.ram, "--sequence-length": asked.sequence_length}
    names = [name for name, value in given.items() if value]
    if model is None and names:
        raise SettingError(f"{', '.join(names)}: nothing can be computed without --model; add it, or leave them out")


def _folder(path: str) -> str:
    if not path.strip():
        raise InputError("--nvme-path: give a folder")
    folder = user_path(path)
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise InputError(
            f"--nvme-path {path}: neither it nor the folder above it exists, so that its disk cannot be looked at; "
            f"give a folder on the disk that shall be used"
        )
    return str(folder)
