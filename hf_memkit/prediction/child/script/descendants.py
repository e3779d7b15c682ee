"""Ends the prediction when a program that the script starts trains, however it was started.

Each program gets `in_descendants/` first in its PYTHONPATH, and `MEMKIT_PREDICTION`. In a Python, the `sitecustomize`
there waits for a training. The script's own `os.environ` stays as it is. A program without these variables (`env -i`,
`python -I`, ssh, a container) is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posix
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.as_json import dumps
from hf_memkit.prediction.child.user_code import users_line

_FOLDER: Final = str(Path(__file__).with_name("in_descendants"))

Result = Callable[[], tuple[int, Path]]
"""Returns the script's process, and the path of its result."""


def watch_descendants(result: Result) -> Callable[[], None]:
    """Gives the variables to all programs from here on. Returns a function to call before each start: it renews those
    of programs that get this process's environment."""

    def variables(given: Mapping[str, str]) -> dict[str, str]:
        process, path = result()
        packages = os.pathsep.join(filter(None, (_FOLDER, given.get("PYTHONPATH"))))
        return {"PYTHONPATH": packages, "MEMKIT_PREDICTION": dumps([process, str(path), users_line()])}

    def renew() -> None:
        for name, value in variables(os.environ).items():
            os.putenv(name, value)  # of the process; `os.environ` does not show it

    def with_variables(function: Any, index: int) -> Any:
        """The function, whose argument `env` or with this index is an environment."""

        @functools.wraps(function)
        def start(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("env", args[index] if len(args) > index else None)
            if given is not None:
                with contextlib.suppress(TypeError, AttributeError):  # of the given value: starting fails, too
                    full = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
                    full |= variables(full)
                    if "env" in kwargs:
                        kwargs["env"] = full
                    else:
                        args = (*args[:index], full, *args[index + 1 :])
            return function(*args, **kwargs)

        return start

    for name in ("execve", "posix_spawn", "posix_spawnp"):
        replaced = with_variables(getattr(os, name), 2)
        for module in (os, posix):
            setattr(module, name, replaced)
    popen: Any = subprocess.Popen
    popen.__init__ = with_variables(popen.__init__, 11)
    renew()
    return renew
