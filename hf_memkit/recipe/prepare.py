"""The examples of a setup: made once a machine, by the first of its processes.

The others map them into their memory from files, so that several processes need no more RAM for them than one, and
cannot have different ones. Where they leave nothing to group by length, the setup goes without: texts that are all
longer than the sequence are all cut to its length, which is no mistake of whoever wrote the recipe, and must not stop
the run, as the callback that looks at a Trainer's sampler does.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import RunError
from hf_memkit.recipe.ranks import FOLDER_VARIABLE, Ranks
from hf_memkit.recipe.tasks import Examples, task_of
from hf_memkit.setup import Setup

Say = Callable[[str], None]


def prepare_data(setup: Setup, say: Say, ranks: Ranks) -> Examples:
    """What the setup's task makes of its data, the same on every rank.

    Raises:
        DataError: the data cannot be used.
        RunError: another machine has other data.
    """
    if ranks.leads_machine:
        examples = task_of(setup).prepare(setup, say)
        if ranks.share("blocks", examples.checksum) != examples.checksum:
            raise RunError(
                f"rank {ranks.rank} has different examples than rank 0. Use the same data and "
                "package versions on all machines"
            )
        if ranks.local_world_size == 1:
            ranks.wait_for_all("data")
            return examples
        folder = Path(tempfile.mkdtemp(prefix="memkit-data-", dir=os.environ.get(FOLDER_VARIABLE)))
        _write(folder, examples)
        ranks.share_on_machine("data", str(folder))
    else:
        folder = Path(ranks.share_on_machine("data"))
        examples = _read(folder)
    ranks.wait_for_all("data")
    if ranks.leads_machine:
        shutil.rmtree(folder)  # what is mapped stays until its processes end
    return examples


def first(rows: Any, count: int) -> Any:
    """The first `count` examples, without a copy."""
    from hf_memkit.recipe.packing import Blocks

    return Blocks(rows.array[:count]) if isinstance(rows, Blocks) else rows.select(range(count))


def _write(folder: Path, examples: Examples) -> None:
    import numpy as np

    from hf_memkit.recipe.packing import Blocks

    for name, rows in (("train", examples.train), ("held_out", examples.held_out)):
        if isinstance(rows, Blocks):
            np.save(folder / f"{name}.npy", rows.array)
        else:
            rows.save_to_disk(str(folder / name))
    (folder / "facts.json").write_text(json.dumps({"checksum": examples.checksum, "facts": dict(examples.facts)}))
    examples.processing_class.save_pretrained(str(folder / "processing"))


def _read(folder: Path) -> Examples:
    import datasets
    import numpy as np

    from hf_memkit.recipe.packing import Blocks

    train, held_out = (
        Blocks(np.load(path, mmap_mode="r"))
        if (path := folder / f"{name}.npy").exists()
        else datasets.load_from_disk(str(folder / name))
        for name in ("train", "held_out")
    )
    told = json.loads((folder / "facts.json").read_text())
    return Examples(train, held_out, _processing_class(folder / "processing"), told["checksum"], told["facts"])


def _processing_class(folder: Path) -> Any:
    """What `save_pretrained` wrote there: a tokenizer, an image processor, or both of a processor."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    written = {path.name for path in folder.iterdir()}
    if "processor_config.json" in written or {"preprocessor_config.json", "tokenizer_config.json"} <= written:
        found: Any = AutoProcessor
    else:
        found = AutoImageProcessor if "preprocessor_config.json" in written else AutoTokenizer
    return found.from_pretrained(str(folder), local_files_only=True)


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
