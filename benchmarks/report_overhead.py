"""What the memory report costs: time added to a training step, against nothing and against what others do.

    python benchmarks/report_overhead.py                  # about five minutes on two cores; writes the evidence
    python benchmarks/report_overhead.py --rounds 1 --steps 20 --long-steps 100 --out /tmp   # a quick look

All arms train the same GPT-2 of 148 parameter tensors, one after the other, round after round, so that whatever else
the machine does hits all alike. Two figures, because they fail in different ways:

* `added`: the median step of an arm less that of the arm it is compared with, in the same round; then the median over
  rounds, with the lowest and the highest. True, but noisy where steps take milliseconds.
* `inside`: the time spent in the arm's own callbacks and hooks, the mean over all steps, so that what is done at some
  steps only counts too. Includes the stopwatch; leaves out what the arm makes slower elsewhere (a busy thread).

Then one long training with phases and categories on, to see that a step costs at the end what it costs at the
beginning, and where the time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.overhead_arms import ARMS, OURS, PARTS, Arm, Size, Timings, make_model, memkit, memkit_with_allocator
from benchmarks.overhead_arms import with_trainer as trainer_arm
from benchmarks.provenance import RESULTS, provenance

ROUNDS: Final = 5
STEPS: Final = 150
LONG_STEPS: Final = 10_000
WARM_UP: Final = 20  # steps left out of each training: first allocations, and what looks closely at the beginning


def usable_arms(*, on_gpu: bool) -> tuple[list[Arm], list[str]]:
    """The arms that run here, and a line for each that does not."""
    missing = [arm for arm in ARMS if arm.needs is not None and find_spec(arm.needs) is None]
    left_out = [f"{arm.name}: {arm.needs} is not installed" for arm in missing]
    return [arm for arm in ARMS if arm not in missing and not (arm.cpu_only and on_gpu)], left_out


def measure_rounds(arms: Sequence[Arm], size: Size, rounds: int, steps: int) -> dict[str, list[Timings]]:
    """Every arm once a round, in turn."""
    measured: dict[str, list[Timings]] = {arm.name: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            print(f"round {number + 1} of {rounds}: {arm.name}", file=sys.stderr, flush=True)
            measured[arm.name].append(run_quietly(arm, size, WARM_UP + steps))
    return measured


def run_quietly(arm: Arm, size: Size, steps: int) -> Timings:
    """One training in a folder of its own that is gone afterwards; what it prints is dropped."""
    with tempfile.TemporaryDirectory(prefix="memkit-overhead-") as folder, contextlib.redirect_stdout(None):
        return arm.train(size, steps, Path(folder))


def summarize(arm: Arm, measured: dict[str, list[Timings]]) -> dict[str, Any]:
    """An arm's row, in µs a step: what cannot be told is absent."""
    own = measured[arm.name]
    medians = [statistics.median(timings.step_us[WARM_UP:]) for timings in own]
    row: dict[str, Any] = {"arm": arm.name, "what": arm.what, "step_us": statistics.median(medians)}
    if arm.against is not None:
        others = [statistics.median(timings.step_us[WARM_UP:]) for timings in measured[arm.against]]
        added = [mine - other for mine, other in zip(medians, others, strict=True)]
        row["against"] = arm.against
        row["added_us"] = statistics.median(added)
        row["added_us_range"] = [min(added), max(added)]
    if all(timings.inside_us for timings in own):
        means = [statistics.fmean(timings.inside_us[WARM_UP:]) for timings in own]
        row["inside_us"] = statistics.median(means)
        row["inside_us_range"] = [min(means), max(means)]
    return row


def measure_long(size: Size, steps: int, *, on_gpu: bool) -> dict[str, Any]:
    """One long training: the cost of a step at its beginning and its end, the file and this process's memory."""
    callbacks = memkit() if on_gpu else memkit_with_allocator
    with tempfile.TemporaryDirectory(prefix="memkit-overhead-") as folder, contextlib.redirect_stdout(None):
        timings = trainer_arm(callbacks, OURS)(size, steps, Path(folder))
        file_bytes = (Path(folder) / "memory-rank0.jsonl").stat().st_size
    inside, tenth = timings.inside_us, max(1, steps // 10)
    return {
        "steps": steps,
        "first_tenth_us": statistics.fmean(inside[:tenth]),
        "last_tenth_us": statistics.fmean(inside[-tenth:]),
        "first_tenth_median_us": statistics.median(inside[:tenth]),
        "last_tenth_median_us": statistics.median(inside[-tenth:]),
        "highest_us": max(inside),
        "file_bytes": file_bytes,
    }


def measure_parts(size: Size, steps: int, *, on_gpu: bool) -> dict[str, float]:
    """Where our time goes, µs a step by part; more stopwatches, so that the sum is more than `inside`."""
    arm = Arm("parts", "", trainer_arm(memkit() if on_gpu else memkit_with_allocator, PARTS))
    return dict(sorted(run_quietly(arm, size, WARM_UP + steps).parts_us.items()))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, µs a step."""
    lines = [f"{'arm':<20}{'step':>10}{'added':>10}{'lowest':>10}{'highest':>10}{'inside':>10}"]
    for row in rows:
        low, high = row.get("added_us_range", (None, None))
        numbers = (row["step_us"], row.get("added_us"), low, high, row.get("inside_us"))
        lines.append(f"{row['arm']:<20}" + "".join(f"{'–' if n is None else format(n, '.0f'):>10}" for n in numbers))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often every arm trains")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each of these trainings")
    parser.add_argument("--long-steps", type=int, default=LONG_STEPS, help="steps of the long training")
    parser.add_argument("--only", nargs="*", metavar="ARM", help="only these arms and what they are compared with")
    parser.add_argument("--width", type=int, default=Size.width, help="GPT-2's hidden size")
    parser.add_argument("--batch", type=int, default=Size.batch, help="sequences a step")
    parser.add_argument("--length", type=int, default=Size.length, help="tokens a sequence")
    parser.add_argument("--cpu-clock", action="store_true", help="time inside is CPU time: for a machine that is busy")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the evidence")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import torch

    on_gpu = torch.cuda.is_available()
    size = Size(width=options.width, batch=options.batch, length=options.length, cpu_clock=options.cpu_clock)
    arms, left_out = usable_arms(on_gpu=on_gpu)
    if options.only is not None:
        wanted = {*options.only, *(arm.against for arm in arms if arm.name in options.only)}
        arms = [arm for arm in arms if arm.name in wanted]
    print("\n".join(left_out), end="\n" if left_out else "", file=sys.stderr)
    measured = measure_rounds(arms, size, options.rounds, options.steps)
    rows = [summarize(arm, measured) for arm in arms]
    tensors = [parameter.numel() for parameter in make_model(size).parameters()]
    evidence = {
        "schema": 1,
        "benchmark": "report_overhead",
        "model": {**asdict(size), "parameter_tensors": len(tensors), "parameters": sum(tensors)},
        "rounds": options.rounds,
        "steps": options.steps,
        "arms": rows,
        "left_out": left_out,
        "long": measure_long(size, options.long_steps, on_gpu=on_gpu),
        "parts_us": measure_parts(size, options.steps, on_gpu=on_gpu),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        **provenance(),
    }
    name = torch.cuda.get_device_name().replace(" ", "-") if on_gpu else "cpu"
    path = options.out / f"report_overhead-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=2) + "\n")
    print(table(rows))
    print(json.dumps({"long": evidence["long"], "parts_us": evidence["parts_us"]}, indent=2))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
