"""Tests over the limit of CPU time fail, others pass; one that is little over it is measured again."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests import cpu_limit

cpu_limit.LIMIT_S, cpu_limit._import_s = 0.3, lambda: 0.1

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: ")
    config.pluginmanager.register(cpu_limit.CpuLimit(["slow"]))
"""
BURNS = "import time\nuntil = time.process_time() + 0.6\nwhile time.process_time() < until: pass\n"
TESTS = f"""
import subprocess, sys, time, pytest

def burn(seconds=0.6):
    until = time.process_time() + seconds
    while time.process_time() < until: pass

TIMES = iter([0.38, 0.1])

def test_burns(): burn()
def test_is_little_over_each_time(): burn(0.38)
def test_is_little_over_once(): burn(next(TIMES))
def test_a_child_burns(): subprocess.run([sys.executable, "-c", {BURNS!r}], check=True)
def test_a_child_that_lives_burns():
    child = subprocess.Popen([sys.executable, "-c", {BURNS!r} + "print(1, flush=True)\\ninput()"], stdin=-1, stdout=-1)
    child.stdout.readline()
@pytest.mark.slow
def test_slow(): burn()
def test_imports(): import burns
def test_sleeps(): time.sleep(0.5)
"""


def test_what_burns_cpu_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "burns.py").write_text(BURNS)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    failed = {line.split("::")[1].split(" ")[0] for line in ran.stdout.splitlines() if line.startswith("FAILED")}
    burns = {"test_burns", "test_a_child_burns", "test_a_child_that_lives_burns", "test_is_little_over_each_time"}
    assert failed == burns and "4 failed, 4 passed" in ran.stdout, ran.stdout
