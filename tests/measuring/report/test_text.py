"""The text: one screen, the verdict first, nothing that steers a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_memkit.cli import main
from hf_memkit.common.answer.terminal import show
from hf_memkit.common.terms import at
from hf_memkit.measuring.report.answer import report_answer, report_json, text_report
from hf_memkit.measuring.report.load import load_run
from tests.measuring.report import synthetic_records as made

PREDICTION: dict[str, Any] = {
    "peak_allocated_gib": 11.0,
    "peak_reserved_gib": [11.5, 12.5],
    "phases": {"backward": {"peak_allocated_gib": 11.0, "peak_reserved_gib": None}, "optimizer": "?"},
    "categories": {"weights_gib": 1.44, "loss_gib": float("nan"), "activations_gib": 1.0},
}


def test_a_healthy_run_is_one_screen_and_the_verdict_comes_first(tmp_path: Path) -> None:
    shown = text_report(load_run(made.write(tmp_path, made.healthy()))).splitlines()
    assert len(shown) <= 24 and max(map(len, shown[:-1])) <= 80
    assert shown[0].startswith("Peak 11.4 of 15.8 GiB: 72 % ") and shown[0].endswith("in backward of step 66.")
    whole = "\n".join(shown)
    assert "Finished after step 200." in whole and "No memory problem found" in whole
    assert "headroom 3.3 GiB" in whole.replace("\n", " ")
    for name in ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "other"):
        assert sum(line.startswith(name) for line in shown) == 1
    bars = {line.split()[0]: line.count("█") for line in shown if " GiB " in line and "By " not in line}
    assert bars["activations"] > bars["loss"] > 0


def test_near_the_gpu_there_are_changes_of_this_job(tmp_path: Path) -> None:
    shown = " ".join(text_report(load_run(made.write(tmp_path, made.healthy(60, longest=1600)))).split())
    assert re.match(r"Peak 14\.9 of 15\.8 GiB: 94 % [^,]+, in backward of step 32\. Tight: 0\.[1-9] GiB left", shown)
    assert " per_device_train_batch_size: " in shown and " saves " in shown


def test_ranks_prediction_and_modules(tmp_path: Path) -> None:
    run = load_run(made.of_ranks(tmp_path / "ranks", 12, 4))
    shown = text_report(run).splitlines()
    row = next(i for i, line in enumerate(shown) if line.startswith("By rank"))
    peaks = [float(line.split()[1]) for line in shown[row + 1 : row + 9]]
    assert peaks == sorted(peaks, reverse=True) and "4 more" in shown[row + 9]
    predicted = load_run(made.write(tmp_path / "predicted", made.healthy(3, prediction=PREDICTION)))
    shown_text = text_report(predicted, modules=True)
    assert "Peak allocated: predicted 11.00 GiB, measured" in shown_text
    assert "Peak reserved: predicted 11.50–12.50 GiB" in shown_text
    assert "Furthest off: activations, predicted 1.00 GiB, measured" in " ".join(shown_text.split())
    right = {"peak_allocated_gib": 11.0, "categories": {"weights_gib": 1.44}, "phases": 7}
    shown_right = text_report(load_run(made.write(tmp_path / "right", made.healthy(3, prediction=right))))
    assert "Every category is within 2 % of the predicted peak" in " ".join(shown_right.split())
    assert shown_text.splitlines()[-1].split() == ["total", "774,030,080", "all", "1.44", "GiB"], (
        "36 layers count 36 times"
    )


def test_a_cap_on_the_allocator_counts_as_the_gpu(tmp_path: Path) -> None:
    records = made.healthy(20)
    records[0]["hardware"]["allocator_cap_fraction"] = 0.8
    shown = text_report(load_run(made.write(tmp_path, records)))
    assert "of 12.6 GiB" in shown and "cap" in shown.splitlines()[0]


HOSTILE = "[red]x[/red] \x1b[31mred\x1b[0m\x07 \u202egnp.exe\u2066 \x9b2J \r\nnew\u2028line \ud800 [link=http://evil]y[/link]"


def hostile_records() -> list[dict[str, Any]]:
    """What a model, a path, a log or an argument can bring, in every place that is shown."""
    records = made.out_of_memory(30)
    run, modules, oom, end = records[0], records[1], records[-2], records[-1]
    for name in ("model_class", "model_type", "attention", "engine"):
        run[name] = HOSTILE
    run["hardware"]["device_name"] = run["host"]["hostname"] = HOSTILE
    run["arguments"][HOSTILE] = run["versions"][HOSTILE] = HOSTILE
    run["facts"] = {"recipe": HOSTILE, "variant": HOSTILE, HOSTILE: {HOSTILE: [HOSTILE]}}
    run["optimizer_classes"] = [HOSTILE]
    modules["rows"][0] |= {"name": HOSTILE, "class": HOSTILE, "places": {HOSTILE: 5, "device": 7}}
    for name in ("error", "error_type", "cause", "snapshot"):
        oom[name] = HOSTILE
    oom["inputs"] = {HOSTILE: HOSTILE}
    oom["changes"][0] |= {"key": HOSTILE, "value": HOSTILE, "reason": HOSTILE, "cost": HOSTILE, "basis": HOSTILE}
    oom["categories"][HOSTILE] = 3.0
    end["error"] = end["error_type"] = HOSTILE
    records.insert(5, {"kind": "save", "step": 3, "peak_allocated_gib": 3.0, "checkpoint": HOSTILE})
    records.insert(5, {"kind": HOSTILE, "step": 3})
    return records


@pytest.mark.parametrize("colour", [True, False])
def test_nothing_from_the_records_steers_the_terminal(tmp_path: Path, colour: bool) -> None:
    folder = made.write(tmp_path / "a [red]b \u202e\x1b[1m", hostile_records())
    run = load_run(folder)
    if colour:
        console = Console(
            record=True, force_terminal=True, color_system="truecolor", width=100, file=(tmp_path / "o").open("w")
        )
        show(report_answer(run, modules=True), console=console)
        shown = console.export_text()  # without the colours that are memkit's own
    else:
        shown = text_report(run, modules=True)
    steering = {character for character in shown if not character.isprintable() and character != "\n"}
    assert not steering, steering
    assert "\\x1b[31mred" in shown and "[red]x[/red]" in shown, "it is shown as it is written"
    assert "\\u202e" in shown.replace("\n", "")
    table = shown[shown.index("By module ") :]
    assert "[red]x[/red]" in table.replace("\n", "")


def test_json_has_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.write(tmp_path, made.out_of_memory())
    assert main(["report", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(report_json(load_run(folder))))
    why = "ran out of memory in backward of step 61"
    assert printed["ending"] == {"rank": 0, "kind": "out of memory", "why": why, "cause": None, "step": 60}
    summary = printed["summary"]
    assert summary["peak"]["phase"] == "backward" and summary["capacity_gib"] == made.CAPACITY_GIB
    assert abs(sum(summary["categories"].values()) - summary["peak"]["gib"]) < 1e-9
    assert [change["value"] for change in printed["changes"]] == [2, True]
    assert printed["findings"][0]["kind"] == "longer batches"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.write(tmp_path / "a run", made.healthy(3))
    assert main(["report", str(folder)]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and plain.endswith(f"As a page: memkit report '{folder}' --html '{folder}'\n")
    assert main(["report", str(folder), "--html", str(folder)]) == 0
    assert capsys.readouterr().out == f"Wrote {folder}/memory-report.html\n"
    assert main(["report", str(folder), "--modules"]) == 0
    assert f"Page: {folder}/memory-report.html" in (shown := capsys.readouterr().out) and "transformer.wte" in shown
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("memkit: error: ")
    assert main(["report", str(folder), "--follow", "--json"]) == 2


def test_too_few_steps_are_not_called_steady(tmp_path: Path) -> None:
    for steps in (1, 19, 20):
        shown = " ".join(text_report(load_run(made.write(tmp_path / str(steps), made.healthy(steps)))).split())
        assert f"No memory problem found over {steps} step" in shown
        assert ("too few to tell whether memory grows" in shown) is (steps < 20)


def test_out_of_host_memory_does_not_blame_the_gpu(tmp_path: Path) -> None:
    records = [
        {**r, "cause": "host memory", "phase": "evaluate", "step": 60} if r["kind"] == "oom" else r
        for r in made.out_of_memory()
    ]
    shown = text_report(load_run(made.write(tmp_path, records)))
    assert shown.startswith("Out of host RAM in the evaluation after step 60")


@pytest.mark.parametrize(
    ("phase", "step", "words"),
    [
        ("backward", 61, "in backward of step 61"),
        ("data", 3, "in step 3, before the model's forward"),
        ("evaluate", 50, "in the evaluation after step 50"),
        ("save", 0, "in a save"),
        ("optimizer", None, "in optimizer"),
        (None, 4, "in step 4"),
        (None, None, ""),
    ],
)
def test_moments_in_words(phase: str | None, step: int | None, words: str) -> None:
    assert at(phase, step) == words
