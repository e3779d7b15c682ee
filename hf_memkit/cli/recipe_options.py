"""How `memkit recipe` shall run what was asked for, and where that says its processes run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hf_memkit.errors import InputError
from hf_memkit.recipe.launch import MASTER_PORT, Place
from hf_memkit.recipe.ranks import Ranks
from hf_memkit.request import Request

__all__ = ["RunOptions"]

_FLAGS = {"setting": "--set", "as_json": "--json"}
_OPTIONS = (
    "variant", "model", "data", "gpu", "gpu_memory", "ram", "max_steps", "sequence_length", "output", "nvme_path",
    "setting", "resume", "overwrite", "dry_run", "short", "export", "no_trace", "as_json",
)  # fmt: skip
"""Those that every process is given; where they run is told them by their launcher."""


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line beside the request, under their parameters' names; what was not given is None,
    empty or False.

    Attributes:
        request: the recipe, and what was asked for beyond it; without its own arguments, GPUs and nodes.
        setting: `--set`, as it was written.
    """

    request: Request
    setting: tuple[str, ...] = ()
    gpus: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    short: bool = False
    export: str | None = None
    no_trace: bool = False
    as_json: bool = False

    @property
    def shown_only(self) -> bool:
        """Whether nothing is to run."""
        return self.dry_run or self.export is not None

    def given(self, *names: str) -> list[str]:
        """The flags of those of `names` that were given."""
        values = {**vars(self.request), **vars(self)}
        return [_flag(name) for name in names if values[name] not in (None, "", (), False)]

    def for_ranks(self) -> list[str]:
        """The command line of each process: where it runs is told it by its launcher."""
        arguments = ["recipe", self.request.recipe or ""]
        for part in (self.request, self):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if field.name not in _OPTIONS or value == field.default:
                    continue
                values = value if isinstance(value, tuple) else (value,)
                arguments += [_flag(field.name) if item is True else f"{_flag(field.name)}={item}" for item in values]
        return arguments

    def place(self, ranks: Ranks, gpus: int = 1, nodes: int = 1) -> Place:
        """Where the processes run: what a launcher says, else what was asked for, else `gpus` and `nodes`.

        Raises:
            InputError: the options contradict each other or the launcher, or lack something.
        """
        if ranks.launched:
            return self._launcher_s_place(ranks)
        place = Place(
            self.gpus or gpus,
            self.nodes or nodes,
            self.node_rank or 0,
            self.master_addr or "",
            self.master_port or MASTER_PORT,
        )
        if place.nodes == 1:
            if needless := self.given("master_addr", "master_port") + (["--node-rank"] if self.node_rank else []):
                raise InputError(f"{', '.join(needless)}: for several machines; add --nodes, or leave it out")
            return place
        missing = [] if place.master_addr else ["--master-addr, the address of machine 0"]
        missing += [f"--node-rank, from 0 to {place.nodes - 1}"] if self.node_rank is None else []
        if missing and not self.shown_only:
            raise InputError(f"--nodes {place.nodes}: give {' and '.join(missing)}, on every machine")
        if place.node_rank >= place.nodes:
            raise InputError(f"--node-rank {place.node_rank}: must be below --nodes, which is {place.nodes}")
        return place

    def _launcher_s_place(self, ranks: Ranks) -> Place:
        place = Place(ranks.local_world_size, ranks.nodes)
        if place.processes != ranks.world_size:
            raise InputError(
                f"the launcher started {ranks.world_size} processes, and {ranks.local_world_size} on this machine: "
                f"recipes want the same number on each"
            )
        for flag, asked, started in (("--gpus", self.gpus, place.gpus), ("--nodes", self.nodes, place.nodes)):
            if asked is not None and asked != started:
                raise InputError(
                    f"{flag} {asked} contradicts the launcher, which started {place.gpus} processes on each of "
                    f"{place.nodes} machines (WORLD_SIZE={ranks.world_size}); leave {flag} out"
                )
        if needless := self.given("master_addr", "master_port") + (["--node-rank"] if self.node_rank else []):
            raise InputError(f"{', '.join(needless)}: the launcher that started this process says so; leave it out")
        return place


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")
