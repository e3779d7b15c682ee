"""Images with one label each → a batch of pixels, for image classification; the loader's workers open the files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from hf_memkit.catalog.models import ModelFacts, hub_reachable, quiet_transformers
from hf_memkit.common.errors import InputError
from hf_memkit.recipes.tasks.media import loader_arguments, whole_config
from hf_memkit.recipes.tasks.task import Settings, Task
from hf_memkit.setup.setup import Setup

_SMALLEST_CROP: Final = 0.25

_TRAIN: Final = ("train", "training")
_HELD_OUT: Final = ("validation", "val", "valid", "dev", "eval", "test", "testing")


class _ImageClassification(Task):
    name: ClassVar[str] = "image-classification"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    columns: ClassVar[Mapping[str, str]] = {"image": "image", "label": "label"}
    local_form: ClassVar[str] = (
        "a folder with a folder of images for each label, or a table with the columns image and label"
    )
    script: ClassVar[str] = "train_images"
    rows: ClassVar[str] = "image_rows"
    script_needs: ClassVar[tuple[str, ...]] = ("pillow",)
    script_reads: ClassVar[tuple[str, ...]] = ("smallest_crop",)
    examples_are: ClassVar[str] = "images"
    takes_length: ClassVar[bool] = False
    made_up_by: ClassVar[str] = "made_up_images"

    def sequence_length(self, requested: int | None, default: int, model: ModelFacts) -> int:
        """Patches and the class token, by the config; another length is refused."""
        whole, tokens = whole_config(model.config), default
        size, patch = getattr(whole, "image_size", None), getattr(whole, "patch_size", None)
        if isinstance(size, int) and isinstance(patch, int):  # a vision transformer
            tokens = int((size // patch) ** 2 + 1)
        if requested is not None and requested != tokens:
            fixed = f"{model.name} makes {tokens} tokens of each image"
            raise InputError(f"--sequence-length {requested}: {fixed}. Omit --sequence-length")
        return tokens

    def data_settings(self, data: Any) -> Settings:
        why = (
            "to train on, a random part of at least this share of an image is scaled to the model's size, and "
            "mirrored half of the time: so a small data set is not memorised"
        )
        return {"smallest_crop": (_SMALLEST_CROP, why)}

    def arguments(self, data: Any) -> Settings:
        return {
            **loader_arguments("open, crop and scale images"),
            "label_names": (["labels"], "what the collator calls them"),
            "prediction_loss_only": (False, "an evaluation also counts right answers"),
            "batch_eval_metrics": (True, "batch by batch: no logits are kept"),
        }

    def columns_among(self, columns: Mapping[str, str], available: Collection[str]) -> dict[str, str]:
        """Names of columns as in ImageFolder, with paths in `file_name`."""
        return {**columns, "image": columns["image"] if columns["image"] in available else "file_name"}

    def folders(self, path: Path) -> Mapping[str, Any]:
        parts = zip(("train", "held_out"), _parts(path), strict=False)
        return {"folders": {name: str(folder.resolve()) for name, folder in parts}}

    def processor_settings(self, setup: Setup, own: bool) -> tuple[Settings, tuple[str, ...]]:
        if own:
            return {}, ()
        processor, why = _image_processor(setup)
        return {"image_size": (dict(processor.size), why)}, ()


def _parts(root: Path) -> tuple[Path, ...]:
    """(folder to train on, held-out folder) if the data has such parts; else the whole."""
    names = {folder.name.lower(): folder for folder in root.iterdir() if folder.is_dir() and folder.name[0] != "."}
    train = next((names[name] for name in _TRAIN if name in names), None)
    if train is None or names.keys() - {*_TRAIN, *_HELD_OUT}:
        return (root,)
    return (train, *(names[name] for name in _HELD_OUT if name in names))


def _image_processor(setup: Setup) -> tuple[Any, str]:
    """(the image processor, the reason for it)."""
    name, why = setup["data.tokenizer"], "a small model has its own image size"
    with quiet_transformers():
        # Imported with a quiet log: the import recommends torchvision.
        from transformers import AutoImageProcessor, ViTImageProcessor

        if name is not None:
            try:
                own = AutoImageProcessor.from_pretrained(name, local_files_only=not hub_reachable())
                return own, f"the model's own ({name})"
            except Exception as error:  # missing, gated or broken files, an unknown class: no common base class
                why = f"{name} gave none ({type(error).__name__})" if hub_reachable() else f"{name} cannot be reached"
        size = getattr(whole_config(setup["model.architecture"]), "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        processor = ViTImageProcessor(size={"height": height, "width": width})
    return processor, f"made here: {width} × {height} pixels, values from -1 to 1, as in the first ViT; {why}"


TASK = _ImageClassification()
