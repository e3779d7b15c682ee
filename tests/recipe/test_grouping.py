"""Grouping by length where every text is cut to one length: left out, and told; the callback would stop the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_memkit.cli import main
from hf_memkit.hardware import Machine, gpu_of_size
from hf_memkit.recipe.prepare import without_needless_grouping
from hf_memkit.recipe.rehearse import rehearse
from hf_memkit.recipe.schema import load_recipe
from hf_memkit.recipe.tasks import task_of
from hf_memkit.request import Request
from hf_memkit.setup import Setup
from tests.recipe.resolving import resolve


def long_texts(path: Path, *further: str) -> Path:
    rows = [f"{' '.join(f'word{n} {i}' for i in range(80))},{'good' if n % 2 else 'bad'}" for n in range(20)]
    path.write_text("text,label\n" + "\n".join([*rows, *further]) + "\n")
    return path


def small(machine: Machine, data: Path) -> Setup:
    card = machine.with_gpu(gpu_of_size("8GB"))
    request = Request(variant="resident", data=str(data), max_steps=1)
    return rehearse(
        load_recipe("bert-large-on-8gb"), resolve(load_recipe("bert-large-on-8gb"), card, request, use_hub=False)
    ).setup


def test_texts_of_one_length_are_not_grouped(machine: Machine, tmp_path: Path) -> None:
    setup = small(machine, long_texts(tmp_path / "long.csv"))
    said: list[str] = []
    examples = task_of(setup).prepare(setup, lambda line: None)
    changed = without_needless_grouping(setup, examples, said.append)
    assert said == ["Grouping by length is left out: every example has 64 tokens"]
    gone = {each.key for each in setup.settings} - {each.key for each in changed.settings}
    assert gone == {"arguments.train_sampling_strategy", "trainer_parts.check_length_grouping"}
    assert without_needless_grouping(changed, examples, said.append) is changed and len(said) == 1


def test_one_text_of_another_length_is_enough(machine: Machine, tmp_path: Path) -> None:
    setup = small(machine, long_texts(tmp_path / "mixed.csv", "short,bad", "short,good"))
    said: list[str] = []
    examples = task_of(setup).prepare(setup, lambda line: None)
    # The last of each class are held out, the short ones too: what is trained on is all long.
    assert without_needless_grouping(setup, examples, said.append) is not setup and said
    setup = small(machine, long_texts(tmp_path / "more.csv", *["short,bad", "short,good"] * 3))
    assert without_needless_grouping(setup, task_of(setup).prepare(setup, lambda line: None), said.append) is setup


def test_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = long_texts(tmp_path / "long.csv")
    output = tmp_path / "run"
    arguments = ["--variant", "resident", "--data", str(data), "--max-steps", "1", "--output", str(output)]
    assert main(["recipe", "bert-large-on-8gb", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "Grouping by length is left out: every example has 64 tokens" in shown and "Done: 1 steps" in shown
