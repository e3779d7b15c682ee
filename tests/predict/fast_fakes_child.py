"""Traces one request twice, with and without remembered results, each in a process of its own.

    python -m tests.predict.fast_fakes_child < requests.json      # a list; prints a list of [with, without, share]

`share` is how many of the operations were answered from memory.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_memkit.prediction.child import fast_fakes, serve
from hf_memkit.prediction.child.training import trace_training
from hf_memkit.prediction.trace_request import TraceRequest


def traced(content: dict[str, Any], place: Path, *, fast: bool) -> None:
    asked, hits = [0], [0]
    run = fast_fakes.FastFakes.run

    def counted(self: Any, func: Any, args: Any, kwargs: Any, rule: Any = None) -> Any:
        asked[0] += 1
        if not fast:
            return (rule or func)(*args, **kwargs)
        before = len(self._known)
        result = run(self, func, args, kwargs, rule)
        hits[0] += len(self._known) == before
        return result

    fast_fakes.FastFakes.run = counted  # type: ignore[method-assign]
    trace = trace_training(TraceRequest.from_json(content)).to_json()
    place.write_text(json.dumps({"trace": trace, "share": hits[0] / asked[0]}))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the server ends when its standard input is closed
    why = serve._load()
    assert why is None, why
    found = []
    with TemporaryDirectory() as folder:
        for content in asked:
            pair = []
            for fast in (True, False):
                place = Path(folder) / f"{fast}.json"
                place.unlink(missing_ok=True)
                ended = serve._forked(partial(traced, content, place, fast=fast), 300)
                assert ended is None, ended
                pair.append(json.loads(place.read_text()))
            found.append([pair[0]["trace"], pair[1]["trace"], pair[0]["share"]])
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    serve._leave(main)
