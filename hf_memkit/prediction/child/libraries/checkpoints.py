"""Checkpoints that a run cannot go on from, told by their files' names and headers: no weight is read. The errors are
transformers' and PEFT's own."""

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

from hf_memkit.prediction.child.gpu.cuda_questions import replace_everywhere

Shapes = dict[str, tuple[int, ...]]

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""As safetensors names them."""


def headers_in(file: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of the tensors in a file of safetensors; empty: it is none."""
    try:
        with safetensors.safe_open(file, "pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: (tuple(each.get_shape()), DTYPES.get(each.get_dtype())) for name, each in found.items()}
    except (safetensors.SafetensorError, OSError):
        return {}


def sizes_that_differ(model: Any, shapes: Shapes, mapping: Any) -> set[tuple[str, Any, Any]]:
    """Parameters for which a checkpoint has another shape, as transformers finds them (5.23.0: core_model_loading.py,
    `convert_and_load_state_dict_in_model`); what it converts is left out."""
    if mapping is None:  # transformers 4.57
        own = model.state_dict()
        differ = {name for name, shape in shapes.items() if name in own and tuple(own[name].shape) != shape}
        return {(name, torch.Size(shapes[name]), own[name].shape) for name in differ}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    own = model.state_dict()
    found = set()
    for name, shape in shapes.items():
        to, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converted is None and to in own and tuple(own[to].shape) != shape:
            found.add((to, torch.Size(shape), own[to].shape))
    return found


def refuse_checkpoint(trainer: Any, folder: Any) -> None:
    """What `train(resume_from_checkpoint=…)` raises at once (transformers 5.23.0: trainer.py 1559), if the folder is
    on this machine.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as transformers, PEFT and DeepSpeed raise them.
    """
    if not isinstance(folder, str | os.PathLike) or not Path(folder).is_dir():
        return
    if trainer.is_deepspeed_enabled or trainer.args.deepspeed:  # which keeps its value alone (`deepspeed_engine.py`)
        _refuse_engine(Path(folder), trainer.args.world_size)
    elif all(isinstance(each, FakeTensor) for each in trainer.model.parameters()):
        with _headers_alone():
            try:
                trainer._load_from_checkpoint(os.fspath(folder))
            except Exception as error:  # others are about values that are not there
                own = isinstance(error, FileNotFoundError | ValueError) and "checkpoint" in str(error)
                if own or "size mismatch" in str(error):
                    raise
    TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))


def _refuse_engine(folder: Path, processes: int) -> None:
    """transformers 5.23.0: integrations/deepspeed.py 687; deepspeed 0.19.8: runtime/zero/stage_1_and_2.py,
    `load_state_dict`, runtime/engine.py, `_get_all_zero_checkpoint_names`."""
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
def _headers_alone() -> Iterator[None]:
    """Within it files of safetensors give tensors without memory."""

    def load_file(filename: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        # Types that are not listed are taken for fp32: only shapes are compared.
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
