"""Runs client scripts one after another in one process, each as `python SCRIPT ARGUMENTS` in a folder of its own.

    python -m tests.clients.drive JOBS.json
    torchrun --nproc_per_node 2 -m tests.clients.drive JOBS.json

Jobs are a list of `{"folder", "source", "arguments", "times", "counted"}`. What a script printed and how it ended goes
to `FOLDER/ended-rankR.json`. A script that is run several `times` finds the names that it left, as the cell of a
notebook does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.clients.counted import LIVE

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    import transformers  # before anything is captured: its logger keeps the standard error that it finds

    del transformers
    for job in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(job["folder"])
        os.chdir(folder)
        names = {stream: folder / f"{stream}-rank{RANK}.txt" for stream in ("stdout", "stderr")}
        with captured(1, names["stdout"]), captured(2, names["stderr"]):
            code = run_script(job)
        printed = {stream: path.read_text() for stream, path in names.items()}
        (folder / f"ended-rank{RANK}.json").write_text(json.dumps({"code": code, **printed}))
        forget_deepspeed()
    leave_processes()


def run_script(job: dict[str, Any]) -> Any:
    script = str(Path(job["folder"]) / "script.py")
    sys.argv = [script, *job["arguments"]]
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": script}
    code: Any = 0
    with LIVE if job["counted"] else contextlib.nullcontext():
        for _ in range(job["times"]):
            try:
                exec(compile(job["source"], script, "exec", dont_inherit=True), namespace)
            except SystemExit as leaving:
                code = leaving.code
            except BaseException:
                traceback.print_exc()
                code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@contextlib.contextmanager
def captured(descriptor: int, path: Path) -> Iterator[None]:
    """Sends what is written to the descriptor, by Python or not, to a file."""
    kept = os.dup(descriptor)
    with path.open("wb") as file:
        os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def forget_deepspeed() -> None:
    """What a process that trains once never needs: the next training starts without the last one's engine."""
    gc.collect()
    if "deepspeed" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def leave_processes() -> None:
    if "deepspeed" in sys.modules:
        from hf_memkit.setup.process_group import leave_process_group

        leave_process_group()


if __name__ == "__main__":
    main()
