"""One rank that publishes numbers and takes part in no collective. Prints what it has heard; a line on its standard
input ends it."""

from __future__ import annotations

import json
import sys
import threading
import time

import torch.distributed

from hf_memkit.measuring.callback import numbers_of_ranks

numbers_of_ranks._INTERVAL_S = 0.05  # type: ignore[misc]


def main() -> None:
    torch.distributed.init_process_group("gloo")
    told_to_end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told_to_end.set()), daemon=True).start()
    numbers = numbers_of_ranks.join_ranks()
    assert numbers is not None
    if numbers.rank == 2:
        time.sleep(2)  # one that has not reported yet
    step, longest_ms = 0, 0.0
    while not told_to_end.wait(0.05):
        step += 1
        began = time.perf_counter()
        numbers.publish(step, {"peak_allocated_gib": numbers.rank + step / 1000})
        heard = numbers.heard()
        longest_ms = max(longest_ms, (time.perf_counter() - began) * 1000)
        report = {rank: [known.step, known.numbers, known.age_s] for rank, known in heard.items()}
        print(json.dumps({"step": step, "heard": report, "longest_ms": longest_ms}), flush=True)
    began = time.perf_counter()
    numbers.close()
    print(json.dumps({"close_s": time.perf_counter() - began, "failure": numbers._shared.failure}), flush=True)


if __name__ == "__main__":
    main()
