"""The data of a setup, read, tokenized and cut into blocks: once a machine, by the first of its processes.

The others map the blocks into their memory from a file, so that several processes need no more RAM for them than one,
and cannot have different ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit.errors import RunError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.ranks import FOLDER_VARIABLE, Ranks
from hf_memkit.training_setup import TrainingSetup

if TYPE_CHECKING:
    from hf_memkit.recipe.packing import Packed

__all__ = ["prepare_data"]

Say = Callable[[str], None]


def prepare_data(setup: TrainingSetup, say: Say, ranks: Ranks) -> tuple[Packed, Any, str]:
    """(blocks, tokenizer, SHA-256 of the blocks to train on), the same on every rank.

    Raises:
        DataError: the data cannot be used.
        RunError: another machine has other data.
    """
    if ranks.leads_machine:
        packed, tokenizer = _prepare(setup, say)
        checksum = hashlib.sha256(packed.train.array.tobytes()).hexdigest()
        if ranks.share("blocks", checksum) != checksum:
            raise RunError(
                f"rank {ranks.rank} has other blocks than rank 0: the data of the machines differ, or their packages"
            )
        if ranks.local_world_size == 1:
            ranks.wait_for_all("data")
            return packed, tokenizer, checksum
        folder = Path(tempfile.mkdtemp(prefix="memkit-data-", dir=os.environ.get(FOLDER_VARIABLE)))
        _write(folder, packed, tokenizer)
        ranks.share_on_machine("data", [str(folder), checksum])
    else:
        shared, checksum = ranks.share_on_machine("data")
        folder = Path(shared)
        packed, tokenizer = _read(folder)
    ranks.wait_for_all("data")
    if ranks.leads_machine:
        shutil.rmtree(folder)  # what is mapped stays until its processes end
    return packed, tokenizer, checksum


def _prepare(setup: TrainingSetup, say: Say) -> tuple[Packed, Any]:
    from hf_memkit.recipe.data import load_documents
    from hf_memkit.recipe.packing import pack
    from hf_memkit.recipe.tokenizer import check_vocabulary, get_tokenizer

    data = setup.section("data")
    documents = load_documents(
        data["source"],
        default_hub_id=data["hub_id"],
        default_hub_config=data["hub_config"],
        text_column=data["text_column"],
        hub_reachable=hub_reachable(),
    )
    say(f"Data: {documents.source}")
    chosen = get_tokenizer(
        data["tokenizer"], documents, vocabulary_size=data["vocabulary_size"], allow_download=hub_reachable()
    )
    say(f"Tokenizer: {chosen.reason}")
    check_vocabulary(chosen.tokenizer, data["vocabulary_size"])
    packed = pack(
        documents, chosen.tokenizer, sequence_length=data["sequence_length"], holdout_fraction=data["held_out"]
    )
    return packed, chosen.tokenizer


def _write(folder: Path, packed: Packed, tokenizer: Any) -> None:
    import numpy as np

    np.save(folder / "train.npy", packed.train.array)
    np.save(folder / "held_out.npy", packed.held_out.array)
    counts = {
        field.name: getattr(packed, field.name)
        for field in dataclasses.fields(packed)
        if field.name not in ("train", "held_out")
    }
    (folder / "counts.json").write_text(json.dumps(counts))
    tokenizer.save_pretrained(str(folder / "tokenizer"))


def _read(folder: Path) -> tuple[Packed, Any]:
    import numpy as np
    from transformers import AutoTokenizer

    from hf_memkit.recipe.packing import Blocks, Packed

    train, held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out"))
    counts = json.loads((folder / "counts.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"), local_files_only=True)
    return Packed(train=Blocks(train), held_out=Blocks(held_out), **counts), tokenizer
