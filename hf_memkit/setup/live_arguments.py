"""Watches and changes the TrainingArguments objects of a running script, also subclasses such as TRL's configs.

Hooks are installed once the script imports transformers, and stay as long as the process. Therefore only a process
that belongs to the script uses them: that of `memkit run`, or a prediction's child.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import os
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.when_imported import when_imported

_MEMKIT: Final = str(Path(__file__).resolve().parents[1])

_COPIERS: Final = (
    *(str(module.__file__) for module in (copy, copyreg, dataclasses, pickle)),
    *(f"{os.sep}{package}{os.sep}" for package in ("dill", "cloudpickle", "multiprocess")),
)
"""Parts of the paths of code that copies an object without using its values."""

_WHOLE: Final = frozenset({"__str__", "__repr__", "__eq__", "to_dict", "to_json_string", "to_sanitized_dict"})
"""Methods that read all fields to show or copy them."""

_DERIVED: Final[Mapping[str, tuple[str, ...]]] = {
    "mixed_precision": ("bf16", "fp16"),
    "deepspeed_plugin": ("deepspeed",),
    "hf_deepspeed_config": ("deepspeed",),
    "fsdp_plugin_args": ("fsdp", "fsdp_config"),
    "_setup_devices": (),
    "distributed_state": (),
    "_n_gpu": (),
}
"""Attribute that `TrainingArguments.__post_init__` adds (transformers 5.23.0) → the fields that it is derived from.
Device attributes depend on no field of a plan."""

_OF_THE_DEVICE: Final = ("_setup_devices", "distributed_state", "_n_gpu")
"""Attributes set by `_setup_devices`. Computing them again drops the process's AcceleratorState, which a Trainer may
use already (transformers 5.23.0: training_args.py, `_setup_devices`)."""

_DECIDE_THE_DEVICE: Final = frozenset({"use_cpu", "deepspeed", "ddp_backend", "ddp_timeout", "accelerator_config"})


@dataclass
class CreationRecord:
    """Values of one object during its creation.

    Attributes:
        script: the caller's values and the defaults, before anything is derived.
        given: the same with the changes by hooks of `on_creation`.
        after_init: all its attributes after the last `__post_init__`.
    """

    script: dict[str, Any]
    given: dict[str, Any]
    after_init: dict[str, Any] = field(default_factory=dict)


Hook = Callable[[Any, CreationRecord], None]

_latest: list[tuple[type, CreationRecord]] = []
_records: dict[int, tuple[CreationRecord, weakref.ref[Any]]] = {}
_in_creation: set[int] = set()
_begins: list[Hook] = []
_ends: list[Hook] = []
_watching: list[FieldReads] = []
_read_by_all: set[str] = set()  # fields that every watcher has recorded
_hooked: list[bool] = []


def on_creation(*, begins: Hook | None = None, ends: Hook | None = None) -> None:
    """Call a hook for every TrainingArguments object that is created from now on.

    Args:
        begins: called before the first `__post_init__`, with the caller's values and defaults, so that derived fields
            follow its changes (TRL's configs derive `bf16` from `fp16`; trl 1.16.0: base_config.py).
        ends: called after the last `__post_init__`.
    """
    if begins is not None:
        _begins.append(begins)
    if ends is not None:
        _ends.append(ends)
    if not _hooked:
        _hooked.append(True)
        when_imported("transformers.training_args", _hook)


def creation_record(arguments: Any) -> CreationRecord | None:
    """The record of its creation; None for an object created before `on_creation` or `watch_reads`, or by copying."""
    entry = _records.get(id(arguments))
    return entry[0] if entry is not None and entry[1]() is arguments else None


def latest_creation() -> tuple[type, CreationRecord] | None:
    """The class and the record of the object whose creation began last. Without `after_init` it failed, or goes on."""
    return _latest[-1] if _latest else None


def _hook(training_args: types.ModuleType) -> None:
    """Hook the base class, because the script's subclasses are pickled by value, and `datasets` makes fingerprints of
    them. A dataclass's `__init__` reads `__post_init__` from the object; a call by `super()` does not."""
    plain = training_args.TrainingArguments.__getattribute__

    def watched(self: Any, name: str) -> Any:
        if name == "__post_init__" and id(self) not in _in_creation:
            return functools.partial(_initialize, self, plain(self, name))
        if _watching and name not in _read_by_all:
            _note_read(self, name, sys._getframe(1))
        return plain(self, name)

    training_args.TrainingArguments.__getattribute__ = watched


def _initialize(arguments: Any, post_init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with _creation(arguments):
        script = _copied(vars(arguments))
        for hook in _begins:
            hook(arguments, CreationRecord(script, script))
        record = CreationRecord(script, _copied(vars(arguments)))
        _latest[:] = [(type(arguments), record)]
        post_init(*args, **kwargs)
    record.after_init = _copied(vars(arguments))
    key = id(arguments)
    _records[key] = record, weakref.ref(arguments, lambda _: _records.pop(key, None))
    for hook in _ends:
        hook(arguments, record)


@contextlib.contextmanager
def _creation(arguments: Any) -> Iterator[None]:
    _in_creation.add(id(arguments))
    try:
        yield
    finally:
        _in_creation.discard(id(arguments))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with copied dicts and lists: a `__post_init__`, and Trainer, change some in place."""
    return {name: _copy_of(value) for name, value in values.items()}


def _copy_of(value: Any) -> Any:
    if type(value) is dict:
        return _copied(value)
    return [_copy_of(each) for each in value] if type(value) is list else value


def _same_content(first: Any, second: Any) -> bool:
    """Whether two attributes are equal; DeepSpeed configs and plugins, which each object creates, by content."""
    for content in ("config", "deepspeed_config"):  # HfTrainerDeepSpeedConfig, DeepSpeedPlugin
        if type(first) is type(second) and isinstance(getattr(first, content, None), dict):
            return _same(getattr(first, content), getattr(second, content))
    return _same(first, second)


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # a value that cannot be compared
        return False


class FieldReads:
    """Names of the attributes of TrainingArguments objects that were read since their creation (`watch_reads`)."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    @property
    def fields(self) -> frozenset[str]:
        """Fields that other code may have used, directly or through an attribute that transformers derives from them
        (`mixed_precision` from `bf16` and `fp16`). A renamed field appears under both names.

        Attributes that a subclass derives, such as GRPO's `generation_batch_size`, are left to `too_late`.
        """
        derived = {field for name in self._names for field in _DERIVED.get(name, ())}
        return frozenset((self._names - _DERIVED.keys()) | derived)

    def too_late(self, arguments: Any, fields: Mapping[str, Any]) -> frozenset[str]:
        """Attributes that were read and that `change_fields(arguments, fields)` would change, derived ones included;
        empty: the change is not too late. Device and ranks do not count: they belong to the process.

        Raises:
            InputError: its class has no such field, or rejects the combination.
        """
        current = dict(vars(arguments))
        changed = _rebuild(arguments, fields).attributes
        _name_config_of(current, changed)
        names = self._names - set(_OF_THE_DEVICE) & {*current, *changed}
        return frozenset(name for name in names if not _same_content(current.get(name), changed.get(name)))


def watch_reads() -> FieldReads:
    """Record from now on which attributes of all TrainingArguments objects are read.

    Reads by the script and by libraries count, and `vars(arguments)` counts as reading everything. A property counts
    by the attributes that it reads: `train_batch_size` reads `per_device_train_batch_size`. These reads do not count:
    - during creation, because `change_fields` runs every `__post_init__` again;
    - in a method that shows or copies the whole object: `__str__`, `to_dict`, `dataclasses.replace`, `copy`, pickles
      (`datasets` makes fingerprints of them);
    - by memkit.

    Some effects need no read: under ZeRO-3 `from_pretrained` splits the model (transformers 5.23.0:
    integrations/deepspeed.py, `is_deepspeed_zero3_enabled`, asks a global config).

    Reading an attribute then takes 0.15 µs (measured with Python 3.11); nothing else becomes slower.
    """
    reads = FieldReads()
    _watching.append(reads)
    _read_by_all.clear()
    on_creation()
    return reads


def _note_read(arguments: Any, name: str, frame: types.FrameType) -> None:
    from hf_memkit.catalog import library_versions

    attributes = object.__getattribute__(arguments, "__dict__")
    if (name in attributes or name == "__dict__") and _is_use(arguments, frame):
        names = set(attributes) if name == "__dict__" else set(library_versions.names_of(name))
        for reads in _watching:
            reads._names |= names
        _read_by_all.update(names)


def _is_use(arguments: Any, frame: types.FrameType | None) -> bool:
    """Whether the code of a read in this frame may use the value."""
    if id(arguments) in _in_creation or frame is None:
        return False
    file = frame.f_code.co_filename
    if file.startswith(_MEMKIT) or any(part in file for part in _COPIERS):
        return False
    while frame is not None:
        code = frame.f_code
        if code.co_name in _WHOLE and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is arguments:
            return False
        frame = frame.f_back
    return True


def change_fields(arguments: Any, fields: Mapping[str, Any]) -> None:
    """Change fields of a TrainingArguments object in place, as if it had been created with them.

    memkit creates a second object of its class with the same values and `fields`, and copies its attributes. Later
    edits by the script stay, except of `fields`. Values that other code has read already do not change
    (`FieldReads.too_late`). Without a record of its creation, current values count as the given ones.

    Args:
        arguments: an object of TrainingArguments or of a subclass. Unchanged if this raises.
        fields: current or former name → value.

    Raises:
        InputError: its class has no such field, or rejects the combination (with the class's message).
    """
    rebuilt = _rebuild(arguments, fields)
    record = creation_record(arguments)
    if record is not None:
        record.given = rebuilt.given
        record.after_init = rebuilt.after_init
    _name_config_of(rebuilt.attributes, vars(arguments))
    vars(arguments).clear()
    vars(arguments).update(rebuilt.attributes)


class _Rebuilt(NamedTuple):
    """The object after `change_fields`: the two parts of its `CreationRecord`, and all attributes."""

    given: dict[str, Any]
    after_init: dict[str, Any]
    attributes: dict[str, Any]


def _rebuild(arguments: Any, fields: Mapping[str, Any]) -> _Rebuilt:
    """The changed object. Afterwards transformers may use its DeepSpeed config: call `_name_config_of`."""
    from hf_memkit.catalog import library_versions

    kind: Any = type(arguments)
    current_names = {library_versions.current_name(name): value for name, value in fields.items()}
    wanted = library_versions.to_installed_arguments(current_names)
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    if unknown := sorted(wanted.keys() - known):
        lines = (f"{name}: {kind.__name__} has no such field{did_you_mean(name, known)}" for name in unknown)
        raise InputError("\n".join(lines))

    record = creation_record(arguments)
    current = dict(vars(arguments))
    given = dict(record.given) if record is not None else _as_given(arguments, known, wanted)
    new = kind.__new__(kind)
    start = _copied({**given, **wanted})
    vars(new).update(start)
    # Keep the device, unless a changed field can decide it, or DeepSpeed is switched on or off.
    others = wanted.keys() & _DECIDE_THE_DEVICE - {"deepspeed"}
    same_engine = bool({**current, **wanted}.get("deepspeed")) == bool(current.get("deepspeed"))
    if same_engine and all(_same(wanted[name], current.get(name)) for name in others):
        vars(new).update({name: current[name] for name in _OF_THE_DEVICE if name in current})

    try:
        with _creation(new), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # already shown for the first object
            new.__post_init__()
    except Exception as error:
        _name_config_of(current, vars(new))
        values = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        raise InputError(f"{values}: {kind.__name__} cannot be built: {error}") from error

    after_init = _copied(vars(new))
    attributes = dict(vars(new))
    for name, value in current.items():  # keep what the script or a library has set since creation
        if record is not None:
            is_edited = name not in record.after_init or not _same(value, record.after_init[name])
        else:
            is_edited = name not in after_init and name not in _DERIVED
        if is_edited and name not in wanted:
            attributes[name] = value
    return _Rebuilt(start, after_init, attributes)


def _name_config_of(attributes: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Make transformers use the DeepSpeed config of `attributes`, or none: it keeps the last one in a global
    (transformers 5.23.0: integrations/deepspeed.py, `set_hf_deepspeed_config`)."""
    config = attributes.get("hf_deepspeed_config")
    if config is not None or "hf_deepspeed_config" in before:
        module = sys.modules["transformers.integrations.deepspeed"]
        module.set_hf_deepspeed_config(config) if config is not None else module.unset_hf_deepspeed_config()


def _as_given(arguments: Any, known: set[str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Values with which the object may have been created."""
    given = {name: value for name, value in vars(arguments).items() if name in known}
    # GRPO and RLOO derive one or both of these, and refuse both as arguments (trl 1.16.0: grpo_config.py).
    both = {"generation_batch_size", "steps_per_generation"}
    if both <= known and not both & wanted.keys():
        if given["steps_per_generation"] != given["gradient_accumulation_steps"]:
            raise InputError(
                f"{type(arguments).__name__}: cannot tell whether generation_batch_size or steps_per_generation was "
                "set. Add one of the two to the fields"
            )
        given.update(dict.fromkeys(both))
    elif both <= known:
        given.update(dict.fromkeys(both - wanted.keys()))
    return given
