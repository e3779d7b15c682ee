"""memkit in a separate environment, and comparisons of two real environments.

`other` has the libraries, of which PEFT is the installed one with one line changed, as an upgrade might change it:
each adapter copies what it reads. `own` has memkit and what it prints with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from hf_memkit import predict_script
from hf_memkit.catalog.environments import find_environment, refuse_too_old
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.library_versions import OLDEST
from hf_memkit.cli import main, predict_environments
from hf_memkit.common import boot
from hf_memkit.common.answer.terminal import show
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import format_size
from hf_memkit.prediction.comparison import compare
from hf_memkit.prediction.from_setup import from_trace
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.setup.job import Job
from hf_memkit.setup.setup import Setup
from tests.conftest import ROOT

MIB = 2**20
ROWS, TOKENS, LAYERS, WIDTH = 8, 256, 2, 256
SCRIPT = f"""
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    num_hidden_layers={LAYERS}, hidden_size={WIDTH}, intermediate_size=512, num_attention_heads=4, vocab_size={TOKENS}
)
adapters = LoraConfig(r=8, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), adapters)
rows = [{{"input_ids": torch.arange({TOKENS}), "labels": torch.arange({TOKENS})}}] * {2 * ROWS}
arguments = TrainingArguments(
    "out", per_device_train_batch_size={ROWS}, max_steps=2, report_to="none", save_strategy="no",
    use_cpu="--cpu" in sys.argv,
)
Trainer(model, arguments, train_dataset=rows).train()
"""
LINE = "result = result + lora_B(lora_A(dropout(x))) * scaling"
CHANGED = "result = result + lora_B(lora_A(dropout(x.clone()))) * scaling"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its Python. It has no memkit, no pydantic and no deepspeed, and a package of a name that memkit brings along."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder / "venv", symlinks=True)
    own = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
    places = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and ".compat" in path]
    libraries = folder / "site-packages"
    libraries.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith("deepspeed"):
            (libraries / each.name).symlink_to(each)
    (own / "libraries.pth").write_text("\n".join([*places, str(libraries)]) + "\n")
    (own / "only_there.py").touch()
    (own / "pydantic.py").write_text("raise ModuleNotFoundError('no pydantic', name='pydantic')\n")
    (own / "shellingham.py").write_text("THERE = True\n")
    spec = importlib.util.find_spec("peft")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, own / "peft", ignore=shutil.ignore_patterns("__pycache__"))
    layer = own / "peft" / "tuners" / "lora" / "layer.py"
    assert LINE in layer.read_text()
    layer.write_text(layer.read_text().replace(LINE, CHANGED))
    (own / "peft-9.9.dist-info").mkdir()
    (own / "peft-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 9.9\n")
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
def test_what_differs_between_two_environments_is_named(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Would notice: libraries of this environment in the other's trace, versions read here, a module that is not told
    from its neighbours, memkit's own packages that the other environment would need."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    here, there = (predict_script("train.py", gpu="T4", python=python) for python in (None, other.parents[1]))
    found = compare(here, there)
    copied = LAYERS * ROWS * TOKENS * WIDTH * 4  # of two adapters, instead of one tensor that they share
    modules = {(name.rpartition("layers.*.")[2], kind): pair for (name, kind), pair in found.modules.items()}
    for pair, more in (
        (found.categories["activations"], copied),
        (found.phases["forward"], copied),
        (modules["self_attn.q_proj", "activations"], copied),
        (modules["self_attn.k_proj", "activations"], copied),
        (modules["input_layernorm", "activations"], -copied),
    ):
        assert pair[1] - pair[0] == pytest.approx(more, rel=0.01)
    assert list(found.categories) == ["activations"]
    environment = find_environment(other)
    monkeypatch.setenv("COLUMNS", "120")
    capfd.readouterr()
    show(predict_environments.comparison_answer(here, there, environment, "train.py"))
    message = capfd.readouterr().out
    assert f"with {other}: " in message and "There FITS" in message and "Here FITS" in message
    rows = [" ".join(line.split()) for line in message.splitlines()]
    assert f"peft {version('peft')} 9.9" in rows
    here_bytes, there_bytes = found.categories["activations"]
    assert f"activations {format_size(here_bytes)} {format_size(there_bytes)} +{format_size(copied)}" in rows


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """memkit's command, in an environment without the libraries that train."""
    folder = tmp_path_factory.mktemp("own")
    venv.create(folder / "venv", symlinks=True)
    libraries = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
    names = (*boot._LENT, "packaging", "psutil", "typing_extensions")
    for each in {each for name in names for each in Path(sysconfig.get_path("purelib")).glob(f"{name}*")}:
        (libraries / each.name).symlink_to(each)
    (libraries / "memkit.pth").write_text(f"{ROOT}\n")
    command = folder / "venv" / "bin" / "memkit"
    python = folder / "venv" / "bin" / "python"
    command.write_text(f"#!{python}\nfrom hf_memkit.cli import main_and_exit\nmain_and_exit()\n")
    command.chmod(0o755)
    return command


def typed(own: Path, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`memkit WORDS`, from a shell in which these variables are set, and no environment is active otherwise."""
    inherited = {name: value for name, value in os.environ.items() if name not in (*_SHELL, "PYTHONPATH")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run([own, *words], cwd=folder, env=environment, capture_output=True, text=True)


_SHELL = ("VIRTUAL_ENV", "CONDA_PREFIX")


@pytest.mark.slow
def test_memkit_in_its_own_environment_goes_by_the_active_one(own: Path, other: Path, tmp_path: Path) -> None:
    """Would notice: libraries of memkit's environment in the trace, a package that the other must have for memkit, an
    answer that does not say whose libraries it is of."""
    (tmp_path / "train.py").write_text("import only_there\n" + SCRIPT)
    active = typed(own, tmp_path, "predict", "train.py", "--gpu", "T4", "--json", VIRTUAL_ENV=str(other.parents[1]))
    assert active.returncode == 0, active.stderr
    assert f"with the libraries of {other} (the active environment)" in active.stderr
    found = json.loads(active.stdout)
    expected = predict_script(tmp_path / "train.py", gpu="T4", python=other)
    assert found["verdict"] == "fits" and found["peak_allocated_gib"] == expected.to_json()["peak_allocated_gib"]
    assert found["categories"] == expected.to_json()["categories"]


@pytest.mark.slow
def test_without_the_libraries_a_line_says_what_to_do(own: Path, tmp_path: Path) -> None:
    """Would notice: a traceback, where memkit lies alone and nothing is active; a conda base that is taken for the
    environment that trains; a check that needs torch."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "args.yaml").write_text("output_dir: out\nper_device_batch_size: 3\n")
    (tmp_path / "base" / "bin").mkdir(parents=True)
    (tmp_path / "base" / "bin" / "python").symlink_to(sys.base_prefix + "/bin/python3")
    for words in (
        ["predict", "train.py", "--gpu", "T4"], ["run", "train.py"], ["recipe", "gpt2-on-16gb"],
        ["preset", "show", "resident"], ["ds", "show", "zero2", "--model", "gpt2"],
    ):  # fmt: skip
        ended = typed(own, tmp_path, *words, CONDA_PREFIX=str(tmp_path / "base"))
        assert ended.returncode == 2 and ended.stdout == "", ended
        assert ended.stderr.count("\n") == 1 and "no torch, no transformers" in ended.stderr, ended.stderr
        assert "--python PATH" in ended.stderr
    venv.create(bare := tmp_path / "bare", symlinks=True)
    ended = typed(own, tmp_path, "predict", "train.py", "--gpu", "T4", "--python", str(bare))
    assert ended.returncode == 2 and "no torch, no transformers" in ended.stderr.splitlines()[-1], ended.stderr
    ended = typed(own, tmp_path, "check", "args.yaml")
    assert ended.returncode == 1 and "per_device_train_batch_size" in ended.stdout, ended
    ended = typed(own, tmp_path, "recipe", "--json")
    assert ended.returncode == 0 and "gpt2-on-16gb" in ended.stdout, ended


@pytest.mark.slow
def test_a_run_has_the_report_and_the_imports_of_its_own_environment(own: Path, other: Path, tmp_path: Path) -> None:
    """Would notice: a script that imports memkit's libraries instead of its own, or ones that it lacks."""
    checks = """
import shellingham, sys
assert shellingham.THERE and "typer" not in sys.modules, sorted(sys.modules)
try:
    import pydantic
except ModuleNotFoundError as error:
    assert str(error) == "no pydantic"
else:
    raise AssertionError("pydantic")
"""
    (tmp_path / "train.py").write_text(checks + SCRIPT)
    command = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "train.py", "--cpu"]
    ended = typed(own, tmp_path, "run", "--python", str(other), "--records", "records", "--", *command)
    assert ended.returncode == 0, ended.stderr
    assert "Finished after step 2" in ended.stderr
    assert (tmp_path / "records" / "memory-report.html").exists()


@pytest.mark.slow
def test_where_the_comparison_fails_the_answer_stands(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Would notice: no answer at all, where only the other environment cannot run the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").write_text("import pydantic\n" + SCRIPT)
    assert main(["predict", "train.py", "--gpu", "T4", "--json", "--compare-with", str(other)]) == 0
    found = json.loads(capfd.readouterr().out)
    beside = found["compared_with"]
    assert found["verdict"] == "fits" and beside["python"] == str(other) and beside["prediction"] is None
    assert beside["differences"]["libraries"]["peft"] == {"here": version("peft"), "there": "9.9"}
    why = next(note for note in found["notes"] if note.startswith("not compared with "))
    assert "train.py, line 1" in why and "no pydantic" in why


def test_a_python_that_is_too_old_is_named() -> None:
    """It cannot even read memkit's other files."""
    code = f"import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_path({boot.BOOT!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "Python 3.9. memkit needs 3.11 or later there." in ended.stderr


def test_a_library_that_is_too_old_is_named_with_the_oldest_that_works() -> None:
    found = {"torch": "2.13.0", "transformers": "4.40.2"}
    with pytest.raises(InputError) as raised:
        refuse_too_old(found, "/there/bin/python", "--python /there")
    message = str(raised.value)
    assert f"transformers 4.40.2 is too old: memkit needs {OLDEST['transformers']} or later" in message
    assert "no accelerate" in message and "/there/bin/python -m pip install" in message
    page = (ROOT / "docs" / "your-tools.md").read_text()
    assert all(f"{name} {oldest}" in page for name, oldest in OLDEST.items()), "the page names others"


def test_the_allocator_is_the_one_of_the_torch_that_traced() -> None:
    """Would notice: free blocks in the order of this environment's torch, where another one made the trace."""
    # Two free blocks of 30 MiB, one of them half of a segment. torch 2.13 takes the older segment, so that the other
    # half and its neighbour serve 60 MiB; torch 2.12 the older block, which is that half.
    trace = Trace(
        operations=[""], modules=[""], events=[1, 2, -2, 3, 4, -1, 5, -5, -3, 6, -4, 7], marks=[(12, "forward")]
    )
    for size in (30, 60, 30, 30, 11, 30, 60):
        trace.add(size * MIB, 0)
    job = Job(None, described_machine("T4", None, None, None), 1, 1)
    for torch_version, reserved in (("2.12.1", 150 * MIB), ("2.13.0", 90 * MIB)):
        libraries = {"torch": torch_version, "transformers": "5.17.0"}
        found = from_trace(trace, "cuda", Setup("script"), job, None, [], trainer="Trainer", libraries=libraries)
        assert found.phases["forward"][1] == reserved, torch_version
        assert found.source == f"torch {torch_version}, transformers 5.17.0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such program"),
        ("#!/bin/sh\necho hello", "not a Python that runs here"),
        ("""#!/bin/sh\necho '["3.9.1", {}]'""", "Python 3.9.1. memkit needs 3.11 or later"),
        ("""#!/bin/sh\necho '["3.12.1", {"transformers": "4.47.1"}]'""", "transformers 4.47.1 is too old"),
    ],
)
def test_what_cannot_trace_is_refused_in_a_line(tmp_path: Path, content: str | None, message: str) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(InputError, match="--python") as raised:
        find_environment(python)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_own_environment_is_found_too() -> None:
    found = find_environment(sys.executable)
    assert found.libraries["torch"] == version("torch")
    asked = subprocess.run([found.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
    assert asked.stdout.strip() == sys.prefix
