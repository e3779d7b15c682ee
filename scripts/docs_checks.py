"""Checks of whole pages: links lead somewhere, outputs are generated, and shown commands run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer
from docs_blocks import BLOCKS, ROOT

from tests.loaded import Loaded, loaded
from tests.measuring.report import synthetic_records

READMES = tuple(ROOT / folder / "README.md" for folder in ("", "docs/techniques", "ds_configs", "recipes"))
PAGES = {page: page.read_text() for page in (*READMES, *sorted((ROOT / "docs").rglob("[!R]*.md")))}

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
    "trl.scripts.sft": "tests/predict_script/test_trl_trainers.py",
    "my_package.train": "tests/run/test_as_python.py",
    "run my-job": "tests/run/test_recipe_folder.py",
    "--plan plan.yaml -- --output_dir out --bf16": "tests/run/test_plans.py",
    "tickets": "tests/engine/test_own_recipe.py",
    "--write plan.yaml -- '…'": "tests/cli/test_plan.py",
    "ITS": "docs/contributing.md",
}
"""Part of a command that cannot run here (it needs GPUs, another environment, a name to be filled in) or takes
minutes → what runs it, or one like it."""

ENDS = {"--verify": (2, "--verify"), "--resume": (2, "no unfinished run"), "doctor": (0, "/fast")}
"""Part of a command → how it ends without a GPU and without that disk: (exit code, part of its output)."""


def problems() -> Iterator[str]:
    """All problems of the pages, a line each."""
    for page, text in PAGES.items():
        name = str(page.relative_to(ROOT))
        for problem in (*problems_of_blocks(name, text), *broken_links(page, text)):
            yield f"{name}: {problem}"
    yield from outputs_of_help()
    yield from failing_commands()


def problems_of_blocks(name: str, text: str) -> Iterator[str]:
    for block in re.findall(r"<!-- \w+: ([\w-]+) -->", text):
        if (name, block) not in BLOCKS:
            yield f"nothing fills its block {block}"
    if "```text" in without_blocks(text):
        yield "an output outside of the generated blocks"


def broken_links(page: Path, text: str) -> Iterator[str]:
    for in_markdown, in_html in re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", without_code(text)):
        target = in_markdown or in_html
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (heading and heading not in headings(file)):
            yield f"the link {target} leads nowhere"


def without_blocks(text: str) -> str:
    """A page without its generated blocks, whose commands run when they are filled."""
    return re.sub(r"<!-- \w+: .*?<!-- end -->", "", text, flags=re.DOTALL)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def outputs_of_help() -> Iterator[str]:
    """Outputs in a verb's `--help` that no page shows."""
    from hf_memkit.cli.main import app

    pages = "\n".join(PAGES.values())
    for name, command in typer.main.get_command(app).commands.items():
        for line in (command.epilog or "").splitlines():
            if line.startswith(" " * 6) and line.strip(" …") not in pages:
                yield f"memkit {name} --help: no page shows the output {line.strip()!r}"


def failing_commands() -> Iterator[str]:
    """Commands outside of the generated blocks that end otherwise than they should."""
    with loaded() as process, tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        make_files(process, files)
        for command, page in shown_commands().items():
            if any(part in command for part in ELSEWHERE):
                continue
            copy = shutil.copytree(files, tempfile.mkdtemp(dir=folder), dirs_exist_ok=True)
            if problem := run(command, process, Path(copy)):
                yield f"{page}: {command}\n{problem}"


def shown_commands() -> dict[str, str]:
    """Command → the name of the first page that shows it."""
    commands: dict[str, str] = {}
    for page, text in PAGES.items():
        blocks = re.findall(r"^```bash\n(.*?)^```", without_blocks(text), re.DOTALL | re.MULTILINE)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if line.startswith("memkit "):
                commands.setdefault(shlex.join(shlex.split(line, comments=True)), page.name)
    return commands


def make_files(process: Loaded, folder: Path) -> None:
    """Writes the files that the commands read."""
    folder.mkdir()
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    launcher = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 8}
    contents = {
        "train.py": TRAIN,
        "train.log": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB.\n",
        "my.txt": "A line of text to train on.\n" * 400,
        "reviews.csv": "text,label\n" + "It works,good\nIt broke,bad\n" * 20,
        "chats.jsonl": f"{json.dumps(chat)}\n" * 40,
        "mine.json": '{"train_file": "x.txt", "activation_checkpointing": false}',
        "args.yaml": "output_dir: out\nbf16: true\ndeepspeed: ds.json\n",
        "fsdp.json": '{"version": 2, "activation_checkpointing": true}',
        "zero3.yaml": json.dumps({**launcher, "deepspeed_config": {"zero3_init_flag": True}}),
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    synthetic_records.write(folder / "out", synthetic_records.healthy(20))
    for command in (
        "memkit ds copy zero2-offload ds.json",
        "memkit recipe bert-large-on-8gb --copy recipe.yaml",
        f"memkit plan train.py --gpu T4 --write plan.yaml -- {OWN}",
    ):
        ran = process.run(command.split(), folder)
        if ran.returncode != 0:
            raise SystemExit(f"{command}\n{ran.output}")


def run(command: str, process: Loaded, folder: Path) -> str:
    """Runs a command, and returns how it ended; nothing if that is as it should be."""
    words = shlex.split(command.replace("'…'", OWN).replace("OUTPUT_DIR", "out"))
    if "copy" in words[2:3] and len(words) > 4:
        (folder / words[4]).unlink(missing_ok=True)  # the command makes it
    if words[1:3] == ["recipe", "gpt2-on-16gb"] and not {"--dry-run", "--export", "--resume"} & set(words):
        words.append("--dry-run")  # tests/engine/test_pack.py rehearses it, which takes a minute
    ran = process.run(words, folder)
    code, part = next((end for key, end in ENDS.items() if key in command), (0, ""))
    ended_well = ran.returncode == code and part in ran.output
    return "" if ended_well else f"exit code {ran.returncode} after {ran.seconds:.0f} s\n{ran.output}"
