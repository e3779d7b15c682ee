"""Images with one label each → a batch of pixels, for models that classify them; the files are opened a batch at a
time, in the data loader's workers."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from hf_memkit.errors import DataError, InputError, MissingPackageError
from hf_memkit.models import ModelFacts, hub_reachable, quiet_transformers
from hf_memkit.recipe.sources import HubData, kept, source_of, stamps
from hf_memkit.recipe.tasks.image_files import (
    EXAMPLE,
    LOCAL_FORM,
    check_bytes,
    image_rows,
    list_images,
    split_folders,
)
from hf_memkit.recipe.tasks.media import hub_rows, loader_arguments, whole_config
from hf_memkit.recipe.tasks.task import Settings, Task
from hf_memkit.recipe.text_readers import in_one_line
from hf_memkit.setup import Setup

_HEAD_ROWS: Final = 100
"""Images of the hub that are opened before training."""

_SMALLEST_CROP: Final = 0.25


class _ImageClassification(Task):
    name: ClassVar[str] = "image-classification"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    packages: ClassVar[tuple[str, ...]] = ("PIL",)
    columns: ClassVar[Mapping[str, str]] = {"image": "image", "label": "label"}
    local_form: ClassVar[str] = LOCAL_FORM
    example: ClassVar[str] = EXAMPLE
    script: ClassVar[str] = "train_images"
    script_needs: ClassVar[tuple[str, ...]] = ("pillow",)
    script_reads: ClassVar[tuple[str, ...]] = ("smallest_crop",)
    takes_length: ClassVar[bool] = False
    made_up_by: ClassVar[str] = "made_up_images"

    def sequence_length(self, asked: int | None, default: int, model: ModelFacts) -> int:
        """Patches and the class token: the config decides.

        Raises:
            InputError: another length was asked for.
        """
        found = _patches(model.config) or default
        if asked is not None and asked != found:
            raise InputError(
                f"--sequence-length {asked}: {model.name} makes {found} tokens of each image (its patches and a class "
                f"token). Remove the option, or choose a --model with another image_size or patch_size"
            )
        return found

    def data_settings(self, data: Any) -> Settings:
        return {
            "smallest_crop": (
                _SMALLEST_CROP,
                "to train on, a random part of at least this share of an image is scaled to the model's size, and "
                "mirrored half of the time: so a small data set is not memorised",
            )
        }

    def arguments(self, data: Any) -> Settings:
        return {
            **loader_arguments("open, crop and scale images"),
            "label_names": (["labels"], "what the collator calls them"),
            "prediction_loss_only": (False, "an evaluation also counts right answers"),
            "batch_eval_metrics": (True, "batch by batch: no logits are kept"),
        }

    def read(self, setup: Setup) -> tuple[Any, tuple[str, ...], str, bool]:
        """(rows, labels, what a person reads, whether they bring a held-out part)."""
        if importlib.util.find_spec("PIL") is None:
            raise MissingPackageError("images need pillow, which is not installed; run: pip install pillow")
        source = source_of(setup, any_ending=True)
        if source is None:
            return *_made_up(), False
        if isinstance(source, HubData):
            return *_from_hub(source, setup["data.columns"]), False
        return _from_files(source, setup["data.columns"])

    def columns_among(self, columns: Mapping[str, str], there: Collection[str]) -> dict[str, str]:
        """As ImageFolder has them, its column of paths is `file_name`."""
        return {**columns, "image": columns["image"] if columns["image"] in there else "file_name"}

    def folders(self, path: Path) -> Mapping[str, Any]:
        parts = zip(("train", "held_out"), split_folders(path) or (path,), strict=False)
        return {"folders": {name: str(folder.resolve()) for name, folder in parts}}

    def processor_settings(self, setup: Setup, own: bool) -> tuple[Settings, tuple[str, ...]]:
        if own:
            return {}, ()
        processor, why = _image_processor(setup)
        return {"image_size": (dict(processor.size), why)}, ()


def _patches(config: Mapping[str, Any]) -> int | None:
    """Tokens that a vision transformer makes of an image; None for models of another kind."""
    whole = whole_config(config)
    size, patch = getattr(whole, "image_size", None), getattr(whole, "patch_size", None)
    if not isinstance(size, int) or not isinstance(patch, int):
        return None
    return int((size // patch) ** 2 + 1)


def _features(labels: Any) -> Any:
    import datasets

    return datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=list(labels)),
            "held_out": datasets.Value("bool"),
            "sha256": datasets.Value("string"),
        }
    )


def _from_files(path: Path, columns: Mapping[str, str]) -> tuple[Any, tuple[str, ...], str, bool]:
    """(rows, labels, what a person reads, whether they bring a held-out part)."""
    found = list_images(path, columns)
    arguments = {"files": found.files, "labels": found.labels, "stamps": stamps(file.path for file in found.files)}
    rows = kept(image_rows, _features(found.labels), arguments, found.source)
    return rows, found.labels, found.source, found.has_held_out


def _from_hub(wanted: HubData, columns: Mapping[str, str]) -> tuple[Any, tuple[str, ...], str]:
    import datasets

    rows = hub_rows(wanted, columns, datasets.Image, {"image": "images", "label": "labels"}, LOCAL_FORM)
    if not isinstance(rows.features["label"], datasets.ClassLabel):
        rows = rows.class_encode_column("label")
    labels = tuple(rows.features["label"].names)
    without = sum(number is None or number < 0 for number in rows["label"])
    if without:
        raise DataError(
            f"{wanted.name}: {without} of {len(rows)} images of its split {wanted.split!r} have no label; give a data "
            f"set with a label for each"
        )
    for number, row in enumerate(rows.select(range(min(_HEAD_ROWS, len(rows)))), 1):
        try:
            check_bytes(row["image"]["bytes"] or Path(row["image"]["path"]).read_bytes())
        except (OSError, TypeError) as error:
            raise DataError(f"{wanted.name}: row {number}: not an image: {in_one_line(error)}") from error
    return rows, labels, wanted.name


def _made_up() -> tuple[Any, tuple[str, ...], str]:
    import datasets

    from hf_memkit.recipe.tasks.made_up_images import LABELS, made_up_images

    features = datasets.Features({name: _features(LABELS)[name] for name in ("image", "label")})
    rows = datasets.Dataset.from_list(made_up_images(), features=features)
    told = f"{len(rows)} images drawn here, because the hub is not reachable (--data trains on {LOCAL_FORM})"
    return rows, LABELS, told


def _split(rows: Any, own: bool, share: float) -> tuple[Any, Any]:
    """(to train on, held out), with the column that says which images are cropped at random."""
    from hf_memkit.components.image_batches import each_label_split

    if len(rows) < 2:
        raise DataError(f"{len(rows)} image; the minimum is 2, one to train on and one to hold out. Give more data")
    if own:
        is_held_out, labels = rows["held_out"], rows["label"]
        train = [number for number, held in enumerate(is_held_out) if not held]
        held_out = [number for number, held in enumerate(is_held_out) if held]
        if len(held_out) > 1:  # mixed, so that the part of them that is evaluated has all labels
            first, last = each_label_split([labels[number] for number in held_out], 0.5)
            held_out = [held_out[number] for number in (*first, *last)]
    else:
        train, held_out = each_label_split(rows["label"], share)
    without = set(held_out)
    # Before rows are chosen: afterwards `datasets` would write all of them anew.
    rows = rows.add_column("augment", [number not in without for number in range(len(rows))])
    return rows.select(train), rows.select(held_out)


def _image_processor(setup: Setup) -> tuple[Any, str]:
    """(the image processor, why this one)."""
    name, why = setup["data.tokenizer"], "a small model has its own image size"
    with quiet_transformers():
        # Here, because importing it says that torchvision would be faster.
        from transformers import AutoImageProcessor, ViTImageProcessor

        if name is not None:
            try:
                return AutoImageProcessor.from_pretrained(name, local_files_only=not hub_reachable()), (
                    f"the model's own ({name})"
                )
            except Exception as error:  # missing, gated or broken files, an unknown class: no common base class
                why = f"{name} gave none ({in_one_line(error)})" if hub_reachable() else f"{name} cannot be reached"
        size = getattr(whole_config(setup["model.architecture"]), "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        processor = ViTImageProcessor(size={"height": height, "width": width})
    return processor, f"made here: {width} × {height} pixels, values from -1 to 1, as the first ViT has it; {why}"


TASK = _ImageClassification()
