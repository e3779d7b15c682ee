"""A collator that opens images when it makes a batch: rows with file names or bytes → pixels.

The data set stays as small as its list of files, and the data loader's workers open, crop and scale images while the
GPU computes. For training, a random part of an image is cropped, scaled to the model's size and mirrored with a
probability of one half; for evaluation, the image processor prepares the whole image.
"""

from __future__ import annotations

import io
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import EvalPrediction

_TRIES = 10  # as in torchvision's RandomResizedCrop


class ImageBatches:
    """Collator: a list of rows → `{"pixel_values": (rows, channels, height, width), "labels": (rows,)}`. A row has
    `image` (`{"path": …}` or `{"bytes": …}`, as `datasets.Image(decode=False)` gives it), `label`, and `augment`:
    whether to crop a random part of the image, of at least `smallest_crop` of its area. `dtype`: of the pixels, such
    as that of 16-bit weights. Default: float32."""

    def __init__(self, image_processor: Any, *, smallest_crop: float = 0.25, dtype: torch.dtype | None = None) -> None:
        self._processor = image_processor
        self._size = target_size(image_processor)
        self._smallest_crop = smallest_crop
        self._dtype = dtype

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch. Raises OSError if a file is missing or is not an image."""
        pixels: list[Tensor] = []
        generator = _generator_of(rows)
        for row in rows:
            image = open_image(row["image"])
            options = {}
            if row.get("augment"):
                image = _random_part(image, self._size, self._smallest_crop, generator)
                options = {"do_resize": False, "do_center_crop": False}
            pixels.append(self._processor(image, return_tensors="pt", **options)["pixel_values"][0])
        labels = torch.tensor([int(row["label"]) for row in rows])
        stacked = torch.stack(pixels)
        return {"pixel_values": stacked if self._dtype is None else stacked.to(self._dtype), "labels": labels}


def open_image(image: Mapping[str, Any]) -> Image.Image:
    """The decoded image in RGB, rotated by its EXIF data.

    Raises:
        OSError: it cannot be read, or is not an image.
    """
    source = io.BytesIO(image["bytes"]) if image.get("bytes") else image["path"]
    with Image.open(source) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def target_size(image_processor: Any) -> tuple[int, int]:
    """(height, width) of the image processor's output, in pixels."""
    size = image_processor.size
    if getattr(image_processor, "do_center_crop", False) and getattr(image_processor, "crop_size", None):
        size = image_processor.crop_size
    if isinstance(size, int):
        return size, size
    values = dict(size)
    side = values.get("shortest_edge")
    return (side, side) if side else (values["height"], values["width"])


def _generator_of(rows: Sequence[Mapping[str, Any]]) -> torch.Generator | None:
    """Random numbers for a batch that depend on its images and their order alone: a resumed run makes the same ones,
    although its workers do not make the batches that it skips. Trainer shuffles anew in each epoch, so an image is
    cropped differently in each. None, torch's own generator: a batch of one image would be cropped alike each time."""
    if len(rows) == 1:
        return None
    seed = 0
    for row in rows:
        image = row["image"]
        seed = zlib.crc32(str(image["path"]).encode() if image.get("path") else image["bytes"], seed)
    return torch.Generator().manual_seed(seed)


def _random_part(
    image: Image.Image, size: tuple[int, int], smallest: float, generator: torch.Generator | None
) -> Image.Image:
    """A random part of the image, scaled to `size` (height, width) and mirrored with a probability of one half. Its
    share of the area is drawn from `smallest` to 1 and its aspect ratio from 3/4 to 4/3 (logarithmic), as in
    torchvision's RandomResizedCrop (Szegedy et al. 2015, arXiv:1409.4842)."""

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    width, height = image.size
    for _ in range(_TRIES):
        area = width * height * uniform(smallest, 1.0)
        ratio = math.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
        wide = round(math.sqrt(area * ratio))
        high = round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = int(uniform(0, width - wide + 1))
            top = int(uniform(0, height - high + 1))
            break
    else:
        wide = min(width, max(1, round(height * 4 / 3)))
        high = min(height, max(1, round(width * 4 / 3)))
        left = (width - wide) // 2
        top = (height - high) // 2
    part = image.resize(size[::-1], Image.Resampling.BICUBIC, box=(left, top, left + wide, top + high))
    return ImageOps.mirror(part) if uniform(0, 1) < 0.5 else part


def each_label_split(labels: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """(training rows, held-out rows): holds out the last `share` of the rows of every label.

    A folder of images is sorted by label, so the last rows of the whole list would have one label. Both lists mix the
    labels evenly: each part of a list has about the same labels as the whole. Rows of one label keep their order, so
    photographs taken one after the other are mostly in the same list.
    """
    counts = Counter(labels)
    seen = dict.fromkeys(counts, 0)
    positions = []
    for label in labels:
        positions.append((seen[label] + 0.5) / counts[label])
        seen[label] += 1
    order = sorted(range(len(positions)), key=positions.__getitem__)
    held_out = min(max(1, round(share * len(order))), len(order) - 1)
    return order[:-held_out], order[-held_out:]


class Accuracy:
    """`compute_metrics` for `batch_eval_metrics`: the share of images whose label is the most likely one. With
    `most_likely` as `preprocess_logits_for_metrics`, two numbers are kept and no logits."""

    def __init__(self) -> None:
        self._right = self._all = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        label_ids = prediction.label_ids[0] if isinstance(prediction.label_ids, tuple) else prediction.label_ids
        predicted, labels = (
            np.asarray(torch.as_tensor(values).cpu()) for values in (prediction.predictions, label_ids)
        )
        self._right += int((predicted == labels).sum())
        self._all += labels.size
        if not compute_result:
            return {}
        accuracy = self._right / max(self._all, 1)
        self._right = self._all = 0
        return {"accuracy": accuracy}


def most_likely(logits: Any, labels: Tensor) -> Tensor:
    """The most likely label of each image."""
    best: Tensor = (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)
    return best
