"""Reads the command that starts a training: `accelerate launch … train.py …`, `torchrun …`, `deepspeed …`, `python …`,
and the commands of front ends: `trl sft …`, `llamafactory-cli train …`, `axolotl train …`, `swift sft …`.

The launcher's own parser reads it, in the Python that trains: launchers set the number of processes, and choose engine
and precision by environment variables. Nothing is started.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.common import boot
from hf_memkit.common.errors import InputError, TraceFailed
from hf_memkit.common.user_script import UserScript

if TYPE_CHECKING:
    from hf_memkit.prediction.trace.request import ReadCommand

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_MODULE: Final = re.compile("-m|--m(o(d(u(l(e)?)?)?)?)?")
"""The module option of launchers, and its abbreviations."""

_PYTHON: Final = re.compile(r"python[\d.]*$")
_LAUNCHERS: Final = ("accelerate", "accelerate-launch", "torchrun", "deepspeed")
_SLURM: Final = "srun"
"""Starts the same command on several machines; the command gives the numbers of machines and GPUs."""
FRONT_ENDS: Final = {
    "trl": "trl sft …", "llamafactory-cli": "llamafactory-cli train CONFIG", "lmf": "lmf train CONFIG",
    "axolotl": "axolotl train CONFIG", "swift": "swift sft …",
}  # fmt: skip
"""Commands that start a launcher, or train at once → how such a command is written."""

_LIMIT_S: Final = 120.0

PARALLELISM: Final = "ACCELERATE_USE_PARALLELISM_CONFIG"
DEEPSPEED: Final = "ACCELERATE_USE_DEEPSPEED"
_ENGINES: Final = {
    PARALLELISM: "tensor, context or sequence parallelism",  # first: it comes with an engine
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_FSDP": "FSDP",
    DEEPSPEED: "DeepSpeed",
}
"""Variables by which `accelerate launch` chooses the engine of each process (accelerate 1.15.0: utils/launch.py)."""


def launchers_engine(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(variable by which `accelerate launch` picks an engine, such as `ACCELERATE_USE_FSDP=true`, engine), or None."""
    for name, engine in _ENGINES.items():
        if is_on(environment.get(name)):
            return f"{name}={environment[name]}", engine
    return None


@dataclass(frozen=True, slots=True)
class Launched:
    """What a command starts."""

    script: UserScript  # of each process
    gpus: int | None = 1  # processes per machine, one GPU each; None: as many as the machine has GPUs
    nodes: int = 1  # machines
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that the command sets
    before: tuple[str, ...] = ()  # the launcher with its options, up to the word for the script; without `-m`
    is_launcher: bool = True  # whether it starts processes; False: it is Python only
    front_end: str = ""  # such as `"axolotl"`
    typed: tuple[str, ...] = ()  # the front end's command

    def with_script(self, script: UserScript) -> list[str]:
        """The same command for another script, with that script's arguments."""
        words = (word for word in self.before if not _ASSIGNMENT.match(word) and is_command(word))
        launcher = next(word for word in words if word not in ("env", _SLURM))
        flag = "--module" if Path(launcher).name == "deepspeed" else "-m"
        return [*self.before, *([flag] if script.is_module else []), script.target, *script.arguments]

    def sizes(self, gpus: int | None, nodes: int) -> tuple[int, int]:
        """(GPUs per machine, machines), combined with `--gpus` and `--nodes`; None and 1: not given. Raises
        InputError if the command has another number."""
        for option, given, own in (("--gpus", gpus, self.gpus), ("--nodes", nodes if nodes > 1 else None, self.nodes)):
            if given is not None and own is not None and given != own:
                raise InputError(f"{option} {given}: the command starts {own}; omit {option}, or change the command")
        return self.gpus or gpus or 1, max(nodes, self.nodes)


def is_command(word: str) -> bool:
    """Whether a word in the position of a script begins a command."""
    name = Path(word).name
    known = name in ("env", _SLURM, *_LAUNCHERS, *FRONT_ENDS) or _PYTHON.match(name) is not None
    return _ASSIGNMENT.match(word) is not None or (known and not word.endswith(".py"))


def read_command(
    words: Sequence[str], environment: Mapping[str, str] | None = None, *, gpus: int | None = None
) -> Launched:
    """Reads a command, with assignments (`NAME=VALUE`) before it, without starting anything. Raises InputError if it
    contains no script, or its launcher refuses it.

    Args:
        environment: its environment variables. Default: this process's.
        gpus: number of GPUs that a front end sees on each machine. Default: this machine's.
    """
    own: dict[str, str] = {}
    rest = list(words[1:] if words[:1] and words[0] == "env" else words)
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, own[name] = rest.pop(0).partition("=")
    assigned = ("env", *(f"{name}={value}" for name, value in own.items())) if own else ()
    if rest[:1] == [_SLURM]:
        start = next((number for number, word in enumerate(rest) if number and is_command(word)), len(rest))
        assigned, rest = (*assigned, *rest[:start]), rest[start:]
        if not rest:
            raise InputError(f"{' '.join(words)}: srun without a launcher; write srun accelerate launch, or torchrun")
    name = Path(rest[0]).name if rest else ""
    if _PYTHON.match(name):
        before, script = _of_python(rest)
        if script.target not in ("accelerate.commands.launch", "torch.distributed.run", "torch.distributed.launch"):
            return Launched(script, environment=own, before=(*assigned, *before), is_launcher=False)
        rest = [*before, "-m", script.target, *script.arguments]
    elif name not in (*_LAUNCHERS, *FRONT_ENDS):
        raise InputError(f"{' '.join(words[:3])}: no launcher; write accelerate launch, torchrun, deepspeed or python")
    variables = {**(os.environ if environment is None else environment), **own}
    parsed = _read_front_end(rest, variables, gpus) if name in FRONT_ENDS else _read_launcher(rest, variables)
    if parsed.error:
        example = FRONT_ENDS.get(name, "")
        no_training = rest[1:2] != example.split()[1:2] and (name != "trl" or parsed.error == "starts no training")
        hint = f"; write {example} for a training" if example and no_training else ""
        raise InputError(f"{' '.join(rest[:2])}: {parsed.error}{hint}")
    rest, script = list(parsed.command) or rest, parsed.script
    if not script.is_module:
        UserScript.at(script.target)
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    per_node = len(visible.split(",")) if parsed.gpus is None and visible else parsed.gpus
    before = rest[: parsed.at]
    if script.is_module:
        del before[max(number for number, word in enumerate(before) if _MODULE.fullmatch(word))]
    return Launched(
        script, per_node, parsed.nodes, {**own, **parsed.environment}, (*assigned, *before),
        is_launcher=parsed.is_launcher, front_end=name if name in FRONT_ENDS else "",
        typed=tuple(words) if name in FRONT_ENDS else (),
    )  # fmt: skip


def _read_launcher(words: list[str], environment: Mapping[str, str]) -> ReadCommand:
    """Runs the parser in the worker that will trace the script, which has accelerate and torch loaded."""
    from hf_memkit.prediction.trace.request import ReadCommand
    from hf_memkit.prediction.worker import lent_worker

    try:
        with lent_worker(None) as worker:
            return worker.read(words, environment)
    except TraceFailed as failure:
        return ReadCommand(error=str(failure))


def _read_front_end(words: list[str], environment: Mapping[str, str], gpus: int | None) -> ReadCommand:
    """Runs a front end in a separate process, because it may import any library."""
    from hf_memkit.prediction import wire
    from hf_memkit.prediction.trace.request import ReadCommand

    module, hidden = "hf_memkit.prediction.child.script.read_launch", {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}
    try:
        ran = subprocess.run(
            boot.command("-m", module, "--gpus", str(gpus or 0), *words), env={**environment, **hidden},
            capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ReadCommand(
            error=f"its options were not read within {_LIMIT_S:.0f} s; try again, or give the script alone"
        )
    answers = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode == 0 and answers:
        return wire.loads(ReadCommand, answers[-1])
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    why = lines[-1].rpartition("error: ")[2] if lines else f"its parser ended: exit code {ran.returncode}"
    return ReadCommand(error=why)


def _of_python(words: list[str]) -> tuple[list[str], UserScript]:
    """(the words before the script, or before `-m`; the script). Raises InputError if there is none."""
    index = 1
    while index < len(words) and words[index].startswith("-"):
        flags, is_module, name = words[index][1:].partition("m")
        if words[index][:2] in ("-W", "-X"):  # options with a value
            index += 1 if len(words[index]) > 2 else 2
            continue
        if words[index] == "-" or (not words[index].startswith("--") and "c" in flags):
            break
        if is_module and not words[index].startswith("--"):
            rest = words[index + 1 :] if name else words[index + 2 :]
            if not name and index + 1 >= len(words):
                break
            before = [*words[:index], *([f"-{flags}"] if flags else [])]
            return before, UserScript(name or words[index + 1], True, tuple(rest))
        index += 1
    if index >= len(words) or words[index].startswith("-"):
        raise InputError(f"{' '.join(words)}: no script in this command; write python train.py or python -m MODULE")
    return words[:index], UserScript.at(words[index], words[index + 1 :])
