"""A setup and its examples in, the setup without grouping by length out, where the examples leave nothing to group.

Texts that are all longer than the sequence are all cut to its length. That is no mistake of whoever wrote the recipe,
and must not stop the run, as the callback that looks at a Trainer's sampler does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hf_memkit.recipe.tasks import Examples
from hf_memkit.setup import Setup

__all__ = ["without_needless_grouping"]

_SETTINGS: Final = ("arguments.train_sampling_strategy", "trainer_parts.check_length_grouping")
_BATCH: Final = 1000


def without_needless_grouping(setup: Setup, examples: Examples, say: Callable[[str], None]) -> Setup:
    """The setup; without grouping by length, which is then told, where all examples have one length."""
    if setup.get(_SETTINGS[0]) != "group_by_length":
        return setup
    length = _only_length(examples)
    if length is None:
        return setup
    say(f"Grouping by length is left out: every example has {length} tokens")
    for key in _SETTINGS:
        setup = setup.drop(key)
    return setup


def _only_length(examples: Examples) -> int | None:
    """The length of every example to train on, in tokens; None where they differ, or have none."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    from hf_memkit.recipe.packing import Blocks

    rows: Any = examples.train
    if isinstance(rows, Blocks):
        return int(rows.array.shape[1])
    name = (getattr(examples.processing_class, "model_input_names", None) or ["input_ids"])[0]
    if name not in rows.column_names:
        return None
    found: set[int] = set()
    for table in rows.with_format("arrow").select_columns(name).iter(batch_size=_BATCH):
        found.update(compute.unique(compute.list_value_length(table.column(name))).to_pylist())
        if len(found) > 1:
            return None
    return found.pop() if found else None
