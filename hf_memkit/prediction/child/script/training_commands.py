"""Detects commands that start a training: launchers, and Python that runs code which could train.

Nothing is run or imported: only shell scripts, first lines of programs and imports of Python files are read.

```
torchrun --nproc_per_node 2 train.py      a launcher
sh -c "cd x && python -m pkg.train"       Python, with a module of a package that needs torch
axolotl train x.yml                       a Python program that imports such a package
python download.py                        no training, if it imports no such package and nothing that starts processes
```
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Final

_LAUNCHERS: Final = frozenset(
    {"accelerate", "accelerate-launch", "colossalai", "composer", "deepspeed", "deepspeed.pt", "horovodrun", "ray",
     "torchrun"}
)  # fmt: skip
"""Programs that start trainings."""

_STARTERS: Final = frozenset(
    {"aprun", "bsub", "jsrun", "mpiexec", "mpiexec.hydra", "mpirun", "orterun", "qsub", "salloc", "sbatch", "srun"}
)
"""Programs that start any program on the nodes of a cluster."""

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
_VALUED: Final = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of Python that take a value."""

_NEED_TORCH: Final = frozenset(
    {"accelerate", "deepspeed", "jax", "keras", "lightning", "pytorch_lightning", "ray", "tensorflow", "torch",
     "transformers"}
)  # fmt: skip
"""Libraries that train; a package that requires one may train."""

_DATA_NAMES: Final = re.compile(r"(Config|FeatureExtractor|Processor|Tokenizer|TokenizerFast|logging|set_seed)$")
"""Names of transformers for preparing data."""

_STARTING_MODULES: Final = frozenset({"importlib", "multiprocessing", "pty", "runpy", "subprocess"})
_STARTING: Final = re.compile(r"(exec|spawn|posix_spawn)\w*$|(fork|popen|system)$")
"""Modules of Python, and functions of `os`, that can run any code."""

_PROCESSES: Final = re.compile(r"--(num[_-]processes|nproc[_-]per[_-]node|num[_-]gpus)(=(?P<value>\d+))?$")
_MAX_DEPTH: Final = 5
"""Depth of scripts that start scripts."""


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """A command that trains."""

    words: tuple[str, ...]  # the command, without a shell's words before it
    target: str  # its equivalent on memkit's command line, such as `train.py -- --lr 1`; empty if unknown

    def __str__(self) -> str:
        shown = shlex.join(self.words)
        return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


_MAX_SHOWN: Final = 200


def training_command(
    words: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ
) -> TrainingCommand | None:
    """The training that a command starts in this folder with these variables; None if it starts none."""
    training = _Reader(folder, environment).training(tuple(words))
    return None if training is None else TrainingCommand(training, _target(training))


@dataclass(frozen=True, slots=True)
class _Reader:
    folder: Path
    environment: Mapping[str, str]
    depth: int = 0

    def training(self, words: tuple[str, ...]) -> tuple[str, ...] | None:
        """The part of a command that trains; None if nothing does."""
        words = tuple(itertools.dropwhile(_ASSIGNMENT.match, words))
        if not words or self.depth > _MAX_DEPTH:
            return None
        program, rest = Path(words[0]).name, words[1:]
        if program in _LAUNCHERS:
            return None if set(rest[:1]) & _QUESTIONS else words
        if _PYTHON.match(program):
            return words if self._python_trains(rest) else None
        if program in _SHELLS:
            deeper = replace(self, depth=self.depth + 1)
            for number, word in enumerate(rest):
                if re.match(r"-\w*c$", word):
                    text, values = next(iter(rest[number + 1 :]), ""), rest[number + 2 :]
                    return deeper._in_text(text, ("", *values)[: len(values) + 1])
                if not word.startswith(("-", "+")):
                    try:
                        return deeper._in_text((self.folder / word).read_text(errors="replace"), rest[number:])
                    except OSError:
                        return None
            return None
        if program in _WRAPPERS or program in _STARTERS:
            for number in range(len(rest)):
                if training := self.training(rest[number:]):
                    return training
            if program in _WRAPPERS or set(rest[:1]) & _QUESTIONS or any(map(self._program, rest)):
                return None
            return words
        path = self._program(words[0])
        interpreter = _first_line(path) if path is not None else ()
        if not interpreter:
            return None
        if not _PYTHON.match(Path(interpreter[-1]).name):
            return replace(self, depth=self.depth + 1).training((*interpreter, str(path), *rest))
        return words if not set(rest[:1]) & _QUESTIONS and _file_trains(path, unknown=True) else None

    def _program(self, name: str) -> Path | None:
        if "/" in name:
            path = self.folder / name
            return path if path.is_file() else None
        program = shutil.which(name, path=self.environment.get("PATH"))
        return Path(program) if program else None

    def _python_trains(self, rest: tuple[str, ...]) -> bool:
        """Whether Python with these arguments could train. Not with `-c`, with which libraries query the machine."""
        index = 0
        while index < len(rest) and rest[index].startswith("-"):
            word = rest[index]
            if word in ("-", "-c") or (word[1] != "-" and "c" in word and "m" not in word):
                return False
            if word[1] != "-" and "m" in word:
                name, rest = word.partition("m")[2], rest[index + 1 :]
                if not name:
                    name, rest = next(iter(rest), ""), rest[1:]
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names:
                    local = _module_file(name, [str(self.folder)])
                    if _file_trains(local) if local is not None else _package_trains(name, unknown=True):
                        return True
                # A script after a module that runs scripts, such as `coverage` or `pdb`.
                scripts = (self.folder / argument for argument in rest if argument.endswith(".py"))
                return any(script.is_file() and _file_trains(script) for script in scripts)
            index += 2 if word in _VALUED else 1
        return index < len(rest) and _file_trains(self.folder / rest[index])

    def _in_text(self, text: str, given: tuple[str, ...]) -> tuple[str, ...] | None:
        """The first command of a shell script that trains. `given`: `$0`, `$1` …"""
        variables = {**self.environment, **{str(number): value for number, value in enumerate(given)}}
        variables |= dict.fromkeys("@*", shlex.join(given[1:]))
        for line in text.replace("\\\n", " ").splitlines():
            for command in _commands(line):
                words = [part for word in command for part in _expanded(word, variables)]
                while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
                    name, equals, value = words.pop(0).partition("=")
                    if equals:
                        variables[name] = value
                if training := self.training(tuple(words)):
                    return training
        return None


_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_VARIABLE: Final = re.compile(r"\$(?:(?P<name>\w+|[@*])|\{(?P<long>\w+|[@*])(?::?[-=](?P<default>[^}]*))?\})")


def _commands(line: str) -> Iterator[list[str]]:
    """The simple commands in a line of a shell script."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote that ends in another line
        words = line.split()
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("();<>|&"):
            if command:
                yield command
            command = []
        else:
            command.append(word.strip("`"))


def _expanded(word: str, variables: Mapping[str, str]) -> list[str]:
    """A word with its variables expanded: several words if it is a single variable."""

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["long"]
        return variables.get(name) or _VARIABLE.sub(value, match["default"] or "")

    filled = _VARIABLE.sub(value, word)
    return filled.split() if _VARIABLE.fullmatch(word) else [filled]


def _first_line(path: Path) -> tuple[str, ...]:
    """The interpreter in a script's first line, without `env`; empty for other programs."""
    try:
        with path.open("rb") as file:
            line = file.read(256).partition(b"\n")[0]
    except OSError:
        return ()
    if not line.startswith(b"#!"):
        return ()
    words = line[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return tuple(words[:1])


# ---- imports of Python files ----


@cache
def _file_trains(path: Path, *, unknown: bool = False) -> bool:
    """Whether a Python file imports a library that trains or starts processes, directly or through other files of the
    user's; True if a file is unreadable. `unknown`: the answer for a package that is not installed."""
    if (name := _installed_as(path)) is not None:
        return _package_trains(name, unknown=True)
    seen: set[Path] = set()
    left = [path]
    while left:
        file = left.pop().resolve()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return True
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os" and _STARTING.match(node.attr):
                return True
            for name, level in _imported(node):
                top = name.partition(".")[0]
                if not level and top in sys.stdlib_module_names:
                    if top in _STARTING_MODULES:
                        return True
                    continue
                folders = [file.parents[level - 1]] if level else [file.parent, path.parent]
                local = _module_file(name, [str(folder) for folder in folders])
                if local is not None:
                    left.append(local)
                elif not level and (top == "torch" or _package_trains(name, unknown=unknown)):
                    return True
    return False


def _imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(module name, level of a relative import) of each imported name and its packages. Skips transformers if only
    names for preparing data are imported."""
    names: list[str] = []
    level = 0
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        if node.module == "transformers" and all(_DATA_NAMES.search(alias.name) for alias in node.names):
            return
        level, module = node.level, [node.module] if node.module else []
        names = [".".join((*module, alias.name)) for alias in node.names]
    for name in names:
        parts = name.split(".")
        yield from ((".".join(parts[:number]), level) for number in range(1, len(parts) + 1))


def _module_file(name: str, folders: Sequence[str]) -> Path | None:
    """The file of a module in these folders, or installed from a checkout, found without importing it."""
    spec, within = None, list(folders)
    for number, part in enumerate(name.split(".")):
        spec = importlib.machinery.PathFinder.find_spec(part, within)
        if spec is None and number == 0:
            with contextlib.suppress(ValueError):  # the module has no spec
                spec = importlib.util.find_spec(part)  # finds packages installed from a checkout
        if spec is None:
            return None
        within = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    if _installed_as(path) is not None:
        return None
    main = path.with_name("__main__.py")
    return main if path.name == "__init__.py" and main.exists() else path


def _installed_as(path: Path) -> str | None:
    """The dotted name of a file in an installed package; None for other files."""
    parts = path.parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            inside = parts[parts.index(folder) + 1 :]
            return ".".join((*inside[:-1], Path(inside[-1]).stem))
    return None


_distributions: Final = cache(packages_distributions)


@cache
def _package_trains(name: str, *, unknown: bool) -> bool:
    """Whether a module's package requires a library that trains; of torch itself only its launchers count. `unknown`:
    the answer for a package that is not installed."""
    top = name.partition(".")[0]
    if top == "torch":
        return name.startswith("torch.distributed")
    if top in _NEED_TORCH:
        return True
    distributions = _distributions().get(top)
    if not distributions:
        return unknown
    requirements = [line for name in distributions for line in requires(name) or () if "extra ==" not in line]
    names = (re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("-", "_") for line in requirements)
    return any(name in _NEED_TORCH for name in names)


# ---- what to type instead ----


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
        elif number > 0 and word.endswith(".py") and not (_installed_as(Path(word)) or "").startswith(starters):
            target, rest = shlex.quote(word), words[number + 1 :]
        else:
            continue
        return f"{target}{gpus} -- {shlex.join(rest)}" if rest else f"{target}{gpus}"
    return ""
