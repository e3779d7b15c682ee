"""Recipes predicted by the data that `--data` names: the worst batch that it can form, and a usual one.

```
setup ──> folder ──> its script, up to Trainer.train() ──> lengths of the worst, and of a usual batch ──> predict
```

The script runs once for all candidates with the same rows and batches, with a model of random weights. Without data a
recipe is predicted with sequences of its length, which is a bound. Where all batches have one size, packed sequences,
images, it stays so.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from hf_memkit.catalog.models import hub_reachable
from hf_memkit.common.errors import DataError, ScriptFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction import Prediction, predict
from hf_memkit.prediction.from_script import BatchNeeds
from hf_memkit.prediction.running_scripts import lengths_of
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
    """Who predicts a recipe's setups: by the data that the request names, where it is on this machine. A data set of
    the hub is not downloaded for a prediction."""
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
    return task_of(setup).padded(setup)


def batches_of(judge: Judge, setup: Setup, found: Prediction) -> BatchNeeds | None:
    """What `judge`, whose prediction `found` is, knows of the data's batches."""
    return judge.batches(setup, found) if isinstance(judge, ByData) else None


class ByData:
    """Predicts setups of one recipe, each with the worst batch of its data, which is prepared once."""

    def __init__(self) -> None:
        self._found: dict[str, BatchLengths | None] = {}
        self._notes: list[str] = []

    def __call__(self, setup: Setup) -> Prediction:
        """The prediction of the setup with its worst batch."""
        found = self._batches_of(setup)
        if found is None:
            return predict(setup)
        usual = found.typical
        made = predict(_with(setup, found.worst), typical=_with(setup, usual) if usual is not None else None)
        return made.with_notes(*self._notes, f"predicted: {found.description}")

    def batches(self, setup: Setup, worst: Prediction) -> BatchNeeds | None:
        """What a usual batch needs, and the worst (`worst`: what was predicted) if it is made smaller; None: all
        batches are about as large."""
        found = self._batches_of(setup)
        if found is None or found.typical is None or found.shapes is None:
            return None
        usual = _with(setup, found.typical)
        smaller: dict[str, Setup] = {}
        if worst.verdict == "does not fit":
            if found.half is not None and found.rows == setup.micro_batch_size:
                change = f"--set per_device_train_batch_size={setup.micro_batch_size // 2}"
                smaller[change] = _halved(_with(setup, found.half))
            if found.cut is not None:
                cut = _with(setup, found.cut)
                smaller[f"--sequence-length {cut.sequence_length}"] = cut
        needs = {change: predict(each, typical=usual) for change, each in smaller.items()}
        less = {change: each for change, each in needs.items() if each.needs_less_than(worst)}
        return BatchNeeds(found.shapes, predict(usual), less)

    def _batches_of(self, setup: Setup) -> BatchLengths | None:
        """As `lengths_of`; None where all batches have one size."""
        columns = padded(setup)
        if not columns:
            return None
        decisive = [*setup.section("data").items(), *((name, setup.get(name)) for name in _DECISIVE)]
        key = json.dumps(decisive, sort_keys=True)
        if key not in self._found:
            setup, self._notes = _of_random_weights(setup)
            self._found[key] = _lengths_of(setup, columns)
        return self._found[key]


_DECISIVE = (
    "model.name", "arguments.packing", "arguments.assistant_only_loss", "arguments.per_device_train_batch_size",
    "arguments.gradient_accumulation_steps", "arguments.train_sampling_strategy", "trainer_parts.pad_batches",
)  # fmt: skip
"""Beside the section `data`: what rows and batches depend on."""


def _of_random_weights(setup: Setup) -> tuple[Setup, list[str]]:
    """(the setup without what changes no batch, so that its script needs no weights; what is to be said of that)."""
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
    said = f"Tokenizer: not the model's own, because {name} is not on this machine: one that is trained on the data"
    return setup.put("data.tokenizer", None, said), [said]


def _lengths_of(setup: Setup, columns: Sequence[str]) -> BatchLengths:
    """Of batches, as the script makes them. It ends with a message where its data is wrong: a DataError here."""
    with tempfile.TemporaryDirectory() as folder:
        script, *_ = export_script(RecipeRun("this recipe", setup.preset, setup), Path(folder))
        try:
            return lengths_of(UserScript.found(str(script)), setup.resolved_for.machine, columns)
        except ScriptFailed as failed:
            if "ended without calling" not in str(failed):
                raise
            raise DataError(failed.text) from None


def _with(setup: Setup, lengths: Lengths) -> Setup:
    """The setup with sequences as long as those of a batch."""
    setup = setup.put("data.sequence_length", lengths["input_ids"], _WHY)
    return setup.put("data.target_length", lengths["labels"], _WHY) if "labels" in lengths else setup


def _halved(setup: Setup) -> Setup:
    return setup.put_all(
        "arguments",
        per_device_train_batch_size=(setup.micro_batch_size // 2, _WHY),
        gradient_accumulation_steps=(2 * setup.accumulation, _WHY),
    )
