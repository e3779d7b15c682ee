"""Folders and tables of images: what is read, and ten and more ways to spoil them. Real files, real pillow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

pytest.importorskip("PIL")

from PIL import Image

from hf_memkit.components.image_batches import Accuracy, ImageBatches, each_label_split, open_image, target_size
from hf_memkit.errors import DataError
from hf_memkit.recipe.tasks.image_classification import _from_files, _split
from hf_memkit.recipe.tasks.image_files import EXAMPLE, LOCAL_FORM, SUFFIXES
from hf_memkit.recipe.tasks.made_up_images import LABELS, made_up_images

pytestmark = pytest.mark.usefixtures("cache")

_COLUMNS = {"image": "image", "label": "label"}


def picture(path: Path, colour: tuple[int, int, int] = (200, 30, 30), side: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((side, side), 60).convert("RGB").save(path)  # noise: a JPEG of some length
    with Image.open(path) as image:
        image.load()
    Image.blend(image.convert("RGB"), Image.new("RGB", (side, side), colour), 0.5).save(path)
    return path


def good(root: Path) -> Path:
    for label in ("cat", "dog"):
        for number in range(3):
            picture(root / label / f"{number}.jpg")
    return root


def load(path: Path) -> tuple[Any, tuple[str, ...], str, bool]:
    return _from_files(path, _COLUMNS)


def table(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestForms:
    def test_a_folder_for_each_label(self, tmp_path: Path) -> None:
        rows, labels, source, own = load(good(tmp_path))
        assert labels == ("cat", "dog") and not own and source == f"{tmp_path} (6 images, 2 labels)"
        assert rows["label"] == [0, 0, 0, 1, 1, 1]
        assert rows[0]["image"] == {"bytes": None, "path": str(tmp_path / "cat" / "0.jpg")}, (
            "files stay where they are"
        )

    def test_what_systems_leave_behind_is_passed_over(self, tmp_path: Path) -> None:
        good(tmp_path)
        for name in ("cat/.DS_Store", "cat/Thumbs.db", ".hidden"):
            (tmp_path / name).write_text("x")
        assert len(load(tmp_path)[0]) == 6

    @pytest.mark.parametrize("held_out", ["validation", "val", "test"])
    def test_a_part_of_its_own_is_held_out(self, tmp_path: Path, held_out: str) -> None:
        good(tmp_path / "train")
        picture(tmp_path / held_out / "dog" / "9.png")
        rows, labels, _, own = load(tmp_path)
        assert own and labels == ("cat", "dog")
        train, evaluated = _split(rows, own, 0.05)
        assert len(train) == 6 and all(train["augment"])
        assert [row["image"]["path"] for row in evaluated] == [str(tmp_path / held_out / "dog" / "9.png")]
        assert evaluated["augment"] == [False]

    @pytest.mark.parametrize("column", ["image", "file_name"])
    def test_a_table_of_paths(self, tmp_path: Path, column: str) -> None:
        for name in ("a.jpg", "b.webp"):
            picture(tmp_path / name)
        table(tmp_path / "metadata.jsonl", {column: "a.jpg", "label": 10}, {column: "b.webp", "label": "9"})
        for source in (tmp_path, tmp_path / "metadata.jsonl"):
            rows, labels, _, _ = load(source)
            assert labels == ("9", "10") and rows["label"] == [1, 0]

    def test_files_are_checked_again_once_they_changed(self, tmp_path: Path) -> None:
        assert len(load(good(tmp_path))[0]) == 6
        (tmp_path / "cat" / "1.jpg").write_bytes(b"no image at all")
        with pytest.raises(DataError, match="not an image that pillow can read"):
            load(tmp_path)


def _no_folders(root: Path) -> str:
    picture(root / "1.jpg")
    what = "it has images, and no folder for each label"
    return f"{root}: no labels: {what}; expected {LOCAL_FORM}, such as {EXAMPLE}"


def _no_images(root: Path) -> str:
    (root / "notes.txt").write_text("a dog")
    return f"{root}: no labels: it has no image, only notes.txt; expected {LOCAL_FORM}, such as {EXAMPLE}"


def _empty(root: Path) -> str:
    return f"{root}: no labels: it is empty; expected {LOCAL_FORM}, such as {EXAMPLE}"


def _one_label(root: Path) -> str:
    picture(root / "cat" / "1.jpg")
    return f"{root}: all 1 images have the label 'cat'; the minimum is 2 labels, such as {EXAMPLE}"


def _empty_label(root: Path) -> str:
    (good(root) / "bird").mkdir()
    return f"{root / 'bird'}: no image of the label 'bird'; put some in, or remove the folder"


def _mixed_nesting(root: Path) -> str:
    picture(good(root) / "cat" / "black" / "1.jpg")
    return f"{root / 'cat' / 'black'}: a folder inside the label 'cat'; expected its images directly in {root / 'cat'}"


def _beside_labels(root: Path) -> str:
    picture(good(root) / "1.jpg")
    return f"{root / '1.jpg'}: an image beside the label folders of {root}; move it into the folder of its label"


def _not_an_image(root: Path) -> str:
    (good(root) / "dog" / "notes.txt").write_text("a dog")
    return (
        f"{root / 'dog' / 'notes.txt'}: not an image (.txt); expected {', '.join(SUFFIXES)}; convert it, or move it "
        f"out of the folder"
    )


def _zero_bytes(root: Path) -> str:
    (good(root) / "cat" / "0.jpg").write_bytes(b"")
    return f"{root / 'cat' / '0.jpg'}: empty (0 bytes); expected an image"


def _unreadable(root: Path) -> str:
    (good(root) / "cat" / "0.jpg").write_bytes(b"%PDF-1.7 this is something else")
    said = "not an image that pillow can read. Save it again, or remove it"
    return f"{root / 'cat' / '0.jpg'}: {said}"


def _two_bad(root: Path) -> str:
    _unreadable(root)
    (root / "dog" / "2.jpg").write_bytes(b"")
    return (
        f"2 of 6 images cannot be used: {root / 'cat' / '0.jpg'}: not an image that pillow can read. Save it "
        f"again, or remove it; {root / 'dog' / '2.jpg'}: empty (0 bytes); expected an image"
    )


def _other_label_held_out(root: Path) -> str:
    good(root / "train")
    picture(root / "validation" / "bird" / "1.jpg")
    return f"{root / 'validation'}: label 'bird' is not among the labels of {root / 'train'} (cat, dog)"


def _two_tables(root: Path) -> str:
    for name in ("a.csv", "b.csv"):
        (root / name).write_text("image,label\n")
    return f"{root}: 2 tables (a.csv, b.csv …); name one with --data"


_ROW = '{"image": "cat/1.jpg", "label": "cat"}'


def _missing_file(root: Path) -> str:
    table(root / "metadata.jsonl", {"image": "gone.jpg", "label": "cat"})
    return f"{root}/metadata.jsonl:1: gone.jpg: no such file in {root}"


def _no_label(root: Path) -> str:
    picture(root / "1.jpg")
    table(root / "metadata.jsonl", {"image": "1.jpg", "label": None})
    return f"{root}/metadata.jsonl:1: column 'label': expected a label's name, found null; such as {_ROW}"


def _no_column(root: Path) -> str:
    table(root / "metadata.jsonl", {"image": "1.jpg", "labels": "cat"})
    there = "columns here: 'image', 'labels'; did you mean 'labels'?"
    return f"{root}/metadata.jsonl:1: no column 'label'; {there}; expected {_ROW}"


def _twice(root: Path) -> str:
    picture(root / "1.jpg")
    table(root / "metadata.jsonl", {"image": "1.jpg", "label": "cat"}, {"image": "1.jpg", "label": "dog"})
    return f"{root}/metadata.jsonl:2: 1.jpg appears again, as 'dog' and 'cat'. Remove one of the rows"


@pytest.mark.parametrize(
    "spoil",
    [
        _no_folders, _no_images, _empty, _one_label, _empty_label, _mixed_nesting, _beside_labels, _not_an_image,
        _zero_bytes, _unreadable, _two_bad, _other_label_held_out, _two_tables, _missing_file, _no_label, _no_column,
        _twice,
    ],
)  # fmt: skip
def test_spoiled_images(tmp_path: Path, cache: Path, spoil: Callable[[Path], str]) -> None:
    expected = spoil(tmp_path)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert str(caught.value) == expected
    assert not [file for file in cache.rglob("*") if file.suffix == ".arrow"], "nothing half-processed is kept"


@pytest.mark.parametrize("ending", [".jpg", ".png", ".webp"])
def test_an_image_whose_end_is_missing(tmp_path: Path, ending: str) -> None:
    path = picture(good(tmp_path) / "cat" / f"cut{ending}", side=200)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{path}: cannot be read: ") and "\n" not in str(caught.value)


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
        torch.manual_seed(0)
        batches = ImageBatches(processor, dtype=torch.bfloat16)
        first, second = batches([{"image": image, "label": 0, "augment": True}] * 2)["pixel_values"]
        assert first.shape == (3, 32, 48) and first.dtype == torch.bfloat16 and not torch.equal(first, second)

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
