"""The worst batch that is found is the worst that the sampler can form: compared with 10,000 real draws of it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_memkit.errors import Unmodelled
from hf_memkit.prediction.child.batches import chosen_batches, shape_of
from hf_memkit.prediction.child.row_sizes import row_sizes

pytestmark = pytest.mark.timeout(120)

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


def drawn(loader: DataLoader[Any], lengths: Sequence[int]) -> int:
    """Tokens of the largest of so many real batches, padded; by their rows' numbers, which takes no time."""
    batches = iter(())
    worst = 0
    for _ in range(DRAWS):
        numbers = next(batches, None)
        if numbers is None:
            batches = iter(loader.batch_sampler or ())
            numbers = next(batches)
        worst = max(worst, len(numbers) * max(lengths[number] for number in numbers))
    return worst


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
    assert chosen.usual["input_ids"].numel() <= chosen.high["input_ids"].numel() < worst / 10
    assert chosen.half["input_ids"].shape == (2, 900) and chosen.cut[0]["input_ids"].shape == (4, chosen.cut[1])
    assert shape_of(chosen.worst) == "4 × 900 tokens" and f"row {100 if kind == 'of a subset' else 200}" in chosen.said


def test_a_sampler_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a prediction that waits for its last batch."""
    monkeypatch.setattr("hf_memkit.prediction.child.batches._PASSES_S", 0.2)
    chosen = chosen_batches(DataLoader(table(lengths_of()), batch_sampler=Endless(), collate_fn=padded))
    assert shape_of(chosen.worst) == "2 × 900 tokens" and chosen.rows == 2


@pytest.mark.parametrize(("shuffle", "tokens"), [(False, 110), (True, 160)])
def test_rows_that_are_not_padded(shuffle: bool, tokens: int) -> None:
    """Would notice: rows together that the sampler never puts together, or padding where there is none."""

    def behind_one_another(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[each for row in picked for each in row["input_ids"]]])}

    loader = DataLoader(table([100, 10, 10, 60, 60, 50]), 2, shuffle=shuffle, collate_fn=behind_one_another)
    assert shape_of(chosen_batches(loader).worst) == f"1 × {tokens} tokens"


def test_lengths_that_only_the_collator_knows() -> None:
    """Would notice: characters taken for tokens. The row of most characters is not the one of most tokens."""
    texts = ["a b c d"] * 200 + ["x" * 400] + [" ".join("y" * 90)]
    rows = datasets.Dataset.from_dict({"text": texts})

    def tokenised(picked: Sequence[dict[str, str]]) -> dict[str, torch.Tensor]:
        return padded([{"input_ids": list(range(len(row["text"].split())))} for row in picked])

    chosen = chosen_batches(DataLoader(rows, 1, shuffle=True, collate_fn=tokenised))
    assert shape_of(chosen.worst) == "1 × 90 tokens" and shape_of(chosen.usual) == "1 × 4 tokens"


def test_rows_that_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a data set of one's own that is read for ever, and a sample that is not said to be one."""

    class Own(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 1_000

        def __getitem__(self, number: int) -> dict[str, Any]:
            time.sleep(0.001)
            return {"input_ids": list(range(10 + number % 7))}

    chosen = chosen_batches(DataLoader(Own(), 4, shuffle=True, collate_fn=padded))
    assert shape_of(chosen.worst) == "4 × 16 tokens" and "1,000 rows can give" in chosen.said
    monkeypatch.setattr("hf_memkit.prediction.child.row_sizes.LIMIT_S", 0.1)
    assert "a sample of " in chosen_batches(DataLoader(Own(), 4, shuffle=True, collate_fn=padded)).said


def test_a_stream() -> None:
    """Would notice: an endless stream that is read to its end, and rows that are gone when they are needed."""

    class Stream(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for length in itertools.chain(lengths_of(), itertools.repeat(5)):
                yield {"input_ids": list(range(length))}

    chosen = chosen_batches(DataLoader(Stream(), batch_size=4, collate_fn=padded))
    assert shape_of(chosen.worst) == "4 × 900 tokens" and "first 2,000 rows of the stream" in chosen.said


def test_images_by_their_headers(tmp_path: Path) -> None:
    """Would notice: an image of 48 million pixels that is decoded for its size, a file that is none, which ends it."""
    for number in range(40):
        Image.new("L", (64, 48)).save(tmp_path / f"{number:02}.png")
    Image.new("1", (8_000, 6_000)).save(tmp_path / "07.png")
    (tmp_path / "11.png").write_bytes(b"no image")
    rows = datasets.Dataset.from_dict({"image": sorted(map(str, tmp_path.glob("*.png"))), "label": [0] * 40})
    rows = rows.cast_column("image", datasets.Image())
    began = time.monotonic()
    sizes = row_sizes(rows)
    assert time.monotonic() - began < 2 and sizes.sizes[7] > 48_000_000 > 100 * sizes.sizes[8]

    def stacked(picked: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        most = [max(row["image"].size[side] for row in picked) for side in (1, 0)]
        return {"pixel_values": torch.empty(len(picked), 1, *most, dtype=torch.uint8)}

    chosen = chosen_batches(DataLoader(rows, 2, shuffle=True, collate_fn=stacked))
    assert shape_of(chosen.worst) == "2 × 1 × 6,000 × 8,000 pixel_values"
    assert chosen.unreadable is not None and chosen.unreadable[0] == 11 and "07.png" not in chosen.unreadable[1]


def test_fifty_thousand_rows_a_second() -> None:
    rows = table(np.random.default_rng(0).integers(1, 20, 200_000).tolist()).shuffle(seed=0)
    began = time.monotonic()
    chosen_batches(DataLoader(rows, 8, shuffle=True, collate_fn=padded))
    assert time.monotonic() - began < 200_000 / 50_000


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
    assert shape_of(chosen.worst) == "2 × 30 tokens" and chosen.usual is None and "first 2 batches" in chosen.said
    whole = chosen_batches(DataLoader(list(rows.values()), 2, shuffle=True, collate_fn=stacked))
    assert shape_of(whole.worst) == "2 × 30 tokens" and whole.half is None and whole.usual is not None


def test_no_row() -> None:
    with pytest.raises(Unmodelled, match="no batch"):
        chosen_batches(DataLoader(table([]), 4, collate_fn=padded))
