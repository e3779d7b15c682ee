"""Measures on this CPU for `plan_cpu.py`: rates of one core, and steps of real trainings.

    python benchmarks/plan_cpu_child.py FOLDER < CASES

CASES is a JSON list. A case is `{"rates": null}` or `{"setup": …, "length": …, "steps": …}`; its answer is
FOLDER/NUMBER.json. Each runs in a process of its own, forked from this one, which has loaded the libraries, one after
the other.

Times are CPU time of the process, which computes in one thread: what other processes take from the core is not in it,
what they take of caches and of the memory's bandwidth is. The clock's time stands beside it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_memkit.setup.setup import Setup

_PRODUCT: Final = 2048
"""Rows, columns and summed dimension: three fp32 matrices take 50 MB, more than the last cache of this core."""

_COPY_BYTES: Final = 256 << 20

_ROUNDS: Final = 7


def measured_rates() -> dict[str, float]:
    """`"float32"` and `"bfloat16"`: 10^12 FLOP/s of a large product; `"memory"`: 10^9 bytes/s of a large copy, what is
    read and what is written. The best of seven."""
    import torch

    found: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        a, b = (torch.randn(_PRODUCT, _PRODUCT).to(getattr(torch, dtype)) for _ in range(2))
        found[dtype] = 2 * _PRODUCT**3 / _least_s(functools.partial(torch.mm, a, b)) / 1e12
    source = torch.randn(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    found["memory"] = 2 * _COPY_BYTES / _least_s(functools.partial(target.copy_, source)) / 1e9
    return found


def _least_s(run: Callable[[], Any]) -> float:
    run()
    return min(_timed_s(run) for _ in range(_ROUNDS))


def _timed_s(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def trained(setup: Setup, length: int, steps: int) -> dict[str, Any]:
    """Trains with Trainer on made-up tokens; seconds of each step but the first, which fills caches and makes the
    optimizer's states.

    Returns:
        `cpu_s`, `clock_s`: of each step, from its beginning to that of the next; `peak_rss_bytes`: of the process.
    """
    import torch
    from transformers import PrinterCallback, TrainerCallback, default_data_collator

    from hf_memkit.setup.build import build_arguments, build_model, install_model_parts, trainer_class, trainer_options

    cpu_s: list[float] = []
    clock_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            cpu_s.append(time.process_time())
            clock_s.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = build_arguments(
            setup,
            {
                "output_dir": folder, "max_steps": steps + 2, "use_cpu": True, "report_to": [], "save_strategy": "no",
                "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
            },
        )  # fmt: skip
        model = build_model(setup, lambda _: None, random_weights=True)
        install_model_parts(model, setup)
        rows = arguments.train_batch_size * arguments.gradient_accumulation_steps * (steps + 2)
        draws = torch.Generator().manual_seed(1)
        tokens = torch.randint(1, setup["model.architecture"]["vocab_size"], (rows, length), generator=draws)
        examples = [{"input_ids": row, "labels": row.clone()} for row in tokens]
        options = trainer_options(setup, model=model, arguments=arguments, own={"callbacks": [Clock()]})
        options = {"data_collator": default_data_collator, **options}
        trainer = trainer_class(setup)(model=model, args=arguments, train_dataset=examples, **options)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_s": _steps(cpu_s), "clock_s": _steps(clock_s), "peak_rss_bytes": peak}


def _steps(times_s: list[float]) -> list[float]:
    """Of the steps behind the first."""
    return [after - before for before, after in itertools.pairwise(times_s)][1:]


def _answer(case: dict[str, Any]) -> dict[str, Any]:
    if "rates" in case:
        return dict(measured_rates())
    return trained(Setup.from_json(case["setup"]), case["length"], case["steps"])


def main(folder: Path) -> int:
    import peft  # noqa: F401 - loaded once, for all
    import torch
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    for number, case in enumerate(json.load(sys.stdin)):
        child = os.fork()
        if child == 0:
            try:
                found = _answer(case)
            except BaseException as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
            (folder / f"{number}.json").write_text(json.dumps(found), encoding="utf-8")
            os._exit(0)
        os.waitpid(child, 0)
        print(number, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
