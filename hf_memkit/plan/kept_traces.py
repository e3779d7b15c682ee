"""Traces of earlier plans, by content: who trains the same with the same libraries need not be traced again.

A key is made of the script's file, of what its own training comes to (its trace, what it says of itself, the lengths
of all its rows), the settings in the place of its own, and the code that traced it. So another model, other data,
another line of the script, or another version make another key. A module beside the script counts only by what it
changes of the script's own training.
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

from hf_memkit.prediction import wire
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.traced_training import Outcome, TracedTraining
from hf_memkit.setup.script_overrides import Overrides

_MOST_BYTES: Final = 200 * 2**20
"""Of all files together: some hundred traces. The oldest go first."""


class KeptTraces:
    """
    Args:
        own: what came of the script as it stands.
        request: what it was asked on.
    """

    def __init__(self, own: TracedTraining, request: ScriptRequest) -> None:
        asked_on = (request.device, request.capability, request.processes, request.per_node)
        script = request.script
        file = Path(script.target)
        source = file.read_text(errors="replace") if not script.is_module and file.is_file() else script.target
        own = replace(own, host=None)  # measured anew each time
        text = wire.dumps([source, script.arguments, own, asked_on, _versions()], sort_keys=True)
        self._folder = _cache_folder() / "traces"
        self._key = hashlib.sha256(text.encode()).hexdigest()

    def find(self, overrides: Overrides, result: Path) -> bool:
        """Whether such a trace was kept, which is then at `result`."""
        path = self._path(overrides)
        with contextlib.suppress(OSError, ValueError):
            wire.loads(Outcome, path.read_text())
            shutil.copyfile(path, result)
            path.touch()
            return True
        return False

    def keep(self, overrides: Overrides, result: Path) -> None:
        """Keeps a trace; does nothing where that cannot be written."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._path(overrides)
            temporary = path.with_suffix(f".{os.getpid()}")
            shutil.copyfile(result, temporary)
            temporary.replace(path)
            self._drop_oldest()

    def _path(self, overrides: Overrides) -> Path:
        asked = json.dumps(overrides.to_json(), sort_keys=True)
        return self._folder / f"{hashlib.sha256((self._key + asked).encode()).hexdigest()}.json"

    def _drop_oldest(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
        held = 0
        for each in files:
            held += each.stat().st_size
            if held > _MOST_BYTES:
                each.unlink(missing_ok=True)


def _cache_folder() -> Path:
    """By the XDG Base Directory Specification, which wants an absolute path."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return folder / "memkit"


@cache
def _versions() -> dict[str, str]:
    """Of everything that is installed, because any library can have made the Trainer, and of memkit's own code: a
    checkout changes without its number."""
    found = {each.name: each.version for each in distributions()}
    own = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for path in sorted([*(package / "prediction").rglob("*.py"), *(package / "components").glob("chunked_loss*.py")]):
        own.update(path.read_bytes())
    return {**found, "memkit": own.hexdigest()}
