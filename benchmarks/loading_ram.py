"""RAM that loading a model takes, in the forms in which it is loaded: on a CPU, with real checkpoint files.

    python benchmarks/loading_ram.py        # under a minute; writes the evidence

Each load runs in a process of its own (a fork of this one, with everything imported). Linux tells three figures:

* `anonymous`: memory that is the process's own afterwards, what was swapped out included. It cannot be dropped.
* `mapped`: pages of the checkpoint file itself. The system drops them when it needs room, and processes share them.
* `peak`: the highest of both together while loading (VmHWM, reset before).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance

MIB = 2**20


def status() -> dict[str, float]:
    """MiB of this process, by Linux's name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon", "RssFile", "VmSwap")))
    return {key: int(value.split()[0]) / 1024 for key, value in pairs}


def in_child(load: Callable[[], Any]) -> dict[str, float]:
    """What `load` takes in a forked process.

    Raises:
        RuntimeError: it failed there.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the parent's threads did not come along
            ctypes.CDLL(None).malloc_trim(0)  # or the load would use memory that the parent has freed and kept
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            before = status()
            model = load()
            after = status()
            found = {
                "peak_mib": after["VmHWM"] - before["VmRSS"],
                "anonymous_mib": sum(after[key] - before[key] for key in ("RssAnon", "VmSwap")),
                "mapped_mib": after["RssFile"] - before["RssFile"],
                "weights_mib": sum(parameter.nbytes for parameter in model.parameters()) / MIB,
            }
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("the load failed in its process")
    result: dict[str, float] = json.loads(text)
    return result


def make_checkpoints(folder: Path, width: int, layers: int) -> None:
    """The same random Llama as fp32 and fp16 safetensors files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=16000, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "fp32")
    model.half().save_pretrained(folder / "fp16")


def loads(folder: Path) -> dict[str, Callable[[], Any]]:
    """By what it is called in the docs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def load(name: str, dtype: Any = None) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, **({} if dtype is None else {"dtype": dtype}))

    def random(dtype: Any) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "fp32"), dtype=dtype)

    return {
        "fp16 file, no dtype given": lambda: load("fp16"),
        "fp16 file, dtype float32": lambda: load("fp16", torch.float32),
        "fp16 file, dtype bfloat16": lambda: load("fp16", torch.bfloat16),
        "fp32 file, dtype float32": lambda: load("fp32", torch.float32),
        "fp32 file, dtype bfloat16": lambda: load("fp32", torch.bfloat16),
        "fp32 file, all read, then .bfloat16()": lambda: load("fp32").bfloat16(),
        "no file, random weights in float32, then .bfloat16()": lambda: random(torch.float32).bfloat16(),
        "no file, random weights in bfloat16": lambda: random(torch.bfloat16),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_checkpoints(folder, options.width, options.layers)
        rows = [{"load": name, **in_child(load)} for name, load in loads(folder).items()]
    evidence = {
        **provenance(),
        "command": "python benchmarks/loading_ram.py",
        "model": {"width": options.width, "layers": options.layers},
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "loading_ram.json"
    path.write_text(json.dumps(evidence, indent=2) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
