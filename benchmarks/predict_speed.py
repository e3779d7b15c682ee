"""How long `memkit predict` takes, whole and with the child kept, beside what other tools answer to the same cases.

    python benchmarks/predict_speed.py [--only gpt2-xl]      # minutes; writes benchmarks/results/predict_speed.json

Each case: bf16 autocast, every layer checkpointed, AdamW, one sequence. `whole_s`: the command, from nothing.
`kept_s`: a second setting of the same model (twice the batch) in a process whose child has loaded its libraries.
`ram_gib`: the highest sum of the proportional set sizes of the command and its children, looked at ten times a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.predict_peers import PEERS
from benchmarks.provenance import RESULTS, provenance
from hf_memkit.catalog.architectures import built_in

ROOT: Final = Path(__file__).resolve().parents[1]
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the length of its sequence, and how long the whole command may take."""

    model: str
    length: int
    whole_bar_s: float
    kept_bar_s: float | None = None


CASES: Final = (
    Case("gpt2-xl", 1024, 12, 3),
    Case("Llama-3.1-8B", 4096, 15),
    Case("Llama-3.1-70B", 4096, 40),
)

PEER_S: Final = 90
"""After how many seconds another tool is stopped: more than twice what the slowest case may take here."""

KEPT = """
import json, sys, time
from dataclasses import replace
from hf_memkit.setup.job import Job
from hf_memkit.catalog.hardware import gpu_of_size, this_machine
from hf_memkit.prediction import predict
from hf_memkit.prediction.defaults import default_setup, describe_model
found = describe_model(sys.argv[1])
setup = default_setup(found, {"bf16": True, "activation_checkpointing": True})
machine = this_machine().with_gpu(gpu_of_size("80GB"))
for batch in (1, 2):
    started = time.monotonic()
    predict(replace(setup, job=Job(found.facts, machine, batch, int(sys.argv[2]))))
print(json.dumps(time.monotonic() - started))
"""


def whole_command(case: Case) -> dict[str, Any]:
    """One `memkit predict`: its seconds, its RAM, its answer."""
    command = [
        sys.executable, "-m", "hf_memkit", "predict", "--model", case.model, "--gpu-memory", "80GB", "--json",
        "--batch-size", "1", "--sequence-length", str(case.length),
        "--set", "bf16=true", "--set", "activation_checkpointing=true",
    ]  # fmt: skip
    started, most = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            most = max(most, _held(root))
            time.sleep(0.1)
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
    return {
        "whole_s": time.monotonic() - started,
        "ram_gib": most / GIB,
        "answer_gib": answer["peak_allocated_gib"],
        "reserved_gib": answer["peak_reserved_gib"],
        "confidence": answer["confidence"],
    }


def _held(root: psutil.Process) -> int:
    """Bytes of a process and all below it; shared pages count once."""
    total = 0
    try:
        for process in (root, *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:
        return 0  # one of them ended meanwhile
    return total


def run(case: Case) -> dict[str, Any]:
    known = built_in(case.model)
    assert known is not None
    asked = json.dumps({"config": dict(known[1].config), "batch": 1, "length": case.length})
    row: dict[str, Any] = {"model": case.model, "length": case.length, **whole_command(case)}
    kept = subprocess.run(
        [sys.executable, "-c", KEPT, case.model, str(case.length)], capture_output=True, text=True, cwd=ROOT
    )
    row["kept_s"] = json.loads(kept.stdout.splitlines()[-1])
    row["bars_s"] = {"whole": case.whole_bar_s, "kept": case.kept_bar_s}
    row["peers"] = {}
    for name in PEERS:
        row["peers"][name] = ask_peer(name, asked)
    return row


def ask_peer(name: str, asked: str) -> dict[str, Any]:
    """What another tool answers within `PEER_S`."""
    started = time.monotonic()
    command = [sys.executable, str(ROOT / "benchmarks" / "predict_peers.py"), name, asked]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PEER_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PEER_S} s", "whole_s": time.monotonic() - started}
    lines = ran.stdout.strip().splitlines()
    answer = json.loads(lines[-1]) if ran.returncode == 0 and lines else {"error": ran.stderr.strip()[-500:]}
    return {**answer, "whole_s": time.monotonic() - started}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rows = []
    for case in CASES:
        if options.only in (None, case.model):
            rows.append(run(case))
            print(json.dumps(rows[-1], indent=2), flush=True)
    evidence = {**provenance(), "command": "python benchmarks/predict_speed.py", "rows": rows}
    path = options.out / "predict_speed.json"
    path.write_text(json.dumps(evidence, indent=2) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
