"""`memkit plan --model` and `--recipe`: a model with a batch, or a recipe's variant, instead of a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.common.units import MIB

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.plan.make_plan import PlanRequest
    from hf_memkit.plan.plan import Plan
    from hf_memkit.setup.request import Request
    from hf_memkit.setup.setup import Setup


_NO_SCRIPT: Final = "Instead of a script: a model or a recipe"


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """Options of `memkit plan` that describe a training without a script."""

    model: Annotated[
        str | None, typer.Option(help="Hub ID or local folder. No weights are loaded.", rich_help_panel=_NO_SCRIPT)
    ] = None
    recipe: Annotated[str | None, typer.Option(help="Recipe name or YAML file.", rich_help_panel=_NO_SCRIPT)] = None
    variant: Annotated[
        str,
        typer.Option(help="With --recipe: variant; auto: the first that fits.", rich_help_panel=_NO_SCRIPT),
    ] = "auto"
    preset: Annotated[
        str | None, typer.Option(help="With --model: preset to start from.", rich_help_panel=_NO_SCRIPT)
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="With --model: per_device_train_batch_size.", rich_help_panel=_NO_SCRIPT),
    ] = None
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence.", rich_help_panel=_NO_SCRIPT)
    ] = None
    accumulation: Annotated[
        int | None,
        typer.Option(min=1, help="With --model: gradient_accumulation_steps.", rich_help_panel=_NO_SCRIPT),
    ] = None
    args: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --model: your own arguments (YAML or JSON). They take precedence.",
            rich_help_panel=_NO_SCRIPT,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a TrainingArguments field, or a value such as rank=32. Repeatable.",
            rich_help_panel=_NO_SCRIPT,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="With --model: run code that comes with it.", rich_help_panel=_NO_SCRIPT
        ),
    ] = False


def setups_for(machines: Sequence[Machine], options: SetupOptions, *, ram: str | None, gpus: int) -> list[Setup]:
    """What a model with a batch, or a recipe, comes to on each machine."""
    from hf_memkit.setup.request import Request

    found = []
    for machine in machines:
        assert machine.gpu is not None
        capacity = f"{machine.gpu.capacity_bytes / MIB:.0f}MiB"
        named = machine.gpu.name.removesuffix(" PCIe") in KNOWN_GPUS
        request = Request(
            recipe=options.recipe, variant=options.variant, model=options.model, preset=options.preset or "", ram=ram,
            gpus=gpus, gpu=machine.gpu.name if named else None, gpu_memory=None if named else capacity,
            sequence_length=options.sequence_length, trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        setup = _setup(request, options)
        # A GPU may have been given by its size.
        found.append(replace(setup, job=replace(setup.sized_job, machine=machine)))
    return found


def _setup(request: Request, options: SetupOptions) -> Setup:
    from hf_memkit.recipes.resolve import read_own_arguments, resolve

    own: dict[str, Any] = {
        "args": options.args,
        "batch_size": options.batch_size,
        "accumulation": options.accumulation,
    }
    if request.recipe is None:
        return resolve(read_own_arguments(request, options.settings or (), **own), None)[0]
    from hf_memkit.cli.predict import read_recipe

    recipe, request = read_recipe(request, options.settings, preset=options.preset, **own)
    return resolve(request, None, recipe=recipe, stored=True)[0]


def planned_setups(setups: Sequence[Setup], wanted: PlanRequest, *, trust_remote_code: bool) -> tuple[Plan, ...]:
    """A plan for each; those that Ctrl-C leaves out are not there."""
    from hf_memkit.plan.make_plan import plan_setup

    found: list[Plan] = []
    for setup in setups:
        found.append(plan_setup(setup, wanted, trust_remote_code=trust_remote_code))
        if found[-1].stopped_by_hand:
            break
    return tuple(found)
