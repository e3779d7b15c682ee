"""Batches of images, their labels and their accuracy. Real files, real pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

pytest.importorskip("PIL")

from PIL import Image

from hf_memkit.components.image_batches import Accuracy, ImageBatches, each_label_split, open_image, target_size
from hf_memkit.recipes.tasks.made_up_images import LABELS, made_up_images


def picture(path: Path, colour: tuple[int, int, int] = (200, 30, 30), side: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((side, side), 60).convert("RGB").save(path)  # noise: a JPEG of some length
    with Image.open(path) as image:
        image.load()
    Image.blend(image.convert("RGB"), Image.new("RGB", (side, side), colour), 0.5).save(path)
    return path


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size={"height": 32, "width": 48})


class TestBatches:
    def test_an_evaluation_sees_what_the_processor_makes(self, processor: Any, tmp_path: Path) -> None:
        image = {"path": str(picture(tmp_path / "a.png", side=100)), "bytes": None}
        batch = ImageBatches(processor)([{"image": image, "label": 3, "augment": False}] * 2)
        assert batch["pixel_values"].shape == (2, 3, 32, 48) and batch["labels"].tolist() == [3, 3]
        own = processor(open_image(image), return_tensors="pt")["pixel_values"][0]
        assert (batch["pixel_values"][0] == own).all()

    def test_training_sees_another_part_each_time(self, processor: Any, tmp_path: Path) -> None:
        import torch

        image = {"path": str(picture(tmp_path / "a.png", side=100)), "bytes": None}
        other = {"path": None, "bytes": picture(tmp_path / "b.png", side=100).read_bytes()}
        torch.manual_seed(0)
        batches = ImageBatches(processor, dtype=torch.bfloat16)
        row, of_bytes = ({"image": each, "label": 0, "augment": True} for each in (image, other))
        first, second = batches([row] * 2)["pixel_values"]
        assert first.shape == (3, 32, 48) and first.dtype == torch.bfloat16 and not torch.equal(first, second)
        assert not torch.equal(batches([row, of_bytes])["pixel_values"][0], first), "in another batch"
        assert not torch.equal(*(batches([row])["pixel_values"] for _ in range(2))), "alone"

    def test_a_batch_is_the_same_whatever_was_made_before(self, processor: Any, tmp_path: Path) -> None:
        """Of a worker that resumes, which did not make the batches that it skips."""
        import torch

        image = {"path": str(picture(tmp_path / "a.png", side=100)), "bytes": None}
        rows = [{"image": image, "label": 0, "augment": True}] * 2
        first = ImageBatches(processor)(rows)["pixel_values"]
        torch.manual_seed(7)
        assert torch.equal(ImageBatches(processor)(rows)["pixel_values"], first)

    @pytest.mark.parametrize("size", [(1, 300), (300, 1), (2, 2)])
    def test_strange_shapes_have_a_part_too(self, processor: Any, tmp_path: Path, size: tuple[int, int]) -> None:
        Image.new("L", size, 100).save(tmp_path / "a.png")
        row = {"image": {"path": str(tmp_path / "a.png"), "bytes": None}, "label": 0, "augment": True}
        assert ImageBatches(processor)([row])["pixel_values"].shape == (1, 3, 32, 48)

    def test_size_of_a_processor_that_crops(self) -> None:
        from types import SimpleNamespace

        crops = SimpleNamespace(
            size={"shortest_edge": 256}, do_center_crop=True, crop_size={"height": 224, "width": 224}
        )
        assert target_size(crops) == (224, 224)
        assert target_size(SimpleNamespace(size={"shortest_edge": 256})) == (256, 256)


def test_every_label_is_held_out_in_its_share() -> None:
    labels = [0] * 100 + [1] * 60 + [2] * 40
    train, held_out = each_label_split(labels, 0.1)
    assert sorted(train + held_out) == list(range(200))
    assert [sum(labels[row] == label for row in held_out) for label in range(3)] == [10, 6, 4]
    assert [row for row in held_out if labels[row] == 0] == list(range(90, 100)), "the last of each label"
    assert {labels[row] for row in held_out[:10]} == {0, 1, 2}, "mixed"


def test_accuracy_adds_up_over_batches() -> None:
    import torch
    from transformers import EvalPrediction

    accuracy = Accuracy()
    assert accuracy(EvalPrediction(torch.tensor([1, 2]), torch.tensor([1, 0])), compute_result=False) == {}
    assert accuracy(EvalPrediction(torch.tensor([3]), torch.tensor([3])), compute_result=True) == {"accuracy": 2 / 3}
    assert accuracy(EvalPrediction(torch.tensor([0]), torch.tensor([3])), compute_result=True) == {"accuracy": 0}


def test_made_up_images_are_images_of_all_labels() -> None:
    rows = datasets.Dataset.from_list(made_up_images(2))
    assert len(rows) == 2 * len(LABELS) and open_image(rows[0]["image"]).size == (64, 64)
