"""Ends a prediction when a program that the script has started trains.

This folder stands first in PYTHONPATH of these programs (`descendants.py`), so that each Python imports this file when
it starts. Any Python 3 may: the syntax is that of 3.6, and before a training begins only os and sys are imported.
A training is one of the calls in `_TRAINS`, or a scheduler. It writes the script's result, kills the script's process
and exits. After the prediction, when the folder of the result is gone, everything runs unchanged.
"""

# Types, pathlib and contextlib would be further imports.
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# ruff: noqa: PTH100, PTH104, PTH119, PTH120, PTH123, SIM105

import os
import sys

SCHEDULERS = frozenset(
    {"aprun", "bsub", "jsrun", "mpiexec", "mpiexec.hydra", "mpirun", "orterun", "qsub", "salloc", "sbatch", "srun"}
)
"""Programs that start any program, also on other machines."""

_TRAINS = {
    "transformers.trainer": ("Trainer", "__init__"),
    "transformers.modeling_utils": ("PreTrainedModel", "from_pretrained"),
    "torch.optim.optimizer": ("Optimizer", "__init__"),
    "torch.distributed.run": ("", "run"),
    "accelerate.commands.launch": ("", "launch_command"),
    "deepspeed.launcher.runner": ("", "main"),
}
"""Module -> (class, its function), without a class the module's. It loads weights, starts ranks, or begins a training:
already the constructor of Trainer makes a folder, and a repository on the hub."""

_SERVER = "hf_memkit.prediction.child.serve"
"""Module of memkit that predicts, and trains nothing."""

_STARTS = ("os.exec", "os.posix_spawn", "os.system", "subprocess.Popen")
"""Audit events of programs that Python starts."""


class _Finder:
    """Changes the modules of `_TRAINS` when they are imported."""

    def __init__(self, prediction):
        self.prediction = prediction

    def find_spec(self, name, path=None, target=None):
        if name not in _TRAINS:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                self._change_after_import(spec.loader)
                return spec
        return None

    def _change_after_import(self, loader):
        execute = loader.exec_module

        def execute_and_change(module):
            execute(module)
            kind, name = _TRAINS[module.__name__]
            owner = getattr(module, kind) if kind else module
            original = vars(owner)[name]
            if isinstance(original, classmethod):
                setattr(owner, name, classmethod(self._ending(original.__func__)))
            else:
                setattr(owner, name, self._ending(original))

        loader.exec_module = execute_and_change

    def _ending(self, function):
        import functools  # the library has imported it

        does = _LOADS if function.__name__ == "from_pretrained" else _IS_TRAINING

        @functools.wraps(function)
        def ends_prediction(*args, **kwargs):
            _end_prediction(self.prediction, *does)
            return function(*args, **kwargs)

        return ends_prediction


_IS_TRAINING = ("starts a real training", "Give memkit the training script that it starts")
_LOADS = ("starts a program that loads weights", "Give memkit its script if it trains; else run it before you predict")


def _end_prediction(prediction, what, fix):
    """Writes the script's result, and ends its process and this one; returns if that prediction has ended.
    `prediction`: the JSON of `[process, path of the result, line of the script]`."""
    import json
    import shlex

    script, result, line = json.loads(prediction)
    with open("/proc/self/cmdline", "rb") as file:
        words = os.fsdecode(file.read()).split("\0")[:-1]
    command = " ".join(shlex.quote(word) for word in words)
    if len(command) > 200:
        command = command[:200] + "…"
    message = f"{what}: {command}. {fix}"
    failed = {"by_script": False, "type": "StartedTraining", "message": message, "place": line, "text": ""}
    written = f"{result}.{os.getpid()}"
    try:
        with open(written, "w") as file:
            json.dump({"failed": failed}, file)
        os.rename(written, result)
    except OSError:
        return
    try:
        os.kill(script, 9)
    except OSError:
        pass
    os._exit(1)


def _audit(prediction):
    def audit(event, arguments):
        if event in _STARTS:
            given = arguments[0] if event == "os.system" else arguments[1]
            words = given.split() if isinstance(given, (str, bytes)) else list(given)
            words = [os.path.basename(os.fsdecode(word)) for word in words]
            if words[1:2] == ["-c"]:
                words = words[2].split() if words[2:] else []
            if SCHEDULERS.intersection(words[:1]):
                _end_prediction(prediction, *_IS_TRAINING)

    return audit


def _import_hidden():
    """Imports the `sitecustomize` that this one hides."""
    own = sys.modules.pop(__name__)
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", __name__) != __name__:
            raise
        sys.modules[__name__] = own


if __name__ == "sitecustomize":
    _given = os.environ.get("MEMKIT_PREDICTION")
    if _given and _SERVER not in getattr(sys, "orig_argv", ()):
        sys.meta_path.insert(0, _Finder(_given))
        if hasattr(sys, "addaudithook"):
            sys.addaudithook(_audit(_given))
    _import_hidden()
