"""`memkit plan --model` and `--recipe`: a model with a batch, or a recipe's variant, instead of a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import MIB

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.catalog.host_rates import GivenHost
    from hf_memkit.plan.judgement import Judged
    from hf_memkit.plan.plan import Plan
    from hf_memkit.setup.request import Request
    from hf_memkit.setup.setup import Setup


def setups_for(
    machines: Sequence[Machine],
    *,
    model: str | None,
    recipe: str | None,
    variant: str,
    preset: str | None,
    batch_size: int | None,
    sequence_length: int | None,
    accumulation: int | None,
    settings: Sequence[str] | None,
    args: str | None,
    ram: str | None,
    gpus: int,
    trust_remote_code: bool,
) -> list[Setup]:
    """What a model with a batch, or a recipe, comes to on each machine.

    Raises:
        InputError: options that contradict one another, or name what is not there.
    """
    from hf_memkit.setup.request import Request

    found = []
    for machine in machines:
        assert machine.gpu is not None
        capacity = f"{machine.gpu.capacity_bytes / MIB:.0f}MiB"
        named = machine.gpu.name.removesuffix(" PCIe") in KNOWN_GPUS
        request = Request(
            recipe=recipe,
            variant=variant,
            model=model,
            ram=ram,
            gpus=gpus,
            gpu=machine.gpu.name if named else None,
            gpu_memory=None if named else capacity,
            sequence_length=sequence_length,
            trust_remote_code=trust_remote_code,
        )
        sizes = {
            "per_device_train_batch_size": ("--batch-size", batch_size),
            "gradient_accumulation_steps": ("--accumulation", accumulation),
        }
        found.append(_on(machine, _setup(replace(request, preset=preset or ""), settings or (), args, sizes)))
    return found


def _setup(request: Request, settings: Sequence[str], args: str | None, sizes: dict[str, Any]) -> Setup:
    from hf_memkit.recipes.resolve import read_own, resolve

    if request.recipe is None:
        return resolve(read_own(request, settings, args, sizes), None)[0]
    from hf_memkit.recipes.schema import load_recipe

    wrong = [
        f"{option}: not with --recipe; write --set {field}={value}"
        for field, (option, value) in sizes.items()
        if value is not None
    ]
    wrong += ["--args: not with --recipe; write --set KEY=VALUE"] if args is not None else []
    wrong += (
        ["--preset: not with --recipe, whose variants are its presets; choose one with --variant"]
        if request.preset
        else []
    )
    if wrong:
        raise InputError("\n".join(wrong))
    recipe = load_recipe(request.recipe)
    return resolve(read_own(request, settings, recipe=recipe), None, recipe=recipe, stored=True)[0]


def _on(machine: Machine, setup: Setup) -> Setup:
    """For this very machine: a GPU may have been given by its size."""
    return replace(setup, job=replace(setup.sized_job, machine=machine))


def planned_setups(
    setups: Sequence[Setup],
    *,
    trust_remote_code: bool,
    also: tuple[str, ...],
    limit_s: float | None,
    said: Callable[[Judged], None],
    host: GivenHost | None = None,
    sequences: int | None = None,
) -> tuple[Plan, ...]:
    """A plan for each; those that Ctrl-C leaves out are not there."""
    from hf_memkit.plan.make_plan import plan_setup

    found: list[Plan] = []
    for setup in setups:
        one = plan_setup(
            setup, trust_remote_code=trust_remote_code, also=also, limit_s=limit_s, said=said, host=host,
            sequences=sequences,
        )  # fmt: skip
        found.append(one)
        if found[-1].stopped_by_hand:
            break
    return tuple(found)
