"""Images with a label each: a folder of images for each label, a table of their paths, or a data set of the hub."""

from __future__ import annotations

import dataclasses
import glob
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, Image, Value, concatenate_datasets, load_dataset
from PIL import Image as Pillow

from hf_memkit.recipes.export.scripts.rows import Source, in_one_line, stamps_of

EXAMPLE = "photos/cat/1.jpg, photos/dog/1.jpg"
ROW = '{"image": "cat/1.jpg", "label": "cat"}'

PATHS = Features({"path": Value("string")})


def read(source: Source) -> tuple[Dataset, int | None]:
    """Rows of `image` and `label`, and the number of rows to train on, from the first, if the data has such a part.
    Every local image is opened, and the first 100 of the hub's."""
    rows, first = list_rows(source)
    if "hub_id" in source.data:
        for row, image in enumerate(rows["image"][:100]):
            if why := unreadable(image["bytes"] or Path(image["path"]).read_bytes()):
                source.refuse(why, row)
    elif not source.data.get("made_up"):
        paths = [image["path"] for image in rows["image"]]
        stamps = stamps_of(paths)
        arguments = {"paths": paths, "stamps": stamps}
        Dataset.from_generator(_decoded_paths, features=PATHS, gen_kwargs=arguments)  # cached for the next run
    return rows, first


def list_rows(source: Source) -> tuple[Dataset, int | None]:
    """`read` without opening the images."""
    data = source.data
    if data.get("made_up"):
        from hf_memkit.recipes.tasks.made_up_images import LABELS, made_up_images

        features = Features({"image": Image(decode=False), "label": ClassLabel(names=list(LABELS))})
        return Dataset.from_list(made_up_images(), features=features), None
    rows, first = _of_folders(data["folders"]) if "folders" in data else (_of_table(source), None)
    if not isinstance(rows.features["label"], ClassLabel):
        rows = rows.class_encode_column("label")
    names = rows.features["label"].names
    if len(names) < 2:
        source.refuse(
            f"all {len(rows)} images have the label {names[0]!r}; the minimum is 2 labels, such as {EXAMPLE}"
        )
    unlabelled = [row for row, label in enumerate(rows["label"]) if label is None or label < 0]
    if unlabelled:
        source.refuse(f"no label, as {len(unlabelled)} of {len(rows)} images. Give each a label", unlabelled[0])
    return rows.cast_column("image", Image(decode=False)), first


def _of_folders(folders: dict[str, str]) -> tuple[Dataset, int | None]:
    """Rows of folders with a folder for each label, read together, so that they have the same labels."""
    files = {name: f"{glob.escape(folder)}/**" for name, folder in folders.items()}
    try:
        parts = load_dataset("imagefolder", data_files=files, drop_labels=False)
    except Exception as error:  # no images: several classes of errors
        raise SystemExit(f"{folders['train']}: no images ({in_one_line(error)}); expected {EXAMPLE}") from None
    for name, part in parts.items():
        root = Path(folders[name]).resolve()
        for image in part.cast_column("image", Image(decode=False))["image"]:
            if (path := Path(image["path"])).resolve().parent.parent != root:
                place = "next to the folders of labels" if path.parent == root else "in a folder inside a label's"
                raise SystemExit(f"{path}: an image {place}; expected {root.name}/{{label}}/{path.name}")
    return concatenate_datasets(list(parts.values())), len(parts["train"]) if "held_out" in parts else None


def _of_table(source: Source) -> Dataset:
    """Rows of a table of paths, relative to its folder; or of a data set of the hub with images."""
    source = dataclasses.replace(source, example=ROW)
    rows = source.load()
    image, label = source.data["columns"]["image"], source.data["columns"]["label"]
    if "files" not in source.data:
        for column in (image, label):
            if column not in rows.column_names:
                source.refuse(f"no column {column!r}; columns here: {', '.join(map(repr, rows.column_names))}")
        if not isinstance(rows.features[image], Image):
            source.refuse(f"column {image!r}: expected images, found {rows.features[image]}")
        return source.by_roles(rows, ("image", "label"))
    rows = source.texts(source.texts(rows, image), label)
    folder = source.files[0].parent
    paths = [str((folder / name).resolve()) for name in rows[image]]
    for row, path in enumerate(paths):
        if not Path(path).is_file():
            source.refuse(f"{path}: no such file", row)
    if len(set(paths)) < len(paths):
        row = next(row for row, path in enumerate(paths) if path in paths[:row])
        source.refuse(f"{paths[row]} appears again. Remove one of the rows", row)
    return Dataset.from_dict({"image": paths, "label": [label.strip() for label in rows[label]]})


def unreadable(content: bytes) -> str:
    """Why the image cannot be decoded; empty if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images and unusual metadata
            with Pillow.open(io.BytesIO(content)) as image:
                image.draft("RGB", (image.width // 8, image.height // 8))  # JPEG: reads everything, decodes an eighth
                image.load()
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        return f"not an image that pillow can read: {in_one_line(error)}. Save it again, or remove it"
    return ""


def _decoded_paths(paths: Sequence[str], stamps: Any) -> Iterator[dict[str, str]]:
    """Paths whose image was decoded. `stamps` (size, modification time) make `datasets` notice changed files."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # decoding releases Python's lock
        for path, why in zip(paths, pool.map(lambda path: unreadable(Path(path).read_bytes()), paths), strict=True):
            if why:
                raise SystemExit(f"{path}: {why}")
            yield {"path": path}
