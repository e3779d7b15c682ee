"""`memkit recipe` without a name, and `--copy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.cli import main
from hf_memkit.common import resources
from hf_memkit.recipes.schema import load_recipe


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["recipe", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_recipe_stands_with_what_each_variant_needs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert [row["name"] for row in rows] == resources.names("recipes")
    for row in rows:
        assert row["variants"] == list(load_recipe(row["name"]).variants)
        sizes = [each["predicted_card_gib"] for each in row["variants_predicted"]]
        assert any(size is not None and size > 0.5 for size in sizes), row["name"]
    assert main(["recipe"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted, not measured" in shown and "memkit recipe --gpu 16GB" in shown


def test_a_gpu_gets_what_fits_it_the_fullest_first(capsys: pytest.CaptureFixture[str]) -> None:
    result = listed(capsys, "--gpu", "16GB", "--ram", "64GB")
    assert result["gpu"]["bf16"] and result["ram_gib"] < 64
    recipes = [(each["recipe"], each["verdict"], each["predicted_card_gib"]) for each in result["fits"]]
    assert ("gpt2-on-16gb", "fits") in [each[:2] for each in recipes]
    assert all(size < 16 for _, _, size in recipes) and {verdict for _, verdict, _ in recipes} <= {"fits", "tight"}
    first = {name: size for name, _, size in reversed(recipes)}  # of each recipe the first variant
    fitting = [first[name] for name, verdict, _ in recipes if verdict == "fits"]
    order = list(dict.fromkeys(name for name, _, _ in recipes))
    best = [first[name] for name in order if next(v for n, v, _ in recipes if n == name) == "fits"]
    assert fitting and best == sorted(best, reverse=True)
    named = {each["recipe"] for key in ("fits", "does_not_fit") for each in result[key]} | set(result["not_predicted"])
    assert named == set(resources.names("recipes"))
    assert "llama-8b-on-80gb" in {each["recipe"] for each in result["does_not_fit"]}


def test_a_larger_gpu_and_more_ram_never_take_anything_away(capsys: pytest.CaptureFixture[str]) -> None:
    def fit(*arguments: str) -> set[tuple[str, str]]:
        return {(each["recipe"], each["variant"]) for each in listed(capsys, *arguments)["fits"]}

    small = fit("--gpu", "16GB", "--ram", "16GB")
    assert small <= fit("--gpu", "24GB", "--ram", "16GB") <= fit("--gpu", "80GB", "--ram", "2048GB")
    assert small < fit("--gpu", "16GB", "--ram", "2048GB"), "offloading needs RAM"


def test_a_gpu_without_bf16_gets_only_what_computes_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    result = listed(capsys, "--gpu", "T4", "--ram", "64GB")
    assert not result["gpu"]["bf16"]
    fits = {(each["recipe"], each["variant"]) for each in result["fits"]}
    assert ("gpt2-on-16gb", "resident") not in fits and ("llama-8b-qlora-on-16gb", "qlora") in fits


@pytest.mark.parametrize("card", ["16GB", "T4"])
def test_a_command_stands_in_one_piece_in_80_columns(
    card: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("--gpu", card, "--ram", "2048GB")
    result = listed(capsys, *arguments)["fits"]
    commands = {each["recipe"]: each["command"] for each in reversed(result)}
    assert all(each["command"].split()[2:] in ([each["recipe"]], [each["recipe"], "--variant", each["variant"]])
               for each in result)  # fmt: skip
    assert main(["recipe", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in commands.values():
        (line,) = [line for line in lines if line.startswith(f"{command}  ")]
        assert len(line) <= 80 and " × " in line.removeprefix(command), "its figures beside it, not cut off"
    assert main(["recipe"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in resources.names("recipes"))


def test_copy_writes_a_file_that_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.yaml"
    assert main(["recipe", "gpt2-on-16gb", "--copy", str(target)]) == 0
    mine = load_recipe(str(target))
    assert (mine.name, mine.variants) == ("mine", load_recipe("gpt2-on-16gb").variants)
    capsys.readouterr()
    for wrong in (str(target), str(tmp_path / "mine.txt"), str(tmp_path / "no" / "mine.yaml")):
        assert main(["recipe", "gpt2-on-16gb", "--copy", wrong]) == 2
        assert wrong in capsys.readouterr().err


def test_a_gpu_without_bf16_is_told_how_to_rehearse_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--gpu", "T4", "--ram", "32GB"]) == 0
    assert "with --gpu T4, for that one (fp16)" in " ".join(capsys.readouterr().out.split())
    assert main(["recipe", "--gpu", "16GB", "--ram", "32GB"]) == 0
    assert "Without a GPU these commands" not in " ".join(capsys.readouterr().out.split())
