"""What the rest of a log tells beside its messages: how the job was started, on which system, with which settings of
the allocator, and kernels that met a wrong index.
In: the log, line by line, as it is read. Out: `Surroundings`."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, TextIO

Platform = Literal["macOS", "WSL2", "Windows"]

_PLATFORMS: Final[tuple[tuple[Platform, re.Pattern[str]], ...]] = (
    ("WSL2", re.compile(r"/mnt/[a-z]/|\bWSL2?\b|microsoft-standard")),
    ("macOS", re.compile(r"/Users/\w|/opt/homebrew/|\bMPS backend\b|\bDarwin\b")),
    ("Windows", re.compile(r"\b[A-Z]:\\[\w .-]{1,80}\\[^\n]{0,300}\.(?:py|exe|dll)\b|\[WinError \d|\.\.\\c10\\")),
)
_OF_PLATFORMS: Final = (
    "/mnt/", "WSL", "microsoft", "/Users/", "homebrew", "MPS", "Darwin", ":\\", "WinError", "\\c10",
)  # fmt: skip

# As it is set, not as torch's error recommends it: "try setting PYTORCH_CUDA_ALLOC_CONF=…".
_ALLOCATOR: Final = re.compile(
    r"(?<!setting )\bPYTORCH_(?:\w{1,6}_)?ALLOC_CONF['\"]?\]? {0,2}[=:] {0,2}['\"]?([a-z_]{4,40}:[\w:.,\[\] -]{1,200})"
)

# As above: the error says "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit".
_WATERMARK: Final = re.compile(
    r"(?<!Use )\bPYTORCH_MPS_HIGH_WATERMARK_RATIO['\"]?\]? {0,2}[=:] {0,2}['\"]?"
    r"(\d(?:\.\d{1,6})?)(?![.\d]| to disable)"
)

_ASSERT: Final = re.compile(r"\bblock: \[\d{1,9},\d{1,9},\d{1,9}\][^\n]{0,80}Assertion `([^`\n]{1,200})` failed")

# torch: c10/cuda/CUDAException.cpp
_POINTER: Final = re.compile(r"(?:\[\w: ]{1,20}\]:? ?)?Search for [`'](?:cuda|hip)\w{1,60}' in https?://")

_SCRIPT: Final = r"[\w./~@%+:\\-]{1,300}\.py"
_STARTER: Final = re.compile(
    r"(?:^|[\s'\"(`$+>/:!=])(?=(?:(?:python|pypy)[\d.]{0,5}|torchrun|deepspeed|accelerate launch|accelerate-launch"
    r"|(?:uv|poetry|pixi|conda|mamba|micromamba|pdm|hatch|pipenv|rye) run) )"
)
_TOOL: Final = re.compile(
    r"(?:^|[\s'\"(`$+>/])"
    r"(?:swift (?:sft|pt|rlhf)|llamafactory-cli train|axolotl train|trl (?:sft|dpo|grpo|kto|reward))(?= )"
)
"""Commands of tools that read the arguments of a Trainer but name no script."""
_LIST: Final = re.compile(r"\[(?:'[^'\n]{0,2000}'(?:, )?){2,200}\]")
"""A command as Python's launchers print it."""
_ENDS: Final = re.compile(r" (?:[|&;]|\d?>)|;")

_PY: Final = re.compile(rf"^{_SCRIPT}$")
_MODULE: Final = re.compile(r"^[A-Za-z_][\w.]{0,200}$")
_LAUNCHERS: Final = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.launch",
    "deepspeed.launcher.runner", "hf_memkit",
)  # fmt: skip
_TOOLS: Final = re.compile(r"(?:^|[/\\])(?:site-packages|dist-packages|bin)[/\\]|[/\\]lib[/\\]python3|multiprocessing")

_STARTERS: Final = 8
"""Words in one line that may begin a command."""

_LIBRARIES: Final = re.compile(
    r"/(?:torch|transformers(?!/examples)|accelerate|deepspeed|peft|trl|bitsandbytes|datasets|vllm|unsloth\w*)/"
)
"""Folders of libraries that are used from a checkout."""

_FIRST_WORDS: Final = ("python", "torchrun", "deepspeed", "accelerate", "pypy", " run ")

_LONGEST: Final = 4_000


@dataclass(frozen=True, slots=True)
class Command:
    """A started script, or `-m` and the module (empty where a tool has its own), and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()

    def runs(self, file: str) -> bool:
        """Whether it starts this file, of a frame."""
        if not self.target.startswith("-m "):
            return self.target.rpartition("/")[2] == file.rpartition("/")[2]
        module = "/" + self.target.removeprefix("-m ").replace(".", "/")
        return f"/{file}".endswith((f"{module}.py", f"{module}/__main__.py"))

    def typed(self, verb: str, gpu: str = "") -> str:
        """`memkit plan train.py --gpu 24GB -- --bf16`."""
        own = shlex.join(self.arguments) if self.arguments else "ARGUMENTS"
        return f"memkit {verb} {self.target}{f' --gpu {gpu}' if gpu else ''} -- {own}"

    def values(self) -> Mapping[str, Any]:
        """The arguments as HfArgumentParser reads them: `--name value`, `--name=value`, and `--name` alone."""
        found: dict[str, Any] = {}
        name = None
        for word in self.arguments:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                name = name.replace("-", "_")
                found[name] = _value(value) if equals else True
                name = None if equals else name
            elif name is not None:
                found[name] = _value(word)
                name = None
        return found


_WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False, "none": None, "null": None}


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(slots=True)
class Surroundings:
    """What a log shows so far.

    Attributes:
        command: the last command in it that starts a Python script.
        platform: the system, if it is not plain Linux.
        allocator, watermark: values of the allocator's variable and of MPS's for its limit, where they are set.
        rocm: whether an error has a code of ROCm; a build for ROCm may write CUDA in the error itself.
        assertion: what a kernel asserted of an index, such as `srcIndex < srcSelectDimSize`.
    """

    command: Command | None = None
    assertion: str | None = None
    rocm: bool = False
    platform: Platform | None = None
    allocator: str | None = None
    watermark: str | None = None

    _begun: str = ""

    def see(self, line: str) -> None:
        """Takes one line. A command may go on over several, each but the last with a backslash at its end."""
        if "hipError" in line:
            self.rocm = True
        if self.platform in (None, "Windows") and any(word in line for word in _OF_PLATFORMS):
            shown = next((name for name, sign in _PLATFORMS if sign.search(line[:_LONGEST])), None)
            self.platform = shown or self.platform
        if "ALLOC_CONF" in line and (set_to := _ALLOCATOR.search(line[:_LONGEST])) is not None:
            self.allocator = set_to[1]
        if "WATERMARK" in line and (set_to := _WATERMARK.search(line[:_LONGEST])) is not None:
            self.watermark = set_to[1]
        if "Assertion" in line and (found := _ASSERT.search(line[:_LONGEST])) is not None:
            self.assertion = self.assertion or found[1]
        if self._begun or line.endswith(("\\\n", "\\\r\n")):
            line = self._begun + line
            self._begun = ""
            if (body := line.rstrip()).endswith("\\") and len(body) < _LONGEST:
                self._begun = f"{body[:-1].rstrip()} "
                return
        runs = " --" in line and _TOOL.search(line[:_LONGEST]) is not None
        runs = runs or ((".py" in line or "-m" in line) and any(word in line for word in _FIRST_WORDS))
        if runs and not line.lstrip().startswith("File "):  # a frame
            self.command = _command(line[:_LONGEST]) or self.command


class Watched:
    """A log that tells `surroundings` each line that is read."""

    def __init__(self, log: TextIO, surroundings: Surroundings) -> None:
        self._log, self._surroundings = log, surroundings

    def readline(self, size: int = -1) -> str:
        line = self._log.readline(size)
        self._surroundings.see(line)
        # A pointer to the documentation below an error repeats its code: that is no second error.
        return line[len(line.rstrip("\r\n")) :] if _POINTER.match(line) else line


def _command(line: str) -> Command | None:
    """The script that the command in `line` starts; None without one. Reads a shell's form and Python's list."""
    for listed in _LIST.finditer(line):
        try:
            words = [str(word) for word in ast.literal_eval(listed[0])]
        except (SyntaxError, ValueError):
            continue
        if (found := _script(words)) is not None:
            return found
    for starter in islice(_STARTER.finditer(line), _STARTERS):
        text, quote = line[starter.end() :], line[starter.start() : starter.end()]
        text = text.partition(quote)[0] if quote in ("'", '"', "`") else text
        text = _ENDS.split(text, maxsplit=1)[0]
        words = _words(text)
        if (found := _script(words)) is not None:
            return found
    if (tool := _TOOL.search(line)) is not None:
        return Command("", _own(_words(_ENDS.split(line[tool.end() :], maxsplit=1)[0])))
    return None


def _words(text: str) -> list[str]:
    """The words of a command as a shell takes them; of one that is quoted itself, those before the quotation's end."""
    for part in (text, re.split(r"['\"`](?=[^'\"`]*$)", text, maxsplit=1)[0]):
        try:
            return shlex.split(part)
        except ValueError:  # a quotation that does not end here
            continue
    return text.split()


def _script(words: list[str]) -> Command | None:
    """The script among the words of a command line that begins with a starter."""
    for number, word in enumerate(words[1:40], 1):
        following = words[number + 1] if number + 1 < len(words) else ""
        if word in ("-m", "--module") and _MODULE.match(following):
            if following in _LAUNCHERS:
                continue
            return Command(f"-m {following}", _own(words[number + 2 :]))
        if _PY.match(word) and not _TOOLS.search(word):
            return Command(word, _own(words[number + 1 :]))
    return None


def _own(arguments: list[str]) -> tuple[str, ...]:
    """The script's arguments without the one that launchers add."""
    return tuple(word for word in arguments if not word.startswith(("--local_rank=", "--local-rank=")))


def script_of_frames(files: list[tuple[str, str]]) -> str | None:
    """The user's script among the (file, function) of frames, the outermost first: the file whose top level runs; else
    the innermost file of the user's own."""
    own = [(file, function) for file, function in files if _PY.match(file) and not _TOOLS.search(file)]
    top = next((file for file, function in own if function == "<module>"), None)
    inner = next((file for file, _ in reversed(own) if not _LIBRARIES.search(file)), None)
    return top or inner
