"""Trackers start no run above `train()`: nothing is reported, and no file of theirs is written.

Where a library has a disabled mode, the script gets a run of that mode, whatever its arguments are; elsewhere an
`Untracked`. What a script reads from a tracker cannot be made up: it raises.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import tempfile
import types
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.errors import InputError
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.script.notices import notice
from hf_memkit.prediction.child.user_code import users_line


@dataclass(frozen=True, slots=True)
class Tracker:
    """A library by which trainings report. Names are attributes of its module, with dots those of a class there;
    `*` matches several."""

    starts: str  # names that return an `Untracked`; of a disabled mode: see `mode`
    reads: str  # names that raise, in the module and in a run
    mode: str = ""  # name that starts a run, and takes mode="disabled"


TRACKERS: Final = {
    "wandb": Tracker("login setup", "Api agent controller restore sweep use_artifact use_model", mode="init"),
    "swanlab": Tracker("login sync*", "Api OpenApi", mode="init"),
    "trackio": Tracker(
        "init log* finish alert save show sync freeze import_*", "Api use_artifact delete_project",
    ),
    "mlflow": Tracker(
        "active_run start_* end_run log_* set_* create_* update_* enable_* disable_* flush_* autolog login trace "
        "add_trace register_* initialize_logged_model finalize_logged_model",
        "MlflowClient get_run get_parent_run get_experiment* get_logged_model get_trace get_assessment load_* "
        "search_* list_* delete_* restore_* run",
    ),
    "comet_ml": Tracker(
        "*Experiment start init init_onprem login end flush get_global_experiment get_running_experiment",
        "API APIExperiment Optimizer get_comet_api_client get_artifact get_hf_dataset get_metric get_other "
        "get_parameter",
    ),
    "clearml": Tracker(
        "Task.init Task.create Task.current_task Task.set_* Logger.current_logger OutputModel Dataset.create "
        "browser_login",
        "Task.get_* Task.query_tasks Dataset.get Dataset.list_datasets InputModel Model StorageManager.get_* "
        "PipelineController get_parameter* get_models get_registered_artifacts artifacts models",
    ),
    "neptune": Tracker("init_* Run Model ModelVersion Project", "fetch* download* get_structure exists"),
    "dvclive": Tracker("Live", ""),
    "codecarbon": Tracker("EmissionsTracker OfflineEmissionsTracker track_emissions", ""),
    "dagshub": Tracker("init login upload_files DAGsHubLogger dagshub_logger", "get_repo_bucket_client"),
    "azureml.core.run": Tracker("Run.get_context", "get_* download_* input_datasets"),
}  # fmt: skip
"""Those that transformers integrates (5.23.0: integrations/integration_utils.py), but for TensorBoard, whose files are
the script's own, and Flyte and Kubeflow, which report only within their own jobs."""


class ReadsTracker(InputError):
    """A call that reads from a tracker."""


def disable_trackers() -> None:
    """Replaces what starts a tracker, in each library when it is imported; variables do it for processes that the
    script starts."""
    folder = Path(tempfile.gettempdir())  # removed at the end
    os.environ |= dict.fromkeys(("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR"), str(folder))
    os.environ |= {"WANDB_MODE": "disabled", "SWANLAB_MODE": "disabled", "NEPTUNE_MODE": "debug"}
    os.environ["MLFLOW_TRACKING_URI"] = folder.as_uri()
    for library, tracker in TRACKERS.items():
        when_imported(library, functools.partial(_disable, library, tracker))


def _disable(library: str, tracker: Tracker, module: types.ModuleType) -> None:
    for pattern in tracker.starts.split():
        for owner, name in _matching(module, pattern):
            options = {"library": library, "reads": tracker.reads, "call": name}
            setattr(owner, name, type(name, (Untracked,), options))
    for pattern in tracker.reads.split():
        for owner, name in _matching(module, pattern):
            setattr(owner, name, _refused(library, name))
    if not tracker.mode:
        return
    start = getattr(module, tracker.mode)

    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        _note(library, tracker.mode)
        run = start(*args, **{**kwargs, "mode": "disabled"})
        for name in tracker.reads.split():
            for owner in (run, module):  # a run puts its methods into the module
                if hasattr(owner, name):
                    setattr(owner, name, _refused(library, name))
        return run

    setattr(module, tracker.mode, started)


def _matching(module: types.ModuleType, pattern: str) -> list[tuple[Any, str]]:
    """(owner, name) of the callables in the module that match; none: this version has no such name."""
    path, _, last = pattern.rpartition(".")
    try:
        owner = attrgetter(path)(module) if path else module
    except AttributeError:
        return []
    names = {*vars(owner), *getattr(owner, "__all__", ())}  # the second: some are loaded when they are first read
    names = {name for name in names if name not in vars(owner) or callable(getattr(owner, name))}
    return [(owner, name) for name in names if fnmatchcase(name, last)]


class Untracked:
    """A run, and all that belongs to one: every attribute, item and call gives it again, but what reads raises."""

    library = reads = call = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _note(cls.library, cls.call)
        return args[0] if len(args) == 1 and inspect.isfunction(args[0]) else super().__new__(cls)  # a decorator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.config = copy.copy(kwargs.get("config") or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if any(fnmatchcase(name, pattern) for pattern in self.reads.split()):
            raise _reading(self.library, name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and inspect.isfunction(args[0]) else self

    def connect(self, settings: Any, *args: Any, **kwargs: Any) -> Any:
        """ClearML's: gives back what the script connects."""
        return settings

    connect_configuration = connect

    def __getitem__(self, name: Any) -> Any:
        return self

    def __setitem__(self, name: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __str__(self) -> str:
        return "untracked"

    __iter__ = __contains__ = None  # it has no content


def _refused(library: str, name: str) -> type:
    """A class, because scripts name the replaced ones in annotations."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _reading(library, name)

    return type(name, (), {"__new__": refuse})


def _reading(library: str, name: str) -> ReadsTracker:
    return ReadsTracker(
        f"{library}'s {name} reads from a tracker, and a prediction starts none. Read it from a file, or leave it out "
        "while you predict"
    )


_noted: set[str] = set()


def _note(library: str, name: str) -> None:
    """A notice, once for each library."""
    if library not in _noted:
        _noted.add(library)
        notice(
            f"{users_line() or 'the script'}: {library}'s {name} starts nothing; a prediction reports to no dashboard"
        )
