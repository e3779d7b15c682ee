"""A predicted script starts no training elsewhere: which commands train, and every way to start one."""

from __future__ import annotations

import ast
import os
import shlex
import sys
from pathlib import Path

import pytest

from hf_memkit.prediction.child.script.in_descendants import sitecustomize
from hf_memkit.prediction.child.script.training_commands import training_command
from tests.predict_script.conftest import Predict
from tests.predict_script.test_command import TINY

PACKAGES = Path(pytest.__file__).parents[1]

FILES = {
    "train.py": "import torch\n",
    "download.py": "import missing, subprocess\nimport datasets\nfrom transformers import AutoTokenizer\n",
    "models.py": "from transformers import AutoModel\n",
    "run.sh": "#!/bin/bash\n# torchrun no.py\nif true; then\n torchrun --nproc-per-node 2 \\\n train.py --lr 1\nfi",
    "env.sh": "#!/usr/bin/env bash\npip install accelerate\necho 'then torchrun train.py'\ngit clone x/deepspeed\n",
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
    "trl sft --lr 1": "",
    "vllm serve model": "",
    "env -i A=1 B=2 timeout 10 python train.py": "train.py",
    "A=1 torchrun train.py": "train.py",
    "sh -c 'cd x && torchrun train.py > log'": "train.py",
    "bash run.sh": "train.py --gpus 2 -- --lr 1",
    "./run.sh": "train.py --gpus 2 -- --lr 1",
    "conda run -n other python train.py": "train.py",
    "python -m train": "-m train",
    "python -um trl.scripts.sft --lr 1": "-m trl.scripts.sft -- --lr 1",
    "python -m cProfile -o x train.py": "train.py",
    "python models.py": "models.py",
}
RUN = [
    "git clone accelerate", "nvidia-smi -q", "gcc -v", "hostname", "ldconfig -p", "accelerate env", "torchrun --help",
    "python -c 'import torch'", "python -Ic 'import torch'", "python -m pip install torch", "python -m venv x",
    "python", "python -m torch.utils.collect_env", "python download.py", "python -m download", "bash env.sh",
    "srun hostname", "mpirun --version", "sh -c 'nvidia-smi | head -1'", "env FOO=1 hostname", "hf download x",
    f"python {PACKAGES}/torch/_inductor/compile_worker/__main__.py", "sh -c 'echo \"torchrun train.py\"'", "xargs",
    "python broken.py", "python missing.py", "python -m not_installed.train",
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
    found = training_command(shlex.split(command), files)
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


TRAINS = "import job; job.main()"
LOADS = "from transformers import GPT2Model as M; M.from_pretrained('nowhere/model')"
STEPS = "import torch; torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0).step(); open('trained', 'w')"
IN_DESCENDANTS = {
    "code": f"subprocess.run([sys.executable, '-c', {TRAINS!r}])",
    "weights": f"subprocess.run([sys.executable, '-c', {LOADS!r}], env={{**os.environ, 'A': '1'}})",
    "own loop": f"os.spawnve(os.P_WAIT, sys.executable, [sys.executable, '-c', {STEPS!r}], {{'A': '1'}})",
    "stdin": f"subprocess.run([sys.executable], input={TRAINS!r}, text=True, cwd=os.getcwd())",
    "shell": f"os.system('cd . && echo \"{TRAINS}\" | ' + sys.executable + ' -')",
    "indirect": "subprocess.run([sys.executable, 'indirect.py'])",
    "console script": "os.popen('./console').read()",
    "variable in a shell script": "subprocess.run(['sh', 'given.sh', sys.executable, '-c', 'import job; job.main()'])",
    "background": f"p = subprocess.Popen([sys.executable, '-c', {TRAINS!r}]); import time; time.sleep(300)",
    "scheduler": "subprocess.run([sys.executable, '-c', 'import os; os.system(\"./sbatch job.sh\")'])",
    "launcher": "subprocess.run('L=torchrun; $L job.py', shell=True)",
}
CHEAP_DESCENDANTS = ("scheduler",)


@pytest.mark.parametrize(
    "way",
    [name if name in CHEAP_DESCENDANTS else pytest.param(name, marks=pytest.mark.slow) for name in IN_DESCENDANTS],
)
def test_a_training_in_a_descendant_ends_the_prediction(predict: Predict, tmp_path: Path, way: str) -> None:
    """Nothing of the command shows that it trains; the script would go on after it."""
    (tmp_path / "job.py").write_text(
        f"{TINY}\ndef main():\n    trainer(tiny(), use_cpu=True).train()\n    open('trained', 'w')\n"
        "if __name__ == '__main__': main()\n"
    )
    (tmp_path / "indirect.py").write_text("import job\njob.main()\n")
    (tmp_path / "given.sh").write_text('exec "$@"\n')
    for name, text in {"console": f"#!{sys.executable}\n{TRAINS}\n", "sbatch": "#!/bin/sh\ntouch trained\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outcome = predict(f"import os, subprocess, sys\n{IN_DESCENDANTS[way]}\n", environment={"PATH": path})
    assert outcome.failed is not None, outcome
    assert outcome.failed.type == "StartedTraining" and outcome.failed.place == "train.py, line 2"
    assert not (tmp_path / "trained").exists() and not (tmp_path / "out").exists()


def test_any_python_3_reads_what_descendants_import() -> None:
    ast.parse(Path(sitecustomize.__file__).read_text(), feature_version=(3, 6))


READS = """
    from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast
    GPT2Config().save_pretrained("made")
"""


@pytest.mark.parametrize("reads", ["", pytest.param(READS, marks=pytest.mark.slow)], ids=["nothing", "tokenizers"])
def test_descendants_keep_their_environment(predict: Predict, tmp_path: Path, reads: str) -> None:
    """A program runs, also one that reads a config and a tokenizer, with the user's `sitecustomize` and PYTHONPATH,
    and in a program that it starts. The script sees none of memkit's variables."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("hidden = 1\n")
    prepare = """
import os, subprocess, sys, sitecustomize
assert sitecustomize.hidden and "site" in sys.path[1], sys.path
if "A" not in os.environ:
    READS
    inner = "import os, sitecustomize; open('inner', 'w').write(os.environ['PYTHONPATH']); sitecustomize.hidden"
    subprocess.run([sys.executable, "-c", inner], check=True)
"""
    (tmp_path / "prepare.py").write_text(prepare.replace("READS", reads.strip()))
    code = """
import os, subprocess, sys
before = dict(os.environ)
given = {**before, "A": "1"}
for environment in (None, given):
    subprocess.run([sys.executable, "prepare.py"], check=True, env=environment)
assert given == {**before, "A": "1"} and dict(os.environ) == before and "MEMKIT_PREDICTION" not in before
os.environ["PYTHONPATH"] = "other"
assert subprocess.run(["sh", "-c", "echo $PYTHONPATH"], capture_output=True, text=True).stdout.endswith(":other\\n")
os.posix_spawn("/bin/true", ["true"], os.environ)
assert os.environ["PYTHONPATH"] == "other"
"""
    outcome = predict(code, environment={"PYTHONPATH": str(tmp_path / "site")})
    assert outcome.untrained is not None and outcome.untrained.exit is None, outcome
    assert (tmp_path / "inner").read_text().endswith(f":{tmp_path}/site")


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
