"""The worst batch that is found is the worst that the sampler can form: compared with 10,000 real draws of it."""

from __future__ import annotations

import importlib.util
import io
import itertools
import random
import time
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.training.batch_shapes import distinct_shapes, shape_of
from hf_memkit.prediction.child.training.batches import chosen_batches, longest_row
from hf_memkit.prediction.child.training.row_sizes import row_sizes
from tests.predict_script.conftest import Predict
from tests.prediction.fake_and_real import _changes, peaks

DRAWS = 10_000


def lengths_of(rows: int = 300, longest: int = 900) -> list[int]:
    """Between 10 and 45 tokens, an empty row, and one twenty times as long."""
    found = [random.Random(number).randint(10, 45) for number in range(rows)]
    found[17], found[200] = 0, longest
    return found


def padded(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    most = max(len(row["input_ids"]) for row in rows)
    return {"input_ids": torch.tensor([[*row["input_ids"], *[0] * (most - len(row["input_ids"]))] for row in rows])}


def table(lengths: Sequence[int]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": [list(range(length)) for length in lengths]})


class Endless(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number, number + 1] for number in itertools.cycle(range(0, 300, 2)))


class BySource(Sampler[list[int]]):
    """A custom batch sampler: only rows of the same source meet, four at a time."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[list[int]]:
        for source in range(10):
            numbers = list(range(source, self.rows, 10))
            random.shuffle(numbers)
            yield from (numbers[at : at + 4] for at in range(0, len(numbers), 4))


def drawn(loader: DataLoader[Any], lengths: Sequence[int], *, is_padded: bool = True) -> int:
    """Tokens of the largest of so many real batches; by their rows' numbers, which takes no time."""
    batches = iter(())
    worst = 0
    for _ in range(DRAWS):
        numbers = next(batches, None)
        if numbers is None:
            batches = iter(loader.batch_sampler or ())
            numbers = next(batches)
        of_rows = [lengths[number] for number in numbers]
        worst = max(worst, len(numbers) * max(of_rows) if is_padded else sum(of_rows))
    return worst


def test_a_batch_has_no_more_rows_than_the_data() -> None:
    """Would notice: the one row of a first try, counted as often as the micro-batch is large."""
    loader = DataLoader(table([7]), batch_size=4, shuffle=True, collate_fn=padded)
    assert shape_of(chosen_batches(loader).worst) == "1 × 7 tokens"


@pytest.mark.parametrize("kind", ["shuffled", "sequential", "grouped", "custom", "of a subset"])
def test_one_sample_twenty_times_as_long(kind: str) -> None:
    """Would notice: rows that cannot meet in one batch, the long one left out, an empty row that ends it."""
    lengths = lengths_of()
    rows = table(lengths)
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": padded}
    if kind == "shuffled":
        loader = DataLoader(rows, shuffle=True, **options)
    elif kind == "sequential":
        loader = DataLoader(rows, **options)
    elif kind == "grouped":
        loader = DataLoader(rows, sampler=LengthGroupedSampler(4, lengths=lengths), **options)
    elif kind == "custom":
        loader = DataLoader(rows, batch_sampler=BySource(len(rows)), collate_fn=padded)
    else:
        loader = DataLoader(Subset(rows, range(100, 300)), shuffle=True, **options)
        lengths = lengths[100:]
    chosen = chosen_batches(loader)
    worst = drawn(loader, lengths)
    assert worst <= chosen.worst["input_ids"].numel() <= worst + 900, "one row more at most"
    assert chosen.typical["input_ids"].numel() <= chosen.high["input_ids"].numel() < worst / 10
    assert chosen.half["input_ids"].shape == (2, 900) and chosen.cut[0]["input_ids"].shape == (4, chosen.cut[1])
    assert (
        shape_of(chosen.worst) == "4 × 900 tokens"
        and f"row {100 if kind == 'of a subset' else 200}" in chosen.description
    )


@pytest.mark.slow
def test_a_sampler_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a prediction that waits for its last batch."""
    monkeypatch.setattr("hf_memkit.prediction.child.training.batches._PASSES_S", 0.2)
    chosen = chosen_batches(DataLoader(table(lengths_of()), batch_sampler=Endless(), collate_fn=padded))
    assert shape_of(chosen.worst) == "2 × 900 tokens" and chosen.rows == 2


@pytest.mark.parametrize(("shuffle", "tokens"), [(False, 110), (True, 160)])
def test_rows_that_are_not_padded(shuffle: bool, tokens: int) -> None:
    """Would notice: rows together that the sampler never puts together, or padding where there is none."""

    def behind_one_another(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[each for row in picked for each in row["input_ids"]]])}

    loader = DataLoader(table([100, 10, 10, 60, 60, 50]), 2, shuffle=shuffle, collate_fn=behind_one_another)
    assert shape_of(chosen_batches(loader).worst) == f"1 × {tokens} tokens"


@pytest.mark.parametrize("flat", [False, True])
def test_tokens_of_a_batch_on_average(flat: bool) -> None:
    """Would notice: tokens that are counted once a column, padding that is counted where there is none."""

    def collate(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if flat:
            return {"input_ids": torch.tensor([[each for row in picked for each in row["input_ids"]]])}
        return padded(picked)

    rows = table([100, 20, 60, 40, 50, 30])
    rows = rows.add_column("labels", rows["input_ids"][:])
    chosen = chosen_batches(DataLoader(rows, 2, collate_fn=collate))  # in order: 120, 100, 80 of 200, 120, 100
    typical, worst = chosen.mean["typical"], chosen.mean["worst"]
    assert worst == pytest.approx((100 / 120, 100 / 120) if flat else (140 / 200, 100 / 120))
    assert typical == pytest.approx((1.0, 1.0) if flat else (140 / 120, 1.0))
    assert chosen.padding == pytest.approx(1 - 300 / 420)
    one = chosen_batches(DataLoader(rows, 1, collate_fn=collate, shuffle=True))
    assert one.padding is not None and 0.1 < one.padding < 0.4, "of two rows, though the loader gives one"
    assert longest_row(padded([{"input_ids": [1] * 7}, {"input_ids": [1]}])) == 7


@pytest.mark.parametrize(
    ("kind", "size"), [("shuffled", 1), ("shuffled", 4), ("sequential", 1), ("sequential", 4), ("custom", 4)]
)
def test_lengths_that_only_the_collator_knows(kind: str, size: int) -> None:
    """Would notice: characters taken for tokens. The row of most characters is not the one of most tokens."""
    texts = ["a b c d"] * 200 + ["x" * 400] + ["a b c"] * 9 + [" ".join("y" * 90), ""]
    rows = datasets.Dataset.from_dict({"text": texts})

    def tokenised(picked: Sequence[dict[str, str]]) -> dict[str, torch.Tensor]:
        return padded([{"input_ids": list(range(len(row["text"].split())))} for row in picked])

    if kind == "custom":
        loader = DataLoader(rows, batch_sampler=BySource(len(rows)), collate_fn=tokenised)
    else:
        loader = DataLoader(rows, size, shuffle=kind == "shuffled", collate_fn=tokenised)
    chosen = chosen_batches(loader)
    worst = drawn(loader, [len(text.split()) for text in texts])
    assert worst <= chosen.worst["input_ids"].numel() <= worst + 90, "one row more at most"
    assert shape_of(chosen.typical) == f"{size} × 4 tokens"


@pytest.mark.parametrize("kind", ["shuffled", "sequential"])
def test_sources_and_targets_of_their_own_lengths(kind: str) -> None:
    """Would notice: a long target that is forgotten because rows with long sources are larger in all."""
    sources = [60 if number % 3 == 0 else 8 for number in range(300)]
    targets = [4] * 300
    sources[77], targets[200] = 90, 40
    content = {"input_ids": [[1] * each for each in sources], "labels": [[1] * each for each in targets]}
    rows = datasets.Dataset.from_dict(content)

    def both(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = padded([{"input_ids": row["labels"]} for row in picked])["input_ids"]
        return {**padded(picked), "labels": labels}

    loader = DataLoader(rows, 4, shuffle=kind == "shuffled", collate_fn=both)
    chosen = chosen_batches(loader)
    together = [
        sum(4 * max(column[row] for row in numbers) for column in (sources, targets))
        for numbers in (numbers for _ in range(DRAWS // 75) for numbers in loader.batch_sampler or ())
    ]
    found = sum(each.numel() for each in chosen.worst.values())
    assert max(together) <= found <= max(together) + 40 * 4


def test_rows_that_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a custom data set that is read forever, and a sample that is not called one."""

    class Own(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 1_000

        def __getitem__(self, number: int) -> dict[str, Any]:
            time.sleep(0.001)
            return {"input_ids": list(range(10 + number % 7))}

    chosen = chosen_batches(DataLoader(Own(), 4, shuffle=True, collate_fn=padded))
    assert shape_of(chosen.worst) == "4 × 16 tokens" and "1,000 rows can give" in chosen.description
    monkeypatch.setattr("hf_memkit.prediction.child.training.row_sizes.LIMIT_S", 0.1)
    assert "a sample of " in chosen_batches(DataLoader(Own(), 4, shuffle=True, collate_fn=padded)).description


def test_a_stream() -> None:
    """Would notice: an endless stream that is read to its end, and rows that are gone when they are needed."""

    class Stream(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for length in itertools.chain(lengths_of(), itertools.repeat(5)):
                yield {"input_ids": list(range(length))}

    chosen = chosen_batches(DataLoader(Stream(), batch_size=4, collate_fn=padded))
    assert shape_of(chosen.worst) == "4 × 900 tokens" and "first 2,000 rows of the stream" in chosen.description


def encoded(size: tuple[int, int], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("L", size).save(file, kind)
    return file.getvalue()


def of_images(images: Sequence[Any], **columns: Sequence[Any]) -> datasets.Dataset:
    rows = datasets.Dataset.from_dict({"image": images, **columns})
    return rows.cast_column("image", datasets.Image())


@pytest.mark.parametrize("kind", ["paths", "bytes", "JPEG", "lists", "in messages", "selected"])
def test_images_by_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Would notice: an image of 48 million pixels that is decoded for its size, images that are not found where they
    lie, a file that is none, which ends it or is read as a row of no size."""
    held: list[Any] = [{"bytes": encoded((64, 48), "JPEG" if kind == "JPEG" else "PNG"), "path": None}] * 40
    held[7] = {"bytes": encoded((8_000, 6_000), "JPEG" if kind == "JPEG" else "PNG"), "path": None}
    held[11] = {"bytes": b"no image", "path": None}
    held[13] = None
    if kind == "paths":
        for number, each in enumerate(held):
            (tmp_path / f"{number:02}.png").write_bytes((each or held[0])["bytes"])
        held = sorted(map(str, tmp_path.glob("*.png")))
    rows = of_images(held, label=[0] * 40)
    place = list(range(40))
    if kind == "lists":
        feature: Any = datasets.Features({"images": datasets.List(datasets.Image())})
        rows = datasets.Dataset.from_dict({"images": [[each] if each else [] for each in held]}, features=feature)
    elif kind == "in messages":
        content = {"type": datasets.Value("string"), "image": datasets.Image()}
        feature = datasets.Features({"messages": datasets.List({"content": datasets.List(content)})})
        messages = [
            [{"content": [{"type": "image", "image": each}, {"type": "text", "image": None}]}] for each in held
        ]
        rows = datasets.Dataset.from_dict({"messages": messages}, features=feature)
    elif kind == "selected":
        rows, place = rows.select(range(39, 4, -1)), list(range(39, -1, -1))

    def decoded(self: Any) -> None:
        raise AssertionError("decoded")

    with monkeypatch.context() as no_pixels:
        no_pixels.setattr(ImageFile.ImageFile, "load", decoded)
        found = row_sizes(rows)
    assert int(found.sizes.argmax()) == place[7]
    assert found.sizes[place[7]] >= 48_000_000 > 100 * found.sizes[place[8]]
    assert found.unreadable is not None and found.unreadable[0] == place[11]
    assert found.sizes[place[11]] == -1 and found.read == len(rows) - 1


def test_the_largest_image_decides(tmp_path: Path) -> None:
    """Would notice: rows that cannot be read, of which one seems the largest, in a batch; a typical batch of them."""
    images: list[Any] = [{"bytes": encoded((64, 48)), "path": None}] * 40
    images[7] = {"bytes": encoded((800, 600)), "path": None}
    images[11] = {"bytes": b"no image", "path": None}
    images[12] = {"bytes": encoded((8_000, 6_000), "JPEG")[:5_000], "path": None}  # its header is whole

    def stacked(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        most = [max(row["image"].size[side] for row in picked) for side in (1, 0)]
        return {"pixel_values": torch.empty(len(picked), 1, *most, dtype=torch.uint8)}

    loader = DataLoader(of_images(images, label=[0] * 40), 2, shuffle=True, collate_fn=stacked)
    chosen = chosen_batches(loader)
    assert shape_of(chosen.worst) == "2 × 1 × 600 × 800 pixel_values"
    pixels = [800 * 600 if number == 7 else 0 if number in (11, 12) else 64 * 48 for number in range(40)]
    assert chosen.worst["pixel_values"].numel() == drawn(loader, pixels), "of the rows that a run can read"
    assert shape_of(chosen.typical) == "2 × 1 × 48 × 64 pixel_values"
    assert chosen.unreadable is not None and chosen.unreadable[0] == 11
    chosen = chosen_batches(DataLoader(of_images(images[12:]), 2, shuffle=True, collate_fn=stacked))
    assert chosen.unreadable is not None and chosen.unreadable[0] == 0 and "truncated" in chosen.unreadable[1]


def of_sound(sounds: Sequence[Any]) -> datasets.Dataset:
    rows = datasets.Dataset.from_dict({"audio": sounds})
    return rows.cast_column("audio", datasets.Audio(decode=False))  # decoding needs torchcodec


def test_sound_by_its_headers(tmp_path: Path) -> None:
    """Would notice: sound that is decoded for its length, or not measured; a file that is none; rows without any."""
    held: list[Any] = []
    for number, length in enumerate([*[800] * 20, 60_000, *[1_200] * 19]):
        path = tmp_path / f"{number:02}.wav"
        with wave.open(str(path), "wb") as sound:
            sound.setparams((1, 2, 16_000, 0, "NONE", ""))
            sound.writeframes(bytes(2 * length))
        in_table = number % 2 == 0
        held.append({"bytes": path.read_bytes() if in_table else None, "path": None if in_table else str(path)})
    held[5] = None
    held[6] = {"bytes": None, "path": str(tmp_path / "nowhere.wav")}
    rows = of_sound(held)
    found = row_sizes(rows)
    assert found.sizes[20] == 60_000 and found.sizes[21] == 1_200 and found.sizes[5] == 0
    assert found.unreadable is not None and found.unreadable[0] == 6 and found.sizes[6] == -1

    def sampled(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = []
        for row in picked:
            held = row["audio"]
            with wave.open(io.BytesIO(held["bytes"]) if held["bytes"] else held["path"]) as sound:
                lengths.append(sound.getnframes())
        return {"input_values": torch.zeros(len(picked), max(lengths)), "labels": torch.zeros(len(picked), 3).long()}

    chosen = chosen_batches(DataLoader(rows, 4, shuffle=True, collate_fn=sampled))
    assert shape_of(chosen.worst) == "4 × 60,000 input_values" and "row 20" in chosen.description


def test_sound_that_wave_cannot_read(tmp_path: Path) -> None:
    """Would notice: compressed sound without a size where no library reads its header, or with a wrong one."""
    long, short = bytes(range(256)) * 40, bytes(range(256))
    rows = of_sound([{"bytes": short, "path": None}, {"bytes": long, "path": None}])
    if importlib.util.find_spec("soundfile") is None:
        assert row_sizes(rows).sizes.tolist() == [256, 10_240]
        return
    import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]

    assert row_sizes(rows).read == 0
    soundfile.write(tmp_path / "one.flac", np.zeros(5_000), 16_000)
    path = {"bytes": None, "path": str(tmp_path / "one.flac")}
    inside = {"bytes": (tmp_path / "one.flac").read_bytes(), "path": None}
    assert row_sizes(of_sound([path, inside])).sizes.tolist() == [5_000, 5_000]


def test_a_collator_that_takes_things_out_of_rows() -> None:
    """Would notice: a row that lacks its image the second time, as TRL's collator for images leaves it."""
    rows = [{"input_ids": [1] * length, "image": [0.5] * 9} for length in (3, 5, 8, 4)]

    def taking(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**padded(picked), "pixel_values": torch.tensor([row.pop("image") for row in picked])}

    chosen = chosen_batches(DataLoader(rows, 2, shuffle=True, collate_fn=taking))  # type: ignore[arg-type]
    assert shape_of(chosen.worst) == "2 × 8 tokens and 2 × 9 pixel_values" and "4 rows" in chosen.description
    assert all("image" in row for row in rows)


LONG_TEXT_AND_LARGE_IMAGE = """
import sys, torch
from transformers import Trainer, TrainingArguments

lengths = {"text": [(3_000, 100)], "image": [(100, 50_000)], "both": [(3_000, 100), (100, 50_000)]}[sys.argv[1]]
data = [{"input_ids": torch.ones(text).long(), "pixel_values": torch.ones(image)} for text, image in lengths]
arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=1, report_to="none")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.scale = torch.nn.Embedding(10, 64), torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, pixel_values):
        return {"loss": self.embed(input_ids).tanh().mean() + (self.scale * pixel_values).tanh().mean()}

Trainer(Model(), arguments, train_dataset=data).train()
"""


def test_most_tokens_and_largest_images_are_both_traced(predict: Predict) -> None:
    """Would notice: a peak of only one of two batches, either of which may need more."""
    highest = {}
    for rows in ("text", "image", "both"):
        content = predict(LONG_TEXT_AND_LARGE_IMAGE, rows, device="cpu")
        assert [step.kind for step in content.training.steps].count("worst") >= 2
        highest[rows] = peaks(_changes(content.training.of_steps()["worst"]))[1]["backward"]
    assert highest["both"] >= highest["text"] > 1.5 * highest["image"]


def test_more_rows_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lengths come from the table: rows are read for the chosen batches alone."""
    read = datasets.Dataset.__getitem__
    asked: list[Any] = []
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda rows, key: asked.append(key) or read(rows, key))
    counts = []
    for size in (2_000, 20_000):
        asked.clear()
        rows = table(np.random.default_rng(0).integers(1, 20, size).tolist()).shuffle(seed=0)
        chosen_batches(DataLoader(rows, 8, shuffle=True, collate_fn=padded))
        counts.append(len(asked))
    assert counts[1] < 2 * counts[0] and counts[0] < 2_000, counts


def test_rows_that_only_the_loader_can_put_together() -> None:
    """Would notice: a prediction that ends at keys that are no numbers, or at a collator that wants whole batches."""

    class Keys(Sampler[list[str]]):
        def __iter__(self) -> Iterator[list[str]]:
            yield from (["a", "b"], ["b", "c"])

    rows = {"a": [1] * 5, "b": [1] * 9, "c": [1] * 30}

    def stacked(picked: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        assert len(picked) == 2
        return padded([{"input_ids": each} for each in picked])

    chosen = chosen_batches(DataLoader(rows, batch_sampler=Keys(), collate_fn=stacked))  # type: ignore[arg-type]
    assert (
        shape_of(chosen.worst) == "2 × 30 tokens"
        and chosen.typical is None
        and "first 2 batches" in chosen.description
    )
    whole = chosen_batches(DataLoader(list(rows.values()), 2, shuffle=True, collate_fn=stacked))
    assert shape_of(whole.worst) == "2 × 30 tokens" and whole.half is None and whole.typical is not None


def test_no_row() -> None:
    with pytest.raises(Unmodelled, match="no batch"):
        chosen_batches(DataLoader(table([]), 4, collate_fn=padded))


def test_batches_that_are_no_tensors_are_told_apart() -> None:
    """Would notice: the same words for two batches, boxes next to images that are not counted."""
    long, short = ([{"prompt": "a" * size, "n": 1}] * 4 for size in (90, 9))
    assert shape_of({"features": {"input_ids": torch.zeros(2, 5, dtype=torch.long)}}) == "2 × 5 tokens"
    assert (
        "4" in shape_of(long) and str(4 * 91) in shape_of(long) != shape_of(short) == distinct_shapes([long, short])[1]
    )
    images = torch.zeros(2, 3, 8, 8)
    several = [{"pixel_values": images, "labels": [{"boxes": torch.zeros(count, 4)}]} for count in (3, 9)]
    assert len(set(map(shape_of, several))) == 1 and len(set(distinct_shapes(several))) == 2
    assert len(set(distinct_shapes([several[0]] * 2))) == 1
