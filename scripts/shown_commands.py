"""Commands of README.md and docs/, run as they stand there, in a folder that holds the files that they name."""

from __future__ import annotations

import json
import queue
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evidence_tables import ROOT
from pages import PAGES, memkit_commands

from tests.loaded import Loaded, loaded
from tests.measuring.report import synthetic_records

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
    "-- accelerate launch": "tests/prediction/test_launched.py",
    "--python": "tests/predict_script/test_environments.py",
    "--compare-with": "tests/predict_script/test_environments.py",
    "-- torchrun": "tests/prediction/test_launched.py",
    "-- llamafactory-cli": "benchmarks/front_ends.py",
    "-- trl sft": "benchmarks/front_ends.py",
    "trl.scripts.sft": "tests/predict_script/test_trl_trainers.py",
    "my_package.train": "tests/run/test_as_python.py",
    "run my-job": "tests/run/test_recipe_folder.py",
    "tickets": "tests/engine/test_own_recipe.py",
    "--num_train_epochs 3": "benchmarks/plan_example.py",
    "--write plan.yaml -- '…'": "tests/cli/test_plan.py",
    "ITS": "docs/contributing.md",
}
"""What in a command says that it cannot run in this folder (it needs GPUs, another environment, a name to be filled
in) or takes minutes, and what runs it, or one like it."""

ENDS = {
    "--verify": (2, "--verify"),
    "--resume": (2, "no unfinished run"),
    "doctor": (0, "/fast"),
}
"""Part of a command → how it ends without a GPU and without that disk: (exit code, part of its output)."""

SAME = {"--gpu", "--gpus-to-compare", "--price", "--ram", "--gpu-memory", "--model"}
"""Options of which one value stands for all."""


def failures() -> Iterator[str]:
    """Commands that end otherwise than they should, and entries above that no page or file needs any more."""
    commands = shown()
    for part in (*ELSEWHERE, *ENDS):
        if not any(part in command for command in commands):
            yield f"scripts/shown_commands.py: no page shows a command with {part!r}"
    for path in ELSEWHERE.values():
        if not (ROOT / path).exists():
            yield f"scripts/shown_commands.py: {path} does not exist"
    with loaded() as one, loaded() as another, tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        make_files(one, files)
        free = queue.SimpleQueue[Loaded]()
        for process in (one, another):
            free.put(process)

        def failure(number: int, command: str) -> str:
            process = free.get()
            try:
                return _failure(command, process, shutil.copytree(files, Path(folder) / str(number)))
            finally:
                free.put(process)

        tried = [command for command in commands if not any(part in command for part in ELSEWHERE)]
        with ThreadPoolExecutor(2) as two:
            for command, found in zip(tried, two.map(failure, range(len(tried)), tried), strict=True):
                if found:
                    yield f"{commands[command]}: {command}\n{found}"


def shown() -> dict[str, str]:
    """{command: page}; of those that differ in values of `SAME` and the script's own arguments only, the first."""
    found: dict[str, tuple[str, str]] = {}
    for page in PAGES:
        for line in memkit_commands(page.read_text()):
            words = shlex.split(line, comments=True)
            ours = words[: words.index("--")] if "--" in words else words
            kind = [word for before, word in zip(["", *ours], ours, strict=False) if before not in SAME]
            found.setdefault(" ".join(sorted(kind)), (shlex.join(words), page.name))
    return dict(found.values())


def make_files(process: Loaded, folder: Path) -> None:
    """What the commands read."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "train.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB.\n")
    (folder / "my.txt").write_text("A line of text to train on.\n" * 400)
    (folder / "reviews.csv").write_text("text,label\n" + "It works,good\nIt broke,bad\n" * 20)
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 40)
    (folder / "mine.json").write_text('{"train_file": "x.txt", "activation_checkpointing": false}')
    (folder / "args.yaml").write_text("output_dir: out\nbf16: true\ndeepspeed: ds.json\n")
    launcher = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 8}
    (folder / "zero3.yaml").write_text(json.dumps({**launcher, "deepspeed_config": {"zero3_init_flag": True}}))
    synthetic_records.write(folder / "out", synthetic_records.healthy(20))
    for command in (
        "memkit ds copy zero2-offload ds.json",
        "memkit recipe bert-large-on-8gb --copy recipe.yaml",
        f"memkit plan train.py --gpu T4 --write plan.yaml -- {OWN}",
    ):
        ran = process.run(command.split(), folder)
        if ran.returncode != 0:
            raise SystemExit(f"{command}\n{ran.output}")


def _failure(command: str, process: Loaded, folder: Path) -> str:
    """How it ended, if not as it should; empty: it did."""
    words = shlex.split(command.replace("'…'", OWN).replace("OUTPUT_DIR", "out"))
    if "copy" in words[2:3] and len(words) > 4:
        (folder / words[4]).unlink(missing_ok=True)  # the command makes it
    if words[1:3] == ["recipe", "gpt2-on-16gb"] and not {"--dry-run", "--export", "--resume"} & set(words):
        words.append("--dry-run")  # tests/engine/test_pack.py rehearses it, which takes a minute
    ran = process.run(words, folder)
    code, words_shown = next((end for part, end in ENDS.items() if part in command), (0, ""))
    if ran.returncode == code and words_shown in ran.output:
        return ""
    return f"exit code {ran.returncode} after {ran.seconds:.0f} s\n{ran.output}"
