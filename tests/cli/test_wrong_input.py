"""Wrong commands of every verb: a line a problem, before torch is imported or a process is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.cli import main

PREDICT = "predict --model gpt2"
RECIPE = "recipe gpt2-on-16gb"
PLAN = "plan code.py"
WRONG: dict[str, tuple[str, ...]] = {
    "predict": ("--model", "memkit predict --model gpt2-xl"),
    "predict gpt2": ("with --model", "memkit predict --help"),
    "predict train.py": ("train.py: no such file", "memkit predict --help"),
    "predict .": (".: a folder",),
    "predict notes.yaml": ("--args notes.yaml",),
    "predict -m no_such.module": ("-m no_such.module: no module 'no_such'",),
    "predict -m": ("-m: no module",),
    "predict notes.txt --model gpt2 --batch-size 4": ("--model: not with a", "-- --per_device_train_batch_size B"),
    "predict notes.txt --recipe gpt2-on-16gb --batch-size 2": ("--recipe: not with a", "--batch-size: not with"),
    "predict train.py --learning_rate 1e-5": ("after --", "memkit predict --help"),
    "predict --model": ("memkit predict --help",),
    "predict --no-such-option": ("memkit predict --help",),
    "plan": ("nothing to plan", "memkit plan train.py --gpu NAME"),
    "plan train.py --gpu T4": ("train.py: no such file", "memkit plan --help"),
    "plan gpt2 --gpu T4": ("gpt2: no such file; give a model with --model", "memkit plan --help"),
    "plan gpt2-on-16gb --gpu T4": ("is a recipe", "memkit plan --recipe gpt2-on-16gb"),
    "plan org/model --gpu T4": ("--model org/model", "memkit plan --help"),
    f"{PLAN} --gpuu T4": ("No such option: --gpuu; did you mean '--gpu'? Write the script's arguments after --",),
    "plan --model gpt2 --gpu T4 -- --bf16": ("--bf16: no script before --", "--set"),
    f"{PLAN} --gpu A100": ("--gpu: unknown GPU 'A100'", "'A100 40GB' or 'A100 80GB'"),
    f"{PLAN} --gpu T4 --gpus 0": ("--gpus", "memkit plan --help"),
    f"{PLAN} --gpu T4 --limit nan": ("--limit",),
    f"{PLAN} --gpu T4 --nodes 2 --verify --nvme-path .": ("--verify: runs on one machine", "--nvme-path"),
    f"{PLAN} --gpu T4 --sequences-per-step 0": ("--sequences-per-step", "memkit plan --help"),
    f"{PLAN} --gpu T4 --also lomoo": ("--also lomoo: unknown", "'lomo'?"),
    f"{PLAN} --gpu T4 --also prefix": ("--also prefix: unknown; write one of lora, qlora, or an optimizer",),
    f"{PLAN} --gpu T4 --short --json": ("--short, --json",),
    f"{PLAN} --gpu T4 --learning_rate 1": ("after --", "memkit plan --help"),
    f"{PLAN} --gpu T4 --gpus-to-compare T4,L4": ("--gpu T4: not with --gpus-to-compare",),
    f"{PLAN} --gpu-memory 16GB --gpus-to-compare T4 --write p.yaml": (
        "--gpu-memory 16GB: not",
        "--write p.yaml: a plan",
    ),
    f"{PLAN} --gpus-to-compare T4,A100,T5": ("--gpus-to-compare: unknown GPU 'A100'", "'A100 40GB'", "T5"),
    f"{PLAN} --gpus-to-compare T4,t4": ("t4: named twice",),
    f"{PLAN} --gpus-to-compare ,": ("no GPU named",),
    f"{PLAN} --price T4=1": ("--price T4=1: no GPU named", "--gpus-to-compare"),
    f"{PLAN} --gpu T4 --price 0.3": ("--price 0.3: write NAME=NUMBER",),
    f"{PLAN} --gpus-to-compare T4,L4 --price T4=free,A10=1": ("T4=free: not a price", "no plan for A10"),
    f"{PLAN} --gpu T4 --write notes.txt": ("--write notes.txt: exists", "not a memkit plan"),
    f"{PLAN} --gpu T4 --write none/plan.yaml": ("--write none/plan.yaml: no folder",),
    f"{PLAN} --gpu T4 --html notes.txt": ("not a page written by memkit",),
    "predct": ("predict", "memkit --help"),
    "preset show lean --gpu": ("memkit preset show --help",),
    f"{PREDICT} --gpu A100": ("'A100 40GB' or 'A100 80GB'",),
    f"{PREDICT} --gpu 16": ("16GB?",),
    f"{PREDICT} --ram 32": ("--ram: '32' has no unit", "32GB?"),
    f"{PREDICT} --gpu-memory 16XB": ("not a size",),
    f"{PREDICT} --gpu-memory 0.1GB": ("the CUDA context alone",),
    f"{PREDICT} --gpus 0": ("--gpus 0: give 1 or more",),
    f"{PREDICT} --gpus 999999999999999999999": ("--gpus 999999999999999999999: give 100000 or fewer",),
    f"{PLAN} --gpu T4 --gpus 100001": ("--gpus 100001: give 100000 or fewer",),
    f"{PREDICT} --nodes 100001": ("--nodes 100001: give 100000 or fewer",),
    f"{RECIPE} --gpus 100001": ("--gpus 100001: give 100000 or fewer",),
    f"{RECIPE} --nodes 100001": ("--nodes 100001: give 100000 or fewer",),
    "ds show zero3 --gpus 100001": ("--gpus 100001: give 100000 or fewer",),
    f"{PREDICT} --gpu 0GB": ("'0GB' must be above 0",),
    f"{PREDICT} --gpu ''": ("give a name or a size",),
    f"{PREDICT} --html /proc/page.html": ("/proc/page.html: cannot be written",),
    f"{PLAN} --gpu T4 --html /proc/page.html": ("/proc/page.html: cannot be written",),
    "report missing --html /proc/page.html": ("/proc/page.html: cannot be written",),
    f"{RECIPE} --copy new.yaml --data nope --set learning_rate=1": ("--copy", "omit --data, --set"),
    f"{RECIPE} --export notes.txt": ("--export notes.txt: a file",),
    "recipe notes.txt": ("a recipe is a .yaml file",),
    "recipe .": ("a recipe is a .yaml file",),
    "ds copy zero2 - --accelerate": ("omit --accelerate",),
    f"{PREDICT} --short --json": ("mutually exclusive",),
    f"{PREDICT} --html notes.txt": ("not a page written by memkit",),
    f"{PREDICT} --html page.html --compare-with python": ("mutually exclusive",),
    f"{PREDICT} --variant lora": ("--recipe NAME",),
    f"{PREDICT} --preset lora+resident": ("Choose one",),
    f"{PREDICT} --preset resident --set rank=4": ("values of this preset",),
    f"{PREDICT} --technique lora": ("--preset lora",),
    f"{PREDICT} --args broken.json": ("broken.json: line 1",),
    f"{PREDICT} --args ds.json": ("ds.json: a DeepSpeed config; give ",),
    "predict --args notes.yaml": ("notes.yaml names none (model_name_or_path)",),
    "predict --recipe gpt2-on-16gb --model gpt2-xl --gpu T4": ("config.json", "memkit predict --model gpt2-xl"),
    "predict --recipe gpt2-on-16gb --preset lora": ("not with --recipe",),
    f"{PREDICT} --batch-size 0": ("--batch-size",),
    f"{PREDICT} --batch-size 4 --set per_device_train_batch_size=8": ("--batch-size 4",),
    f"{PREDICT} --preset residnt": ("'resident'?",),
    f"{PREDICT} --preset lean --technique lor": ("memkit preset list --techniques",),
    f"{PREDICT} --args missing.yaml": ("missing.yaml",),
    f"{PREDICT} --args ~no-such-user/args.yaml": ("~no-such-user/args.yaml",),
    f"{PREDICT} --set learning_rat=1": ("'learning_rate'?",),
    f"{PREDICT} --set optim=adamw_8bitt": ("adamw_8bit",),
    f"{PREDICT} --set bf16=true --set fp16=true": ("bf16 and fp16",),
    f"{PREDICT} --gpu T4 --sequence-length 4096": ("1024",),
    "predict --model gpt2-x1": ("HF_HUB_OFFLINE=1", "'gpt2-xl'?"),
    "predict --model ./none": ("./none",),
    "predict --recipe gpt2": ("'gpt2-on-16gb'?", "memkit recipe"),
    "predict --recipe gpt2-on-16gb --variant ofload": ("'offload'?",),
    "recipe --export job": ("--export: needs a recipe",),
    "recipe --short": ("--short: needs a recipe",),
    "recipe --gpu RTX-4091": ("'RTX 4090'?",),
    "recipe no/such.yaml": ("no such file",),
    "recipe mine.yaml": ("mine.yaml: what: unknown key", "mine.yaml: variants: missing", "model: 3"),
    f"{RECIPE} --short": ("--short: only with --dry-run",),
    f"{RECIPE} --dry-run --export job": ("--dry-run, --export: mutually exclusive",),
    f"{RECIPE} --resume": ("no unfinished run",),
    f"{RECIPE} --resume --max-steps 5": ("Omit --max-steps",),
    f"{RECIPE} --output /dev/null/x": ("not writable",),
    f"{RECIPE} --gpu A100": ("'A100 40GB' or 'A100 80GB'",),
    f"{RECIPE} --variant ofload": ("'offload'?",),
    f"{RECIPE} --set per_device_train_batch_size=5": ("4, 8",),
    f"{RECIPE} --sequence-length 4096": ("1024",),
    "preset show lora+qlora": ("--technique qlora",),
    "preset show lorra": ("did you mean 'lora'",),
    "preset show lora --set rnk=4": ("values of this preset: ",),
    "preset show lora --set evaluation_strategy=steps": ("eval_strategy: steps",),
    "preset show lora --ram 64GB": ("--ram: no effect without a model",),
    "preset show lora --batch-size 30 --set per_device_train_batch_size=7": ("does not divide 30",),
    "preset show 8bit --nvme-path /tmp": ("--nvme-path: preset '8bit'",),
    "preset show infinity --nvme-path ' '": ("--nvme-path: empty; give a folder",),
    "preset show infinity --nvme-path /no/such": ("--nvme-path /no/such: no such folder",),
    "preset show offload --set deepspeed=ds.json": ("has its own DeepSpeed config",),
    "preset copy lean args.yaml": ("memkit preset show lean",),
    "preset copy lora args.toml": ("not .yaml or .json",),
    "preset copy lora /proc/none/args.yaml": ("cannot be written",),
    "preset copy lora args.json --for axolotl": ("one of trainer, run_clm, trl",),
    "preset copy lora args.json --for run_clm": ("adapter.r",),
    "preset copy resident args.json --for trl": ("optimizer.class",),
    "preset copy lora --args twice.yaml": ("appears twice",),
    "preset copy lora --args typo.yaml": ("typo.yaml: lora_target_module: no field of this name; did you mean",),
    "preset copy 8bit --args former.yaml": ("former.yaml: evaluation_strategy: write eval_strategy: steps",),
    f"{RECIPE} --max-steps 5 --set max_steps=6": ("--max-steps 5",),
    f"{RECIPE} --gpus 3": ("2 or 4 processes",),
    f"{RECIPE} --node-rank 3": ("--node-rank",),
    f"{RECIPE} --nodes 2": ("--master-addr", "--node-rank"),
    f"{RECIPE} --output notes.txt": ("--output notes.txt: is a file",),
    f"{RECIPE} --batch-size 4": ("--set per_device_train_batch_size", "memkit recipe --help"),
    f"{RECIPE} --model no/such": ("no/such", "HF_HUB_OFFLINE=1"),
    f"{RECIPE} --data missing.txt": ("missing.txt",),
    f"{RECIPE} --data ~no-such-user/notes.txt": ("~no-such-user/notes.txt",),
    f"{RECIPE} --data bad.jsonl --dry-run": ("bad.jsonl:2",),
    "recipe vit-large-on-8gb --data photos/": ("photos/: no such",),
    "recipe whisper-small-on-8gb --data notes.txt": ("notes.txt", "sound"),
    "recipe llama-8b-qlora-on-16gb --data bad.jsonl": ("bad.jsonl:2",),
    "recipe bert-large-on-8gb --data notes.txt": ("notes.txt", "label"),
    "recipe flan-t5-xl-on-24gb --data missing.csv": ("missing.csv",),
    "check notes.yaml --gpu A100": ("'A100 40GB'",),
    "ds copy zero3 --model gpt2 --gpu A100": ("'A100 40GB'",),
    "ds copy zero2 --nvme-path x": ("--nvme-path",),
    "ds copy zero3 --model gpt2 --nvme-path /x": ("does not use the disk",),
    "ds copy zero3-infinit": ("did you mean 'zero3-infinity'",),
    "ds copy zero3 --gpus 4": ("--gpus: nothing can be computed without --model",),
    "ds copy zero3 /proc/none/z.json": ("cannot be written",),
    "ds copy onebit-adam": ("deepspeed<=0.19.6",),
    "check ds.json --nvme-path /no/such": ("--nvme-path /no/such: ",),
    "recip": ("No such command 'recip'",),
    "report missing": ("missing",),
    "explain missing.log": ("missing.log",),
}

FILES = {
    "bad.jsonl": '{"text": "a"}\n{oops\n', "broken.json": "{a", "code.py": "print('never run')",
    "ds.json": '{"zero_optimization": {"stage": 2}}', "former.yaml": "evaluation_strategy: steps\n",
    "mine.yaml": "summary: x\nmodel: 3\nwhat: 1\n", "notes.txt": "some text", "notes.yaml": "learning_rate: 1.0e-4\n",
    "twice.yaml": "max_steps: 1\nmax_steps: 2\n", "typo.yaml": "lora_target_module: [q_proj]\nlora_r: 4\nmy_own: 3\n",
}  # fmt: skip

EACH = """
import contextlib, io, json, shlex, sys
started = []
processes = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec")
sys.addaudithook(lambda event, _: started.append(event) if event in processes else None)
from hf_memkit.cli import main
for line in sys.stdin:
    said, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        code = main(shlex.split(line))
    print(json.dumps([line.strip(), code, said.getvalue(), out.getvalue(), "torch" in sys.modules, started]))
"""


@pytest.mark.parametrize(
    "verbs",
    [
        ("pre",),
        *(pytest.param((each,), marks=pytest.mark.slow) for each in ("pl", "rec")),
        ("ds", "check", "report", "explain"),
    ],
    ids=" ".join,
)
def test_wrong_commands_are_answered_before_torch_or_a_process(tmp_path: Path, verbs: tuple[str, ...]) -> None:
    wrong = [line for line in WRONG if line.startswith(verbs)]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", EACH],
        input="\n".join(wrong), capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [answer[0] for answer in answers] == wrong
    for command, code, words, out, torch, started in answers:
        expected = 1 if command == "ds copy onebit-adam" else 2  # another DeepSpeed has it
        assert (code, out, torch, started) == (expected, "", False, []), command
        assert words and all(line.startswith("memkit: error: ") for line in words.splitlines()), words
        assert len(words) < 1000, words
        assert all(part in words for part in WRONG[command]), words
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


@pytest.mark.parametrize("verb", [[], ["preset"], ["ds"]])
def test_without_a_command_help_stands_alone(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(verb) == 2
    words = capsys.readouterr()
    assert "Usage: memkit" in words.out and "error" not in words.err
