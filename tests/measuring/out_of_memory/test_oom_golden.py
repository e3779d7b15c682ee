"""What `memkit explain` and the note on an exception print, word for word: a changed sentence costs one golden file.

`python -m tests.measuring.out_of_memory.test_oom_golden` writes them anew. The screen of a bare message stands in
docs/out-of-memory.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hf_memkit.measuring.callback.oom_note import advice_from_text, note_from_record
from hf_memkit.measuring.out_of_memory import (
    explain_killed,
    explain_oom,
    explain_records,
)
from tests.measuring.out_of_memory.oom_messages import EXAMPLES
from tests.measuring.out_of_memory.test_oom_explain import OOM, RUN
from tests.measuring.out_of_memory.tracebacks import OLDER

GOLDEN: Final = Path(__file__).parent / "golden"
SIZE: Final = next(example.text for example in EXAMPLES if example.name == "torch 2.2-2.9: size")
ARGUMENTS: Final = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}


def log() -> str:
    """A traceback with arguments, and a kill after it."""
    return explain_oom(f"{OLDER['logits'][0]}{SIZE}\ncontainer exited with code 137\n", ARGUMENTS).text()


def run() -> str:
    """A job's records, with a prediction."""
    return explain_records({**RUN, "prediction": {"peak_allocated_gib": 36.5}}, OOM).text()


def killed() -> str:
    """A job whose records end."""
    job = {**RUN, "arguments": {"dataloader_num_workers": 8}, "host": {"pid": 4321}}
    return explain_killed(job, {"step": 5}, "no record after step 5; 0.1 GiB of RAM was left", in_ram=True).text()


def notes() -> str:
    """What stands below an exception's traceback: from its text alone, then from records."""
    alone = advice_from_text(RuntimeError(SIZE))
    assert alone is not None
    recorded = note_from_record(OOM, RUN, explain_records(RUN, OOM), Path("out/memory-rank0.jsonl"))
    return f"{alone.text()}\n\n{recorded.text()}"


SCREENS: Final = {"explain-log.txt": log, "explain-run.txt": run, "explain-killed.txt": killed, "note.txt": notes}


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_word_for_word_what_it_was(name: str) -> None:
    """Finds a sentence, a row or a section that a change elsewhere has added, lost or moved."""
    assert f"{SCREENS[name]()}\n" == (GOLDEN / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, screen in SCREENS.items():
        (GOLDEN / name).write_text(f"{screen()}\n", encoding="utf-8")
