"""What `memkit recipe` runs, and where: the options and the recipe, checked; this machine; and the setup of both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_memkit.errors import InputError
from hf_memkit.recipe.launch import MASTER_PORT, Place
from hf_memkit.recipe.ranks import Ranks
from hf_memkit.request import Request

if TYPE_CHECKING:
    from hf_memkit.hardware import Gpu, Machine
    from hf_memkit.prediction import Prediction
    from hf_memkit.recipe.choose import Judge
    from hf_memkit.recipe.output import RecipeRun
    from hf_memkit.recipe.schema import Recipe


_FLAGS = {"setting": "--set", "as_json": "--json"}
_OPTIONS = (
    "variant", "model", "data", "gpu", "gpu_memory", "ram", "max_steps", "sequence_length", "output", "nvme_path",
    "setting", "resume", "overwrite", "dry_run", "short", "export", "random_weights", "as_json",
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
    random_weights: bool = False
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
                raise InputError(
                    f"{(names := ', '.join(needless))}: only for several machines; add --nodes N, or omit {names}"
                )
            return place
        missing = [] if place.master_addr else ["--master-addr ADDRESS (of machine 0)"]
        missing += [f"--node-rank N (0 to {place.nodes - 1})"] if self.node_rank is None else []
        if missing and not self.shown_only:
            raise InputError(f"--nodes {place.nodes}: on every machine, add {' and '.join(missing)}")
        if place.node_rank >= place.nodes:
            raise InputError(
                f"--node-rank {place.node_rank}: must be below --nodes {place.nodes}; write 0 to {place.nodes - 1}"
            )
        return place

    def _launcher_s_place(self, ranks: Ranks) -> Place:
        place = Place(ranks.local_world_size, ranks.nodes)
        if place.processes != ranks.world_size:
            raise InputError(
                f"the launcher started {ranks.world_size} processes, and {ranks.local_world_size} on this machine: "
                f"start the same number on each machine"
            )
        for flag, asked, started in (("--gpus", self.gpus, place.gpus), ("--nodes", self.nodes, place.nodes)):
            if asked is not None and asked != started:
                raise InputError(
                    f"{flag} {asked} contradicts the launcher, which started {place.gpus} processes on each of "
                    f"{place.nodes} machines (WORLD_SIZE={ranks.world_size}); omit {flag}"
                )
        if needless := self.given("master_addr", "master_port") + (["--node-rank"] if self.node_rank else []):
            raise InputError(f"{(names := ', '.join(needless))}: set by the launcher; omit {names}")
        return place


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def read_request(options: RunOptions, recipe: Recipe, gpus: int | None = None, nodes: int | None = None) -> Request:
    """The request with its own arguments, whatever is wrong whatever the machine being told at once: before torch is
    imported, or a process is started.

    Args:
        options, recipe: the command line and the recipe.
        gpus, nodes: where a launcher says them.

    Raises:
        InputError: there is no such variant, model or GPU, or a value is wrong.
    """
    from hf_memkit.recipe.settings import refuse_wrong
    from hf_memkit.resolve import read_own

    gpus, nodes = gpus or options.gpus or recipe.gpus, nodes or options.nodes or 1
    request = read_own(replace(options.request, gpus=gpus, nodes=nodes), options.setting, recipe=recipe)
    refuse_wrong(recipe, request)
    return request


def refuse_data(options: RunOptions, recipe: Recipe) -> None:
    """Reads what `--data` names; of what is only shown no data set is downloaded.

    Raises:
        DataError: it cannot be used.
    """
    from hf_memkit.recipe.settings import check_data
    from hf_memkit.recipe.sources import is_here

    data = options.request.data
    if data is not None and (not options.shown_only or is_here(data)):
        check_data(recipe, data)


def machine_here(request: Request) -> Machine:
    """This machine, with the disks that the request names."""
    from hf_memkit.hardware import this_machine

    here = this_machine(request.nvme_path or request.output or ".")
    if request.nvme_path:  # checkpoints go to another disk than the swapped states
        here = replace(here, output_free_bytes=this_machine(request.output or ".").disk_free_bytes)
    return here


def rehearses(options: RunOptions, here: Machine) -> bool:
    """Whether what runs is a rehearsal; a GPU that is only described is shown."""
    described = bool(options.request.gpu or options.request.gpu_memory)
    return here.gpu is None and not (described and options.shown_only)


def usual_gpus(recipe: Recipe, *, rehearses: bool) -> int:
    """The GPUs that the recipe is for; where there is none to run on, two processes rehearse for them all."""
    return min(2, recipe.gpus) if rehearses else recipe.gpus


def resolved_run(
    options: RunOptions, recipe: Recipe, request: Request, here: Machine, place: Place, judge: Judge
) -> tuple[RecipeRun, Prediction | None]:
    """(what runs here: the recipe's setup for the machine in question where that has a GPU, the rehearsal of it
    without; the prediction that it was chosen by, None where it could not be predicted).

    Stored predictions come first, unless the data decides. A rehearsal goes by them alone: it starts at once.

    Raises:
        DoesNotFitError: no variant fits, or the GPU that is described is more than the one that is here.
    """
    from hf_memkit.errors import DoesNotFitError
    from hf_memkit.hardware import described_gpu
    from hf_memkit.recipe.output import RecipeRun
    from hf_memkit.recipe.rehearse import rehearse
    from hf_memkit.resolve import resolve

    rehearsed = rehearses(options, here)
    gpus = max(place.gpus, recipe.gpus) if rehearsed else place.gpus
    request = replace(request, gpus=gpus, nodes=place.nodes)
    at_once = rehearsed and not options.dry_run
    stored = at_once or request.data is None
    described = described_gpu(request.gpu, request.gpu_memory)
    runs = not options.shown_only or (options.dry_run and described is None)
    try:
        setup, prediction = resolve(
            request, None if at_once else judge, recipe=recipe, here=here, stored=stored, runs=runs
        )
    except DoesNotFitError:
        if not at_once:
            raise
        # A rehearsal needs next to nothing: what stands in the target's way is told.
        first = replace(request, variant=next(iter(recipe.variants)))
        setup, prediction = resolve(first, recipe=recipe, here=here, stored=True)
        why = "the recipe's first choice: here it is rehearsed only, and no variant's target would fit this machine"
        setup = replace(setup, why=why)
    if here.gpu is not None and described is not None and not options.shown_only:
        _refuse_another_gpu(described, here.gpu)
    if rehearsed:
        return rehearse(recipe, setup, gpus=place.gpus), prediction
    return RecipeRun(recipe.name, setup.preset, setup, gpus=place.gpus, nodes=place.nodes), prediction


def _refuse_another_gpu(described: Gpu, here: Gpu) -> None:
    """A setup for a GPU that is larger, or computes in bf16, would fail on the one that is here."""
    from hf_memkit.errors import DoesNotFitError

    if described.usable_bytes > here.usable_bytes or (described.bf16 and not here.bf16):
        smaller = described.usable_bytes > here.usable_bytes
        lacks = f"less memory than {described.name}" if smaller else f"no bf16, which {described.name} has"
        raise DoesNotFitError(
            f"this machine's {here.name} has {lacks}. Omit --gpu and --gpu-memory to run here, or add --dry-run or "
            f"--export"
        )
