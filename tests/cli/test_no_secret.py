"""A secret that a user gives in any place stands in nothing that a verb prints or writes, and reaches the script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_memkit.cli import main
from hf_memkit.measuring.memory.records import RecordWriter
from tests.measuring.report import synthetic_records as made

CANARY = "c4n4ry"
LOG = f"""+ WANDB_API_KEY={CANARY} torchrun t.py --hub_token {CANARY} --api-key={CANARY} --max_tokens 5
Arguments(hub_token='{CANARY}')
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of \
which 1.00 GiB is free. Including non-PyTorch memory, this process has 14.00 GiB memory in use. Of the allocated \
memory 13.00 GiB is allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated.
"""
ARGUMENTS = f"output_dir: out\nno_cuda: true\nhub_token: {CANARY}\npush_to_hub_token: {CANARY}\n"
DEEPSPEED = {
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 3},
    "hub_token": CANARY,
    "wandb": {"enabled": True, "api_key": CANARY, "api_kye": "x"},
}
SCRIPT = f"""
import os, sys
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
assert args.hub_token == os.environ["HF_TOKEN"] == "{CANARY}", "the process receives it"
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
rows = [{{"input_ids": list(range(8)), "labels": list(range(8))}}] * 8
Trainer(model, args, train_dataset=rows).train()
"""
WITH_TOKEN = ["--output_dir", "out", "--hub_token", CANARY, "--report_to", "none", "--max_steps", "2"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in a folder with files that contain the canary; returns what it printed and wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in {"t.log": LOG, "args.yaml": ARGUMENTS, "ds.json": json.dumps(DEEPSPEED), "t.py": SCRIPT}.items():
        (tmp_path / name).write_text(text)
    records = made.healthy(4, facts={"data": f"https://me:{CANARY}@host/rows"})
    records[0]["prediction"] = {"request": {"arguments": WITH_TOKEN}}
    made.write(tmp_path / "records", records)

    def ran(*words: str, codes: tuple[int, ...] = (0, 1, 2)) -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        monkeypatch.setattr("hf_memkit.cli.printing.command_line", list(words))
        code = main(list(words))
        out, err = capfd.readouterr()
        assert code in codes, err
        files = [path for path in tmp_path.rglob("*") if path.is_file() and before.get(path) != path.read_bytes()]
        return out + err + "".join(path.read_text(errors="replace") for path in files)

    return ran


@pytest.mark.parametrize(
    "command",
    [
        "explain t.log",
        "explain t.log --json --args args.yaml",
        "explain t.log --args ds.json",
        "check args.yaml ds.json",
        "check ds.json --args args.yaml --json",
        "check args.yaml ds.json --output-format sarif",
        "preset show lora --args args.yaml",
        "preset show lora --json --set hub_token=c4n4ry",
        f"recipe gpt2-on-16gb --gpu 16GB --ram 64GB --set hub_token={CANARY} --export job",
        "report records",
        "report records --json",
        "report records --html page.html",
        f"predict t.py --hub_token {CANARY}",
        f"run --plam x t.py --hub_token={CANARY}",
        f"plan ds.json -- --hub_token {CANARY}",
    ],
)
def test_no_verb_shows_it(run: Callable[..., str], command: str) -> None:
    shown = run(*command.split())
    assert shown and CANARY not in shown


def test_a_command_to_paste_has_the_variable(run: Callable[..., str]) -> None:
    shown = run("explain", "t.log", codes=(0,))
    assert '--hub_token "$HF_TOKEN" --api-key="$API_KEY" --max_tokens 5' in " ".join(shown.split())


def test_no_record_has_it(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "memory-rank0.jsonl")
    for kind in ("run", "oom", "end"):
        writer.write(kind, {"prediction": {"request": {"arguments": WITH_TOKEN}}, "error": f"hub_token='{CANARY}'"})
    writer.close()
    text = writer.path.read_text()
    assert CANARY not in text and text.count("$HF_TOKEN") == 6


COMMAND = (f"HF_TOKEN={CANARY}", "python", "t.py", *WITH_TOKEN)
PAGE = ("--gpu", "T4", "--html", "page.html")
PLAN = (*PAGE, "--limit", "3", "--write", "plan.yaml")


@pytest.mark.usefixtures("loaded_worker")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("predict", "t.py", *PAGE, "--json", "--", *WITH_TOKEN), id="predict"),
        pytest.param(("predict", *PAGE, "--", *COMMAND), id="predict a command", marks=pytest.mark.exhaustive),
        pytest.param(("plan", "t.py", *PLAN, "--json", "--", *WITH_TOKEN), id="plan", marks=pytest.mark.slow),
        pytest.param(("plan", *PLAN, "--", *COMMAND), id="plan a command", marks=pytest.mark.exhaustive),
    ],
)
def test_the_script_gets_it_and_the_answer_does_not_have_it(run: Callable[..., str], words: tuple[str, ...]) -> None:
    """Would notice: a secret in the cache of traces, too."""
    shown = run(*words, codes=(0,))
    assert "$HF_TOKEN" in shown and CANARY not in shown
