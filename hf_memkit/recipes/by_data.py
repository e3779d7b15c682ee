"""Predict recipes from the data of `--data`: its worst batch, and a typical one.

```
setup ──> folder ──> its script, up to Trainer.train() ──> lengths of the worst, and of a typical batch ──> predict
```
The script runs once for all candidates with the same rows and batches, with a model of random weights. Without data a
recipe is predicted with sequences of its length, an upper bound; so are recipes whose batches have one size: packed
sequences, images.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from hf_memkit.catalog.models import hub_reachable
from hf_memkit.common.errors import DataError, ScriptFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction import Prediction, predict
from hf_memkit.prediction.running_scripts import lengths_of
from hf_memkit.prediction.script_prediction import BatchNeeds
from hf_memkit.prediction.traced_training import BatchLengths
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.sources import is_here
from hf_memkit.recipes.tasks import task_of
from hf_memkit.recipes.variant_search import Judge
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup

_WHY = "of the data"

Lengths = Mapping[str, int]
"""Column → tokens of a batch."""


def judge_of(request: Request) -> Judge:
    """The predictor of a recipe's setups: from the request's data if on this machine. No hub data is downloaded."""
    if request.data is None:
        return predict
    return ByData() if is_here(request.data) else partial(_predict_unread, request.data)


def _predict_unread(data: str, setup: Setup) -> Prediction:
    """The prediction of a setup whose data set `data` is not on this machine, with a warning that it was not read."""
    assumed = f"; rows of {setup.sequence_length} tokens are assumed" if task_of(setup).takes_length else ""
    return predict(setup).with_warnings(f"--data {data}: not on this machine, so it was not read{assumed}")


def padded_columns(setup: Setup) -> tuple[str, ...]:
    """Columns that are padded to the longest row of a micro-batch; none if all batches have one size."""
    return task_of(setup).padded_columns(setup)


def batches_of(judge: Judge, setup: Setup, prediction: Prediction) -> BatchNeeds | None:
    """Facts about the data's batches, if `judge` predicts from data."""
    return judge.batches(setup, prediction) if isinstance(judge, ByData) else None


class ByData:
    """Predicts setups of one recipe, each with the worst batch of its data, which is prepared once."""

    def __init__(self) -> None:
        self._lengths: dict[str, BatchLengths | None] = {}
        self._notes: list[str] = []

    def __call__(self, setup: Setup) -> Prediction:
        """The prediction of the setup with its worst batch."""
        lengths = self._batches_of(setup)
        if lengths is None:
            return predict(setup)
        typical = _with_lengths(setup, lengths.typical) if lengths.typical is not None else None
        prediction = predict(_with_lengths(setup, lengths.worst), typical=typical)
        return prediction.with_notes(*self._notes, f"predicted: {lengths.description}")

    def batches(self, setup: Setup, worst: Prediction) -> BatchNeeds | None:
        """Needs of a typical batch, and of smaller worst ones if `worst` does not fit; None if all are about equal."""
        lengths = self._batches_of(setup)
        if lengths is None or lengths.typical is None or lengths.shapes is None:
            return None
        typical = _with_lengths(setup, lengths.typical)
        smaller: dict[str, Setup] = {}
        if worst.verdict == "does not fit":
            if lengths.half is not None and lengths.rows == setup.micro_batch_size:
                half, steps = setup.micro_batch_size // 2, 2 * setup.accumulation
                batch = {"per_device_train_batch_size": (half, _WHY), "gradient_accumulation_steps": (steps, _WHY)}
                change = f"--set per_device_train_batch_size={half}"
                smaller[change] = _with_lengths(setup, lengths.half).put_all("arguments", batch)
            if lengths.cut is not None:
                cut = _with_lengths(setup, lengths.cut)
                smaller[f"--sequence-length {cut.sequence_length}"] = cut
        needs = {change: predict(reduced, typical=typical) for change, reduced in smaller.items()}
        smaller_needs = {change: need for change, need in needs.items() if need.needs_less_than(worst)}
        return BatchNeeds(lengths.shapes, predict(typical), smaller_needs)

    def _batches_of(self, setup: Setup) -> BatchLengths | None:
        """`lengths_of` the batches; None if all have one size."""
        columns = padded_columns(setup)
        if not columns:
            return None
        decisive = [*setup.section("data").items(), *((name, setup.get(name)) for name in _DECISIVE)]
        key = json.dumps(decisive, sort_keys=True)
        if key not in self._lengths:
            setup, self._notes = _without_weights(setup)
            with tempfile.TemporaryDirectory() as folder:
                script, *_ = export_script(RecipeRun("this recipe", setup.preset, setup), Path(folder))
                try:
                    lengths = lengths_of(UserScript.at(str(script)), setup.resolved_for.machine, columns)
                except ScriptFailed as failed:
                    if "ended without calling" not in str(failed):
                        raise
                    raise DataError(failed.text) from None  # the script's message about wrong data
            self._lengths[key] = lengths
        return self._lengths[key]


_DECISIVE = (
    "model.name", "arguments.packing", "arguments.assistant_only_loss", "arguments.per_device_train_batch_size",
    "arguments.gradient_accumulation_steps", "arguments.train_sampling_strategy", "trainer_parts.pad_batches",
)  # fmt: skip
"""Settings outside the section `data` that rows and batches depend on."""


def _without_weights(setup: Setup) -> tuple[Setup, list[str]]:
    """The setup without settings that change no batch, so that its script needs no weights, and notes about it."""
    for section in ("adapter", "deepspeed", "environment", "model_parts", "optimizer"):
        setup = setup.drop(section)
    for name in ("dtype", "quantization"):
        setup = setup.drop(f"model.{name}")
    setup = setup.put("model.origin", "architecture", _WHY).put("model.random_weights", True, _WHY)
    name = setup["data.tokenizer"]
    if name is None or hub_reachable() or Path(name).is_dir():
        return setup, []
    if "/" in name and isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str):
        return setup, []
    note = f"Tokenizer: not the model's own, because {name} is not on this machine: one that is trained on the data"
    return setup.put("data.tokenizer", None, note), [note]


def _with_lengths(setup: Setup, lengths: Lengths) -> Setup:
    """The setup with the sequence lengths of a batch."""
    setup = setup.put("data.sequence_length", lengths["input_ids"], _WHY)
    return setup.put("data.target_length", lengths["labels"], _WHY) if "labels" in lengths else setup
