"""Options of `memkit plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Final

from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.host_rates import GivenHost
from hf_memkit.cli.options import Nodes, NvmePath, flags_given, more, option
from hf_memkit.cli.training_options import SubjectOptions, TrainingOptions
from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.units import GB, MIB, parse_rate
from hf_memkit.common.user_files import user_path
from hf_memkit.plan.time_limit import LIMIT_S, MOST_TIMES

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.setup.setup import Setup


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainingOptions):
    gpus_to_compare: Annotated[
        str | None, option("Instead of --gpu: rank these GPUs. --limit is for each of them.", metavar="NAME,NAME…")
    ] = None
    price: Annotated[
        list[str] | None, option("Price of one such GPU an hour, in any currency.", metavar="NAME=NUMBER,…")
    ] = None
    sequences_per_step: Annotated[
        int | None, option("Sequences an optimizer step on all GPUs. Default: the script's.", metavar="N", min=1)
    ] = None
    host: Annotated[
        list[str] | None,
        more(
            "The machine: cores=32, ram-bandwidth=200GB/s, nvme-read=6GB/s, nvme-write=3GB/s, pcie=25GB/s, "
            "network=50GB/s.",
            metavar="NAME=VALUE,…",
        ),
    ] = None
    nodes: Nodes = 1
    nvme_path: NvmePath = None
    also: Annotated[
        list[str] | None,
        option(
            "Include another method: lora, qlora (shown as code) or an optimizer (lomo). Repeatable.", metavar="NAME"
        ),
    ] = None
    limit: Annotated[
        float | None,
        more(
            "Time to search for each GPU, after the script's start. Default: "
            f"{LIMIT_S:.0f}, or up to {MOST_TIMES * LIMIT_S:.0f} while nothing fits or improvements are large.",
            metavar="SECONDS",
            min=0,
        ),
    ] = None
    write: Annotated[str | None, option("Write the setup, for memkit run --plan FILE.", metavar="FILE")] = None
    verify: Annotated[
        bool,
        option(
            "Run a few steps of the setup on this machine's GPU, in a separate process; the next if it fails.",
            "--verify",
        ),
    ] = False

    def refuse_other_subjects(self) -> None:
        """Refuses a missing training, two trainings, and options that contradict the training."""
        if self.script is not None and self.script.startswith("-"):
            raise InputError(
                f"{self.script}: no script before --. Write memkit plan train.py -- {self.script}; with --model, "
                "--set KEY=VALUE"
            )
        self.refuse_wrong_subject("plan")
        if self.script is not None:
            return
        if self.model is not None and self.recipe is not None:
            raise InputError("--model, --recipe: mutually exclusive. Omit one.")
        if self.model is None and self.recipe is None:
            given = ", ".join(flags_given(self, *(field.name for field in fields(SubjectOptions))))
            lone = f"{given}: no model named; " if given else "nothing to plan: "
            raise InputError(
                f"{lone}give a training script (memkit plan train.py --gpu NAME -- ARGUMENTS), --model or --recipe"
            )
        if self.verify:
            raise InputError("--verify: needs a training script: memkit plan train.py --verify -- ARGUMENTS")

    def refuse_contradictions(self, nodes: int = 1) -> None:
        """Refuses options that contradict one another or have no effect, with a line each."""
        from hf_memkit.catalog.optimizers import OPTIMIZERS
        from hf_memkit.plan.choices import ADAPTERS

        wrong = []
        if (compared := self.gpus_to_compare) is not None:
            for option, value in (("--gpu", self.gpu), ("--gpu-memory", self.gpu_memory)):
                if value is not None:
                    instead = f"--gpus-to-compare {compared},{value}"
                    wrong.append(f"{option} {value}: not with --gpus-to-compare; write {instead}")
            if self.write is not None:
                instead = "write --gpu NAME instead of --gpus-to-compare"
                wrong.append(f"--write {self.write}: a plan is for one GPU; {instead}")
            if self.verify:
                wrong.append("--verify: runs one setup on this machine's GPU; omit it, or --gpus-to-compare")
        elif self.price and self.gpu is None and self.gpu_memory is None:
            wrong.append(f"--price {self.price[0]}: no GPU named; add --gpu NAME, or --gpus-to-compare NAME,NAME")
        if nodes > 1 and self.verify:
            wrong.append(f"--verify: runs on one machine, and the plan is for {nodes}; omit it")
        if nodes > 1 and self.nvme_path is not None:
            wrong.append(f"--nvme-path: a plan for {nodes} machines does not swap to their disks; omit it")
        if self.limit is not None and not math.isfinite(self.limit):
            wrong.append(f"--limit {self.limit}: not a number of seconds; write one, such as --limit 120")
        methods = (*ADAPTERS, *OPTIMIZERS)
        near = {name: did_you_mean(name, methods) for name in self.also or () if name not in methods}
        known = f"; write one of {', '.join(ADAPTERS)}, or an optimizer of Trainer (optim): {', '.join(OPTIMIZERS)}"
        wrong += [f"--also {name}: unknown{match or known}" for name, match in near.items()]
        if wrong:
            raise InputError("\n".join(wrong))

    def machines(self) -> tuple[Machine, ...]:
        """The machine that trains; with `--gpus-to-compare` a machine with each of these GPUs."""
        if self.gpus_to_compare is None:
            machine = self.machine()
            if machine.gpu is None:
                raise InputError("this machine has no GPU; name one: --gpu NAME or --gpu 16GB")
            return (machine,)
        from hf_memkit.catalog.hardware import described_machine

        names = [each.strip() for each in self.gpus_to_compare.split(",") if each.strip()]
        if not names:
            raise InputError("--gpus-to-compare: no GPU named; separate names by commas: T4,L4,24GB")
        machines: dict[str, Machine] = {}
        wrong = []
        for name in names:
            try:
                machine = described_machine(name, None, self.ram, None, option="--gpus-to-compare")
            except InputError as error:
                wrong.append(str(error))
                continue
            assert machine.gpu is not None
            if machine.gpu.name in machines:
                wrong.append(f"--gpus-to-compare: {name}: named twice; omit one")
            machines[machine.gpu.name] = machine
        if wrong:
            raise InputError("\n".join(dict.fromkeys(wrong)))  # a wrong --ram repeats for each GPU
        return tuple(machines.values())

    def setups(self, machines: Sequence[Machine], gpus: int, nodes: int = 1) -> list[Setup]:
        """The setup of a model or a recipe for each machine."""
        from hf_memkit.recipes.resolve import resolve
        from hf_memkit.setup.request import Request

        setups = []
        for machine in machines:
            assert machine.gpu is not None
            capacity = f"{machine.gpu.capacity_bytes / MIB:.0f}MiB"
            named = machine.gpu.name.removesuffix(" PCIe") in KNOWN_GPUS
            request = Request(
                ram=self.ram, gpus=gpus, nodes=nodes, gpu=machine.gpu.name if named else None,
                gpu_memory=None if named else capacity,
            )  # fmt: skip
            recipe, request = self.read(request)
            setup, _ = resolve(request, None, recipe=recipe, stored=recipe is not None)
            # A GPU may have been given by its size.
            setups.append(replace(setup, job=replace(setup.sized_job, machine=machine)))
        return setups


def read_prices(given: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    """Reads values such as `"L4=0.71,T4=0.35"`: GPU → price per hour. The InputError has a line for each mistake.
    `gpus`: those that are planned."""
    from hf_memkit.catalog.hardware import described_gpu

    prices: dict[str, float] = {}
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
        elif gpu.name in prices:
            wrong.append(f"--price {each}: {gpu.name} has two prices; omit one")
        else:
            prices[gpu.name] = value
    if wrong:
        raise InputError("\n".join(wrong))
    return prices


_RATES: Final = {
    "ram-bandwidth": "ram_gb_per_s",
    "nvme-read": "nvme_read_gb_per_s",
    "nvme-write": "nvme_write_gb_per_s",
    "pcie": "pcie_gb_per_s",
    "network": "network_gb_per_s",
}
_CORES: Final = "cores"


def read_host(given: Sequence[str], nvme_path: str | None = None) -> GivenHost:
    """Reads values such as `"cores=32,nvme-read=6GB/s"`; the InputError has a line for each mistake."""
    cores: int | None = None
    rates: dict[str, float] = {}
    seen: set[str] = set()
    wrong = []
    for each in (part.strip() for text in given for part in text.split(",") if part.strip()):
        name, equals, value = (part.strip() for part in each.partition("="))
        if name not in (names := (_CORES, *_RATES)):
            near = did_you_mean(name, names) or f"; write one of {', '.join(names)}"
            wrong.append(f"--host {each}: unknown name{near}")
        elif name in seen:
            wrong.append(f"--host {each}: {name} given twice; omit one")
        elif name == _CORES and not (value.isascii() and value.isdigit() and int(value)):
            wrong.append(f"--host {each}: write a whole number of cores: cores=32")
        elif name == _CORES:
            cores = int(value)
        elif not equals or not value:
            wrong.append(f"--host {each}: write NAME=RATE, such as {name}=6GB/s")
        else:
            try:
                rates[_RATES[name]] = parse_rate(value) / GB
            except InputError as error:
                wrong.append(f"--host {name}: {error}")
        seen.add(name)
    if nvme_path is not None and not nvme_path.strip():
        wrong.append("--nvme-path: empty; give a folder on a fast disk")
    elif nvme_path is not None and user_path(nvme_path).exists() and not user_path(nvme_path).is_dir():
        wrong.append(f"--nvme-path {nvme_path}: a file; give a folder")
    if wrong:
        raise InputError("\n".join(wrong))
    return GivenHost(cores, nvme_path=nvme_path, **rates)
