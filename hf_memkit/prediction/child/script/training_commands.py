"""Detects commands that start a training: launchers, schedulers, and Python with a library or a file that trains.

Nothing is run or imported: only shell scripts and the imports of one Python file are read. A training that this does
not see, such as one of `python -c` or of a console script, ends the prediction when it begins (`descendants.py`).

```
torchrun --nproc_per_node 2 train.py         a launcher
sh -c "cd x && python -m trl.scripts.sft"    Python, with a module of a library that trains
python train.py                              a file that imports such a library
python download.py                           no training, if it imports none
```
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_memkit.prediction.child.script.in_descendants.sitecustomize import SCHEDULERS
from hf_memkit.prediction.launch_command import FRONT_ENDS

_LAUNCHERS: Final = frozenset(
    {"accelerate", "accelerate-launch", "colossalai", "composer", "deepspeed", "deepspeed.pt", "horovodrun", "ray",
     "torchrun", "vllm", *FRONT_ENDS}
)  # fmt: skip
_WRAPPERS: Final = frozenset(
    {"chrt", "command", "conda", "env", "eval", "exec", "ionice", "mamba", "micromamba", "nice", "nohup", "nsys",
     "numactl", "pipenv", "poetry", "setsid", "stdbuf", "sudo", "taskset", "time", "timeout", "torchfrtrace", "uv",
     "uvx", "xargs"}
)  # fmt: skip
"""Programs, and words of the shell, that are followed by another command."""

_SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "source", "zsh", "."})
_KEYWORDS: Final = frozenset({"!", "{", "do", "elif", "else", "export", "if", "then", "until", "while"})
_QUESTIONS: Final = frozenset({"--help", "--version", "-h", "config", "env", "info", "list", "status", "version"})
"""First arguments with which a launcher only prints information."""

_PYTHON: Final = re.compile(r"(python|pypy)[\d.]*$")
_CODE: Final = re.compile(r"-[bBdEhiIOPqRsSuvx]*(?P<kind>[cm])(?P<name>.*)$")
"""Option of Python before code or a module."""

_TRAIN: Final = frozenset(
    {"accelerate", "deepspeed", "jax", "keras", "lightning", "pytorch_lightning", "ray", "tensorflow", "torch",
     "transformers", "trl", "vllm"}
)  # fmt: skip
"""Libraries that train, or fill a GPU."""

_DATA_NAMES: Final = re.compile(r"(Config|FeatureExtractor|Processor|Tokenizer|TokenizerFast|logging|set_seed)$")
"""Names of transformers for preparing data."""

_PROCESSES: Final = re.compile(r"--(num[_-]processes|nproc[_-]per[_-]node|num[_-]gpus)(=(?P<value>\d+))?$")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_MAX_DEPTH: Final = 5  # of scripts that start scripts
_MAX_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """A command that trains."""

    words: tuple[str, ...]  # the command, without a shell's words before it
    target: str  # its equivalent on memkit's command line, such as `train.py -- --lr 1`; empty if unknown

    def __str__(self) -> str:
        shown = shlex.join(self.words)
        return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


def training_command(words: Sequence[str], folder: Path) -> TrainingCommand | None:
    """The training that a command starts in this folder; None if it starts none."""
    training = _training(tuple(words), folder)
    return None if training is None else TrainingCommand(training, _target(training))


def _training(words: tuple[str, ...], folder: Path, depth: int = 0) -> tuple[str, ...] | None:
    """The part of a command that trains. `depth`: of scripts that started it."""
    words = tuple(itertools.dropwhile(_ASSIGNMENT.match, words))
    if not words or depth > _MAX_DEPTH:
        return None
    program, rest = Path(words[0]).name, words[1:]
    if program in _LAUNCHERS:
        return None if set(rest[:1]) & _QUESTIONS else words
    if _PYTHON.match(program):
        return words if _python_trains(rest, folder) else None
    if program in _SHELLS:
        for word, following in itertools.pairwise((*rest, "")):
            if re.match(r"-\w*c$", word):
                return _first_training(following, folder, depth)
            if not word.startswith(("-", "+")):
                return _first_training(_text(folder / word), folder, depth)
    elif program in _WRAPPERS or program in SCHEDULERS:
        commands = (_training(rest[number:], folder, depth) for number in range(len(rest)))
        if training := next(filter(None, commands), None):
            return training
        known = set(rest[:1]) & _QUESTIONS or any(map(shutil.which, rest))
        return words if program in SCHEDULERS and not known else None
    elif "/" in words[0] and (text := _text(folder / words[0])).startswith("#!"):
        interpreter = text.splitlines()[0].removeprefix("#!").split()
        return _training((*interpreter, *words), folder, depth + 1)
    return None


def _first_training(text: str, folder: Path, depth: int) -> tuple[str, ...] | None:
    """The first command of a shell script that trains."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in _commands(line):
            words = itertools.dropwhile(lambda word: word in _KEYWORDS or _ASSIGNMENT.match(word), command)
            if training := _training(tuple(words), folder, depth + 1):
                return training
    return None


def _commands(line: str) -> Iterator[list[str]]:
    """The simple commands in a line of a shell script."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote that ends in another line
        words = line.split()
    for is_between, command in itertools.groupby(words, lambda word: set(word) <= set("();<>|&")):
        if not is_between:
            yield [word.strip("`") for word in command]


def _text(path: Path) -> str:
    """A file's content; empty if there is none."""
    try:
        return path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def _python_trains(rest: tuple[str, ...], folder: Path) -> bool:
    """Whether Python with these arguments runs a library that trains, or a file that imports one."""
    for word, following in itertools.pairwise((*rest, "")):
        path = folder / word
        if code := _CODE.match(word):
            name = code["name"] or following
            path = folder / name.replace(".", "/")
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            if code["kind"] == "m" and not path.is_file() and _is_training(name, of_torch="torch.distributed"):
                return True
        if word == "-" or (code and code["kind"] == "c"):
            return False
        if path.suffix == ".py" and path.is_file() and "-packages/" not in word:
            return _file_trains(path)  # a later word, with modules such as `coverage` and `pdb`
    return False


def _file_trains(path: Path) -> bool:
    """Whether a Python file imports a library that trains."""
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return False
    for node in nodes:
        if isinstance(node, ast.Import) and any(_is_training(alias.name) for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and not node.level and _is_training(node.module or ""):
            names = [alias.name for alias in node.names]
            if node.module != "transformers" or not all(map(_DATA_NAMES.search, names)):
                return True
    return False


def _is_training(module: str, *, of_torch: str = "torch") -> bool:
    """Whether the module belongs to a library that trains. `of_torch`: the part of torch that does."""
    top = module.partition(".")[0]
    return f"{module}.".startswith(f"{of_torch}.") if top == "torch" else top in _TRAIN


def _target(words: tuple[str, ...]) -> str:
    """The target of a launcher or Python, with memkit's options; empty if no word names it."""
    gpus, starters = "", ("torch.distributed", "accelerate.commands", "deepspeed")
    for number, word in enumerate(words):
        if match := _PROCESSES.match(word):
            value = match["value"] or next(iter(words[number + 1 : number + 2]), "")
            gpus = f" --gpus {value}" if value.isdigit() and value != "1" else ""
        module = word in ("-m", "--module") or re.match(r"-[a-zA-Z]*m$", word)
        if module and number + 1 < len(words):
            name, rest = words[number + 1], words[number + 2 :]
            if name.startswith(starters) or name in sys.stdlib_module_names:
                continue
            target = f"-m {name}"
        elif number > 0 and word.endswith(".py") and "-packages/" not in word:
            target, rest = shlex.quote(word), words[number + 1 :]
        else:
            continue
        return f"{target}{gpus} -- {shlex.join(rest)}" if rest else f"{target}{gpus}"
    return ""
