"""A setup as text to paste: command-line flags, YAML, Python, and the commands to run first.

In: a candidate. Out: text, with the argument names of the installed transformers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import yaml
from packaging.version import Version

from hf_memkit.catalog import library_versions
from hf_memkit.common.commands import command
from hf_memkit.deepspeed import presets
from hf_memkit.plan import other_code
from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.front_end_keys import front_end
from hf_memkit.prediction.traced_training import TracedTraining


@dataclass(frozen=True, slots=True)
class Pasted:
    """
    Attributes:
        before: commands to type first: they write the files that the arguments name, or install packages.
        environment: variables of the command, as `"NAME=value"`.
        flags: `"--NAME value"` each, for scripts that read their arguments with HfArgumentParser, which takes the last
            one of an argument that is given twice.
        yaml: the arguments as a YAML file, with the variables in a comment on top.
        python: the arguments as keywords of TrainingArguments, below lines that set the variables.
        no_flag: arguments that must be None, which no flag can set, as `"NAME=None"`.
        model: keyword arguments of `from_pretrained`, which a script has no flags for; empty if none.
        code: lines of Python to add to the script; empty if none.
        diff: `code` and `model` as a diff of the script's own files, for `patch -p0`; empty if not possible.
        front_end: the arguments as lines for a front end's config or command line; empty without a front end.
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
        """Commands to type in the shell before the script's own command."""
        return (*(f"export {variable}" for variable in self.environment), *self.before)

    def to_json(self) -> dict[str, Any]:
        content = {**asdict(self), "flags": " ".join(self.flags)}
        return {key: value for key, value in content.items() if key != "front_end" or value}


def pasted(candidate: Candidate, own: TracedTraining | None = None, *, command: str = "") -> Pasted:
    """The text to paste for a candidate.

    Args:
        own: the traced training of the unchanged script; None: without a diff.
        command: of the front end, such as `"axolotl"`; empty if the script is started without one.
    """
    front = front_end(command)
    engine = candidate.engine
    release = Version(version("transformers")).release[:2]  # importing transformers would take seconds
    arguments = {library_versions.name_in_version(name, release): each for name, each in candidate.arguments.items()}
    environment = tuple(f"{name}={shlex.quote(value)}" for name, value in candidate.environment.items())
    before = tuple(choice.install for choice in candidate.choices if choice.install)
    exported = [f"# First, in the shell: export {variable}\n" for variable in environment]
    variables = [
        f"# Before torch is imported:\nos.environ[{name!r}] = {value!r}\n"
        for name, value in candidate.environment.items()
    ]
    if engine:
        before += tuple(_copy_preset(engine, arguments["deepspeed"]))
        arguments["deepspeed"] = f"{engine}.json"
    changes = other_code.diff(own.facts, candidate.overrides) if own is not None and candidate.code else ""
    model = {
        name: value
        for name, value in candidate.overrides.model.items()
        if not changes and not (candidate.code and name == "quantization_config")  # the lines of code contain it
    }
    return Pasted(
        before=before,
        environment=environment,
        flags=tuple(_flag(name, value) for name, value in arguments.items() if value is not None),
        yaml="".join(exported) + yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True, width=1000),
        python="".join(variables) + _call("TrainingArguments", arguments),
        no_flag=tuple(f"{name}=None" for name, value in arguments.items() if value is None),
        model=_call("AutoModel….from_pretrained", model) if model else "",
        code=candidate.code,
        diff=changes,
        front_end=tuple(front.lines(arguments, candidate.overrides.model)) if front is not None else (),
    )


def _copy_preset(engine: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Commands that copy a DeepSpeed preset and set the swap folder and the buffer size of `config` in it."""
    weights = config["zero_optimization"].get("offload_param", {})
    folder = weights.get("nvme_path")
    yield command("memkit", "ds", "copy", engine, *(("--nvme-path", folder) if folder else ()))
    size = weights.get("buffer_size")
    if size != presets.load(engine)["zero_optimization"].get("offload_param", {}).get("buffer_size"):
        yield f"""sed -i 's/"buffer_size": [0-9]*/"buffer_size": {size}/' {engine}.json"""


def _flag(name: str, value: Any) -> str:
    """A flag with its value; `--fsdp` has none (transformers 5.23: training_args.py)."""
    return "--fsdp" if name == "fsdp" and value is True else f"--{name} {_word(value)}"


def _word(value: Any) -> str:
    """The value of a flag; a mapping is JSON (transformers: training_args.py, `_VALID_DICT_FIELDS`)."""
    return shlex.quote(json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping) else str(value))


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    lines = "".join(f"    {key}={value!r},\n" for key, value in arguments.items())
    return f"{name}(\n    ...,\n{lines})"
