"""Complete checkpoints, with all their weights, for Trainer.

transformers 5 saves models of many architectures (ViT, DINOv2, Mixtral, Qwen3-MoE, OLMoE) under the names of their
first checkpoints. `from_pretrained` translates these, Trainer does not: when it resumes, and with
`load_best_model_at_end`, it leaves such weights as they are, with one line in the log (transformers 5.23.0: trainer.py
3695, 3824; its issue 43701). That is 98 % of ViT-Base's parameters, 33 % of DINOv2-Base's, 96 % of Qwen3-30B-A3B's.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS: Final = tuple(
    f"{prefix}model{suffix}"
    for prefix in ("", "pytorch_", "adapter_")
    for suffix in (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
)
"""Names of files with weights, in a checkpoint or, for further adapters, in its subfolders."""


NO_STATE: Final = "no readable trainer_state.json"


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint in `folder`, or None."""
    return next((str(path) for path in _checkpoints(folder) if not lack_of(path)), None)


def checkpoint_to_resume(folder: str | Path, say: Callable[[str], None]) -> str | None:
    """The newest complete checkpoint, with a line for each newer one, or None. Raises SystemExit if there is none, but
    one that was saved to its end: the checkpoints of a training from the first step would replace it."""
    used = last_checkpoint(folder)
    for path in _checkpoints(folder):
        if str(path) == used:
            break
        lack = lack_of(path)
        if used is None and lack != NO_STATE:
            raise SystemExit(
                f"{path}: training cannot continue from it ({lack}), and no other checkpoint is complete. To train "
                "from the first step, move the checkpoints to another folder"
            )
        instead = f"continues from {Path(used).name}" if used else "starts at step 1"
        say(f"{path}: skipped ({lack}). Training {instead}")
    return used


def _checkpoints(folder: str | Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(folder).glob("checkpoint-*")}
    return sorted((path for path in steps if steps[path].isdigit()), key=lambda path: int(steps[path]), reverse=True)


def lack_of(checkpoint: Path) -> str:
    """What a resume from the checkpoint would lack, as "no scheduler.pt"; empty: it is complete. Trainer starts with a
    new optimizer and scheduler, without a message, where one of their files is absent (transformers 5.23.0: trainer.py
    3923). Reads no tensors; leaves the shards of DeepSpeed and FSDP to them."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))  # written last
    except (OSError, ValueError, RecursionError):
        return NO_STATE
    if any(any(checkpoint.glob(shards)) for shards in ("global_step*", "pytorch_model_fsdp*", "optimizer_*")):
        return ""
    optimizer = next((name for name in ("optimizer.pt", "optimizer.bin") if (checkpoint / name).is_file()), None)
    if optimizer is None:
        return "no optimizer.pt"
    files = [checkpoint / optimizer, checkpoint / "scheduler.pt"]
    weights = [path for kind in WEIGHTS for path in (*checkpoint.glob(kind), *checkpoint.glob(f"*/{kind}"))]
    for index in [path for path in weights if path.suffix == ".json"]:
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return f"{index.name} cannot be read"
        weights += [index.parent / name for name in sorted(shards)]
    if not weights:
        return "no weights"
    for path in [*files, *weights]:
        if not path.is_file():
            return f"no {path.name}"
        if path.suffix != ".json" and not _is_whole(path):
            return f"{path.name} is cut short"
    return ""


def _is_whole(path: Path) -> bool:
    """Whether a file of `torch.save` has its end, and one of safetensors the size in its header."""
    if path.suffix != ".safetensors":
        return zipfile.is_zipfile(path)
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False
    return bool(size == 8 + length + max(ends, default=0))


def refuse_finished(checkpoint: str, arguments: Any) -> None:
    """Raises SystemExit if the checkpoint has all steps: Trainer would take one more, and overwrite the model with its
    result. It counts after a step only (transformers 5.23.0: trainer_callback.py 592)."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    done, wanted, name = state["global_step"], arguments.max_steps, "max_steps"
    if wanted <= 0:
        done, wanted, name = state["epoch"], arguments.num_train_epochs, "num_train_epochs"
    if done >= wanted:
        raise SystemExit(
            f"{checkpoint}: has the model after all steps ({name}: {wanted}). To train on, set a larger {name}; to "
            "train from the first step, move the checkpoints to another folder"
        )


@dataclass(frozen=True)
class LostWeights:
    """Weights that Trainer does not read from a checkpoint: `names`, and the `parameters` in them, of `total`."""

    names: tuple[str, ...]
    parameters: int
    total: int

    def __str__(self) -> str:
        return f"{self.parameters:,} of {self.total:,} parameters ({100 * self.parameters / self.total:.0f} %)"


def lost_weights(model: nn.Module, checkpoint: str | Path) -> LostWeights | None:
    """What Trainer does not read from `checkpoint`; None: nothing is lost, or another library reads it (adapters,
    quantised weights, DeepSpeed, FSDP). Reads names only."""
    folder = Path(checkpoint)
    if not _is_read_by_trainer(model) or any(folder.glob("global_step*")) or any(folder.glob("pytorch_model_fsdp*")):
        return None
    names = _names_in(folder)
    return None if names is None else _lost(model, names)


def lost_when_saved(model: nn.Module) -> LostWeights | None:
    """What Trainer would not read from a checkpoint that it saves of `model`; None: nothing, or it is unknown."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        return None
    if not _is_read_by_trainer(model):
        return None
    names = revert_weight_conversion(model, {name: tensor.detach().to("meta") for name, tensor in _weights(model)})
    return _lost(model, names)


def restore_all_weights(trainer: Any) -> None:
    """Make `trainer` read all weights of a checkpoint, when it resumes and when it loads the best model. Only where it
    would lose some: everything else is read as before."""
    if restores_all_weights(trainer):
        return
    read, read_best = trainer._load_from_checkpoint, trainer._load_best_model

    def loses(checkpoint: str | None) -> bool:
        by_engine = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        return checkpoint is not None and not by_engine and lost_weights(trainer.model, checkpoint) is not None

    def load_from_checkpoint(resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if loses(resume_from_checkpoint):
            _restore(trainer.model, resume_from_checkpoint)
        else:
            read(resume_from_checkpoint, *args, **kwargs)

    def load_best_model() -> None:
        if loses(trainer.state.best_model_checkpoint):
            _restore(trainer.model, trainer.state.best_model_checkpoint)
        else:
            read_best()

    trainer._load_from_checkpoint, trainer._load_best_model = load_from_checkpoint, load_best_model
    trainer.restores_all_weights = True


def restores_all_weights(trainer: Any) -> bool:
    """Whether `restore_all_weights` has been called."""
    return getattr(trainer, "restores_all_weights", False) is True


def is_loaded_from(model: nn.Module, checkpoint: str | Path) -> bool:
    """Whether `from_pretrained` has loaded the model from this folder."""
    name = getattr(model, "name_or_path", None)
    return isinstance(name, str) and bool(name) and os.path.realpath(name) == os.path.realpath(checkpoint)


def _is_read_by_trainer(model: nn.Module) -> bool:
    """Whether Trainer itself reads and writes the model's weights, under names that transformers chooses."""
    from transformers import PreTrainedModel

    adapted = hasattr(model, "peft_config") or getattr(model, "is_quantized", False)
    return isinstance(model, PreTrainedModel) and not adapted


def _restore(model: Any, checkpoint: str) -> None:
    """Copy the checkpoint's weights into `model`. Raises SystemExit if it lacks some."""
    import torch

    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    options = {"config": copy.deepcopy(model.config), "dtype": functools.reduce(torch.promote_types, dtypes)}
    with torch.random.fork_rng(devices=[]):  # the new model draws numbers before it is filled
        saved, report = type(model).from_pretrained(checkpoint, **options, output_loading_info=True)
    weights = saved.state_dict()
    if lost := _lost(model, weights.keys() - set(report["missing_keys"])):
        raise SystemExit(f"{checkpoint}: has no weights for {lost}, such as {lost.names[0]}. Resume from another one")
    model.load_state_dict(weights, strict=False)


def _lost(model: nn.Module, names: Collection[str]) -> LostWeights | None:
    """The weights of `model` of which no name is among `names`. Tied weights have several."""
    names_of: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for name, tensor in _weights(model):
        names_of.setdefault(id(tensor), []).append(name)
        sizes[id(tensor)] = tensor.numel()
    patterns = [*(getattr(model, "_keys_to_ignore_on_save", None) or [])]
    patterns += getattr(model, "_keys_to_ignore_on_load_missing", None) or []

    def is_absent(own: list[str]) -> bool:
        return not any(name in names or any(re.search(each, name) for each in patterns) for name in own)

    lost = [weight for weight, own in names_of.items() if is_absent(own)]
    if not lost:
        return None
    parameters = sum(sizes[weight] for weight in lost)
    return LostWeights(tuple(names_of[weight][0] for weight in lost), parameters, sum(sizes.values()))


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers under all their names, as `state_dict` has them. Calls none of its hooks: those of
    FSDP would gather the weights."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        unsaved = module._non_persistent_buffers_set
        own = {**module._parameters, **{name: each for name, each in module._buffers.items() if name not in unsaved}}
        for name, tensor in own.items():
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _names_in(folder: Path) -> set[str] | None:
    """Names of the weights that Trainer reads in `folder`, without reading them; None without weights of a model."""
    for name in ("model.safetensors", "pytorch_model.bin"):  # before the indexes, as Trainer does
        path = folder / name
        if path.is_file() and path.suffix == ".bin":
            import torch

            return set(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        if path.is_file():
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return set(header) - {"__metadata__"}
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            return set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"])
    return None
