"""Options of `memkit plan`: what they mean together, and those that are read here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_memkit.common.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine


def refuse_contradictions(
    *,
    gpu: str | None,
    gpu_memory: str | None,
    gpus_to_compare: str | None,
    price: Sequence[str] | None,
    also: Sequence[str] | None,
    limit: float | None,
    write: str | None,
    short: bool,
    as_json: bool,
    verify: bool = False,
    sequences_per_step: int | None = None,
    gpus: int = 1,
) -> None:
    """Refuses options that contradict one another, or mean nothing, with a line each."""
    from hf_memkit.catalog.optimizers import OPTIMIZERS
    from hf_memkit.plan.choices import ADAPTERS, wrong_sequences

    wrong = []
    if short and as_json:
        wrong.append("--short, --json: mutually exclusive. Omit --short: --json has everything.")
    if gpus_to_compare is not None:
        if gpu is not None:
            wrong.append(f"--gpu {gpu}: not with --gpus-to-compare; write --gpus-to-compare {gpus_to_compare},{gpu}")
        if gpu_memory is not None:
            instead = f"--gpus-to-compare {gpus_to_compare},{gpu_memory}"
            wrong.append(f"--gpu-memory {gpu_memory}: not with --gpus-to-compare; write {instead}")
        if write is not None:
            wrong.append(f"--write {write}: a plan is for one GPU; write --gpu NAME instead of --gpus-to-compare")
        if verify:
            wrong.append("--verify: runs one setup on this machine's GPU; omit it, or --gpus-to-compare")
    elif price and gpu is None and gpu_memory is None:
        wrong.append(f"--price {price[0]}: no GPU named; add --gpu NAME, or --gpus-to-compare NAME,NAME")
    if sequences_per_step is not None and (line := wrong_sequences(sequences_per_step, gpus)):
        wrong.append(line)
    if limit is not None and not math.isfinite(limit):
        wrong.append(f"--limit {limit}: not a number of seconds; write one, such as --limit 120")
    methods = (*ADAPTERS, *OPTIMIZERS)
    near = {name: did_you_mean(name, methods) for name in also or () if name not in methods}
    known = f"; write one of {', '.join(ADAPTERS)}, or an optimizer of Trainer (optim): {', '.join(OPTIMIZERS)}"
    wrong += [f"--also {name}: unknown{said or known}" for name, said in near.items()]
    if wrong:
        raise InputError("\n".join(wrong))


def machines_of(
    gpu: str | None, gpu_memory: str | None, gpus_to_compare: str | None, ram: str | None
) -> tuple[Machine, ...]:
    """The machine in question, or several: one with each GPU."""
    from hf_memkit.catalog.hardware import described_machine

    if gpus_to_compare is None:
        machine = described_machine(gpu, gpu_memory, ram, None)
        if machine.gpu is None:
            raise InputError("this machine has no GPU; name one: --gpu NAME or --gpu 16GB")
        return (machine,)
    names = [each.strip() for each in gpus_to_compare.split(",") if each.strip()]
    if not names:
        raise InputError("--gpus-to-compare: no GPU named; separate names by commas: T4,L4,24GB")
    found: dict[str, Machine] = {}
    wrong = []
    for name in names:
        try:
            machine = described_machine(name, None, ram, None, option="--gpus-to-compare")
        except InputError as error:
            wrong.append(str(error))
            continue
        assert machine.gpu is not None
        if machine.gpu.name in found:
            wrong.append(f"--gpus-to-compare: {name}: named twice; omit one")
        found[machine.gpu.name] = machine
    if wrong:
        raise InputError("\n".join(dict.fromkeys(wrong)))  # a wrong --ram is of each of them
    return tuple(found.values())


def read_prices(given: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    """`["L4=0.71,T4=0.35"]` → price of one GPU an hour, by the GPU's name; `gpus`: those in question. The InputError
    has a line for each mistake."""
    from hf_memkit.catalog.hardware import described_gpu

    found: dict[str, float] = {}
    wrong = []
    for each in (part.strip() for text in given for part in text.split(",") if part.strip()):
        name, equals, number = (part.strip() for part in each.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or not name:
            wrong.append(f"--price {each}: write NAME=NUMBER, such as {gpus[0].removesuffix(' GPU')}=0.71")
            continue
        if not (math.isfinite(value) and value > 0):
            wrong.append(f"--price {each}: not a price. Write a number above 0, such as {name}=0.71")
            continue
        try:
            gpu = described_gpu(name, option=f"--price {each}")
        except InputError as error:
            wrong.append(str(error))
            continue
        assert gpu is not None
        if gpu.name not in gpus:
            wrong.append(f"--price {each}: no plan for {gpu.name}; GPUs in this plan: {', '.join(gpus)}")
        elif gpu.name in found:
            wrong.append(f"--price {each}: {gpu.name} has two prices; omit one")
        else:
            found[gpu.name] = value
    if wrong:
        raise InputError("\n".join(wrong))
    return found


def refuse_other_subjects(script: str | None, of_setup: Mapping[str, object], *, module: bool, verify: bool) -> None:
    """Refuses nothing to plan, and two things."""
    given = [name for name, value in of_setup.items() if value not in (None, False, "auto")]
    options = [f"--{'set' if name == 'settings' else name.replace('_', '-')}" for name in given]
    if script is not None and script.startswith("-"):
        raise InputError(
            f"{script}: no script before --. Write memkit plan train.py -- {script}; with --model, --set KEY=VALUE"
        )
    if script is not None:
        from hf_memkit.cli.predict_script import refuse_beside_a_script

        refuse_beside_a_script(**{"set" if name == "settings" else name: of_setup[name] for name in given})
        return
    if module:
        raise InputError("-m: no module. Write its name after -m: memkit plan -m MODULE -- ARGUMENTS")
    if "model" in given and "recipe" in given:
        raise InputError("--model, --recipe: mutually exclusive. Omit one.")
    if not {"model", "recipe"} & set(given):
        lone = f"{', '.join(options)}: no model named; " if given else "nothing to plan: "
        raise InputError(
            f"{lone}give a training script (memkit plan train.py --gpu NAME -- ARGUMENTS), --model or --recipe"
        )
    if "variant" in given and "recipe" not in given:
        raise InputError(f"--variant {of_setup['variant']}: only recipes have variants; add --recipe NAME")
    if verify:
        raise InputError("--verify: needs a training script: memkit plan train.py --verify -- ARGUMENTS")
