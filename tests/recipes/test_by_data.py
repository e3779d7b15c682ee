"""Recipes with `--data`: the worst batch that is predicted is the one that the run's own Trainer can form."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from hf_memkit import predict_recipe
from hf_memkit.catalog.hardware import Machine
from hf_memkit.cli.main import main
from hf_memkit.cli.recipe_options import RecipeOptions, machine_here, read_request, resolve_run
from hf_memkit.prediction.child.training.setup_trainer import rows_for
from hf_memkit.prediction.setup_as_script import SetupJob
from hf_memkit.recipes.by_data import ByData, _with_lengths, judge_of
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.recipes.variant_search import predict_nothing
from hf_memkit.run.ranks import LaunchLayout, Ranks
from hf_memkit.run.training import run
from hf_memkit.setup.request import Request
from tests.conftest import ROOT
from tests.prediction.test_prediction import made
from tests.recipes.resolving import resolve

pytestmark = pytest.mark.usefixtures("cache")

DRAWS = 10_000
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "people", "read", "books")


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def texts(path: Path, longest: int = 100) -> Path:
    """400 texts of 5 to 15 words, one of them longer."""
    lengths = [5 + number % 11 for number in range(400)]
    lengths[77] = longest
    rows = [{"text": words(count, at), "label": "ab"[at % 2]} for at, count in enumerate(lengths)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def pairs(path: Path) -> Path:
    """Long sources, and one long target beside a short source."""
    lengths = [(60 if number < 80 else 5 + number % 11, 3 + number % 5) for number in range(400)]
    lengths[77], lengths[200] = (90, 4), (6, 40)
    rows = [{"source": words(one, at), "target": words(two, -at)} for at, (one, two) in enumerate(lengths)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def chats(path: Path) -> Path:
    lengths = [5 + number % 11 for number in range(120)]
    lengths[77] = 60
    rows = [
        {"messages": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": words(count, at)}]}
        for at, count in enumerate(lengths)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


class _Made(Exception):
    """A Trainer that is ready to train."""


@pytest.mark.parametrize(
    ("name", "data", "settings"),
    [
        ("bert-large-on-8gb", texts, {}),
        pytest.param("bert-large-on-8gb", texts, {"train_sampling_strategy": "random"}, marks=pytest.mark.slow),
        ("flan-t5-xl-on-24gb", pairs, {}),
        pytest.param("llama-8b-qlora-on-16gb", chats, {"per_device_train_batch_size": 4}, marks=pytest.mark.slow),
    ],
    ids=["grouped", "shuffled", "pairs", "chats"],
)
def test_the_worst_batch_is_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: Any, settings: dict[str, Any]
) -> None:
    """Would notice: rows of another tokenising or order, another sampler, a collator that rounds otherwise, a long
    target that is forgotten beside a long source."""
    source = str(data(tmp_path / "rows.jsonl"))
    monkeypatch.chdir(tmp_path)
    pairs = [f"{key}={value}" for key, value in settings.items()]
    options, recipe = RecipeOptions(name=name, data=source, output="run", settings=pairs), load_recipe(name)
    request = read_request(options, recipe)
    job, _ = resolve_run(options, recipe, request, machine_here(request), LaunchLayout(1, 1), predict_nothing)
    made: list[Trainer] = []

    def ready(self: Trainer, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        raise _Made

    monkeypatch.setattr(Trainer, "train", ready)
    with pytest.raises(_Made):
        run(job, lambda line: None, Ranks(), write=partial(export_script, job, Path(job.output)))
    (trainer,) = made
    result = ByData()._batches_of(job.setup)
    assert result is not None and result.typical is not None
    loader = trainer.get_train_dataloader()
    rows, columns = trainer.train_dataset, list(result.worst)
    lengths = [[len(row[column]) for column in columns] for row in rows]
    drawn: list[list[int]] = []
    while len(drawn) < DRAWS:
        drawn += [list(batch) for batch in loader.batch_sampler]

    def tokens(batch: list[int]) -> int:
        return sum(max(lengths[row][at] for row in batch) for at in range(len(columns)))

    real = loader.collate_fn([rows[row] for row in max(drawn, key=tokens)])
    for column in columns:
        assert result.worst[column] == real[column].shape[1]
    assert result.worst["input_ids"] > result.typical["input_ids"]


SMALL = ("--gpu-memory", "950MB")


def tiny(path: Path, **changes: Any) -> str:
    """The classifier's recipe with a model of a few layers, in which activations decide."""
    content = yaml.safe_load((ROOT / "recipes" / "bert-large-on-8gb.yaml").read_text())
    content["model"]["architecture"] |= {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    content["model"]["architecture"] |= {"intermediate_size": 1024, "vocab_size": 1024}
    content["variants"] = {name: content["variants"][name] for name in ("8bit", "lora")}
    for variant in content["variants"].values():
        del variant["checkpointing"]
    content["variants"]["lora"]["micro_batch_size"] = 4
    path.write_text(yaml.safe_dump({**content, **changes}))
    return str(path)


@pytest.mark.exhaustive
def test_verdict_variant_and_advice_are_of_the_worst_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: a prediction of another length than the worst batch's, a typical batch that decides, advice that
    does not come true when it is typed, `--data` that changes nothing."""
    monkeypatch.chdir(tmp_path)
    recipe, data = tiny(tmp_path / "tiny.yaml"), str(texts(tmp_path / "texts.jsonl", longest=400))

    def asked(*options: str) -> tuple[int, dict[str, Any]]:
        code = main(["predict", "--recipe", recipe, "--ram", "64GB", "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    _, result = asked("--data", data, "--variant", "8bit", "--gpu-memory", "8GB")
    batches = result["request"]["batches"]
    (worst, typical), length = (int(each.split()[2]) for each in (batches["worst"], batches["usual"]["batch"])), 512
    assert 400 < worst < length and 5 < typical < 40 and not batches["smaller"]
    for tokens, gib in ((worst, result["peak_reserved_gib"]), (typical, None)):
        _, same = asked("--variant", "8bit", "--gpu-memory", "8GB", "--sequence-length", str(tokens))
        total = same["peak_reserved_gib"][1] + same["outside_allocator_gib"]
        if gib is None:
            assert batches["usual"]["total_gib"] == pytest.approx(total, rel=0.005)
        else:
            assert result["peak_allocated_gib"] == pytest.approx(same["peak_allocated_gib"], rel=0.005)
    _, bound = asked("--variant", "8bit", "--gpu-memory", "8GB")
    assert bound["request"]["batches"] is None and bound["peak_allocated_gib"] > 1.05 * result["peak_allocated_gib"]

    code, out = asked("--data", data, *SMALL, "--variant", "8bit")
    assert code == 1 and out["request"]["batches"]["usual"]["verdict"] == "fits"
    assert out["try_next"] == {"variant": "lora", "basis": "prediction"}
    smaller = out["request"]["batches"]["smaller"]
    assert list(smaller) == ["--set per_device_train_batch_size=8", f"--sequence-length {cut_of(smaller)}"]
    for (change, needs), length in zip(smaller.items(), (("--sequence-length", str(worst)), ()), strict=True):
        code, typed = asked(*SMALL, "--variant", "8bit", *change.split(), *length)
        total = typed["peak_reserved_gib"][1] + typed["outside_allocator_gib"]
        assert needs["total_gib"] == pytest.approx(total, rel=0.02) and code == (needs["verdict"] == "does not fit")


def cut_of(smaller: dict[str, Any]) -> int:
    return int(list(smaller)[1].split()[1])


@pytest.mark.exhaustive
def test_messages_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: `auto` that uses the typical batch, or by a bound that no row of the data reaches; a data set of
    the hub that nobody says is not looked at."""
    monkeypatch.chdir(tmp_path)
    recipe, data = tiny(tmp_path / "tiny.yaml"), str(texts(tmp_path / "texts.jsonl", longest=400))
    short = str(texts(tmp_path / "short.jsonl", longest=15))
    chosen = {}
    for name, given in (("long", data), ("short", short)):
        assert main(["recipe", recipe, "--data", given, "--dry-run", *SMALL, "--ram", "64GB", "--json"]) == 0
        chosen[name] = json.loads(capsys.readouterr().out)
    assert (chosen["long"]["variant"], chosen["short"]["variant"]) == ("lora", "8bit")
    assert chosen["long"]["batches"]["worst"].startswith("4 × 4")
    asked = ["recipe", recipe, "--data", data, "--dry-run", "--variant", "8bit", *SMALL, "--ram", "64GB"]
    assert main(asked) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("DOES NOT FIT") and "A typical batch, 16 × " in out and "the worst, 16 × " in out
    assert "With --set per_device_train_batch_size=8 the worst needs " in out and "its largest is row 77" in out
    same = predict_recipe(recipe, data=data, variant="8bit", gpu_memory=SMALL[1], ram="64GB")
    assert same.verdict == "does not fit" and any(note.startswith("A typical batch, 16 × ") for note in same.notes)
    assert main(["predict", "--data", data, "--model", "gpt2-xl"]) == 2
    assert "--recipe NAME" in capsys.readouterr().err


def test_targets_have_a_length_of_their_own() -> None:
    """Would notice: targets that are cut to their sources, which shorter sources of real data must not do, or that are
    longer than a source may be."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    recipe = load_recipe("flan-t5-xl-on-24gb")
    asked = resolve(recipe, machine_here(Request()), Request(sequence_length=64), use_hub=False)
    assert asked["data.target_length"] == 64
    setup = _with_lengths(asked, {"input_ids": 16, "labels": 24})
    row = rows_for(SetupJob(setup, setup.sequence_length), setup, model)(2, 2)[0]
    assert (len(row["input_ids"]), len(row["labels"])) == (16, 24)


@pytest.mark.parametrize("name", ["gpt2-on-16gb", "qwen3-1.7b-on-16gb"])
def test_where_all_batches_have_one_size_nothing_is_read(name: str) -> None:
    """Would notice: packed rows that are tokenised for nothing, or spoken of."""
    recipe = load_recipe(name)
    setup = resolve(recipe, machine_here(Request()), Request(), use_hub=False)
    assert ByData()._batches_of(setup.put("data.source", "nowhere.jsonl", "not read")) is None


def test_a_data_set_of_the_hub_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Would notice: a prediction that fetches gigabytes, or a bound that is not said to be one."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("hf_memkit.recipes.by_data.predict", lambda setup: made())
    setup = resolve(load_recipe("bert-large-on-8gb"), machine, Request(variant="8bit"), use_hub=False)
    judge = judge_of(Request(data="stanfordnlp/imdb"))
    assert not isinstance(judge, ByData)
    assert any("stanfordnlp/imdb" in line and "512 tokens" in line for line in judge(setup).warnings)
