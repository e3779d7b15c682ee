"""Fixtures and hooks of all tests: a machine, a recipe, the real command line, and the choice of tests to run."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Set before torch is imported: threads that spin while they wait make a busy machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests must not depend on the hub
if "PYTEST_XDIST_WORKER" not in os.environ:  # which inherits it
    # Nothing stays in the user's caches. The hub's keeps its place: XDG_CACHE_HOME would move it.
    os.environ.setdefault(
        "HF_HOME", str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface").expanduser())
    )
    CACHES = tempfile.TemporaryDirectory(prefix="memkit-tests-", ignore_cleanup_errors=True)
    os.environ |= {"XDG_CACHE_HOME": CACHES.name, "HF_DATASETS_CACHE": str(Path(CACHES.name, "datasets"))}

# A shell that runs the tests in the background ignores Ctrl-C, and the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.cli import main
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed import ops
from hf_memkit.prediction.worker import _IRRELEVANT_VARIABLES, Worker, shared_worker
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.setup.techniques.allocator import VARIABLE
from tests import cpu_time
from tests.loaded import Loaded, Ran, loaded

# HF_HOME is set, so no library reads the first one on import; a test may leave the others in its process.
_IRRELEVANT_VARIABLES.update(("XDG_CACHE_HOME", "DS_ACCELERATOR", "DS_LOG_LEVEL"))

# Scripts that tests run use the operators that memkit built, instead of building them again.
os.environ["TORCH_EXTENSIONS_DIR"] = str(ops.extensions_folder(cpu=True))

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return load_recipe("gpt2-on-16gb")


@pytest.fixture(scope="session")
def machine() -> Machine:
    """A 16 GB GPU with bf16, 64 GiB of RAM, 200 GiB of disk."""
    return Machine(gpu_of_size("16GB"), ram_bytes=64 * GIB, disk_free_bytes=200 * GIB, disk_path="/data", cpu_count=8)


MARKERS = {
    "operators": ("--slow", "need a compiled DeepSpeed operator"),
    "slow": ("--slow", "train or start processes beyond one case of each mechanism"),
    "exhaustive": ("--exhaustive", "repeat what others show"),
    "older": ("--older", "need the environments of scripts/older_environments"),
}
"""Marker → (option that runs its tests, why they are left out without it)."""
LEFT_OUT = pytest.StashKey[Counter[str]]()
NO_OPERATORS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    levels = parser.getgroup("levels", "which tests run")
    levels.addoption("--slow", action="store_true", help="slow tests too, and those that need a compiled operator")
    levels.addoption("--exhaustive", action="store_true", help="every test: whole products of lists too")
    levels.addoption("--older", action="store_true", help="those with earlier libraries (scripts/older_environments)")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: it would look through the libraries again and again
    config.stash[LEFT_OUT] = Counter()
    config.pluginmanager.register(cpu_time)
    if not (config.option.slow or config.option.exhaustive or hasattr(config, "workerinput")):
        # An empty folder shows tests that use an operator without the marker, even if this machine has built it.
        config.stash[NO_OPERATORS] = tempfile.TemporaryDirectory()
        os.environ["TORCH_EXTENSIONS_DIR"] = config.stash[NO_OPERATORS].name
        os.environ["TORCH_EXTENSIONS_DIR"] = str(ops.extensions_folder(cpu=True))


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"single", "double"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.operators)
        item.add_marker(pytest.mark.alone)
        item.add_marker(pytest.mark.timeout(3600))  # the first test waits for all trainings
    # Records must be right with every supported transformers: CI also runs these tests with the oldest one.
    if item.path.is_relative_to(ROOT / "tests" / "measuring" / "memory") and "make_trainer" in getattr(
        item, "fixturenames", ()
    ):
        item.add_marker(pytest.mark.compat)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = {"--slow": config.option.slow, "--exhaustive": config.option.exhaustive, "--older": config.option.older}
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        why = [name for name, (option, _) in MARKERS.items() if name in markers and not chosen[option]]
        if why and ("older" in markers or not config.option.exhaustive):
            config.stash[LEFT_OUT][why[-1]] += 1  # the last option is the one that runs it
            left.append(item)
        else:
            kept.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Each training collects garbage. That must not look through all imported modules, which takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["left_out"] = dict(config.stash[LEFT_OUT])
    elif NO_OPERATORS in config.stash:
        built = sorted({path.parent.name for path in Path(config.stash[NO_OPERATORS].name).rglob("build.ninja")})
        if built:
            print(f"\nERROR: tests without the marker `operators` built {', '.join(built)}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        config.stash[NO_OPERATORS].cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints which tests were left out, and the option that runs them."""
    left_out = [] if hasattr(config, "workerinput") else list(config.stash[LEFT_OUT].items())
    notes = [f"{count} tests that {MARKERS[name][1]} (scripts/test {MARKERS[name][0]})" for name, count in left_out]
    if notes:
        print("Left out: " + "; ".join(notes))


@pytest.fixture(autouse=True)
def _restored_process() -> Iterator[None]:
    """Restores what the command line changes in its process, which is also the next test's: the allocator's variable
    and the log level of transformers."""
    before = os.environ.get(VARIABLE)
    yield
    if before is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = before
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None:
        logging.set_verbosity_warning()


VARIANTS = (
    pytest.param("resident", marks=pytest.mark.exhaustive),
    pytest.param("offload", marks=[pytest.mark.operators, pytest.mark.exhaustive]),
    pytest.param("infinity", marks=pytest.mark.operators),
    pytest.param("lora", marks=pytest.mark.exhaustive),
)
"""Variants of the recipe gpt2-on-16gb, for tests that train it. It uses DeepSpeed the most; other recipes train
without."""

Memkit = Callable[..., subprocess.CompletedProcess[str]]
Quick = Callable[..., Ran]


@pytest.fixture
def memkit(tmp_path: Path) -> Memkit:
    """Runs the command line as a user does: in a new process, in an empty folder, without a GPU."""

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        # Keep PYTHONPATH: CI puts an older transformers there.
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
        environment.update(options.pop("env", {}))
        command = [sys.executable, "-m", "hf_memkit", *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=options.pop("cwd", tmp_path), **options
        )

    return run


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """The process that memkit traces in, with the libraries loaded; it forks for each case."""
    started = shared_worker()
    started.wait()
    yield started
    started.close()


@pytest.fixture(scope="session")
def process() -> Iterator[Loaded]:
    with loaded() as started:
        yield started


@pytest.fixture
def quick_memkit(process: Loaded, tmp_path: Path) -> Quick:
    """Like `memkit`, but forked from a process that has imported the libraries, which saves seconds."""
    return lambda *arguments, cwd=tmp_path: process.run(["memkit", *arguments], cwd)


@pytest.fixture
def memkit_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Quick]:
    """Like `memkit`, in this process, for what neither trains nor runs a script."""
    before = dict(os.environ)

    def run(*arguments: str) -> Ran:
        monkeypatch.chdir(tmp_path)
        os.environ.update(CUDA_VISIBLE_DEVICES="", COLUMNS="200")
        capsys.readouterr()
        return Ran(main(list(arguments)), *capsys.readouterr())

    yield run
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A corpus of a few hundred thousand characters that a small model learns quickly."""
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(f"The {n} quick brown foxes jump over {n % 7} lazy dogs." for n in range(6000)))
    return path


def load_script(name: str) -> SimpleNamespace:
    """The names that a file in scripts/ defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / name)))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a records file; each must be valid JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]
