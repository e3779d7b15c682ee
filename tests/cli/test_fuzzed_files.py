"""Any file that a user, a tool or a full disk leaves gets an answer or clear lines: no traceback, and valid JSON."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hf_memkit.catalog.library_versions import fields
from hf_memkit.checks.deepspeed_keys import SECTIONS
from hf_memkit.cli import main
from hf_memkit.common.errors import InputError
from hf_memkit.deepspeed import presets
from hf_memkit.run.planned import PlannedRun

EXAMPLES = pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.exhaustive)])

_KEYS = {key for section in SECTIONS.values() for key in section.keys or {}}
_NAMES = sorted({*fields(), *_KEYS, "no_cuda", "evaluation_strategy", "wandb", "distributed_type"})
NAMES = st.integers(0, len(_NAMES) - 1).map(lambda number: _NAMES[number])


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES | st.text(max_size=5), values, max_size=3)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), NAMES,
    st.sampled_from(["auto", "cpu", "nvme", "0", "1e400", "-1", "bf16", "/", "{", "hf_", "nan"]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | _objects(inner), max_leaves=8)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)

ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 8, "optim": "adamw_torch", "bf16": True, "fsdp": "full_shard",
    "fsdp_config": {"version": 2}, "lr_scheduler_kwargs": {"a": 1}, "deepspeed": presets.load("zero3-offload"),
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "model_name_or_path": "gpt2", "max_length": 512,
}  # fmt: skip
VALID = [ARGUMENTS, *map(presets.load, ("zero2", "zero3-offload", "zero3-infinity-optimizer"))]
LOG = """+ torchrun --nproc_per_node 2 train.py --deepspeed zero3.json --per_device_train_batch_size 8
  File "/site-packages/transformers/models/llama/modeling_llama.py", line 1, in forward
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of
which 1.00 GiB is free. Of the allocated memory 13.00 GiB is allocated by PyTorch
"""


def mutated(valid: Any) -> st.SearchStrategy[Any]:
    """A valid content in which some values, at any depth, are replaced or removed."""

    @st.composite
    def change(draw: st.DrawFn) -> Any:
        content = copy.deepcopy(valid)
        for _ in range(draw(st.integers(1, 3))):
            node = content
            while True:
                keys = list(node) if isinstance(node, dict) else list(range(len(node)))
                if not keys:
                    break
                key = draw(st.sampled_from(keys))
                if isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 2)):
                    node = node[key]
                    continue
                if draw(st.booleans()):
                    node[key] = draw(VALUES)
                else:
                    del node[key]
                break
        return content

    return change()


CONTENTS = st.one_of(VALUES, OBJECTS, *map(mutated, VALID))
TORN = st.tuples(CONTENTS.map(lambda content: json.dumps(content).encode()), st.integers(0, 200)).map(
    lambda torn: torn[0][: torn[1]]
)
FILES = st.one_of(CONTENTS.map(lambda content: json.dumps(content).encode()), TORN, st.binary(max_size=60))
YAML = CONTENTS.map(lambda content: yaml.safe_dump(content, allow_unicode=True).encode("utf-8", "surrogatepass"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzzed")
    (made / "t.log").write_text(LOG)
    return made


@contextlib.contextmanager
def read() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def answers(*words: str) -> None:
    """Runs a command; fails unless it answers or prints an error line."""
    with read() as (out, err):
        code = main(list(words))
    assert code in (0, 1, 2) and "Traceback" not in out.getvalue() + err.getvalue()
    assert code != 2 or err.getvalue().startswith("memkit: "), err.getvalue()
    assert not any(ord(character) < 32 and character not in "\n\t" for character in out.getvalue() + err.getvalue())
    if code != 2 and ("--json" in words or "sarif" in words):
        json.loads(out.getvalue(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def hold(examples: int, contents: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Checks many contents, always the same ones, with no limit of time. A failure is not made smaller."""
    chosen = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    given(contents)(chosen(check))()


CONFIGS = [
    ("check FILE --json", "json"),
    ("check FILE --output-format sarif", "yaml"),
    ("check FILE --args FILE", "json"),
    ("explain t.log --json --args FILE", "json"),
    ("preset show lora --json --args FILE", "yaml"),
    ("preset show zero3-offload --args FILE", "json"),
    ("recipe FILE --dry-run", "yaml"),
]


@EXAMPLES
@pytest.mark.parametrize(("command", "ending"), CONFIGS)
def test_any_config(examples: int, command: str, ending: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = folder / f"config.{ending}"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        answers(*command.replace("FILE", path.name).split())

    hold(examples, YAML | FILES if ending == "yaml" else FILES, check)


@EXAMPLES
def test_any_log(examples: int, folder: Path) -> None:
    path = folder / "any.log"
    lines = st.lists(st.sampled_from(LOG.splitlines()) | st.text(max_size=60) | NAMES, max_size=8)
    words = st.lists(st.sampled_from(LOG.split()) | st.text(max_size=5), max_size=30).map(" ".join)
    texts = (lines.map("\n".join) | words).map(lambda text: text.encode("utf-8", "surrogatepass"))

    def check(content: bytes) -> None:
        path.write_bytes(content)
        answers("explain", str(path), "--json")
        answers("explain", str(path))

    hold(examples, texts | st.binary(max_size=200), check)


@EXAMPLES
def test_any_run_file(examples: int, folder: Path) -> None:
    """Would notice: a KeyError for a damaged run file; a line that does not name it."""
    job = folder / "job"
    options = ("--variant", "resident", "--gpu", "16GB", "--ram", "64GB", "--export", str(job))
    if not job.exists():
        assert main(["recipe", "gpt2-on-16gb", *options]) == 0
    path = job / "memkit-run.json"
    valid = json.loads(path.read_text())
    torn = st.integers(0, len(path.read_bytes()) - 3).map(lambda end: json.dumps(valid)[:end])
    contents = mutated({**valid, "status": "finished"}).map(json.dumps) | VALUES.map(json.dumps) | torn

    def check(content: str) -> None:
        path.write_text(content)
        for words in (
            ("run", str(job)),
            ("recipe", "gpt2-on-16gb", "--output", str(job), "--resume"),
            ("recipe", "gpt2-on-16gb", "--output", str(job)),
            ("report", str(job)),
        ):
            with read() as (out, err):
                code = main(list(words))
            assert code in (1, 2) and not out.getvalue()
            assert err.getvalue().startswith("memkit: error: ") and str(job) in err.getvalue(), err.getvalue()

    try:
        hold(examples, contents, check)
    finally:
        path.write_text(json.dumps(valid))


@EXAMPLES
def test_any_plan_file(examples: int, folder: Path) -> None:
    path = folder / "plan.yaml"
    valid = {
        "arguments": {"per_device_train_batch_size": 4},
        "model": {"dtype": "bfloat16"},
        "environment": {"A": "1"},
        "about": {
            "script": "t.py",
            "gpus": 1,
            "sequences_a_step": 8,
            "prediction": {"a": 1},
            "step_time_s": [1.0, 2.0],
        },
    }

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            PlannedRun.read(path)
        except InputError as error:
            assert str(path) in str(error)

    contents = mutated(valid) | VALUES
    hold(examples, contents.map(lambda content: yaml.safe_dump(content).encode()) | st.binary(max_size=60), check)


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("check FILE", '{"no_cuda": {"a": 1}}'),
        ("explain t.log --args FILE", '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": []}}}'),
        ("check FILE --json", '{"zero_optimization": {"stage": 3}, "stage3_max_reuse_distance": NaN}'),
        ("check FILE", '{"\\b": null}'),
    ],
)
def test_a_file_that_once_had_a_traceback(
    command: str, content: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "once.json").write_text(content)
    answers(*command.replace("FILE", "once.json").split())


def test_a_model_with_its_own_code_is_named_as_one(folder: Path) -> None:
    model = folder / "own code"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (model / "own.py").write_text("open('ran', 'w')")
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    for words in (["check", str(folder / "ds.json")], ["preset", "show", "lora"], ["ds", "show", "zero3"]):
        with read() as (_, err):
            assert main([*words, "--model", str(model)]) == 2
        assert "its own code" in err.getvalue() and "--trust-remote-code" in err.getvalue(), err.getvalue()
    assert not (folder / "ran").exists()
