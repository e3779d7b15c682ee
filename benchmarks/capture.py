"""What memkit says now, as files: to be taken before the code is moved and after, and compared byte for byte.

    python benchmarks/capture.py before/         # some 20 minutes; --part NAME takes one part
    git switch ...
    python benchmarks/capture.py after/
    diff -r before after

In: nothing. Out: a folder a part, a file a case: the command, its exit code, what it printed, and the files that it
wrote. Everything goes through the command line, which outlives what is behind it. What differs from machine to machine
and from hour to hour (RAM, cores, disk, the folder) is pinned.

| part | cases |
|---|---|
| recipes | every recipe × variant × GPU, `--dry-run --json`; without a GPU; as text; exported |
| presets | every preset × model, `preset show` as JSON and as files |
| deepspeed | every DeepSpeed preset × model, `ds copy` |
| explain | every stored message of `tests/measuring/out_of_memory`, as JSON and as text |
| check | every file of the pack, of the docs and of `tests/checks`'s cases, as JSON |
| help | every verb's `--help` |
| predictions | 24 predictions, traced |
| traced | every recipe × variant on the recipe's GPU, traced |
| scripts | the scripts of `tests/predict_script/jobs`, predicted for a T4 |
| plans | plans of three of them, and of a model with a preset |
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

ROOT: Final = Path(__file__).resolve().parents[1]
GPUS: Final = ("16GB", "T4", "A100 80GB")
MODELS: Final = ("gpt2-xl", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-1.7B")
RAM: Final = "64GB"

Case = tuple[str, list[str]]
"""The name of the case, and the command."""


def recipes() -> Iterator[Case]:
    from hf_memkit.recipes.schema import load_recipe

    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = load_recipe(path.stem)
        base = ["recipe", path.stem, "--ram", RAM]
        for variant in (*recipe.variants, "auto"):
            for gpu in GPUS:
                named = [*base, "--variant", variant, "--gpu", gpu]
                yield f"{path.stem}/{variant}-{gpu}.json", [*named, "--dry-run", "--json"]
            yield f"{path.stem}/{variant}-none.json", [*base, "--variant", variant, "--dry-run", "--json"]
            yield f"{path.stem}/{variant}-export", [*base, "--variant", variant, "--export", "job", "--json"]
        yield f"{path.stem}/text", [*base, "--gpu", "16GB", "--dry-run"]
        yield f"{path.stem}/short", [*base, "--gpu", "16GB", "--dry-run", "--short"]
        yield f"{path.stem}/rehearsal", [*base, "--dry-run"]
    for name, more in {
        "steps": ["--max-steps", "7"],
        "length": ["--sequence-length", "256", "--variant", "infinity"],
        "nvme": ["--variant", "infinity", "--nvme-path", "fast"],
        "optim": ["--set", "optim=adamw_torch", "--set", "learning_rate=1e-4", "--variant", "lora"],
        "batch": ["--set", "per_device_train_batch_size=4"],
        "gpus": ["--gpus", "4", "--variant", "offload"],
    }.items():
        yield f"asked/{name}.json", ["recipe", "gpt2-on-16gb", *more, "--ram", RAM, "--gpu", "16GB", *_SHOWN]


_SHOWN: Final = ["--dry-run", "--json"]


def presets() -> Iterator[Case]:
    from hf_memkit.presets import PRESETS

    for name in PRESETS:
        for model in MODELS:
            base = [name, "--model", model, "--gpu", "RTX 3090", "--ram", RAM]
            slug = model.rpartition("/")[2]
            yield f"{name}/{slug}.json", ["preset", "show", *base, "--json"]
            yield f"{name}/{slug}-batch.json", ["preset", "show", *base, "--batch-size", "32", "--json"]
        yield f"{name}/text", ["preset", "show", name, "--model", MODELS[0], "--gpu", "T4", "--ram", RAM]
        yield f"{name}/bare.json", ["preset", "show", name, "--json"]
        own = ["--set", "use_cpu=true", "--set", "optim=sgd"]
        yield f"{name}/cpu.json", ["preset", "show", name, *own, "--json"]
        yield f"{name}/file", ["preset", "copy", name, "args.yaml", "--model", MODELS[0], "--gpu", "RTX 3090"]
    yield "list.json", ["preset", "list", "--json"]
    yield "techniques", ["preset", "list", "--techniques"]


def deepspeed() -> Iterator[Case]:
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        for model in MODELS:
            base = ["ds", "copy", path.stem, "ds.json", "--model", model, "--gpu", "16GB", "--ram", RAM]
            more = ["--gpus", "4"] if "infinity" not in path.stem else ["--nvme-path", "."]
            yield f"{path.stem}/{model.rpartition('/')[2]}", [*base, *more, "--accelerate"]


def explain() -> Iterator[Case]:
    from tests.measuring.out_of_memory import oom_messages, tracebacks

    texts = {f"message-{number}": example.text for number, example in enumerate(oom_messages.EXAMPLES)}
    found = [value for value in vars(tracebacks).values() if isinstance(value, list | tuple)]
    for number, example in enumerate(each for group in found for each in group if hasattr(each, "text")):
        texts[f"traceback-{number}"] = example.text
    texts |= {f"text-{k.lower()}": v for k, v in vars(tracebacks).items() if isinstance(v, str) and k.isupper()}
    for name, text in texts.items():
        yield f"{name}.json", ["explain", _file(name, text), "--json"]
        yield name, ["explain", _file(name, text)]


def checks() -> Iterator[Case]:
    from tests.checks.cases import CASES

    for path in sorted((*(ROOT / "ds_configs").glob("*.json"), *(ROOT / "recipes").glob("*.yaml"))):
        yield f"pack/{path.name}.json", ["check", str(path), "--json", "--fail-on", "hint"]
    for rule, cases in CASES.items():
        jobs = [(f"{rule}-{number}-{kind}", getattr(c, kind)) for number, c in enumerate(cases) for kind in _KINDS]
        for name, job in jobs:
            given = []
            for part, content in (("ds", job.config), ("args", job.arguments)):
                with contextlib.suppress(TypeError):  # an object that no file can hold
                    given += [_file(f"{name}-{part}.json", json.dumps(content))] if content else []
            if given:
                command = ["check", given[0], *(["--args", given[1]] if len(given) > 1 else [])]
                yield f"cases/{name}.json", [*command, "--gpu", "RTX 3090", "--json", "--fail-on", "hint"]


_KINDS: Final = ("bad", "good")


def helps() -> Iterator[Case]:
    verbs: tuple[list[str], ...] = (
        [], ["recipe"], ["predict"], ["preset"], ["preset", "show"], ["preset", "copy"], ["preset", "list"],
             ["ds"], ["ds", "copy"], ["ds", "check"], ["check"], ["explain"], ["report"], ["doctor"])  # fmt: skip
    for verb in verbs:
        yield "-".join(verb) or "memkit", [*verb, "--help"]


def predictions() -> Iterator[Case]:
    for model in MODELS:
        base = ["predict", "--model", model, "--ram", RAM]
        for name, more in {
            "defaults": ["--gpu", "A100 80GB", "--set", "bf16=true"],
            "resident": ["--gpu", "RTX 3090", "--preset", "resident"],
            "lora": ["--gpu", "RTX 3090", "--preset", "lean+lora", "--batch-size", "4"],
            "qlora": ["--gpu", "T4", "--preset", "qlora", "--batch-size", "1"],
            "offload": ["--gpu", "16GB", "--preset", "offload"],
            "zero3": ["--gpu", "A100 80GB", "--preset", "zero3", "--gpus", "4"],
        }.items():
            yield f"{model.rpartition('/')[2]}-{name}", [*base, *more, "--json"]
    yield "text", ["predict", "--model", "gpt2-xl", "--gpu", "T4", "--ram", RAM]
    yield "short", ["predict", "--model", "gpt2-xl", "--gpu", "T4", "--ram", RAM, "--short"]
    for name in ("gpt2-on-16gb", "llama-8b-qlora-on-16gb", "bert-large-on-8gb", "long-context-8b-on-80gb"):
        yield f"recipe-{name}", ["predict", "--recipe", name, "--ram", RAM, "--gpu", "24GB", "--json"]


def traced() -> Iterator[Case]:
    from hf_memkit.recipes.schema import load_recipe

    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = load_recipe(path.stem)
        for variant in (*recipe.variants, "auto"):
            base = ["recipe", path.stem, "--ram", RAM, "--variant", variant, "--gpu", recipe.card]
            yield f"{path.stem}/{variant}.json", [*base, "--dry-run", "--json"]


def scripts() -> Iterator[Case]:
    for name in _jobs():
        yield f"{name}.json", ["predict", "--gpu", "T4", "--ram", RAM, "--json", "--no-search", *_of_job(name)]


def plans() -> Iterator[Case]:
    base = ["plan", "--gpu", "T4", "--ram", RAM, "--limit", "900", "--json"]
    for name in ("lora_chat", "causal_lm_blocks", "masked_lm"):
        yield f"{name}.json", [*base, *_of_job(name)]
    yield "gpt2-xl.json", [*base, "--model", "gpt2-xl", "--preset", "resident"]


def _jobs() -> dict[str, Any]:
    from tests.predict_script.job_list import read_job, typed_jobs

    jobs = ROOT / "tests" / "predict_script" / "jobs"
    if not Path("jobs").exists():
        prepare = [sys.executable, str(jobs / "prepare.py"), "jobs"]
        subprocess.run(prepare, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=sys.stderr)
    read = {
        name: read_job(typed, Path("jobs").absolute(), Path("out"), on_cpu=False)
        for name, typed in typed_jobs().items()
    }
    return {name: script for name, (script, variables) in read.items() if not script.is_module and not variables}


def _of_job(name: str) -> list[str]:
    script = _jobs()[name]
    return [script.target, "--", *script.arguments]


PARTS: Final[dict[str, Callable[[], Iterator[Case]]]] = {
    "help": helps, "explain": explain, "check": checks, "deepspeed": deepspeed, "presets": presets,
    "recipes": recipes, "predictions": predictions, "traced": traced, "scripts": scripts, "plans": plans,
}  # fmt: skip


def _file(name: str, text: str) -> str:
    path = Path("given") / (name if "." in name else f"{name}.log")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def say(command: list[str]) -> str:
    """The command, its exit code, what it printed and wrote."""
    from hf_memkit.cli import main

    before = set(Path().rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(command)
        except SystemExit as error:
            code = error.code
    parts = [f"$ memkit {' '.join(command)}", f"exit {code}", out.getvalue(), err.getvalue()]
    for path in sorted(set(Path().rglob("*")) - before):
        if path.is_file():
            parts.append(f"=== {path}\n{path.read_text(encoding='utf-8')}")
    for path in sorted(set(Path().iterdir()) - before - {Path("jobs")}):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = "\n".join(parts).replace(str(Path.cwd()), "HERE").replace(str(ROOT), "MEMKIT")
    return re.sub(r"\d+(?:\.\d+)? s\b", "N s", said)


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """This machine with 64 GB of RAM, eight cores and 500 GB of free disk, whatever it has."""
    import psutil

    usage = shutil._ntuple_diskusage(10**12, 5 * 10**11, 5 * 10**11)
    memory = psutil.virtual_memory()._replace(total=64 * 2**30, available=60 * 2**30)
    with (
        mock.patch("shutil.disk_usage", lambda path: usage),
        mock.patch("psutil.virtual_memory", lambda: memory),
        mock.patch("psutil.cpu_count", lambda logical=True: 8),
        mock.patch("os.cpu_count", lambda: 8),
        mock.patch("os.sched_getaffinity", lambda pid: set(range(8))),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder, or one whose files are replaced")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; repeatable")
    parser.add_argument("--without", action="append", choices=list(PARTS), default=[], help="all but this one")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    folder = arguments.folder.resolve()
    wanted = [name for name in arguments.part or PARTS if name not in arguments.without]
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch), pinned():
        for part in wanted:
            shutil.rmtree(folder / part, ignore_errors=True)
            for count, (name, command) in enumerate(PARTS[part](), 1):
                path = folder / part / name.replace(" ", "")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(say(command), encoding="utf-8")
                print(f"\r{part}: {count}", end="", file=sys.stderr)
            print(file=sys.stderr)


if __name__ == "__main__":
    main()
