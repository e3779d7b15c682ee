"""The table of replacements lists exactly the names that a tracing process replaces."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

from hf_memkit.prediction.child.script.replacements import (
    ABOVE_TRAIN,
    AT_TRAIN,
    LOADED,
    ON_A_GPU,
    Replacement,
)
from tests.predict_script.conftest import Predict

_SCRIPT = f"""
import json, os, sys
sys.path.append({str(Path(__file__).parents[2])!r})
from tests.predict_script.replaced_names import replaced_names

open("above.json", "w").write(json.dumps(sorted(replaced_names())))
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Model(GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None, **options):
        if not os.path.exists("below.json"):
            open("below.json", "w").write(json.dumps(sorted(replaced_names())))
        return super().forward(input_ids, labels=labels)

model = Model(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0))
rows = [{{"input_ids": [1] * 8, "labels": [1] * 8}}] * 8
Trainer(model, TrainingArguments("out", report_to=[], max_steps=2), train_dataset=rows).train()
"""


_UNSEEN = ("at::", "torch._dynamo.", "trl.", "unsloth_zoo.", "wandb.", "*evaluat*")
"""Rows that begin so: C++, a function without code of memkit's, and libraries that the script does not import."""


def test_what_is_replaced_stands_in_the_table(predict: Predict, tmp_path: Path) -> None:
    outcome = predict(_SCRIPT, processes=2, per_node=2)
    assert outcome.training is not None, outcome.failed
    above, below = (set(json.loads((tmp_path / f"{name}.json").read_text())) for name in ("above", "below"))
    rows = (*LOADED, *ON_A_GPU, *ABOVE_TRAIN)
    assert sorted(each for each in above if not _rows_of(each, rows)) == []
    assert sorted(each for each in below if not _rows_of(each, (*rows, *AT_TRAIN))) == []
    unseen = [row.what for row in (*rows, *AT_TRAIN) if not any(_rows_of(each, (row,)) for each in below)]
    expected = [row.what for row in (*rows, *AT_TRAIN) if row.when is None and not row.what.startswith(_UNSEEN)]
    assert [what for what in unseen if what in expected] == []


def _rows_of(name: str, rows: tuple[Replacement, ...]) -> list[Replacement]:
    return [row for row in rows if any(fnmatchcase(name, pattern) for pattern in row.what.split())]
