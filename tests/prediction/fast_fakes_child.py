"""Traces one request twice, with and without cached results, each in a separate process.

    python -m tests.prediction.fast_fakes_child < asked.json  # [[training, device], …] → [[with, without, share], …]

`share` is how many of the operations were answered from memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import IO, Any

from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.child import serve
from hf_memkit.prediction.child.script.script import run_script
from hf_memkit.prediction.child.tracer import fast_fakes
from hf_memkit.prediction.setup_as_script import SetupJob, as_script
from hf_memkit.prediction.trace.request import Device, ScriptRequest


def traced(script: UserScript, device: Device, result: Path, share: IO[str], *, fast: bool) -> None:
    asked, hits = [0], [0]
    run = fast_fakes.FastFakes.run

    def counted(self: Any, func: Any, args: Any, kwargs: Any, rule: Any = None) -> Any:
        asked[0] += 1
        if not fast:
            return (rule or func)(*args, **kwargs)
        before = len(self._entries)
        result = run(self, func, args, kwargs, rule)
        hits[0] += len(self._entries) == before
        return result

    fast_fakes.FastFakes.run = counted  # type: ignore[method-assign]
    leave = os._exit

    def ended(code: int) -> None:  # where the script comes to `train()`, its process ends
        share.write(str(hits[0] / asked[0]))
        share.flush()
        leave(code)

    os._exit = ended  # type: ignore[assignment]
    run_script(ScriptRequest(script, str(Path.cwd()), dict(os.environ), device=device), result)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the server ends when its standard input is closed
    why = serve._load()
    assert why is None, why
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for content, device in asked:
            traces, shares = [], []
            for fast in (True, False):
                result = Path(tempfile.mkdtemp(dir=folder)) / "result.json"  # a script's files are next to it
                with (
                    as_script(SetupJob.from_json(content)) as script,
                    result.with_name("share").open("w+") as share,
                ):
                    ended = serve._run_in_fork(partial(traced, script, device, result, share, fast=fast), 300)
                    assert ended is None, ended
                    traces.append(json.loads(result.read_text())["training"]["trace"])
                    share.seek(0)
                    shares.append(float(share.read()))
            found.append([*traces, shares[0]])
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    serve._run_and_exit(main)
