"""`memkit predict SCRIPT`, with real processes: the script's process, input, output and files.

Most scripts run in one child process that is loaded once; those that are about starting and ending have their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_memkit import predict_script
from hf_memkit.cli import main
from hf_memkit.cli import predict_script as predict_script_command
from hf_memkit.common.errors import InputError, ScriptFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.run.script import _predict_arguments
from tests.conftest import ROOT

TINY = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (16, 16, 16, 16)]

def tiny(width=32, **options):
    config = GPT2Config(
        n_layer=2, n_embd=width, n_head=2, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0, **options
    )
    return GPT2LMHeadModel(config)

def trainer(model, **options):
    values = {"per_device_train_batch_size": 2, "max_steps": 4, "report_to": "none", "save_strategy": "no", **options}
    return Trainer(model, TrainingArguments("out", **values), train_dataset=rows)
"""

Ran = tuple[int, str, str, str]
"""Exit code, standard output, memkit's lines, and the script's output."""
Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Writes a script, and predicts it as a user types it: `run(code, *arguments, options=[…])`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path.parent / f"{tmp_path.name}-written"

    def of(code: str, *arguments: str, options: tuple[str, ...] = ("--gpu", "T4")) -> Ran:
        (tmp_path / "train.py").write_text(textwrap.dedent(code))
        capsys.readouterr()
        with output.open("wb") as file:
            before = os.dup(2)
            os.dup2(file.fileno(), 2)  # where the script writes; memkit's own lines go to what `capsys` has
            try:
                exited = main(["predict", "train.py", *options, "--", *arguments])
            finally:
                os.dup2(before, 2)
                os.close(before)
        stderr = capsys.readouterr()
        return exited, stderr.out, stderr.err, output.read_text(errors="replace")

    return of


def last(stderr: str) -> str:
    return stderr.strip().splitlines()[-1]


# ---- scripts that train ----


@pytest.mark.slow
def test_a_script_is_predicted_as_it_stands(run: Run, tmp_path: Path) -> None:
    """Would notice: arguments that do not reach it, output on standard output, a variable that hides the GPU, a second
    train() in place of the first, processes that the script leaves."""
    code, out, stderr, written = run(
        TINY
        + """
import os, pathlib, subprocess, time
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
print("x" * 3_000_000)
other = subprocess.Popen(["sleep", "300"], start_new_session=True)
pathlib.Path(f"pid-{other.pid}").touch()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(f"pid-{os.getpid()}").touch()
        time.sleep(300)
    os._exit(0)
while len(list(pathlib.Path().glob("pid-*"))) < 2:
    time.sleep(0.01)
model = tiny()
assert torch.cuda.device_count() == 1 and torch.cuda.get_device_name().endswith("T4")
trainer(model, per_device_train_batch_size=int(sys.argv[1])).train()
print("never here")
trainer(model, per_device_train_batch_size=64).train()
""",
        "3",
        options=("--gpu", "T4", "--html", "page.html"),
    )
    assert code == 0, stderr + written[-2000:]
    assert out.splitlines()[0] in (tmp_path / "page.html").read_text() and out.endswith("Wrote page.html\n")
    assert out.startswith("FITS: ") and "x" * 100 not in out
    assert "train.py: Trainer, GPT2LMHeadModel, " in out and "T4, " in out and "3 × 16 tokens per GPU" in out
    assert "two optimizer steps of Trainer, as train.py makes it, on fake CUDA tensors" in " ".join(out.split())
    assert stderr.splitlines()[0].startswith("memkit: train.py runs on this machine up to ")
    assert written.count("x") >= 3_000_000 and "never" not in written
    assert "a second train() (train.py, line 35)" in " ".join(out.split())
    left = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    assert len(left) == 2 and not any(map(psutil.pid_exists, left))


def test_on_a_terminal_a_line_says_that_time_goes_by(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: a preparation that looks like a hang, and progress lines in a log file."""
    monkeypatch.setattr(predict_script_command, "_FIRST_S", 0.2)
    progress: list[str] = []

    def tell(line: str) -> None:
        if line.startswith("train.py runs: "):
            progress.append(line.rpartition(": ")[2])
        if len(progress) == 4:
            (tmp_path / "enough").touch()

    monkeypatch.setattr(predict_script_command, "tell", tell)
    run("import time; time.sleep(1)")
    assert progress == []
    monkeypatch.setattr(predict_script_command, "is_terminal", lambda: True)
    run("import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.01)")
    assert progress[:4] == ["0 s", "0 s", "1 s", "2 s"], "after 0.2, 0.4, 0.8 and 1.6 s"


@pytest.mark.slow
def test_one_that_does_not_fit_is_told_what_to_change_in_its_own_words(run: Run) -> None:
    """Would notice: advice that names memkit's options or a preset, a wrong exit code, GPUs that are not counted."""
    big = TINY + "\ntrainer(tiny(4096), per_device_train_batch_size=1).train()\n"
    code, out, stderr, _ = run(big, options=("--gpu-memory", "4GB", "--gpus", "2", "--ram", "64GB"))
    assert code == 1, stderr
    assert out.startswith("DOES NOT FIT: ")
    assert "LoRA" in out and "batch_size" not in out and "--batch-size" not in out, "it is 1 already"
    assert "preset" not in out and "2 × 4GB GPU" in out
    assert "the first of 2 ranks" in out and "RAM of 2 processes, each: " in out


FINDS = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": torch.zeros(64, dtype=torch.long), "labels": torch.zeros(64, dtype=torch.long)}] * 400
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20_000, n_positions=64))
batch, finds, evaluates = int(sys.argv[1]), sys.argv[2] == "finds", int(sys.argv[3])
print("a run of the script", file=open("runs", "a"))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=batch, auto_find_batch_size=finds, max_steps=2, report_to="none",
    save_strategy="no", per_device_eval_batch_size=evaluates or 1, eval_strategy="steps" if evaluates else "no")
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
"""


@pytest.mark.slow
def test_the_batch_that_trainer_finds_is_the_largest_that_fits(run: Run, tmp_path: Path) -> None:
    """Would notice: a verdict on another batch than the training's; a script that runs for each batch."""
    options = ("--gpu-memory", "2GB", "--json", "--no-search")

    def predicted(*arguments: str) -> tuple[int, dict[str, Any]]:
        code, out, stderr, _ = run(FINDS, *arguments, options=options)
        assert out, stderr
        return code, json.loads(out)

    code, found = predicted("200", "finds", "0")
    batch, tried = found["request"]["micro_batch_size"], [200]
    assert (tmp_path / "runs").read_text().count("run") == 1
    while tried[-1] > 1:
        tried.append(int(tried[-1] * 0.9))  # accelerate 1.15: utils/memory.py
    assert code == 0 and batch in tried[1:], batch
    assert any("200" in note and str(batch) in note for note in found["notes"] if "auto_find_batch_size" in note)
    assert predicted(str(batch), "", "0")[0] == 0
    assert predicted(str(tried[tried.index(batch) - 1]), "", "0")[0] == 1
    code, found = predicted("4", "finds", "200")  # an evaluation: Trainer tries nothing
    assert code == 1 and found["peak_phase"] == "evaluate" and found["request"]["micro_batch_size"] == 4


def test_the_search_goes_on_where_the_script_waits(run: Run, tmp_path: Path) -> None:
    """Would notice: first lines that run again for the search, such as minutes of tokenising."""
    counts = '\nopen("runs", "a").write("run ")\n'
    code, out, stderr, _ = run(
        TINY + counts + "trainer(tiny(2048), per_device_train_batch_size=4).train()\n",
        options=("--gpu-memory", "2100MB", "--json"),
    )  # fmt: skip
    assert code == 1 and (tmp_path / "runs").read_text() == "run " and "starts again" not in stderr
    assert json.loads(out)["try_next"]["peak_gib"] > 0


def test_nothing_is_looked_for_where_that_is_not_wanted(run: Run) -> None:
    """Would notice: `memkit run --predict`, which asks so, that waits for a search before it trains."""
    big = TINY + "\ntrainer(tiny(4096), per_device_train_batch_size=1).train()\n"
    asked = _predict_arguments(UserScript("train.py", arguments=("--x",)), "--json", "--no-search")
    assert asked == ["predict", "--json", "--no-search", "train.py", "--", "--x"]
    code, out, stderr, _ = run(big, options=("--gpu-memory", "4GB", "--no-search", "--json"))
    assert code == 1 and json.loads(out)["try_next"] is None and "looking for" not in stderr


LONG_ROW = (
    TINY
    + """
lengths = {"both": [16] * 60 + [64], "usual": [16] * 60, "worst": [64] * 8, "long": [65] * 8}[sys.argv[1]]
rows = [{"input_ids": list(range(length)), "labels": list(range(length))} for length in lengths]

def padded(picked):
    most = max(len(row["labels"]) for row in picked)
    return {name: torch.tensor([row[name] + [0] * (most - len(row[name])) for row in picked]) for name in picked[0]}

arguments = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=3, report_to="none")
Trainer(tiny(256), arguments, train_dataset=rows, data_collator=padded).train()
"""
)


@pytest.mark.slow
def test_the_worst_batch_stands_beside_a_usual_one(run: Run) -> None:
    """Would notice: one long row that is missed, and a trace in which the batches are mixed up."""
    json_of, cases = ("--gpu", "T4", "--json"), ("both", "usual", "worst", "long")
    both, typical, worst, long = (json.loads(run(LONG_ROW, rows, options=json_of)[1]) for rows in cases)
    too_long = "rows of 65 tokens are longer than the model's 64 positions"
    assert [any(too_long in note for note in each["notes"]) for each in (both, worst, long)] == [False, False, True]
    batches = both["request"]["batches"]
    assert (batches["worst"], batches["usual"]["batch"]) == ("4 × 64 tokens", "4 × 16 tokens")
    assert both["request"]["sequence_length"] == 64 and both["request"]["accumulation"] == 3
    assert both["peak_allocated_gib"] == pytest.approx(worst["peak_allocated_gib"], rel=0.005)
    outside = both["outside_allocator_gib"]
    assert batches["usual"]["total_gib"] == pytest.approx(typical["peak_reserved_gib"][1] + outside, rel=0.01)
    assert typical["request"]["batches"] is worst["request"]["batches"] is None
    assert not batches["smaller"], "it fits as it is"
    code, out, _, _ = run(LONG_ROW, "both", options=("--gpu-memory", "650MB", "--no-search"))
    assert code == 1 and "A typical batch, 4 × 16 tokens, needs " in out
    assert "With per_device_train_batch_size=2 and gradient_accumulation_steps=6 the worst needs " in out
    assert "With rows of at most 16 tokens the worst needs " in out


PADDED = """
import sys, torch
from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

kind, attention = sys.argv[1], "flash_attention_2" if sys.argv[1] == "flat" else "sdpa"
config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1000, n_positions=2048, attn_implementation=attention)
lengths = [16] * 60 + [2048, 64, 64, 64] if kind != "flat" else [2048, 64, 64, 64] * 4
rows = [{"input_ids": list(range(1, 1 + length)), "labels": list(range(1, 1 + length))} for length in lengths]

def padded(picked):
    most = max(len(row["labels"]) for row in picked)
    def filled(values):
        return torch.tensor([list(each) + [0] * (most - len(each)) for each in values]) % 1000
    mask = filled([[1] * len(row["labels"]) for row in picked])
    return {name: filled([row[name] for row in picked]) for name in picked[0]} | {"attention_mask": mask}

arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, report_to="none", bf16="fp32" not in sys.argv, save_strategy="no",
    train_sampling_strategy="sequential" if kind == "flat" else "random",
)
collator = DataCollatorWithFlattening() if kind == "flat" else padded
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, data_collator=collator).train()
"""


@pytest.mark.slow
def test_without_padding_the_worst_batch_is_smaller(run: Run) -> None:
    """Would notice: a batch without padding that is predicted with the padded one's attention or length, one that is
    offered where it cannot train, length grouping that is taken for help."""
    small = ("--gpu-memory", "1500MB", "--no-search", "--json")
    padded = json.loads(run(PADDED, "padded", options=small)[1])
    smaller = padded["request"]["batches"]["smaller"]
    change = 'data_collator=DataCollatorWithFlattening() and attn_implementation="flash_attention_2"'
    flat = json.loads(run(PADDED, "flat", options=small)[1])
    assert padded["request"]["batches"]["worst"] == "4 × 2,048 tokens" and flat["request"]["sequence_length"] == 2240
    total = flat["peak_reserved_gib"][1] + flat["outside_allocator_gib"]
    assert smaller[change]["total_gib"] == pytest.approx(total, rel=0.02)
    assert flat["peak_allocated_gib"] < 0.6 * padded["peak_allocated_gib"]
    out = run(PADDED, "padded", options=small[:3])[1]
    assert f"With {change} the worst needs " in out and "Grouping by length would not help" in out
    for options, arguments in ((("--gpu", "T4"), ()), (small[:3], ("fp32",))):  # no kernels; none in 32 bits
        where = (*options, *(small if options[0] == "--gpu" else ("--json",)))
        found = json.loads(run(PADDED, "padded", *arguments, options=where)[1])["request"]["batches"]["smaller"]
        assert found and change not in found


def test_a_batch_of_nothing(run: Run) -> None:
    """Would notice: an error of memkit's own where the script asks for no batch at all."""
    code, _, stderr, _ = run(
        TINY + "\ntrainer(tiny(), gradient_accumulation_steps=-1).train()\n", options=("--gpu", "T4")
    )
    assert code == 2 and "gradient_accumulation_steps=-1: no training; give 1 or more" in last(stderr)


@pytest.mark.parametrize(
    "advice",
    [
        {"T4": "compute capability 8.0"},
        pytest.param({"A10G": "bf16=True instead of fp16=True"}, marks=pytest.mark.slow),
    ],
    ids=["T4", "A10G"],
)
def test_bf16_weights_under_fp16_are_refused(run: Run, tmp_path: Path, advice: dict[str, str]) -> None:
    """Would notice: FITS for the job that stops most often on a T4. transformers loads a checkpoint in bf16 as bf16,
    and no CUDA kernel unscales gradients in bf16."""
    code = (
        TINY
        + """
tiny().bfloat16().save_pretrained("saved")
dtype = {"dtype": sys.argv[1]} if sys.argv[1:] else {}
trainer(GPT2LMHeadModel.from_pretrained("saved", **dtype), fp16=True).train()
"""
    )
    place = (
        code.splitlines().index('trainer(GPT2LMHeadModel.from_pretrained("saved", **dtype), fp16=True).train()') + 1
    )
    for gpu, instead in advice.items():
        exited, out, stderr, _ = run(code, options=("--gpu", gpu, "--json"))
        assert (exited, out) == (2, ""), stderr
        assert (
            f"train.py, line {place}: " in last(stderr)
            and 'dtype="float32"' in last(stderr)
            and instead in last(stderr)
        )
    exited, out, stderr, _ = run(code, "float32", options=("--gpu", "T4", "--json"))
    assert exited == 0 and json.loads(out)["warnings"] == [], stderr


@pytest.mark.slow
def test_bf16_that_the_gpu_emulates_stands_under_the_verdict(run: Run) -> None:
    """Would notice: a job that takes three times as long on a T4, of which predict does not speak."""
    code = TINY + "\ntrainer(tiny(), bf16=True).train()\n"
    warned = json.loads(run(code, options=("--gpu", "T4", "--json"))[1])["warnings"]
    assert len(warned) == 1 and json.loads(run(code, options=("--gpu", "A10G", "--json"))[1])["warnings"] == []
    for short in ((), ("--short",)):
        out = run(code, options=("--gpu", "T4", *short))[1]
        assert out.splitlines()[2] == f"Warning: {warned[0]}.", out


@pytest.mark.slow
def test_a_type_that_cuda_refuses_in_the_script_s_own_code(run: Run) -> None:
    """Would notice: a product of whole numbers, or a histogram in bf16, that only fake tensors compute; a script that
    catches what torch raises, and is refused all the same."""
    model = """
class Own(GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None):
        found = super().forward(input_ids=input_ids, labels=labels)
        try:
            torch.cdist(found.logits, found.logits, p=1.0)
        except NotImplementedError:
            torch.cdist(found.logits.float(), found.logits.float(), p=1.0)
        {line}
        return found
model = Own(tiny().config).bfloat16()
trainer(model).train()
"""
    assert run(TINY + model.format(line="pass"), options=("--gpu", "A10G"))[0] == 0
    for line in ("input_ids @ input_ids.T", "torch.histc(found.logits)"):
        code = TINY + model.format(line=line)
        exited, _, stderr, _ = run(code, options=("--gpu", "A10G"))
        place = next(number for number, each in enumerate(code.splitlines(), 1) if line in each)
        assert exited == 2 and f"train.py, line {place}: aten." in last(stderr), stderr


@pytest.mark.slow
def test_the_allocator_s_variable_is_the_user_s(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: the variable of the environment that is not read, or that is read after the script ran."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:oops")
    code, _, stderr, written = run("print('ran')")
    assert code == 2 and "max_split_size_mb" in last(stderr) and written == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    code, out, stderr, _ = run(TINY + "\ntrainer(tiny()).train()\n", options=("--gpu", "T4", "--json"))
    assert code == 0, stderr
    found = json.loads(out)
    assert found["request"]["script"] == "train.py" and found["request"]["micro_batch_size"] == 2
    assert found["peak_reserved_gib"][0] * 2**30 % 2**21 == 0


@pytest.mark.slow
def test_what_deepspeed_holds_is_computed_from_the_script_s_model(run: Run, tmp_path: Path) -> None:
    """Would notice: an engine that is left out, ranks that are not counted, adapters that count as the whole model."""
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    script = (
        TINY
        + """
model = tiny()
for name, each in model.named_parameters():
    each.requires_grad = "mlp" in name or "mlp" not in sys.argv
trainer(model, bf16=True, deepspeed="ds.json").train()
"""
    )
    found = []
    for gpus, trained in (("1", "all"), ("2", "all"), ("1", "mlp")):
        code, out, stderr, written = run(script, trained, options=("--gpu-memory", "16GB", "--gpus", gpus, "--json"))
        assert code == 0, stderr + written
        found.append(json.loads(out))
    one, two, adapters = ({name: 2**30 * size for name, size in each["categories"].items()} for each in found)
    parameters, few = found[0]["request"]["parameters"], found[2]["request"]["trainable_parameters"]
    # fp32 weights and two moments of what is trained; a few buffers of the step beside them
    assert 12 * parameters <= one["optimizer_gib"] < 14 * parameters
    assert one["optimizer_gib"] / 2 == pytest.approx(two["optimizer_gib"], rel=0.1)
    assert 12 * few <= adapters["optimizer_gib"] < 14 * few < 12 * parameters
    assert "joined with the formulas of what DeepSpeed holds" in found[0]["confidence"]["rests_on"]
    assert found[1]["host_rss_gib"] == 2 * found[0]["host_rss_gib"]


# ---- scripts that do not come to train() ----

ENDS = {
    "ends": ("", "ended without calling Trainer.train(): there is no training to trace", "--do_train"),
    "exits": ("import sys; sys.exit(0)", "ended without calling Trainer.train()", ""),
    "exits with 3": ("import sys; sys.exit(3)", "there is no training to trace (exit code 3)", ""),
    "says why": ("import sys; sys.exit('no data')", "ended without calling Trainer.train()", "no data"),
    "refuses arguments": (
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--data', required=True); p.parse_args()",
        "there is no training to trace (exit code 2)", "train.py: error: the following arguments are required: --data",
    ),
    "ends its process": ("import os; os._exit(7)", "ended its process (exit code 7) before two steps were traced", ""),
    "explains at length": ("raise ValueError('much ' * 100 + 'more')", "much …; fix it and try again", "much more"),
    "shards on one GPU": (
        "raise ValueError('Using fsdp only works in distributed training.')",
        "ValueError: Using fsdp only works in distributed training; give the number of GPUs, such as --gpus 2", "",
    ),
    "raises none": ("class Own(BaseException): pass\nraise Own(1)", "train.py, line 2: Own: 1", 'train.py", line 2'),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL", "RAM"),
    "asks": ("input('Go on? ')", "train.py, line 1: EOFError: EOF when reading", "EOF when reading a line"),
    "misses its data": ("open('data.csv')", "train.py, line 1: FileNotFoundError: ", 'train.py", line 1'),
    "misses a package": ("import no_such", "ModuleNotFoundError: No module named", "No module named 'no_such'"),
    "asks for a value": (
        TINY + "\nmodel = tiny()\nprint(float(model.lm_head.weight.sum()))", "line 19: the script reads the value", ""
    ),
    "trains on the CPU": (TINY + "\ntrainer(tiny(), use_cpu=True).train()\n", "omit use_cpu", ""),
    "another precision": (
        "import os; os.environ['ACCELERATE_MIXED_PRECISION'] = 'fp8'\n" + TINY + "\ntrainer(tiny()).train()\n",
        "ACCELERATE_MIXED_PRECISION=fp8: unset it, and set bf16 or fp16", "",
    ),
    "compiles": (
        TINY + "\ntrainer(tiny(), torch_compile=True, torch_compile_backend='cudagraphs').train()\n",
        "not traced", "",
    ),
}  # fmt: skip


ALIKE = ("exits", "exits with 3", "explains at length", "misses its data", "asks for a value", "another precision")
"""Others end in these ways, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else []) for name in ENDS]
)
def test_one_that_never_trains_says_why(run: Run, name: str) -> None:
    """Would notice: a traceback of memkit's, a message that is lost, an exit code that says it was predicted; words
    that are wrong for a plan, which has the same errors."""
    script, why, beside = ENDS[name]
    code, out, stderr, written = run(script)
    assert code == 2 and out == "", stderr
    assert last(stderr).startswith("memkit: error: train.py") and why in last(stderr), stderr
    assert "predict" not in last(stderr)
    assert beside in stderr + written
    assert "hf_memkit" not in stderr and "child/script/script.py" not in stderr + written


@pytest.mark.parametrize("verb", ["predict", "plan"])
@pytest.mark.parametrize("engine", ["FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "CPU"])
def test_an_engine_that_accelerate_would_choose_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, engine: str
) -> None:
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # which is predicted, but not with another beside it
    monkeypatch.setenv(variable := f"ACCELERATE_USE_{engine}", "true")
    assert main([verb, "train.py", "--gpu", "T4"]) == 2
    assert f"{variable}=true" in last(capsys.readouterr().err) and not (tmp_path / "ran").exists()


def test_ulysses_by_accelerates_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    assert main(["predict", "train.py", "--gpu", "T4"]) == 2
    message = last(capsys.readouterr().err)
    assert "PARALLELISM_CONFIG_SP_SIZE=2" in message and "cp_size" in message and not (tmp_path / "ran").exists()


def test_a_mistake_of_syntax_is_shown_before_anything_is_started(run: Run) -> None:
    """Would notice: ten seconds of loading before that, and memkit's own frames."""
    code, _, stderr, written = run("x = (\n")
    assert code == 2 and written == ""
    assert stderr.splitlines()[0].endswith('File "train.py", line 1') and "SyntaxError: '(' was never closed" in stderr
    assert last(stderr) == "memkit: error: train.py: Python cannot parse it (SyntaxError)"


def test_an_exception_in_the_traced_steps_is_the_script_s(run: Run) -> None:
    """Would notice: a loss that fails reported as memkit's error, and memkit's frames in its traceback."""
    code, _, stderr, _ = run(
        TINY
        + """
class Mine(Trainer):
    def compute_loss(self, *args, **kwargs):
        raise ValueError("my loss")

Mine(tiny(), TrainingArguments("out", report_to="none"), train_dataset=rows).train()
"""
    )
    assert code == 2 and "ValueError: my loss" in stderr and "hf_memkit" not in stderr
    assert "ValueError: my loss; fix it" in last(stderr)


def test_from_python(run: Run, tmp_path: Path) -> None:
    """Would notice: an exception without its traceback, arguments that are given twice."""
    run("print(undefined)")
    with pytest.raises(ScriptFailed, match="line 1: NameError") as caught:
        predict_script("train.py", gpu="T4")
    assert "name 'undefined' is not defined" in caught.value.__notes__[0]
    with pytest.raises(InputError, match="has its own"):
        predict_script(UserScript("train.py"), ["--x"])


# ---- separate processes ----


def started(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return subprocess.Popen(
        [sys.executable, "-m", "hf_memkit", "predict", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_its_world_is_the_user_s_and_the_answer_is_clean_json(tmp_path: Path) -> None:
    """Would notice: standard input that is memkit's requests, variables that memkit sets for itself, noise of the
    libraries that memkit loads, a script's output in the JSON; a module next to the user that is not found."""
    (tmp_path / "job.py").write_text(
        TINY
        + """
import os
print("to standard output"); print("to standard error", file=sys.stderr)
os.system("echo from a child")
assert input("How many? ") == "5", "the first line"
assert sys.stdin.read() == "the rest\\n"
assert "TOKENIZERS_PARALLELISM" not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == "3"
assert __name__ == "__main__" and sys.argv[1:] == ["--config", "a.yaml"], sys.argv
trainer(tiny()).train()
"""
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {"CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": str(ROOT)}
    command = ["predict", "-m", "job", "--gpu", "T4", "--json", "--", "--config", "a.yaml"]
    ran = subprocess.run(
        [sys.executable, "-m", "hf_memkit", *command],
        cwd=tmp_path, env=environment, input="5\nthe rest\n", capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    request = json.loads(ran.stdout)["request"]
    assert (request["script"], request["is_module"], request["arguments"]) == ("job", True, ["--config", "a.yaml"])
    assert request["trainer"] == "Trainer" and request["model_class"] == "GPT2LMHeadModel"
    lines = ran.stderr.splitlines()
    assert lines[0].startswith("memkit: -m job runs on this machine"), "nothing stands above"
    assert {"to standard output", "to standard error", "from a child"} <= set(lines), ran.stderr
    assert "Failed to load" not in ran.stderr and "_pytree" not in ran.stderr


PREPARES = """
import multiprocessing, os, pathlib, subprocess, sys, time

def work(number):
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(300)

if __name__ == "__main__":
    if os.isatty(0):
        import tty
        tty.setraw(0)
    work_of = multiprocessing.get_context(sys.argv[1]).Pool(2)
    found = work_of.map_async(work, range(2))
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path(f"pid-{other.pid}").touch()
    pathlib.Path(f"pid-{os.getpid()}").touch()
    found.get()
"""


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [("fork", signal.SIGINT, 130), ("spawn", signal.SIGTERM, 143), ("fork", signal.SIGKILL, -9)],
)
def test_stopping_it_leaves_nothing_behind(tmp_path: Path, how: str, number: int, code: int) -> None:
    """A script that prepares data in a pool. Would notice: workers, programs and the child process that go on after
    Ctrl-C, SIGTERM, or SIGKILL, after which memkit can run nothing; a traceback for it; a terminal that shows no more
    what is typed."""
    (tmp_path / "train.py").write_text(PREPARES)
    ours, theirs_end = pty.openpty()
    terminal = termios.tcgetattr(ours)
    process = started(tmp_path, "train.py", "--gpu", "T4", "--", how, start_new_session=True, stdin=theirs_end)
    try:
        while len(list(tmp_path.glob("pid-*"))) < 4:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        theirs = [psutil.Process(int(path.name[4:])) for path in tmp_path.glob("pid-*")]
        assert len(theirs) == 4 and termios.tcgetattr(ours) != terminal
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: every process of the group gets it
        else:
            process.send_signal(number)
        out, stderr = process.communicate()
        assert (process.returncode, out) == (code, ""), stderr
        lines = [line for line in stderr.splitlines() if ": starts " not in line]  # the program that it starts
        assert lines[0].startswith("memkit: train.py runs on") and "Traceback" not in stderr
        assert lines[1:] == (["memkit: stopped; no process of the script is left"] if code == 130 else [])
        while number == signal.SIGKILL and any(map(lives, {*below, *theirs})):
            time.sleep(0.05)
        assert not any(map(lives, {*below, *theirs}))
        assert termios.tcgetattr(ours) == terminal or number == signal.SIGKILL
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs_end)
