"""TrainingArguments objects of a script that runs: how one was made, which of its fields were read, and another value
for a field of one that exists. Of subclasses too, such as TRL's configs.

Nothing is imported: what concerns transformers happens when the script has imported it. The hooks stay for as long as
the process does, so only a process that is the script's alone has them: that of `memkit run`, or a prediction's child.
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
"""Parts of the paths of code that copies an object and acts on no value."""

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
"""Attributes that `TrainingArguments.__post_init__` adds (transformers 5.23.0), with the fields that they are made of;
of the device none that a plan has."""

_OF_THE_DEVICE: Final = ("_setup_devices", "distributed_state", "_n_gpu")
"""What `_setup_devices` leaves on the object. To compute it again drops the process's AcceleratorState (transformers
5.23.0: training_args.py, `_setup_devices`), which a Trainer may have by then."""
_DECIDE_THE_DEVICE: Final = frozenset({"use_cpu", "deepspeed", "ddp_backend", "ddp_timeout", "accelerator_config"})


@dataclass
class Made:
    """One object, as it was made.

    Attributes:
        script: the values that it was given, and the defaults, before anything was derived from them.
        given: the same with what a hook of `when_made` put there.
        settled: all its attributes after the last `__post_init__`.
    """

    script: dict[str, Any]
    given: dict[str, Any]
    settled: dict[str, Any] = field(default_factory=dict)

    def by_hand(self, arguments: Any) -> dict[str, Any]:
        """Attributes that were set since, each with its value: by the script's lines or a library's."""
        return {
            name: value
            for name, value in vars(arguments).items()
            if name not in self.settled or not _same(value, self.settled[name])
        }


Hook = Callable[[Any, Made], None]

_made: dict[int, tuple[Made, weakref.ref[Any]]] = {}
_making: set[int] = set()
_begins: list[Hook] = []
_ends: list[Hook] = []
_watching: list[Reads] = []
_all_know: set[str] = set()  # fields that every watcher has
_hooked: list[bool] = []


def when_made(*, begins: Hook | None = None, ends: Hook | None = None) -> None:
    """Calls a hook for every TrainingArguments object that is made from now on: `begins` before any `__post_init__`
    runs, a subclass's or the base's, so that all they derive follows from what it sets; `ends` after the last one.

    At `begins` an object has what the caller gave, and defaults. TRL's configs derive `bf16` from `fp16` before the
    base's `__post_init__`, and GRPO's `generation_batch_size` after it (trl 1.16.0: base_config.py, grpo_config.py): a
    field that is set in the base's comes too late for the first.
    """
    if begins is not None:
        _begins.append(begins)
    if ends is not None:
        _ends.append(ends)
    if not _hooked:
        _hooked.append(True)
        when_imported("transformers.training_args", _hook)


def made_of(arguments: Any) -> Made | None:
    """How it was made; None: before `when_made` or `watch_reads`, or as a copy."""
    entry = _made.get(id(arguments))
    return entry[0] if entry is not None and entry[1]() is arguments else None


def _hook(training_args: types.ModuleType) -> None:
    """Changes the base alone: a subclass of the script's own is pickled as it is written, and `datasets` makes
    fingerprints of that. Its `__init__`, which dataclasses writes, asks the object for `__post_init__`; a call by
    `super()` does not."""
    plain = training_args.TrainingArguments.__getattribute__

    def watched(self: Any, name: str) -> Any:
        if name == "__post_init__" and id(self) not in _making:
            return functools.partial(_make, self, plain(self, name))
        if _watching and name not in _all_know:
            _note_read(self, name, sys._getframe(1))
        return plain(self, name)

    training_args.TrainingArguments.__getattribute__ = watched


def _make(arguments: Any, post_init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with _being_made(arguments):
        script = _copied(vars(arguments))
        for hook in _begins:
            hook(arguments, Made(script, script))
        made = Made(script, _copied(vars(arguments)))
        post_init(*args, **kwargs)
    made.settled = _copied(vars(arguments))
    key = id(arguments)
    _made[key] = made, weakref.ref(arguments, lambda _: _made.pop(key, None))
    for hook in _ends:
        hook(arguments, made)


@contextlib.contextmanager
def _being_made(arguments: Any) -> Iterator[None]:
    _making.add(id(arguments))
    try:
        yield
    finally:
        _making.discard(id(arguments))


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts and lists too: a `__post_init__` changes some in place."""
    return {name: copy.copy(each) if type(each) in (dict, list) else each for name, each in values.items()}


def _alike(one: Any, other: Any) -> bool:
    """As `_same`, of objects that each TrainingArguments object makes for itself by what they hold."""
    for content in ("config", "deepspeed_config"):  # HfTrainerDeepSpeedConfig, DeepSpeedPlugin
        if type(one) is type(other) and isinstance(getattr(one, content, None), dict):
            return _same(getattr(one, content), getattr(other, content))
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # a value of the user's that cannot be compared
        return False


class Reads:
    """What of TrainingArguments objects was read since they were made (`watch_reads`)."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    @property
    def fields(self) -> frozenset[str]:
        """Names of fields that something may have acted on: read themselves, or through what transformers derives from
        them (`mixed_precision` from `bf16` and `fp16`). `activation_checkpointing` and `gradient_checkpointing`, and
        their kwargs, are one field and stand here together.

        What a class derives beyond that, such as GRPO's `generation_batch_size` from the batch, `too_late` knows.
        """
        derived = {field for name in self._names for field in _DERIVED.get(name, ())}
        return frozenset((self._names - _DERIVED.keys()) | derived)

    def too_late(self, arguments: Any, fields: Mapping[str, Any]) -> frozenset[str]:
        """Names of attributes of that object that were read and that `changed(arguments, fields)` would change:
        fields, and what its class derives from them. Empty: nothing has acted on them, and a change is not too late.

        The device and the ranks are left out: they are the process's, and fields of a plan do not decide them.

        Raises:
            InputError: as `changed`.
        """
        now, then = dict(vars(arguments)), _remade(arguments, fields).attributes
        _name_config_of(now, then)
        return frozenset(
            name
            for name in self._names - set(_OF_THE_DEVICE)
            if (name in now or name in then) and not _alike(now.get(name), then.get(name))
        )


def watch_reads() -> Reads:
    """Records from now on what of TrainingArguments objects is read, all objects' together.

    A read is one by the script, transformers' Trainer or any other library. It does not count

    - while the object is made: `changed` runs every `__post_init__` again, so what they derive follows a change;
    - in a method that shows or copies the whole object: `__str__`, `to_dict`, `to_json_string`, `to_sanitized_dict`,
      `dataclasses.asdict` and `replace`, `copy`, pickles (`datasets` makes fingerprints of them). A copy that is made
      so is another object: to change the one that trains, take the Trainer's;
    - by memkit itself.

    A property or method of the object counts by what it reads in its turn: `train_batch_size` reads
    `per_device_train_batch_size`; `device`, `world_size` and `n_gpu` read what was found out while the object was
    made, and so no field of a plan. Other code than the above that takes `vars(arguments)` reads everything: nobody
    can tell what it takes out of it.

    Some things follow the arguments without a read: under ZeRO-3 `from_pretrained` makes the model in shards (it asks
    transformers' global config, transformers 5.23.0: integrations/deepspeed.py, `is_deepspeed_zero3_enabled`).

    An attribute of an object then takes 0.15 µs to read (measured with Python 3.11); nothing else becomes slower.
    """
    reads = Reads()
    _watching.append(reads)
    _all_know.clear()
    when_made()
    return reads


def _note_read(arguments: Any, name: str, frame: types.FrameType) -> None:
    from hf_memkit.catalog import library_versions

    attributes = object.__getattribute__(arguments, "__dict__")
    if (name in attributes or name == "__dict__") and _counts(arguments, frame):
        names = set(attributes) if name == "__dict__" else set(library_versions.names_of(name))
        for reads in _watching:
            reads._names |= names
        _all_know.update(names)


def _counts(arguments: Any, frame: types.FrameType | None) -> bool:
    """Whether a read in this frame is one that something may act on."""
    if id(arguments) in _making or frame is None:
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


def changed(arguments: Any, fields: Mapping[str, Any]) -> None:
    """Gives a TrainingArguments object other values of fields, in place, as if it had been made with them.

    An object of the same class is made of what this one was given and of `fields`, all its `__post_init__` run, and
    this one takes over what came of it. What the script has set since then stays, unless it is one of `fields`. What
    others have read before and acted on stays theirs (`watch_reads`).

    Where nobody has seen how it was made, the values that it has now are taken for those it was given.

    Args:
        arguments: an object of TrainingArguments or of a subclass. Unchanged if this raises.
        fields: name, of today's transformers or before → value.

    Raises:
        InputError: its class has no such field, or does not take the values together (the class's own words).
    """
    remade, made, now = _remade(arguments, fields), made_of(arguments), dict(vars(arguments))
    if made is not None:
        made.given, made.settled = remade.given, remade.settled
    _name_config_of(remade.attributes, now)
    vars(arguments).clear()
    vars(arguments).update(remade.attributes)


class _Remade(NamedTuple):
    """An object as `changed` would have it: `given` and `settled` as in `Made`, and all attributes."""

    given: dict[str, Any]
    settled: dict[str, Any]
    attributes: dict[str, Any]


def _remade(arguments: Any, fields: Mapping[str, Any]) -> _Remade:
    """May leave transformers with the new object's DeepSpeed config (`_name_config_of`). Refuses as `changed`."""
    from hf_memkit.catalog import library_versions

    kind: Any = type(arguments)
    wanted = library_versions.to_installed_arguments(
        {library_versions.current_name(name): each for name, each in fields.items()}
    )
    known = {each.name for each in dataclasses.fields(kind) if each.init}
    unknown = [
        f"{name}: {kind.__name__} has no such field{did_you_mean(name, known)}" for name in wanted.keys() - known
    ]
    if unknown:
        raise InputError("\n".join(sorted(unknown)))
    made, now = made_of(arguments), dict(vars(arguments))
    given = dict(made.given) if made is not None else _as_given(arguments, known, wanted)
    new = kind.__new__(kind)
    start = _copied({**given, **wanted})
    vars(new).update(start)
    if not (wanted.keys() & _DECIDE_THE_DEVICE) or _same_but_values(wanted, now):
        vars(new).update({name: now[name] for name in _OF_THE_DEVICE if name in now})
    try:
        with _being_made(new), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has been said
            new.__post_init__()
    except Exception as error:
        _name_config_of(now, vars(new))
        said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        raise InputError(f"{said}: {kind.__name__} cannot be built: {error}") from error
    settled = _copied(vars(new))
    if made is not None:
        kept = made.by_hand(arguments)
    else:
        kept = {name: each for name, each in now.items() if name not in settled and name not in _DERIVED}
    attributes = {**vars(new), **{name: each for name, each in kept.items() if name not in wanted}}
    return _Remade(start, settled, attributes)


def _same_but_values(wanted: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the device stays what it is though a field that can decide it is given: DeepSpeed in both, or none."""
    others = wanted.keys() & _DECIDE_THE_DEVICE - {"deepspeed"}
    return bool({**now, **wanted}.get("deepspeed")) == bool(now.get("deepspeed")) and all(
        _same(wanted[name], now.get(name)) for name in others
    )


def _name_config_of(attributes: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Has transformers know the DeepSpeed config of `attributes`, or that there is none any more: the one made last is
    a global of its (transformers 5.23.0: integrations/deepspeed.py, `set_hf_deepspeed_config`)."""
    config = attributes.get("hf_deepspeed_config")
    if config is not None or "hf_deepspeed_config" in before:
        module = sys.modules["transformers.integrations.deepspeed"]
        module.set_hf_deepspeed_config(config) if config is not None else module.unset_hf_deepspeed_config()


def _as_given(arguments: Any, known: set[str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Values with which the object could have been made, where they tell."""
    given = {name: value for name, value in vars(arguments).items() if name in known}
    # GRPO and RLOO derive one from the other, or both, and refuse to be given both (trl 1.16.0: grpo_config.py,
    # `__post_init__`).
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
