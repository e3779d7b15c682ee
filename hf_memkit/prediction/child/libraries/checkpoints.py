"""Refuses checkpoints that a run cannot resume, from file names and headers without reading weights.

The errors are those of transformers and PEFT.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere

Shapes = dict[str, tuple[int, ...]]

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes under safetensors' names."""


def headers_in(file: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of the tensors in a safetensors file; empty if it is not one."""
    try:
        with safetensors.safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: (tuple(part.get_shape()), DTYPES.get(part.get_dtype())) for name, part in slices.items()}
    except (safetensors.SafetensorError, OSError):
        return {}


def sizes_that_differ(model: Any, shapes: Shapes, mapping: Any) -> set[tuple[str, Any, Any]]:
    """(name, shape in the checkpoint, shape in the model) of parameters with different shapes. As in transformers
    (5.23.0: core_model_loading.py, `convert_and_load_state_dict_in_model`), without weights that it converts."""
    own, renamed = model.state_dict(), dict(shapes)
    if mapping is not None:  # None: transformers 4.57
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        kinds = [[entry for entry in mapping if isinstance(entry, kind)] for kind in (WeightRenaming, WeightConverter)]
        names = {name: rename_source_key(name, *kinds, model.base_model_prefix, own) for name in shapes}
        renamed = {to: shapes[name] for name, (to, converted) in names.items() if converted is None}
    return {
        (name, torch.Size(shape), own[name].shape)
        for name, shape in renamed.items()
        if name in own and tuple(own[name].shape) != shape
    }


def refuse_checkpoint(trainer: Any, folder: Any) -> None:
    """Raises what `train(resume_from_checkpoint=…)` raises at once (transformers 5.23.0: trainer.py 1559), if the
    folder exists on this machine: errors of transformers, PEFT and DeepSpeed."""
    if not isinstance(folder, str | os.PathLike) or not Path(folder).is_dir():
        return
    if trainer.is_deepspeed_enabled or trainer.args.deepspeed:  # the second alone: see `deepspeed_engine.py`
        _refuse_engine(Path(folder), trainer.args.world_size)
    elif all(isinstance(parameter, FakeTensor) for parameter in trainer.model.parameters()):
        with _headers_only():
            try:
                trainer._load_from_checkpoint(os.fspath(folder))
            except Exception as error:  # other errors are about missing values
                own = isinstance(error, FileNotFoundError | ValueError) and "checkpoint" in str(error)
                if own or "size mismatch" in str(error):
                    raise
    TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))


def _refuse_engine(folder: Path, processes: int) -> None:
    """Raises if a DeepSpeed checkpoint cannot be resumed by this number of processes (transformers 5.23.0:
    integrations/deepspeed.py 687; deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, `load_state_dict`,
    runtime/engine.py, `_get_all_zero_checkpoint_names`)."""
    if not list(folder.glob("global_step*")):
        raise ValueError(f"Can't find a valid checkpoint at {folder}")
    latest = folder / "latest"
    step = folder / (latest.read_text().strip() if latest.exists() else "-")
    saved = len(list(step.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")))
    if saved and saved != processes:
        raise ValueError(
            f"{step} was saved by {saved} processes and {processes} would read it: DeepSpeed splits optimizer states "
            f"by their number; resume with {saved} GPUs, or without these states"
        )


@contextlib.contextmanager
def _headers_only() -> Iterator[None]:
    """Within it safetensors files load as tensors without memory."""

    def load_file(filename: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        # Unlisted dtypes are treated as fp32: only shapes are compared.
        return {
            name: torch.empty((), dtype=dtype or torch.float32).expand(shape)
            for name, (shape, dtype) in headers_in(filename).items()
        }

    original = safetensors.torch.load_file
    replace_everywhere(original, load_file)
    try:
        yield
    finally:
        replace_everywhere(load_file, original)
