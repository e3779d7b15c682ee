"""`memkit plan`: the fastest setup of a training that fits a GPU, or the best GPU for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import typer

from hf_memkit.cli.options import INTERRUPTED, tell, with_options
from hf_memkit.cli.plan_options import PlanOptions, read_host, read_prices
from hf_memkit.cli.printing import print_json, say_to_stderr, typed_command
from hf_memkit.common.errors import InputError, ScriptFailed

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.common.user_script import UserScript
    from hf_memkit.plan.candidate import Candidate
    from hf_memkit.plan.judgement import Judgement
    from hf_memkit.plan.make_plan import PlanRequest
    from hf_memkit.plan.plan import Plan
    from hf_memkit.plan.verify import Verified
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
"""Exit code: the search was stopped before it found a setup. 1 means that none fits."""


@with_options
def plan(context: typer.Context, *, options: PlanOptions) -> int:
    """Find the fastest setup of a training script that fits a GPU. Needs no GPU."""
    from hf_memkit.common.answer.document import check_file
    from hf_memkit.common.answer.page import write_page
    from hf_memkit.plan.answer import plan_answer
    from hf_memkit.plan.make_plan import PlanRequest
    from hf_memkit.plan.plan_file import check_plan_file, write_plan
    from hf_memkit.plan.verify import refuse_unverifiable
    from hf_memkit.prediction.running_scripts import refuse_unreadable

    options.refuse_other_subjects()
    launched = options.started("plan", context.obj, options.nodes) if options.script is not None else None
    gpus = (launched.gpus if launched is not None else options.gpus) or 1
    nodes = launched.nodes if launched is not None else options.nodes
    options.refuse_contradictions(nodes)
    if launched is not None:
        refuse_unreadable(launched.script)
    if options.verify:
        refuse_unverifiable(None, gpus)
    host = read_host(options.host or (), options.nvme_path)
    machines = options.machines()
    if options.verify:
        refuse_unverifiable(machines[0], gpus)
    prices = read_prices(options.price or (), [each.gpu.name for each in machines if each.gpu is not None])
    if options.write is not None:
        check_plan_file(options.write)
    if options.html is not None:
        check_file(options.html)

    setups = options.setups(machines, gpus, nodes) if launched is None else []
    script, environment = (launched.script, launched.environment) if launched is not None else (None, None)
    request = PlanRequest(
        gpus=gpus, nodes=nodes, environment=environment, also=tuple(options.also or ()), limit_s=options.limit,
        ram_is_given=options.ram is not None, host=host, sequences=options.sequences_per_step, keeps=True,
    )  # fmt: skip
    plans = _planned(script, setups, machines, request, trust_remote_code=options.trust_remote_code)
    if plans is None:
        return INTERRUPTED
    if launched is not None:
        starts = launched if launched.is_launcher else None
        plans = tuple(
            replace(each, launched=starts, front_end=launched.front_end, typed=launched.typed) for each in plans
        )
    ran: tuple[Verified, ...] = ()
    if options.verify and script is not None:
        only, ran = _verified(plans[0], script, environment)
        plans = (only,)

    files = []
    best = plans[0].proposed
    not_written = None
    try:
        if options.write is not None and best is not None:
            files.append(str(write_plan(plans[0], options.write)))
        if options.html is not None:
            answer = plan_answer(plans, prices, ran, compared=options.gpus_to_compare is not None)
            files.append(str(write_page(options.html, answer, guide="plan.md", command=typed_command())))
    except InputError as error:  # the answer of a long search is printed first
        not_written = error
    _show(plans, prices, script, files, options, ran)
    if not_written is not None:
        raise not_written
    if options.write is not None and best is None:
        tell(f"--write {options.write}: not written; the plan proposes no setup")
    elif options.write is not None and best is not None and plans[0].with_code:
        other = "For a setup with other code, edit the script as shown"
        tell(f"--write {options.write}: holds {best.candidate.name}. {other}")

    verdicts = {each.verdict for each in plans}
    if verdicts & {"fits", "tight"}:
        return 0 if not options.verify or any(each.passed for each in ran) else 1
    return NOT_FINISHED if "unfinished" in verdicts or len(plans) < len(machines) else 1


def _planned(
    script: UserScript | None, setups: Sequence[Setup], machines: Sequence[Machine], request: PlanRequest, *,
    trust_remote_code: bool,
) -> tuple[Plan, ...] | None:  # fmt: skip
    """A plan for each machine; None if Ctrl-C came before any setup was traced."""
    from hf_memkit.cli.predict_script import ended_by_signals
    from hf_memkit.plan.known_mistakes import explained
    from hf_memkit.plan.make_plan import plan_gpus, plan_setup
    from hf_memkit.prediction.running_scripts import name_of

    if script is not None:
        tell(f"{name_of(script)} runs on this machine up to Trainer.train(); files that it writes before stay")
    tell("searching for setups; Ctrl-C prints the best so far")
    try:
        with ended_by_signals("Ctrl-C: stopping; the best so far, if any, is printed") as ended:
            progress = _Progress(machines)
            request = replace(request, on_judged=progress, on_slow=progress.before_slow, on_restart=tell)
            plans = plan_gpus(script, machines, request) if script is not None else ()
            for setup in setups:
                plans = (*plans, plan_setup(setup, request, trust_remote_code=trust_remote_code))
                if plans[-1].stopped_by_hand:
                    break
            if not plans:
                ended()
    except ScriptFailed as error:
        say_to_stderr(error.text)
        raise explained(error) from error
    except KeyboardInterrupt:
        tell("stopped before any setup was traced; no process of the script is left")
        return None
    planned = [each.machine for each in plans]
    if missing := [machine.gpu.name for machine in machines if machine.gpu and machine not in planned]:
        tell(f"not planned: {', '.join(missing)}")
    return plans


class _Progress:
    """Prints a line to standard error for each judged setup, which leaves the script's own output as it is."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        several = len(machines) > 1
        self._gpus = {each.gpu.capacity_bytes: each.gpu.name for each in machines if each.gpu and several}
        self._count, self._began = 0, time.monotonic()

    def before_slow(self, candidate: Candidate, seconds: float) -> None:
        tell(f"{time.monotonic() - self._began:.0f} s: compiling {candidate.name}, about {seconds:.0f} s")

    def __call__(self, judgement: Judgement) -> None:
        from hf_memkit.common.units import format_gib

        self._count += 1
        prediction = judgement.prediction
        result = judgement.why
        if prediction is not None:
            step = f", {judgement.seconds:.3g} s a step" if judgement.is_priced and judgement.seconds else ""
            verdict = "does not fit" if judgement.is_other else prediction.verdict
            gpu = self._gpus.get(prediction.capacity_bytes or 0, "")
            result = f"{format_gib(judgement.needs_bytes)}{step}: {verdict} {gpu}".rstrip()
        if judgement.lacks_host:
            result += f": {judgement.why.partition('; on the GPU')[0]}"
        since = f"{time.monotonic() - self._began:.0f} s, setup {self._count}"
        tell(f"{since}: {judgement.candidate.name}: {result}")


def _verified(
    plan: Plan, script: UserScript, environment: Mapping[str, str] | None
) -> tuple[Plan, tuple[Verified, ...]]:
    """Runs the proposed setups (`verify`) and prints failures; Ctrl-C ends the run and keeps the results so far."""
    from hf_memkit.cli.predict_script import ended_by_signals
    from hf_memkit.plan.verify import verify

    results: list[Verified] = []

    def done(each: Verified) -> None:
        results.append(each)
        if not each.passed:
            tell(f"{each.judgement.candidate.name}: {each.failed}")

    try:
        with ended_by_signals():
            plan, _ = verify(plan, script, environment=environment, on_start=tell, on_end=done)
    except KeyboardInterrupt:
        tell("stopped; no process of the script is left")
    if plan.proposed is not None and not any(each.passed for each in results):
        tell(f"not verified: {plan.proposed.candidate.name}, now the best setup")
    return plan, tuple(results)


def _show(
    plans: Sequence[Plan], prices: Mapping[str, float], script: UserScript | None, files: Sequence[str],
    options: PlanOptions, ran: Sequence[Verified],
) -> None:  # fmt: skip
    from hf_memkit.common.answer.terminal import show
    from hf_memkit.plan.answer import plan_answer, plans_json
    from hf_memkit.plan.pasted import pasted

    is_comparison = options.gpus_to_compare is not None
    if not options.as_json:
        show(plan_answer(plans, prices, ran, compared=is_comparison), short=options.short)
        for file in files:
            print(f"Wrote {file}")
        return

    content = plans_json(plans, prices)
    request = None
    if script is not None:
        request = {"script": script.target, "is_module": script.is_module, "arguments": list(script.arguments)}
    if is_comparison:
        print_json({"request": request, "gpus": content, "files": list(files)})
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
    print_json({"request": request, **content[0], **beside})
