"""A predicted script starts no training elsewhere: which commands train, and every way to start one."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from hf_memkit.prediction.child.script.training_commands import training_command
from tests.predict_script.conftest import Predict
from tests.predict_script.test_command import TINY

PACKAGES = Path(pytest.__file__).parents[1]

FILES = {
    "train.py": "import torch\n",
    "starts.py": "import helper, subprocess\n",
    "indirect.py": "from helper import deeper\n",
    "helper/__init__.py": "",
    "helper/deeper.py": "from . import deepest\n",
    "helper/deepest.py": "import os\nos.execv('x', ['x'])\n",
    "download.py": "import json, missing\nfrom datasets import Dataset\nfrom transformers import AutoTokenizer\n",
    "models.py": "from transformers import AutoModel\n",
    "run.sh": "#!/bin/bash\n# torchrun no.py\nL='torchrun --nproc-per-node 2'\n"
    "if true; then\n $L \\\n train.py --lr 1\nfi",
    "env.sh": "#!/usr/bin/env bash\npip install accelerate\necho 'then torchrun train.py'\ngit clone x/deepspeed\n",
    "given.sh": 'exec "$@"\n',
    "broken.py": "print 1\n",
}

TRAIN = {
    "accelerate launch train.py --lr 1": "train.py -- --lr 1",
    "/opt/bin/torchrun --nproc_per_node=4 train.py": "train.py --gpus 4",
    "deepspeed --num_gpus 2 --module pkg.train x.yml": "-m pkg.train --gpus 2 -- x.yml",
    "python -u -m torch.distributed.run --nproc-per-node 2 train.py": "train.py --gpus 2",
    "python3.11 -m accelerate.commands.launch -m pkg.train x.yml": "-m pkg.train -- x.yml",
    "mpirun -np 2 python train.py": "train.py",
    "srun --ntasks 2 --unknown": "",
    "ray job submit": "",
    "env -i A=1 B=2 timeout 10 python train.py": "train.py",
    "A=1 torchrun train.py": "train.py",
    "sh -c 'cd x && torchrun train.py > log'": "train.py",
    "bash -lc 'exec \"$@\"' x torchrun train.py": "train.py",
    "bash run.sh": "train.py --gpus 2 -- --lr 1",
    "./run.sh": "train.py --gpus 2 -- --lr 1",
    "bash given.sh python train.py 8": "train.py -- 8",
    "conda run -n other python train.py": "train.py",
    "python -m train": "-m train",
    "python -um trl.scripts.sft --lr 1": "-m trl.scripts.sft -- --lr 1",
    "python -m cProfile -o x train.py": "train.py",
    "trl sft --lr 1": "",
    "python starts.py": "starts.py",
    "python indirect.py": "indirect.py",
    "python models.py": "models.py",
    "python broken.py": "broken.py",
    "python missing.py": "missing.py",
    "python -m not_installed.train": "-m not_installed.train",
}
RUN = [
    "git clone accelerate", "nvidia-smi -q", "gcc -v", "hostname", "ldconfig -p", "accelerate env", "torchrun --help",
    "python -c 'import torch'", "python -Ic 'import torch'", "python -m pip install torch", "python -m venv x",
    "python", "python -m torch.utils.collect_env", "python download.py", "python -m download", "bash env.sh",
    "srun hostname", "mpirun --version", "sh -c 'nvidia-smi | head -1'", "env FOO=1 hostname", "hf download x",
    f"python {PACKAGES}/torch/_inductor/compile_worker/__main__.py", "sh -c 'echo \"torchrun train.py\"'", "xargs",
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("command", TRAIN)
def test_a_command_that_trains(files: Path, command: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = training_command(shlex.split(command), files, {**os.environ, "PATH": path})
    assert found is not None and found.target == TRAIN[command]


@pytest.mark.parametrize("command", RUN)
def test_a_command_that_does_not(files: Path, command: str) -> None:
    assert training_command(shlex.split(command), files) is None


STARTS = {
    "popen": 'import subprocess; subprocess.run(["torchrun", "elsewhere.py"])',
    "exec": 'import os; os.execvp("torchrun", ["torchrun", "elsewhere.py"])',
    "forked": 'import os, sys; os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "elsewhere.py"])',
    "system": 'import os; os.system("cd . && torchrun elsewhere.py")',
    "shell": 'import os; os.popen("torchrun elsewhere.py").read()',
    "pty": 'import pty; pty.spawn(["torchrun", "elsewhere.py"])',
    "thread": "import subprocess, threading; t = threading.Thread(target=subprocess.call, args=(['torchrun'],)); "
    "t.start(); t.join()",
    "caught": "import subprocess\ntry: subprocess.run(['torchrun', 'elsewhere.py'])\nexcept BaseException: pass",
    "launcher": 'from torch.distributed.run import main; main(["elsewhere.py"])',
    "spawned": "import multiprocessing as m\ndef elsewhere(): open('trained', 'w')\n"
    "p = m.get_context('spawn').Process(target=elsewhere); p.start(); p.join()",
    "torch": "import torch.multiprocessing as m\ndef elsewhere(rank): open('trained', 'w')\n"
    "m.spawn(elsewhere, nprocs=2)",
    "notebook": "from accelerate import notebook_launcher\ndef elsewhere(): open('trained', 'w')\n"
    "notebook_launcher(elsewhere, num_processes=2)",
}
CHEAP = ("popen", "forked", "torch")


@pytest.mark.parametrize(
    "way", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in STARTS]
)
def test_every_way_to_start_one_ends_the_prediction(predict: Predict, tmp_path: Path, way: str) -> None:
    """The launcher that is found is one that would leave a trace."""
    launcher = tmp_path / "bin" / "torchrun"
    launcher.parent.mkdir()
    launcher.write_text(f"#!/bin/sh\ntouch {tmp_path}/trained\n")
    launcher.chmod(0o755)
    (tmp_path / "elsewhere.py").write_text(f"import torch\nopen('{tmp_path}/trained', 'w')\n")
    path = f"{launcher.parent}:{os.environ['PATH']}"
    found = predict(STARTS[way] + "\n" + TINY + "trainer(tiny()).train()", environment={"PATH": path})
    assert not found.training and not (tmp_path / "trained").exists()
    assert found.failed.place.startswith("train.py, line ") or way == "thread"
    assert "elsewhere" in found.failed.message or way == "thread"


def test_train_in_a_process_that_the_script_forks(predict: Predict) -> None:
    code = "import multiprocessing\np = multiprocessing.Process(target=trainer(tiny()).train); p.start(); p.join()\n"
    found = predict(TINY + code)
    assert found.failed.type == "StartedTraining"


def test_other_programs_and_workers_run(predict: Predict, tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import json\nopen('prepared', 'w').close()\n")
    code = """
import multiprocessing, os, subprocess, sys
from datasets import Dataset
assert subprocess.run([sys.executable, "prepare.py"]).returncode == 0
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
assert os.system("true") == 0 and os.popen("echo 1").read() == "1\\n"
assert Dataset.from_list([{"a": 1}, {"a": 2}]).map(lambda row: {"b": row["a"]}, num_proc=2)["b"] == [1, 2]
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(abs, [-1]) == [1]
"""
    found = predict(TINY + code + "trainer(tiny()).train()")
    assert found.training, found
    assert (tmp_path / "prepared").exists()
