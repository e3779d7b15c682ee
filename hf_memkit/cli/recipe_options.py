"""Options of `memkit recipe`, and the setup that follows from them, the recipe and this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_memkit.cli.options import MachineOptions, Short, more, option
from hf_memkit.cli.run_folder import FolderOptions
from hf_memkit.common.resources import documentation
from hf_memkit.common.user_files import user_path
from hf_memkit.setup.request import Request

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Gpu, Machine
    from hf_memkit.prediction import Prediction
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.variant_search import Judge
    from hf_memkit.run.folder import RecipeRun
    from hf_memkit.run.ranks import LaunchLayout


_DATA = option(f"Your data: a file, a folder or a hub ID. Formats: {documentation('your-own-recipe.md')}")
_SET = option("Override a TrainingArguments field that no variant sets. Repeatable.", "--set", metavar="KEY=VALUE")
_RANDOM_WEIGHTS = more("If the model's weights cannot be loaded, train from random ones.", "--random-weights")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(FolderOptions, MachineOptions):
    name: Annotated[str | None, typer.Argument(help="Recipe name or YAML file. Omit to list all recipes.")] = None
    variant: Annotated[str, more("Variant of the recipe; auto: the first that fits GPU, RAM and disk.")] = "auto"
    model: Annotated[str | None, more("Use this model (hub ID or folder) instead of the recipe's.")] = None
    data: Annotated[str | None, _DATA] = None
    max_steps: Annotated[int | None, more("Stop after this many optimizer steps.", min=1)] = None
    sequence_length: Annotated[int | None, more("Tokens in a sequence.", min=2)] = None
    output: Annotated[str, option("Folder for checkpoints, records and the model.")] = ""
    nvme_path: Annotated[str | None, more("Folder on a fast disk, for the infinity variant.")] = None
    settings: Annotated[list[str] | None, _SET] = None
    dry_run: Annotated[bool, option("Show whether it fits, and each setting with its reason.", "--dry-run")] = False
    short: Short = False
    random_weights: Annotated[bool, _RANDOM_WEIGHTS] = False
    export: Annotated[str | None, more("Write a plain script that does the same.", metavar="DIR")] = None
    copy: Annotated[str | None, more("Write the recipe's YAML file, to change.", metavar="FILE")] = None

    @property
    def request(self) -> Request:
        """The request without the user's own arguments, GPUs and nodes."""
        names = ("variant", "gpu", "gpu_memory", "ram", "max_steps", "sequence_length")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values |= {name: expand(getattr(self, name)) for name in ("model", "data", "nvme_path")}
        return Request(recipe=self.name, output=expand(self.output) or "", **values)

    @property
    def shown_only(self) -> bool:
        return self.dry_run or self.export is not None


def expand(path: str | None) -> str | None:
    """Replaces `~` by the home folder, which a shell does not in `--output=~/runs`."""
    return str(user_path(path)) if path and path.startswith("~") else path


def read_request(options: RecipeOptions, recipe: Recipe, launched: LaunchLayout | None = None) -> Request:
    """The request with the user's own arguments. Refuses mistakes that do not depend on the machine, before torch is
    imported or a process starts. `launched`: processes of a launcher."""
    from hf_memkit.recipes.resolve import read_own_arguments
    from hf_memkit.recipes.settings import refuse_wrong

    gpus, nodes = options.gpus or recipe.gpus, options.nodes or 1
    if launched is not None:
        gpus, nodes = launched.gpus, launched.nodes
    request = read_own_arguments(
        replace(options.request, gpus=gpus, nodes=nodes), options.settings or (), recipe=recipe
    )
    refuse_wrong(recipe, request)
    return request


def refuse_data(options: RecipeOptions, recipe: Recipe) -> None:
    """Reads and checks `--data`; does not download it if nothing will run."""
    from hf_memkit.recipes.settings import check_data
    from hf_memkit.recipes.sources import is_here

    data = options.request.data
    if data is not None and (not options.shown_only or is_here(data)):
        check_data(recipe, data)


def machine_here(request: Request) -> Machine:
    """This machine, with the free space of the request's folders."""
    from hf_memkit.catalog.hardware import this_machine

    here = this_machine(request.nvme_path or request.output or ".")
    if request.nvme_path:  # checkpoints are on another disk than swapped states
        here = replace(here, output_free_bytes=this_machine(request.output or ".").disk_free_bytes)
    return here


def rehearses(options: RecipeOptions, here: Machine) -> bool:
    """Whether the run is a rehearsal. A setup for a described GPU may be shown without one."""
    described = bool(options.request.gpu or options.request.gpu_memory)
    return here.gpu is None and not (described and options.shown_only)


def default_processes(recipe: Recipe, *, rehearses: bool) -> int:
    """The recipe's number of GPUs; a rehearsal has at most two processes."""
    return min(2, recipe.gpus) if rehearses else recipe.gpus


def resolve_run(
    options: RecipeOptions, recipe: Recipe, request: Request, here: Machine, place: LaunchLayout, judge: Judge
) -> tuple[RecipeRun, Prediction | None]:
    """(the run or rehearsal, the prediction that chose it or None).

    Stored predictions are used first, unless the data matters. A rehearsal that starts uses no others, so that it
    starts at once.

    Raises:
        DoesNotFitError: no variant fits, or the described GPU is larger than this machine's.
    """
    from hf_memkit.catalog.hardware import described_gpu
    from hf_memkit.common.errors import DoesNotFitError
    from hf_memkit.recipes.rehearse import rehearse
    from hf_memkit.recipes.resolve import resolve
    from hf_memkit.recipes.variant import needs_less
    from hf_memkit.run.folder import RecipeRun

    is_rehearsal = rehearses(options, here)
    at_once = is_rehearsal and not options.dry_run
    described = described_gpu(request.gpu, request.gpu_memory)
    gpus = max(place.gpus, recipe.gpus) if is_rehearsal else place.gpus
    request = replace(request, gpus=gpus, nodes=place.nodes)
    stored = at_once or request.data is None
    runs = not options.shown_only or (options.dry_run and described is None)
    predictor = None if at_once else judge
    try:
        setup, prediction = resolve(request, predictor, recipe=recipe, here=here, stored=stored, runs=runs)
    except DoesNotFitError:
        if not at_once:
            raise
        # A rehearsal needs little memory, and prints the target's problems.
        first = replace(request, variant=next(iter(recipe.variants)))
        setup, prediction = resolve(first, recipe=recipe, here=here, stored=True)
        why = "the recipe's first choice; no variant would fit this machine, which only rehearses it"
        setup = replace(setup, why=why)
    if here.gpu is not None and described is not None and not options.shown_only:
        _refuse_another_gpu(described, here.gpu)

    if is_rehearsal:
        job = rehearse(recipe, setup, gpus=place.gpus)
    else:
        job = RecipeRun(recipe.name, setup.preset, setup, gpus=place.gpus, nodes=place.nodes)
        if options.random_weights:
            job = replace(job, setup=setup.put("model.random_weights", True, "--random-weights"))
    needs = needs_less(recipe, job.setup)
    return replace(job, asked=request.recipe or recipe.name, needs_less=needs), prediction


def _refuse_another_gpu(described: Gpu, here: Gpu) -> None:
    """Refuses a described GPU that is larger than this machine's, or has bf16 that this one lacks."""
    from hf_memkit.common.errors import DoesNotFitError

    if described.usable_bytes > here.usable_bytes:
        has = f"less memory than {described.name}"
    elif described.bf16 and not here.bf16:
        has = f"no bf16, which {described.name} has"
    else:
        return
    fix = "To run here, omit --gpu and --gpu-memory. Or add --dry-run or --export"
    raise DoesNotFitError(f"this machine's {here.name} has {has}. {fix}")
