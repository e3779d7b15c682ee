"""Seconds to look for out-of-memory messages in one line without end, such as a progress bar's.

    python -m benchmarks.endless_lines

Each line repeats words with which a message, a rank or a prefix may begin. Ten times the length should take about ten
times as long; an expression that backtracks takes up to a hundred times.
"""

from __future__ import annotations

import time
from typing import Final

from hf_memkit.measuring.out_of_memory import find_messages

WORDS: Final = (
    "a", " ", "1", "[rank", "\x1b[", "│ ", "Killed ", "CUDA out of memory. ", "(pid=1", "[[[[", "Process 1 has ",
    ",000", "CUDA error ", "exit code ", "[a] ", "a: ", "> ", '"a',
)  # fmt: skip
SHORT: Final = 20_000


def seconds(words: str, length: int) -> float:
    text = (words * (length // len(words) + 1))[:length]
    started = time.process_time()
    find_messages(text)
    return time.process_time() - started


def main() -> None:
    find_messages(WORDS[-1])
    print(f"{'words':24} {SHORT:>10,} {10 * SHORT:>10,}  times")
    for words in WORDS:
        short, long = seconds(words, SHORT), seconds(words, 10 * SHORT)
        print(f"{words!r:24} {short:10.4f} {long:10.4f} {long / short:6.1f}")


if __name__ == "__main__":
    main()
