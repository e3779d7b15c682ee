"""A cache of traces on disk: a plan reuses the traces of earlier plans for the same training.

The key is a hash of the script's file and arguments, the outcome of the unchanged script (its trace, its facts, the
lengths of all its rows), the overridden settings, the versions of all packages and memkit's tracing code. So another
model, other data, a changed line of the script or another version has another key. A change in a module that the
script imports counts only if it changes the trace of the unchanged script.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from hf_memkit.common.user_files import cache_folder
from hf_memkit.prediction import wire
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.traced_training import Outcome, TracedTraining
from hf_memkit.setup.script_overrides import Overrides

_MAX_BYTES: Final = 200 * 2**20
"""Size of the cache, enough for some hundred traces; beyond it the oldest traces are deleted."""


class KeptTraces:
    """The cached traces of one script.

    Args:
        own: the traced training of the unchanged script.
        request: the request that it was traced for.
    """

    def __init__(self, own: TracedTraining, request: ScriptRequest) -> None:
        traced_for = (request.device, request.capability, request.processes, request.per_node)
        script = request.script
        file = Path(script.target)
        source = file.read_text(errors="replace") if not script.is_module and file.is_file() else script.target
        own = replace(own, host=None, notices=())  # they differ in each run
        text = wire.dumps([source, script.arguments, own, traced_for, _versions()], sort_keys=True)
        self._folder = cache_folder() / "traces"
        self._key = hashlib.sha256(text.encode()).hexdigest()

    def find(self, overrides: Overrides, result: Path) -> bool:
        """Copies the cached trace with these overrides to `result`, if there is one. Returns whether there is."""
        path = self._path(overrides)
        with contextlib.suppress(OSError, ValueError):
            wire.loads(Outcome, path.read_text())
            shutil.copyfile(path, result)
            path.touch()
            return True
        return False

    def keep(self, overrides: Overrides, result: Path) -> None:
        """Adds a trace to the cache; does nothing if the cache is not writable."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._path(overrides)
            temporary = path.with_suffix(f".{os.getpid()}")
            shutil.copyfile(result, temporary)
            temporary.replace(path)
            self._drop_oldest()

    def _path(self, overrides: Overrides) -> Path:
        settings = json.dumps(overrides.to_json(), sort_keys=True)
        return self._folder / f"{hashlib.sha256((self._key + settings).encode()).hexdigest()}.json"

    def _drop_oldest(self) -> None:
        """Deletes the oldest files, also those that a killed plan had not completed."""
        files = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > _MAX_BYTES:
                file.unlink(missing_ok=True)


@cache
def _versions() -> dict[str, str]:
    """Versions of all installed packages, because any of them may take part in the training; and a hash of memkit's
    tracing code, because a checkout changes without a new version number."""
    versions = {package.name: package.version for package in distributions()}
    own = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for path in sorted([*(package / "prediction").rglob("*.py"), *(package / "components").glob("chunked_loss*.py")]):
        own.update(path.read_bytes())
    return {**versions, "memkit": own.hexdigest()}
