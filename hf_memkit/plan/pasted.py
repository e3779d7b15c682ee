"""A setup as what a person pastes: flags of a command line, YAML, Python, and the commands that come before.

In: a candidate. Out: text, with the names of the installed transformers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml
from packaging.version import Version

from hf_memkit.catalog import library_versions
from hf_memkit.deepspeed import presets
from hf_memkit.plan import other_code
from hf_memkit.plan.candidate import SetupCandidate
from hf_memkit.plan.front_end_keys import front_end
from hf_memkit.prediction.traced_training import TracedTraining


@dataclass(frozen=True, slots=True)
class Pasted:
    """
    Attributes:
        before: commands to type first: they write the files that the arguments name, or install what is needed.
        environment: variables of the command, `"NAME=value"`.
        flags: `"--NAME value"` each, for scripts that read their arguments with HfArgumentParser; of an argument that
            is given twice the last one counts.
        yaml: the same as a file of arguments; variables, which are none, in a comment above.
        python: the same as keyword arguments of TrainingArguments, below the variables.
        no_flag: of these arguments `"NAME=None"` each: a parser takes no None.
        model: keyword arguments of `from_pretrained`, for which a script has no flag; empty: none.
        code: what has to be changed in the script besides, in lines; empty: nothing.
        diff: that, and `model`, in the script's own files, for `patch -p0`; empty: nothing, or the lines say it.
        front_end: the same for a front end: lines of its own config, or options; empty: there is none.
    """

    before: tuple[str, ...]
    environment: tuple[str, ...]
    flags: tuple[str, ...]
    yaml: str
    python: str
    no_flag: tuple[str, ...]
    model: str
    code: str
    diff: str = ""
    front_end: tuple[str, ...] = ()

    @property
    def typed_first(self) -> tuple[str, ...]:
        """Commands of a shell, in which the script is started then."""
        return (*(f"export {each}" for each in self.environment), *self.before)

    def to_json(self) -> dict[str, Any]:
        return {
            "before": list(self.before),
            "environment": list(self.environment),
            "flags": " ".join(self.flags),
            "yaml": self.yaml,
            "python": self.python,
            "no_flag": list(self.no_flag),
            "model": self.model,
            "code": self.code,
            "diff": self.diff,
            **({"front_end": list(self.front_end)} if self.front_end else {}),
        }


def pasted(candidate: SetupCandidate, own: TracedTraining | None = None, *, command: str = "") -> Pasted:
    """What sets this candidate's settings in a script by hand. `own`: the script's own training, without which there
    is no diff; `command`: of the front end that was typed, such as `"axolotl"`."""
    front = front_end(command)
    engine = next((each.engine for each in candidate.choices if each.engine), "")
    arguments = _installed(candidate.arguments)
    environment = tuple(f"{name}={shlex.quote(value)}" for name, value in candidate.environment.items())
    before = tuple(each.install for each in candidate.choices if each.install)
    exported = [f"# First, in the shell: export {each}\n" for each in environment]
    variables = [
        f"# Before torch is imported:\nos.environ[{name!r}] = {value!r}\n"
        for name, value in candidate.environment.items()
    ]
    if engine:
        before += tuple(_copied(engine, arguments["deepspeed"]))
        arguments["deepspeed"] = f"{engine}.json"
    changes = other_code.diff(own.facts, candidate.overrides) if own is not None and candidate.code else ""
    model = {
        name: value
        for name, value in candidate.overrides.model.items()
        if not changes and not (candidate.code and name == "quantization_config")  # which the lines have
    }
    return Pasted(
        before=before,
        environment=environment,
        flags=tuple(f"--{name} {_word(value)}" for name, value in arguments.items() if value is not None),
        yaml="".join(exported) + yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True, width=1000),
        python="".join(variables) + _call("TrainingArguments", arguments),
        no_flag=tuple(f"{name}=None" for name, value in arguments.items() if value is None),
        model=_call("AutoModel….from_pretrained", model) if model else "",
        code=candidate.code,
        diff=changes,
        front_end=tuple(front.lines(arguments, candidate.overrides.model)) if front is not None else (),
    )


def _copied(engine: str, config: Mapping[str, Any]) -> Iterator[str]:
    """What writes this JSON: the preset, with the folder and the buffers that a plan gives it."""
    weights = config["zero_optimization"].get("offload_param", {})
    folder = weights.get("nvme_path")
    yield f"memkit ds copy {engine}" + (f" --nvme-path {shlex.quote(folder)}" if folder else "")
    size = weights.get("buffer_size")
    if size != presets.load(engine)["zero_optimization"].get("offload_param", {}).get("buffer_size"):
        yield f"""sed -i 's/"buffer_size": [0-9]*/"buffer_size": {size}/' {engine}.json"""


def _installed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names that the installed transformers has; it is not imported, which takes seconds."""
    release = Version(version("transformers")).release[:2]
    return {library_versions.name_in_version(name, release): value for name, value in arguments.items()}


def _word(value: Any) -> str:
    """As HfArgumentParser takes it: a mapping is JSON (transformers: training_args.py, `_VALID_DICT_FIELDS`)."""
    return shlex.quote(json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping) else str(value))


def _call(what: str, arguments: Mapping[str, Any]) -> str:
    lines = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    return f"{what}(\n    ...,\n{lines})"
