"""Commands of README.md and docs/, run as they stand there, in a folder that holds the files that they name."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.loaded import Loaded, loaded
from tests.report import synthetic_records
from tests.test_pages import PAGES, typed

pytestmark = pytest.mark.longer

TRAIN = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(return_remaining_strings=True)[0]
config = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, vocab_size=300, n_positions=64, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 64
Trainer(GPT2LMHeadModel(config), args, train_dataset=rows).train()
"""

OWN = "--output_dir out --per_device_train_batch_size 8 --max_steps 3"
"""What `…` stands for on the pages."""

ELSEWHERE = {
    "--gpus 4": "tests/engine/test_processes.py",
    "gpt2-on-16gb --gpus 8": "tests/engine/test_processes.py",
    "--python": "tests/predict_script/test_environments.py",
    "trl.scripts.sft": "tests/predict_script/test_trl_trainers.py",
    "my_package.train": "tests/run/test_as_python.py",
    "tickets": "tests/engine/test_own_recipe.py",
    "--num_train_epochs 3": "benchmarks/plan_example.py",
    "--write plan.yaml -- '…'": "tests/cli/test_plan.py",
    "ITS": "docs/contributing.md",
}
"""What in a command says that it cannot run in this folder (it needs GPUs, another environment, a name to be filled
in) or takes minutes, and what runs it, or one like it."""

ENDS = {
    "--verify": (2, "--verify"),
    "--calibrate out": (2, "no predicted step time"),
    "--calibrate": (2, "GPU"),
    "--resume": (2, "no unfinished run"),
    "doctor": (0, "/fast"),
}
"""What in a command says how it ends on a machine without a GPU and without that disk: (exit code, what is said)."""

SAME = {"--gpu", "--gpus-to-compare", "--price", "--ram", "--gpu-memory", "--model"}
"""Options of which one value stands for all."""


def shown() -> dict[str, str]:
    """{command: page}; of those that differ in values of `SAME` and the script's own arguments only, the first."""
    found: dict[str, tuple[str, str]] = {}
    for page in PAGES:
        for line in typed(page.read_text()):
            words = shlex.split(line, comments=True)
            ours = words[: words.index("--")] if "--" in words else words
            kind = [word for before, word in zip(["", *ours], ours, strict=False) if before not in SAME]
            found.setdefault(" ".join(sorted(kind)), (shlex.join(words), page.name))
    return dict(found.values())


@pytest.fixture(scope="module")
def process() -> Iterator[Loaded]:
    with loaded() as started:
        yield started


@pytest.fixture(scope="module")
def files(process: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "train.py").write_text(TRAIN)
    (folder / "train.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB.\n")
    (folder / "my.txt").write_text("A line of text to train on.\n" * 400)
    (folder / "reviews.csv").write_text("text,label\n" + "It works,good\nIt broke,bad\n" * 20)
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 40)
    (folder / "mine.json").write_text('{"train_file": "x.txt", "activation_checkpointing": false}')
    (folder / "args.yaml").write_text("output_dir: out\nbf16: true\ndeepspeed: ds.json\n")
    synthetic_records.write(folder / "out", synthetic_records.healthy(20))
    for command in (
        "memkit ds copy zero2-offload ds.json",
        "memkit recipe bert-large-on-8gb --copy recipe.yaml",
        f"memkit plan train.py --gpu T4 --write plan.yaml -- {OWN}",
    ):
        ran = process.run(command.split(), folder)
        assert ran.returncode == 0, ran.output
    return folder


def test_what_runs_elsewhere_is_there() -> None:
    """Finds: a test that went, and with it the only run of a shown command; an entry of a command that is gone."""
    assert [part for part in (*ELSEWHERE, *ENDS) if not any(part in command for command in shown())] == []
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("command", [each for each in shown() if not any(part in each for part in ELSEWHERE)])
def test_a_command_of_a_page_ends_well(command: str, process: Loaded, files: Path, tmp_path: Path) -> None:
    """Finds: an example whose options contradict each other or its file, a preset, recipe or GPU that was renamed."""
    folder = shutil.copytree(files, tmp_path / "here")
    words = shlex.split(command.replace("'…'", OWN).replace("OUTPUT_DIR", "out"))
    if "copy" in words[2:3] and len(words) > 4:
        (folder / words[4]).unlink(missing_ok=True)  # what the command makes is not there before
    if words[1:3] == ["recipe", "gpt2-on-16gb"] and not {"--dry-run", "--export", "--resume"} & set(words):
        words.append("--dry-run")  # tests/engine/test_pack.py rehearses it, which takes a minute
    ran = process.run(words, folder)
    code, said = next((end for part, end in ENDS.items() if part in command), (0, ""))
    assert ran.returncode == code and said in ran.output, f"{ran.returncode} after {ran.seconds:.0f} s\n{ran.output}"
