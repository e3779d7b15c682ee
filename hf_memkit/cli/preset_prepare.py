"""A preset as `memkit preset` shows or writes it: resolved for a model and a card, with the user's own arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_memkit.errors import InputError, SettingError
from hf_memkit.user_files import user_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hf_memkit.presets import PresetSetup
    from hf_memkit.presets.files import ArgumentFile
    from hf_memkit.request import Request

__all__ = ["file_of", "prepare", "read_own"]


def read_own(
    request: Request,
    settings: Sequence[str],
    args: str | None,
    sizes: Mapping[str, tuple[str, int | None]] | None = None,
) -> Request:
    """The request with the user's own arguments: those of a file, and of `--set`, which win; and with the values of
    techniques that `--set` gives.

    Args:
        request: its preset and techniques are named.
        settings, args: `--set` and `--args`.
        sizes: field → (the option that says it too, its value).

    Raises:
        InputError: an unknown preset or technique, or a file that cannot be read.
        SettingError: values that are wrong; all are listed.
    """
    from hf_memkit.cli.libraries import quiet_libraries
    from hf_memkit.own_arguments import of_file, with_technique_values

    quiet_libraries()
    kinds: dict[str, type] = {}
    if request.preset:
        from hf_memkit.presets import compose

        techniques = compose(request.preset, request.techniques)  # an unknown name is told first
        kinds = {key: kind for one in techniques for key, kind in one.values.items()}
    from_file, notes = dict[str, Any](), list[str]()
    if args is not None:
        from hf_memkit.checks.reading import read

        from_file, notes = of_file(read(args))
    values, set_here = with_technique_values(settings, kinds)
    for field, (option, value) in (sizes or {}).items():
        if value is not None and set_here.get(field, value) != value:
            raise SettingError(f"{option} {value} and --set {field}={set_here[field]}: these are one; give one")
        set_here |= {} if value is None else {field: value}
    return replace(
        request, values=values, arguments={**from_file, **set_here}, args_file=args, notes=(*request.notes, *notes)
    )


def prepare(request: Request) -> PresetSetup:
    """The preset, resolved. All input is checked before anything is written.

    Raises:
        InputError: something that was asked for does not exist, or has no sense.
        SettingError: values that contradict each other, or would have no effect; all are listed.
    """
    from hf_memkit.hardware import this_machine
    from hf_memkit.own_arguments import length_of
    from hf_memkit.presets.resolve import resolve_preset

    own, notes, model = request.arguments, list(request.notes), request.model
    length = request.sequence_length or length_of(own, notes)
    if model is None and own.get("model_name_or_path"):
        model = _model_of_file(str(own["model_name_or_path"]), notes)
    _refuse_without_model(request, model)
    nvme_path = _folder(request.nvme_path) if request.nvme_path is not None else None
    setup = resolve_preset(replace(request, model=model, sequence_length=length, nvme_path=nvme_path))
    if model is not None and not (request.gpu or request.gpu_memory) and this_machine(".").gpu is None:
        notes.append("no GPU here and none named (--gpu, --gpu-memory): one with bf16 is assumed, of any size")
    return setup.with_notes(*notes)


def file_of(setup: PresetSetup, script: str, deepspeed: str = "") -> ArgumentFile:
    """The file of arguments; `deepspeed` is the path of the DeepSpeed JSON, where there is one."""
    from hf_memkit.presets.files import argument_file

    assert setup.request is not None
    own = setup.request.arguments
    return argument_file(setup, own=own, replaced=setup.replaced, script=script, deepspeed=deepspeed)


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


def _refuse_without_model(request: Request, model: str | None) -> None:
    given = {"--ram": request.ram, "--sequence-length": request.sequence_length}
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
