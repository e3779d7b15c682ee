"""What a script sees of the process that it runs in, as JSON; then it ends as requested."""

import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass, fields


@dataclass
class Pickled:
    number: int = 1

    def __call__(self, more):
        return f"{type(self).__module__} {self.number + more}"


def sees():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "path": sys.path[:3],
        "names": sorted(vars(main)),
        "main": {
            name: str(getattr(main, name)) for name in ("__file__", "__name__", "__package__", "__cached__", "__doc__")
        },
        "kinds": [type(main.__builtins__).__name__, type(main.__loader__).__name__, __spec__ and __spec__.name],
        "pickled by the name of": sys.modules[Pickled.__module__] is main,
        "annotations": [field.type.__name__ for field in fields(Pickled)],  # strings under another's `from __future__`
        "environment": dict(os.environ),
        "excepthook": repr(sys.excepthook),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "filters": [str(each) for each in warnings.filters],
        "imported": [name for name in ("torch", "transformers", "huggingface_hub", "numpy") if name in sys.modules],
    }


def fails():
    try:
        raise ValueError("first")
    except ValueError as error:
        error.add_note("a note")
        raise KeyError("second") from error


if __name__ == "__main__":
    print(json.dumps(sees()))
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "spawns":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(Pickled(), [2, 3]))
    elif how == "fails":
        fails()
    elif how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(20)
    elif how == "leaves":
        sys.stdout.flush()
        os._exit(5)
    elif how:
        sys.exit(int(how) if how.isdigit() else how)
