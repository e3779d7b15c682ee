"""Recipes predicted by the data that `--data` names: the worst batch that it can form, and a usual one.

```
--data ── the task's own tokenising ──> lengths ── the run's sampler and padding ──> worst, usual batch ──> predict
```

Without data a recipe is predicted with sequences of its length, which is a bound. Where all batches have one size,
packed sequences, images, it stays so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_memkit.prediction import Prediction, predict
from hf_memkit.prediction.from_script import BatchNeeds
from hf_memkit.recipe.choose import Judge
from hf_memkit.recipe.sources import is_here
from hf_memkit.recipe.tasks import task_of
from hf_memkit.recipe.tasks.task import PaddedTask
from hf_memkit.request import Request
from hf_memkit.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.prediction.child.batches import Chosen


_WHY = "of the data"


def judge_of(request: Request) -> Judge:
    """Who predicts a recipe's setups: by the data that the request names, where it is on this machine.

    A data set of the hub is not downloaded for a prediction.

    Raises:
        DataError: as `is_here`.
    """
    if request.data is None:
        return predict
    return ByData() if is_here(request.data) else _bound


def _bound(setup: Setup) -> Prediction:
    found = predict(setup)
    if not padded(setup):
        return found
    return found.with_notes(
        f"data of the hub are not downloaded for a prediction: predicted with rows of {setup.sequence_length} tokens"
    )


def padded(setup: Setup) -> tuple[str, ...]:
    """Columns that are padded to the longest row of a micro-batch; none where all batches have one size."""
    task = task_of(setup)
    return task.padded(setup) if isinstance(task, PaddedTask) else ()


def batches_of(judge: Judge, setup: Setup, found: Prediction) -> BatchNeeds | None:
    """What `judge`, whose prediction `found` is, knows of the data's batches."""
    return judge.batches(setup, found) if isinstance(judge, ByData) else None


class ByData:
    """Predicts setups of one recipe, each with the worst batch of its data, which is prepared once."""

    def __init__(self) -> None:
        self._chosen: dict[str, tuple[Chosen | None, Sequence[str]]] = {}

    def __call__(self, setup: Setup) -> Prediction:
        """The prediction of the setup with its worst batch.

        Raises:
            DataError: the data cannot be used.
            InputError: nothing can be said of it.
        """
        chosen, notes = self._batches_of(setup)
        if chosen is None:
            return predict(setup)
        found = predict(_with(setup, chosen.worst), usual=_usual(setup, chosen))
        return found.with_notes(*notes, f"predicted: {chosen.said}")

    def batches(self, setup: Setup, worst: Prediction) -> BatchNeeds | None:
        """What a usual batch needs, and the worst (`worst`: what was predicted) if it is made smaller; None: all
        batches are about as large."""
        from hf_memkit.prediction.child.batch_shapes import told_apart

        chosen, _ = self._batches_of(setup)
        usual = _usual(setup, chosen) if chosen is not None else None
        if chosen is None or usual is None:
            return None
        smaller: dict[str, Setup] = {}
        if worst.verdict == "does not fit":
            if chosen.half is not None and chosen.rows == setup.micro_batch_size:
                smaller[f"--set per_device_train_batch_size={chosen.rows // 2}"] = _halved(_with(setup, chosen.half))
            if chosen.cut is not None:
                cut = _with(setup, chosen.cut[0])
                smaller[f"--sequence-length {cut.sequence_length}"] = cut
        needs = {change: predict(each, usual=usual) for change, each in smaller.items()}
        most, median, high = told_apart([chosen.worst, chosen.usual, chosen.high])
        return BatchNeeds(
            worst=most,
            usual=median,
            high=high,
            usual_needs=predict(usual),
            smaller={change: each for change, each in needs.items() if each.needs_less_than(worst)},
            grouping=chosen.shuffled,
        )

    def _batches_of(self, setup: Setup) -> tuple[Chosen | None, Sequence[str]]:
        """(the batches, None where all have one size; what is said of the rows)."""
        decisive = [*setup.section("data").items(), *((name, setup.get(name)) for name in _DECISIVE)]
        key = json.dumps(decisive, sort_keys=True)
        if key not in self._chosen:
            self._chosen[key] = _chosen(setup)
        return self._chosen[key]


_DECISIVE = (
    "model.name", "arguments.packing", "arguments.assistant_only_loss", "arguments.per_device_train_batch_size",
    "arguments.gradient_accumulation_steps", "arguments.train_sampling_strategy", "trainer_parts.pad_batches",
)  # fmt: skip
"""Beside the section `data`: what rows and batches depend on."""


def _chosen(setup: Setup) -> tuple[Chosen | None, Sequence[str]]:
    from torch.utils.data import BatchSampler, DataLoader

    from hf_memkit.prediction.child.batches import chosen_batches

    task, columns = task_of(setup), padded(setup)
    if not columns or not isinstance(task, PaddedTask):
        return None, ()
    said: list[str] = []
    examples = task.prepare(setup, said.append)
    rows = examples.train.select_columns(list(columns))
    sampler = BatchSampler(_sampler(setup, rows), setup.micro_batch_size, drop_last=False)
    multiple = int((setup.get("trainer_parts.pad_batches") or {}).get("multiple", task.padded_to))
    collate = _Padded(multiple, setup.resolved_for.model.maximum_length if setup.resolved_for.model else None)
    return chosen_batches(DataLoader(rows, batch_sampler=sampler, collate_fn=collate)), said[1:]


def _sampler(setup: Setup, rows: Any) -> Any:
    """As Trainer makes it (transformers 5.23.0: trainer.py, `_get_train_sampler`); `batch_rebalance` can form no batch
    that a shuffled one cannot."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]
    from torch.utils.data import RandomSampler, SequentialSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    strategy = setup.get("arguments.train_sampling_strategy")
    if strategy == "group_by_length":
        size = setup.micro_batch_size * setup.accumulation
        lengths = compute.list_value_length(rows.with_format("arrow")[:].column("input_ids")).to_pylist()
        return LengthGroupedSampler(size, lengths=lengths)
    return SequentialSampler(rows) if strategy == "sequential" else RandomSampler(rows)


class _Padded:
    """Batches as long as a collator would make them, without values.

    Args:
        multiple: what the longest row is rounded up to.
        longest: positions that the model has; None: any number.
    """

    def __init__(self, multiple: int, longest: int | None) -> None:
        self._multiple, self._longest = multiple, longest

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        def length(name: str) -> int:
            most = max(len(row[name]) for row in rows)
            rounded = -(-most // self._multiple) * self._multiple
            return max(most, min(rounded, self._longest or rounded))

        return {name: torch.empty(len(rows), length(name), dtype=torch.int64) for name in rows[0]}


def _usual(setup: Setup, chosen: Chosen) -> Setup | None:
    """The setup with a usual batch; None where that is about as large as the worst."""
    from hf_memkit.prediction.child.batches import is_much_larger

    if chosen.usual is None or not is_much_larger(chosen.worst, chosen.usual):
        return None
    return _with(setup, chosen.usual)


def _with(setup: Setup, batch: Mapping[str, Any]) -> Setup:
    """The setup with sequences as long as those of a batch."""
    lengths = {name: int(each.shape[1]) for name, each in batch.items()}
    setup = setup.put("data.sequence_length", lengths["input_ids"], _WHY)
    return setup.put("data.target_length", lengths["labels"], _WHY) if "labels" in lengths else setup


def _halved(setup: Setup) -> Setup:
    return setup.put_all(
        "arguments",
        per_device_train_batch_size=(setup.micro_batch_size // 2, _WHY),
        gradient_accumulation_steps=(2 * setup.accumulation, _WHY),
    )
