"""Reads the job's command, platform, allocator settings and failed assertions from the other lines of a log."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from hf_memkit.common.commands import command

Platform = Literal["macOS", "WSL2", "Windows"]

_PLATFORMS: Final[tuple[tuple[Platform, re.Pattern[str]], ...]] = (
    ("WSL2", re.compile(r"/mnt/[a-z]/|\bWSL2?\b|microsoft-standard")),
    ("macOS", re.compile(r"/Users/\w|/opt/homebrew/|\bMPS backend\b|\bDarwin\b")),
    ("Windows", re.compile(r"\b[A-Z]:\\[\w .-]{1,80}\\[^\n]{0,300}\.(?:py|exe|dll)\b|\[WinError \d|\.\.\\c10\\")),
)
_OF_PLATFORMS: Final = (
    "/mnt/", "WSL", "microsoft", "/Users/", "homebrew", "MPS", "Darwin", ":\\", "WinError", "\\c10",
)  # fmt: skip

# The variable in use, not the recommendation in torch's error: "try setting PYTORCH_CUDA_ALLOC_CONF=…".
_ALLOCATOR: Final = re.compile(
    r"(?<!setting )\bPYTORCH_(?:\w{1,6}_)?ALLOC_CONF['\"]?\]? {0,2}[=:] {0,2}['\"]?([a-z_]{4,40}:[\w:.,\[\] -]{1,200})"
)

# As above: the error recommends "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit".
_WATERMARK: Final = re.compile(
    r"(?<!Use )\bPYTORCH_MPS_HIGH_WATERMARK_RATIO['\"]?\]? {0,2}[=:] {0,2}['\"]?"
    r"(\d(?:\.\d{1,6})?)(?![.\d]| to disable)"
)

_ASSERT: Final = re.compile(r"\bblock: \[\d{1,9},\d{1,9},\d{1,9}\][^\n]{0,80}Assertion `([^`\n]{1,200})` failed")

_SCRIPT: Final = r"[\w./~@%+:\\-]{1,300}\.py"
_STARTER: Final = re.compile(
    r"(?:^|[\s'\"(`$+>/:!=])(?=(?:(?:python|pypy)[\d.]{0,5}|torchrun|deepspeed|accelerate launch|accelerate-launch"
    r"|(?:uv|poetry|pixi|conda|mamba|micromamba|pdm|hatch|pipenv|rye) run) )"
)
_TOOL: Final = re.compile(
    r"(?:^|[\s'\"(`$+>/])"
    r"(?:swift (?:sft|pt|rlhf)|llamafactory-cli train|axolotl train|trl (?:sft|dpo|grpo|kto|reward))(?= )"
)
"""Commands of tools that take the arguments of a Trainer and no script."""
_LIST: Final = re.compile(r"\[(?:'[^'\n]{0,2000}'(?:, )?){2,200}\]")
"""A command in the form of Python's launchers."""
_ENDS: Final = re.compile(r" (?:[|&;]|\d?>)|;")

_PY: Final = re.compile(rf"^{_SCRIPT}$")
_MODULE: Final = re.compile(r"^[A-Za-z_][\w.]{0,200}$")
_LAUNCHERS: Final = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.launch",
    "deepspeed.launcher.runner", "hf_memkit",
)  # fmt: skip
_TOOLS: Final = re.compile(r"(?:^|[/\\])(?:site-packages|dist-packages|bin)[/\\]|[/\\]lib[/\\]python3|multiprocessing")

_STARTERS: Final = 8
"""Maximum number of words in one line at which a command may begin."""

_LIBRARIES: Final = re.compile(
    r"/(?:torch|transformers(?!/examples)|accelerate|deepspeed|peft|trl|bitsandbytes|datasets|vllm|unsloth\w*)/"
)
"""Folders of libraries that run from a checkout."""

_FIRST_WORDS: Final = ("python", "torchrun", "deepspeed", "accelerate", "pypy", " run ")

_SIGNS: Final = (
    *_OF_PLATFORMS, *_FIRST_WORDS, "hipError", "ALLOC_CONF", "WATERMARK", "torch._dynamo hit config.", "Assertion",
    " --", "\\\n", "\\\r\n",
)  # fmt: skip
"""Words without one of which a line says nothing that `Surroundings` has."""

# Not the arguments of a job without FSDP, as Trainer prints them: `fsdp=[], fsdp_config={'min_num_params': 0, …`.
_FSDP: Final = re.compile(
    r"(?i:\bdistributed(?:_?type| environment)\W{1,4})(?:DistributedType\.)?FSDP|\bFSDP[A-Z][a-z]"
    r"|(?i:(?:\b|_)use_fsdp(?!\W{1,4}(?:false|0|no)\b))|/fsdp/|[Ff]ully_?[Ss]hard"
    r"|\bfsdp_(?:version|sharding|auto_wrap|offload|state_dict|utils)|--fsdp[ =](?!false|False|''|\"\")"
    r"|\bfsdp=(?:True|\[[<'\"\w]|['\"]\w)|['\"]?\bfsdp['\"]?: (?:true|True|\[?['\"]?full)"
)
_OF_FSDP: Final = ("fsdp", "FSDP", "ully_shard", "ullyShard")

# torch's prefix of a rank's errors, and torchrun's summary.
_RANKS: Final = re.compile(r"\[rank(\d{1,5})\]|\blocal_rank: (\d{1,5})\)")
_WORLD_SIZE: Final = re.compile(r"(?i)\b(?:dist_)?world_?[ ]?size['\"]?(?: ?[=:] ?| is | )['\"]?(\d{1,5})\b")

_LONGEST: Final = 4_000


_PROCESSES: Final = ("nproc_per_node", "num_processes", "num_gpus")
_MACHINES: Final = ("nnodes", "num_machines", "num_nodes")
"""Options of torchrun, accelerate launch and deepspeed. accelerate's number of processes is that of all machines."""
_ACCELERATE: Final = ("accelerate", "accelerate-launch", "accelerate.commands.launch")


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the script, or `-m MODULE` (empty: a tool without script), its arguments, and the words before it."""

    target: str
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()

    @property
    def by_accelerate(self) -> bool:
        """Whether `accelerate launch` starts it, whose options choose the engine."""
        return any(word.rpartition("/")[2] in _ACCELERATE for word in self.launcher)

    def option(self, *names: str) -> str:
        """The value of the first of the launcher's options with one of these names; empty without one."""
        for number, word in enumerate(self.launcher):
            name, equals, value = word.lstrip("-").partition("=")
            if word.startswith("--") and name.replace("-", "_") in names:
                return value if equals else " ".join(self.launcher[number + 1 : number + 2])
        return ""

    @property
    def nodes(self) -> int:
        """Machines: of `2:4`, the most."""
        last = self.option(*_MACHINES).rpartition(":")[2]
        return max(int(last), 1) if last.isdecimal() else 1

    @property
    def gpus(self) -> int | None:
        """Processes on each machine; None if the command does not say."""
        count = self.option(*_PROCESSES)
        if count.isdecimal() and int(count) > 0:
            return -(-int(count) // self.nodes) if self.by_accelerate else int(count)
        included = self.option("include").rpartition(":")[2]  # deepspeed --include localhost:0,1
        return len(included.split(",")) if included else None

    def runs(self, file: str) -> bool:
        """Whether it starts this file."""
        if not self.target.startswith("-m "):
            return self.target.rpartition("/")[2] == file.rpartition("/")[2]
        module = "/" + self.target.removeprefix("-m ").replace(".", "/")
        return f"/{file}".endswith((f"{module}.py", f"{module}/__main__.py"))

    def memkit_command(self, verb: str, gpu: str = "", processes: int = 1) -> str:
        """The memkit command for it: `memkit plan train.py --gpu 24GB --gpus 2 -- --bf16`. Of `accelerate launch`, the
        whole command, which has the engine. `processes`: those of the job, by the log."""
        target = self.target.split(maxsplit=1) if self.target.startswith("-m ") else [self.target] * bool(self.target)
        arguments = self.arguments or ("ARGUMENTS",)
        nodes = self.nodes
        gpus = self.gpus or -(-processes // nodes)
        own = self.by_accelerate and (self.gpus is not None or bool(self.option("config_file")))
        options = f"{f' --gpu {gpu}' if gpu else ''}{f' --gpus {gpus}' if gpus > 1 and not own else ''}"
        if self.by_accelerate:
            return f"memkit {verb}{options} -- {command(*self.launcher, *target, *arguments)}"
        options += f" --nodes {nodes}" if nodes > 1 else ""
        return f"memkit {verb} {command(*target)}{options} -- {command(*arguments)}"

    def values(self) -> Mapping[str, Any]:
        """The arguments as HfArgumentParser reads them: `--name value`, `--name=value`, and `--name` alone."""
        values: dict[str, Any] = {}
        name = None
        for word in self.arguments:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word[2:].partition("=")
                name = name.replace("-", "_")
                values[name] = _value(value) if equals else True
                name = None if equals else name
            elif name is not None:
                values[name] = _value(word)
                name = None
        return values


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
    """What the lines of a log show about the job.

    Attributes:
        command: the last command that starts a Python script.
        assertion: a kernel's failed assertion about an index, such as `srcIndex < srcSelectDimSize`.
        rocm: whether an error has a code of ROCm, whose builds may write CUDA in the error itself.
        platform: the system, if it is not plain Linux.
        allocator: value of the allocator's variable, if set.
        watermark: value of the variable for MPS's limit, if set.
        compiling_given_up: whether torch.compile reached its limit of recompilations.
        fsdp: whether a line shows that FSDP is in use.
        world_size: processes of the job, as a line names them; 0 if none does.
        ranks: one more than the highest rank before a line.
    """

    command: Command | None = None
    assertion: str | None = None
    rocm: bool = False
    platform: Platform | None = None
    allocator: str | None = None
    watermark: str | None = None
    compiling_given_up: bool = False
    fsdp: bool = False
    world_size: int = 0
    ranks: int = 0

    _begun: str = ""

    @property
    def processes(self) -> int:
        """Processes of the job, at least."""
        return max(self.world_size, self.ranks, 1)

    def see_block(self, text: str, lines: list[str]) -> None:
        """Reads a block of lines, of which most have nothing about the job."""
        if not self.fsdp and any(name in text for name in _OF_FSDP):
            self.fsdp = _FSDP.search(text) is not None
        if "[rank" in text or "local_rank: " in text:
            self.ranks = max([self.ranks, *(int(one or other) + 1 for one, other in set(_RANKS.findall(text)))])
        if ("orld" in text or "ORLD" in text) and (size := _WORLD_SIZE.search(text)) is not None:
            self.world_size = int(size[1])
        signs = [sign for sign in _SIGNS if sign in text]
        for line in lines if signs or self._begun else ():
            if self._begun or any(sign in line for sign in signs):
                self.see(line)

    def see(self, line: str) -> None:
        """Reads one line. A backslash at its end continues a command in the next line."""
        if "hipError" in line:
            self.rocm = True
        if self.platform in (None, "Windows") and any(word in line for word in _OF_PLATFORMS):
            shown = next((name for name, sign in _PLATFORMS if sign.search(line[:_LONGEST])), None)
            self.platform = shown or self.platform
        if "ALLOC_CONF" in line and (set_to := _ALLOCATOR.search(line[:_LONGEST])) is not None:
            self.allocator = set_to[1]
        if "WATERMARK" in line and (set_to := _WATERMARK.search(line[:_LONGEST])) is not None:
            self.watermark = set_to[1]
        if "torch._dynamo hit config." in line:  # torch: _dynamo/convert_frame.py
            self.compiling_given_up = True
        if "Assertion" in line and (failed := _ASSERT.search(line[:_LONGEST])) is not None:
            self.assertion = self.assertion or failed[1]
        if self._begun or line.endswith(("\\\n", "\\\r\n")):
            line = self._begun + line
            self._begun = ""
            if (body := line.rstrip()).endswith("\\") and len(body) < _LONGEST:
                self._begun = f"{body[:-1].rstrip()} "
                return
        may_run = " --" in line and _TOOL.search(line[:_LONGEST]) is not None
        may_run = may_run or ((".py" in line or "-m" in line) and any(word in line for word in _FIRST_WORDS))
        if may_run and not line.lstrip().startswith("File "):  # a frame
            self.command = _command(line[:_LONGEST]) or self.command


def _command(line: str) -> Command | None:
    """The command in `line`, in the form of a shell or of a Python list; None if there is none."""
    for listed in _LIST.finditer(line):
        try:
            words = [str(word) for word in ast.literal_eval(listed[0])]
        except (SyntaxError, ValueError):
            continue
        if (command := _script(words)) is not None:
            return command
    for starter in islice(_STARTER.finditer(line), _STARTERS):
        text = line[starter.end() :]
        quote = starter[0]
        text = text.partition(quote)[0] if quote in ("'", '"', "`") else text
        if (command := _script(_words(_ENDS.split(text, maxsplit=1)[0]))) is not None:
            return command
    if (tool := _TOOL.search(line)) is not None:
        return Command("", _without_rank(_words(_ENDS.split(line[tool.end() :], maxsplit=1)[0])))
    return None


def _words(text: str) -> list[str]:
    """The words of a shell command; of a quoted command, those inside the quotation."""
    for part in (text, re.split(r"['\"`](?=[^'\"`]*$)", text, maxsplit=1)[0]):
        try:
            return shlex.split(part)
        except ValueError:  # a quotation without end
            continue
    return text.split()


def _script(words: list[str]) -> Command | None:
    """The script or module among the words of a command."""
    for number, word in enumerate(words[1:40], 1):
        following = words[number + 1] if number + 1 < len(words) else ""
        if word in ("-m", "--module") and _MODULE.match(following):
            if following in _LAUNCHERS:
                continue
            return Command(f"-m {following}", _without_rank(words[number + 2 :]), tuple(words[:number]))
        if _PY.match(word) and not _TOOLS.search(word):
            return Command(word, _without_rank(words[number + 1 :]), tuple(words[:number]))
    return None


def _without_rank(arguments: list[str]) -> tuple[str, ...]:
    """The script's arguments without the rank that launchers add."""
    return tuple(word for word in arguments if not word.startswith(("--local_rank=", "--local-rank=")))


def script_of_frames(files: list[tuple[str, str]]) -> str | None:
    """The user's script among (file, function): the top-level file, else the innermost outside of libraries."""
    own = [(file, function) for file, function in files if _PY.match(file) and not _TOOLS.search(file)]
    top = next((file for file, function in own if function == "<module>"), None)
    inner = next((file for file, _ in reversed(own) if not _LIBRARIES.search(file)), None)
    return top or inner
