"""`memkit plan`: the fastest setup of a training that fits a GPU, and what each GPU would make of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hf_memkit.cli.options import (
    MORE,
    Gpu,
    GpuMemory,
    Json,
    Module,
    NvmePath,
    Ram,
    Script,
    ScriptArguments,
    Short,
    show_what_can_be_shown,
    tell,
    with_options,
)
from hf_memkit.cli.plan_model import SetupOptions, setups_for
from hf_memkit.cli.printing import print_json, typed_command
from hf_memkit.common.errors import InputError, ScriptFailed
from hf_memkit.plan.time_limit import LIMIT_S, MOST_TIMES
from hf_memkit.prediction.launch_command import is_command

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.common.user_script import UserScript
    from hf_memkit.plan.judgement import Judgement
    from hf_memkit.plan.make_plan import PlanRequest
    from hf_memkit.plan.measured_steps import Verified
    from hf_memkit.plan.plan import Plan
    from hf_memkit.setup.setup import Setup


EXAMPLES = """[bold]Examples[/bold]

  memkit plan train.py --gpu "A100 40GB" --ram 128GB -- --output_dir out --bf16

      FASTEST THAT FITS A100 40GB: 16 × 1, Liger kernels (fused loss), …

  memkit plan -m trl.scripts.sft --gpu T4 --gpus 2 --short -- --config sft.yaml

  memkit plan train.py --gpus-to-compare "T4,L4" --price "T4=0.35,L4=0.71" -- …

  memkit plan --model gpt2-xl --batch-size 8 --set bf16=true --gpu L4

  [bold]The same training with the plan's settings[/bold]

  memkit plan train.py --gpu L4 --write plan.yaml -- --output_dir out --bf16

  memkit run train.py --plan plan.yaml -- --output_dir out --bf16

  The script runs on this machine up to Trainer.train(); files that it writes before stay.

  [bold]Exit code[/bold]: 0 a setup fits, 1 none does, 3 the search was stopped before it found one
"""

NOT_FINISHED: Final = 3
"""Exit code: the search was stopped before it found a setup. 1 would say that none fits."""


@with_options
def plan(
    context: typer.Context,
    script: Script = None,
    arguments: ScriptArguments = None,
    module: Module = False,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    gpus_to_compare: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME…", help="Instead of --gpu: rank these GPUs. --limit is for each of them."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER,…", help="Price of one such GPU an hour, in any currency."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of one machine that train together (torchrun). Default: the command's, or 1."),
    ] = None,
    sequences_per_step: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Sequences an optimizer step on all GPUs. Default: the script's."),
    ] = None,
    ram: Ram = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,…",
            help="The machine: cores=32, ram-bandwidth=200GB/s, nvme-read=6GB/s, nvme-write=3GB/s, pcie=25GB/s.",
            rich_help_panel=MORE,
        ),
    ] = None,
    nvme_path: NvmePath = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Include another method: lora, qlora (shown as code) or an optimizer (lomo). Repeatable.",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Time to search for each GPU, after the script's start. Default: "
            f"{LIMIT_S:.0f}, or up to {MOST_TIMES * LIMIT_S:.0f} while nothing fits or improvements are large.",
            rich_help_panel=MORE,
        ),
    ] = None,
    write: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the setup, for memkit run --plan FILE.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one HTML page with the plot.", rich_help_panel=MORE)
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run a few steps of the setup on this machine's GPU, in a separate process; the next if it fails.",
        ),
    ] = False,
    short: Short = False,
    as_json: Json = False,
    *,
    of_setup: SetupOptions,
) -> int:
    """Find the fastest setup of a training script that fits a GPU. Needs no GPU."""
    from hf_memkit.cli.plan_host import read_host
    from hf_memkit.cli.plan_options import machines_of, read_prices, refuse_contradictions, refuse_other_subjects
    from hf_memkit.common.answer.document import check_file
    from hf_memkit.plan.make_plan import PlanRequest
    from hf_memkit.plan.plan_file import check_plan_file, write_plan

    refuse_other_subjects(script, vars(of_setup), module=module, verify=verify)
    found, launched, environment = None, None, context.obj
    if script is not None and not module and is_command(script):
        from hf_memkit.cli.predict_script import found_command

        launched = found_command((script, *(arguments or ())), environment, gpus)
        if launched.nodes > 1:
            raise InputError(f"{launched.nodes} machines: a plan is for one; give the command for one machine")
        found, gpus, environment = launched.script, launched.gpus, launched.environment
    gpus = gpus or 1
    refuse_contradictions(
        gpu=gpu, gpu_memory=gpu_memory, gpus_to_compare=gpus_to_compare, price=price, also=also, limit=limit,
        write=write, short=short, as_json=as_json, verify=verify, sequences_per_step=sequences_per_step, gpus=gpus,
    )  # fmt: skip
    from hf_memkit.cli.predict_script import found_script
    from hf_memkit.prediction.running_scripts import refuse_unreadable

    if script is not None:
        found = found or found_script(script, arguments or (), is_module=module, verb="plan")
        refuse_unreadable(found)
    if verify:
        from hf_memkit.plan.verify import refuse_unverifiable

        refuse_unverifiable(None, gpus)
    of_host = read_host(host or (), nvme_path)
    machines = machines_of(gpu, gpu_memory, gpus_to_compare, ram)
    if verify:
        refuse_unverifiable(machines[0], gpus)
    prices = read_prices(price or (), [each.gpu.name for each in machines if each.gpu is not None])
    if write is not None:
        check_plan_file(write)
    if html is not None:
        check_file(html)
    show_what_can_be_shown()
    setups = None
    if found is None:
        setups = setups_for(machines, of_setup, ram=ram, gpus=gpus)
    wanted = PlanRequest(
        gpus=gpus, environment=environment, also=tuple(also or ()), limit_s=limit, ram_is_given=ram is not None,
        host=of_host, sequences=sequences_per_step, keeps=True,
    )  # fmt: skip
    plans = _planned(found, setups, machines, wanted, trust_remote_code=of_setup.trust_remote_code)
    if plans is None:
        return 130  # as a shell has it after Ctrl-C: 1 would say that nothing fits
    if launched is not None:
        starts = launched if launched.is_launcher else None
        typed = {"front_end": launched.front_end, "typed": launched.typed}
        plans = tuple(replace(each, launched=starts, **typed) for each in plans)  # type: ignore[arg-type]
    ran: tuple[Verified, ...] = ()
    if verify:
        assert found is not None
        from hf_memkit.cli.plan_here import verified

        only, ran = verified(plans[0], found, environment)
        plans = (only,)
    verdicts = {each.verdict for each in plans}
    fits = "fits" in verdicts
    files = []
    if write is not None and fits:
        files.append(str(write_plan(plans[0], write)))
    if html is not None:
        from hf_memkit.common.answer.page import write_page
        from hf_memkit.plan.answer import plan_answer

        answer = plan_answer(plans, prices, ran, compared=gpus_to_compare is not None)
        files.append(str(write_page(html, answer, guide="plan.md", command=typed_command())))
    _show(plans, prices, found, files, compared=gpus_to_compare is not None, short=short, as_json=as_json, ran=ran)
    if write is not None and not fits:
        why = "nothing found yet" if verdicts == {"unfinished"} else "nothing fits"
        tell(f"--write {write}: not written; {why}{' without other code' if plans[0].with_code else ''}")
    elif write is not None and plans[0].with_code and (best := plans[0].proposed) is not None:
        tell(f"--write {write}: holds {best.candidate.name}. For a setup with other code, edit the script as shown")
    if not fits and "tight" not in verdicts and ("unfinished" in verdicts or len(plans) < len(machines)):
        return NOT_FINISHED
    return 0 if (fits or "tight" in verdicts) and (not verify or any(each.passed for each in ran)) else 1


def _planned(
    script: UserScript | None,
    setups: Sequence[Setup] | None,
    machines: Sequence[Machine],
    wanted: PlanRequest,
    *,
    trust_remote_code: bool,
) -> tuple[Plan, ...] | None:
    """A plan for each machine; None: Ctrl-C came before anything was judged."""
    from hf_memkit.cli.plan_model import planned_setups
    from hf_memkit.cli.predict_script import ended_by_signals
    from hf_memkit.plan.make_plan import plan_gpus
    from hf_memkit.prediction.running_scripts import name_of

    if script is not None:
        tell(f"{name_of(script)} runs on this machine up to Trainer.train(); files that it writes before stay")
    tell("searching for setups; Ctrl-C prints the best so far")
    try:
        with ended_by_signals("Ctrl-C: printing the best so far") as ended:
            wanted = replace(wanted, on_judged=_Progress(machines))
            if script is None:
                plans = planned_setups(setups or (), wanted, trust_remote_code=trust_remote_code)
            else:
                plans = plan_gpus(script, machines, wanted)
            if not plans:
                ended()
    except ScriptFailed as error:
        print(error.text, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        tell("stopped before any setup was traced; no process of the script is left")
        return None
    planned = [each.machine for each in plans]
    if missing := [machine.gpu.name for machine in machines if machine.gpu and machine not in planned]:
        tell(f"not planned: {', '.join(missing)}")
    return plans


class _Progress:
    """Tells of each setup that is judged, on standard error, a line each: what the script draws or asks stays."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        several = len(machines) > 1
        self._gpus = {each.gpu.capacity_bytes: each.gpu.name for each in machines if each.gpu and several}
        self._count, self._began = 0, time.monotonic()

    def __call__(self, judged: Judgement) -> None:
        from hf_memkit.common.units import format_gib

        self._count += 1
        found = judged.prediction
        gpu = self._gpus.get(found.capacity_bytes or 0) if found is not None else None
        step = f", {judged.seconds:.3g} s a step" if judged.is_priced and judged.seconds else ""
        verdict = found.verdict if found is not None and not judged.is_other else "does not fit"
        fits = f"{verdict}{f' {gpu}' if gpu else ''}"
        said = f"{format_gib(judged.needs_bytes)}{step}: {fits}" if found is not None else judged.why
        if judged.lacks_host:
            said += f": {judged.why.partition('; on the GPU')[0]}"
        since = f"{time.monotonic() - self._began:.0f} s, setup {self._count}"
        tell(f"{since}: {judged.candidate.name}: {said}")


def _show(
    plans: Sequence[Plan],
    prices: Mapping[str, float],
    script: UserScript | None,
    files: Sequence[str],
    *,
    compared: bool,
    short: bool,
    as_json: bool,
    ran: Sequence[Verified] = (),
) -> None:
    if as_json:
        from hf_memkit.plan.as_json import plans_json
        from hf_memkit.plan.pasted import pasted

        found = plans_json(plans, prices)
        request = None
        if script is not None:
            request = {
                "script": script.target, "is_module": script.is_module, "arguments": list(script.arguments),
            }  # fmt: skip
        if compared:
            print_json({"request": request, "gpus": found, "files": list(files)})
            return
        best, faster, own = plans[0].proposed, plans[0].faster(), plans[0].own.training
        to_paste = [each.candidate for each in (best, faster, *plans[0].with_code) if each]
        beside = {
            "faster": faster.candidate.name if faster is not None else None,
            "with_code": [each.candidate.name for each in plans[0].with_code],
            "paste": {each.name: pasted(each, own, command=plans[0].front_end).to_json() for each in to_paste},
            "verified": [each.to_json() for each in ran],
            "files": list(files),
        }
        print_json({"request": request, **found[0], **beside})
        return
    from hf_memkit.common.answer.terminal import show
    from hf_memkit.plan.answer import plan_answer

    show(plan_answer(plans, prices, ran, compared=compared), short=short)
    for file in files:
        print(f"Wrote {file}")
