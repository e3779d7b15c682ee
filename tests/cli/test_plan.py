"""`memkit plan` with a real script, as a user types it: what it answers, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_memkit.cli import main
from hf_memkit.common.errors import InputError
from hf_memkit.plan import make_plan
from hf_memkit.setup.script_overrides import read_plan
from tests.conftest import ROOT

TINY = """
import pathlib, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
print("the script's own line")
pathlib.Path("begun").touch()
time.sleep(float(pathlib.Path("wait").read_text()) if pathlib.Path("wait").exists() else 0)

class Model(GPT2LMHeadModel):
    def gradient_checkpointing_enable(self, *args, **kwargs):
        time.sleep(100_000 * pathlib.Path("slow").exists())
        super().gradient_checkpointing_enable(*args, **kwargs)

config = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, vocab_size=20_000, n_positions=128, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)
rows = [{"input_ids": torch.arange(128), "labels": torch.arange(128)}] * 64
Trainer(Model(config), args, train_dataset=rows).train()
"""
"""Most of what it takes are logits, 8 × 128 × 20,000 numbers: with a micro-batch of 8 it does not fit 900 MB, of which
the CUDA context takes 500 MiB."""

SMALL = ["--gpu", "T4", "--gpu-memory", "900MB"]
OWN = ["--", "--output_dir", "out", "--optim", "sgd", "--per_device_train_batch_size", "8", "--max_steps", "4"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name(f"{tmp_path.name}-cache")))
    (tmp_path / "train.py").write_text(TINY)
    return tmp_path


@pytest.mark.tracing
@pytest.mark.slow
def test_a_script_is_planned_written_and_read_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would notice: a setup that does not fit proposed, another optimizer step than the script's, settings that are
    written and not read, keys of the JSON that go, output of the script between its braces, files that it leaves."""
    code = main(["plan", "train.py", *SMALL, "--write", "plan.yaml", "--html", "plan.html", "--json", *OWN])
    words = capsys.readouterr()
    assert code == 0, words.err
    results: dict[str, Any] = json.loads(words.out)
    assert {
        "request", "name", "gpu", "gpus", "sequences_a_step", "full_share", "best", "setups", "excluded", "left_out",
        "setups_judged", "stopped", "verdict", "notes", "price_an_hour", "run_cost", "million_tokens_cost", "faster",
        "paste", "files", "launch",
    } <= set(results)  # fmt: skip
    assert results["request"]["arguments"] == OWN[1:] and results["files"] == ["plan.yaml", "plan.html"]
    own = next(each for each in results["setups"] if each["name"] == "8 × 1")
    best = next(each for each in results["setups"] if each["name"] == results["best"])
    assert not own["fits"] and own["why"] and best["fits"] and best["group"] == "same result"
    assert best["micro_batch_size"] * best["accumulation"] == 8 == results["sequences_a_step"]
    assert best["peak_gib"] < own["peak_gib"] and best["peak_gib"] <= 0.92 * results["gpu"]["capacity_gib"]
    assert results["run_cost"] is None, "no price was given"
    overrides, about = read_plan("plan.yaml")
    assert overrides.arguments["per_device_train_batch_size"] == best["micro_batch_size"]
    assert overrides.to_json() == best["overrides"] and about["setup"] == best["name"]
    flags = results["paste"][results["best"]]["flags"]
    assert f"--per_device_train_batch_size {best['micro_batch_size']} " in f"{flags} "
    progress = [line for line in words.err.splitlines() if ": fits" in line or ": does not fit" in line]
    assert len(progress) == len(results["setups"]), "a line a setup"
    assert {path.name for path in folder.iterdir()} == {"train.py", "begun", "plan.yaml", "plan.html"}


@pytest.mark.exhaustive
def test_another_batch_that_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would notice: the script's own batch in a setup, steps that do not follow, a script that is not judged as it
    stands, a plan file that does not mention it."""
    own = [*OWN[:-3], "7", "--num_train_epochs", "2", "--activation_checkpointing", "False"]
    options = ["--sequences-per-step", "16", "--limit", "5", "--json", "--write", "plan.yaml"]
    assert main(["plan", "train.py", *SMALL, *options, *own]) == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["sequences_a_step"], results["own_sequences_a_step"]) == (16, 7)
    setups = {each["name"]: each for each in results["setups"]}
    assert "7 × 1" in setups and len(setups) > 1
    for each in setups.values():
        assert each["micro_batch_size"] * each["accumulation"] == (7 if each["name"] == "7 × 1" else 16)
    assert not results["left_out"].keys() & {"16 × 1", "8 × 2", "4 × 4"}, "steps are those of this batch"
    best = setups[results["best"]]
    if best["step_time_s"] is not None and best["run_s"] is not None:
        assert best["run_s"][1] == pytest.approx(8 * best["step_time_s"][1], rel=0.01), "64 rows, 16 a step, twice"
    overrides, about = read_plan("plan.yaml")
    assert about["sequences_a_step"] == 16 and about["own_sequences_a_step"] == 7
    assert overrides.arguments["per_device_train_batch_size"] == best["micro_batch_size"]
    assert "instead of the script's 7" in (folder / "plan.yaml").read_text()
    assert main(["plan", "train.py", *SMALL, "--sequences-per-step", "100", *own]) == 2
    assert "--sequences-per-step 100: the script trains on 64 rows" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_an_evaluation_that_does_not_fit_gets_a_smaller_batch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would notice: "nothing fits" where only the evaluation is too large, whose batch changes no training."""
    evaluated = "train_dataset=rows, eval_dataset=rows, compute_metrics=lambda found: {}"
    (folder / "train.py").write_text(TINY.replace("train_dataset=rows", evaluated))
    own = [*OWN[:-3], "2", "--max_steps", "4", "--eval_strategy", "epoch", "--per_device_eval_batch_size", "64"]
    assert main(["plan", "train.py", "--gpu", "T4", "--gpu-memory", "1200MB", "--json", *own]) == 0
    results = json.loads(capsys.readouterr().out)
    best = next(each for each in results["setups"] if each["name"] == results["best"])
    assert best["group"] == "same result" and "evaluation batch" in best["name"]
    assert best["overrides"]["arguments"]["eval_accumulation_steps"] == 1, "64 rows of logits are 655 MB"
    assert best["overrides"]["arguments"]["per_device_eval_batch_size"] == 2


@pytest.mark.exhaustive
def test_a_method_with_other_code_is_shown_and_not_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would notice: LoRA on the first line or in a plan file, a diff that is not the script's or does not come, QLoRA
    of a model that nobody loads tried silently."""
    (folder / "train.py").write_text(TINY.replace("Trainer(Model(", "Trainer(GPT2LMHeadModel("))
    options = ["--gpu", "T4", "--also", "lora", "--also", "qlora", "--write", "plan.yaml", "--json"]
    code = main(["plan", "train.py", *options, *OWN])
    words = capsys.readouterr()
    assert code == 0, words.err
    results: dict[str, Any] = json.loads(words.out)
    (name,) = results["with_code"]
    row = next(each for each in results["setups"] if each["name"] == name)
    assert row["group"] == "another method" and row["fits"] and row["step_time_s"] and "get_peft_model(" in row["code"]
    assert results["best"] != name and "from_pretrained" in results["left_out"]["QLoRA"]
    overrides, about = read_plan("plan.yaml")
    assert "LoRA" not in about["setup"] and not overrides.adapter and "plan.yaml: holds" in words.err
    diff = results["paste"][name]["diff"]
    assert "+Trainer(get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=16" in diff
    assert "adapter" not in (folder / "plan.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code", "verdict"), [("0", 3, "unfinished"), ("400", 1, "nothing fits")])
def test_where_nothing_fits_or_nothing_was_found_the_exit_code_says_which(
    folder: Path, capsys: pytest.CaptureFixture[str], limit: str, code: int, verdict: str
) -> None:
    """Would notice: 0 where there is no setup, a plan file for one that does not fit, "nothing fits" of a search that
    was stopped, no word of what is missing."""
    options = ["--gpu", "T4", "--gpu-memory", "600MB", "--write", "plan.yaml"]
    assert main(["plan", "train.py", *options, "--limit", limit, "--json", *OWN]) == code
    words = capsys.readouterr()
    results = json.loads(words.out)
    assert (results["verdict"], results["best"], results["stopped"]) == (verdict, None, code == 3)
    assert "plan.yaml: not written" in words.err and not (folder / "plan.yaml").exists()


@pytest.mark.exhaustive
def test_gpus_are_compared_by_the_cost_of_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Would notice: a GPU whose traces are taken for another's; a price that goes to the wrong GPU, or to none; a GPU
    on which nothing fits anywhere but last, or left out."""
    options = ["--gpus-to-compare", "600MB,RTX 2080 Ti,T4", "--price", "T4=0.5", "--limit", "0", "--also", "adafactor"]
    code = main(["plan", "train.py", *options, "--json", *OWN])
    words = capfd.readouterr()  # what the script prints, too
    assert code == 0, words.err
    t4, turing, none = json.loads(words.out)["gpus"]
    assert [each["verdict"] for each in (t4, turing, none)] == ["fits", "fits", "unfinished"]
    assert [each["gpu"]["name"] for each in (t4, turing)] == ["T4", "RTX 2080 Ti"], "first what has a price"
    assert t4["run_cost"] == pytest.approx(t4["setups"][0]["run_s"][1] / 3600 * 0.5) and t4["million_tokens_cost"] > 0
    assert turing["run_cost"] is None and turing["setups"][0]["run_s"][1] < t4["setups"][0]["run_s"][1]
    assert t4["setups"][0]["prediction"]["categories"] == turing["setups"][0]["prediction"]["categories"]
    assert "--limit" in t4["left_out"]["adafactor"], "asked for, and not reached"
    assert none["best"] is None and none["run_cost"] is None and not none["setups"][0]["fits"]
    assert words.err.count("the script's own line") == 2, "it runs once for both of one compute capability"


def started(folder: Path, *gpu: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hf_memkit", "plan", "train.py", *(gpu or SMALL), "--short", *OWN]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def interrupted(process: subprocess.Popen[str], after: str, pause_s: float = 0.0) -> tuple[int, str, str]:
    """As Ctrl-C does it in a terminal: all processes of the group get the signal, once this line was said."""
    assert process.stderr is not None
    heard = ""
    for line in process.stderr:
        heard += line
        if after in line:
            break
    time.sleep(pause_s)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert psutil.wait_procs(children, timeout=120)[1] == [], "nothing goes on"
    return process.returncode, out, heard + err


@pytest.mark.slow
def test_ctrl_c_before_anything_fits(folder: Path) -> None:
    """Would notice: 1 and "nothing fits" because the search was ended."""
    (folder / "slow").touch()
    gpu = ["--gpu", "T4", "--gpu-memory", "600MB"]
    code, out, words = interrupted(started(folder, *gpu), after=": does not fit")
    assert code == 3 and out.startswith("NO SETUP FOUND YET"), words


@pytest.mark.slow
def test_ctrl_c_waits_for_no_trace(folder: Path) -> None:
    """Would notice: an answer that comes when what is being traced has ended, minutes after it was asked."""
    (folder / "slow").touch()
    # After the script as it stands checkpointing is traced, which waits.
    code, out, words = interrupted(started(folder, "--gpu", "T4"), after=": fits", pause_s=3)
    assert code == 0 and out.startswith("FASTEST SO FAR THAT FITS T4: 8 × 1:") and "Traceback" not in words, words
    assert words.count(": fits") == 1 and "search not finished" in " ".join(out.split())
    assert "Ctrl-C: stopping" in words


@pytest.mark.exhaustive
def test_ctrl_c_before_anything_was_judged(folder: Path) -> None:
    """Would notice: 1, which would say that nothing fits; a script that goes on."""
    (folder / "wait").write_text("100000")
    code, out, words = interrupted(started(folder), after="the script's own line")
    assert (code, out) == (130, ""), words
    assert "stopped before any setup was traced" in words and "Traceback" not in words


def test_a_model_s_own_code_is_run_only_if_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: `--trust-remote-code` reached the model's config, and not the plan."""
    given: list[bool] = []

    def planned(setup: Any, asked: Any, *, trust_remote_code: bool) -> None:
        given.append(trust_remote_code)
        raise InputError("a test ends here")

    monkeypatch.setattr(make_plan, "plan_setup", planned)
    asked = ["plan", "--model", "gpt2", "--gpu", "T4", "--batch-size", "1"]
    assert (main([*asked, "--trust-remote-code"]), main(asked)) == (2, 2)
    assert given == [True, False]
