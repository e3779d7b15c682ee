"""A preset, or several joined by `+`, resolved for a model and a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.models import describe, hub_reachable, refuse_absent
from hf_memkit.checks import Problem
from hf_memkit.common.errors import SettingError, did_you_mean
from hf_memkit.prediction import predict
from hf_memkit.presets.compose import apply_preset, compose, leave_out_impossible
from hf_memkit.presets.named import PRESETS
from hf_memkit.presets.preset_setup import mistakes_of
from hf_memkit.presets.sharing import share_among_processes
from hf_memkit.presets.sizes import Judge, Sizes, solve
from hf_memkit.presets.users_values import apply_own_arguments
from hf_memkit.setup.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH, DEFAULT_NVME, Job
from hf_memkit.setup.own_arguments import is_field, wrong_counts
from hf_memkit.setup.request import Request, refuse_below_one, refuse_too_long
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES, wrong_value


def resolve_preset(request: Request, *, use_hub: bool | None = None) -> Setup:
    """The preset for the requested model and machine. Arguments of the user's script are ignored.

    Raises:
        SettingError: lists everything that contradicts, is unknown, cannot be exact, or would have no effect or harm.
    """
    _check_values(request.preset, request.techniques, request.values)
    if problems := wrong_counts({key: value for key, value in request.arguments.items() if is_field(key)}):
        raise SettingError("\n".join(f"arguments: {problem}" for problem in problems))
    refuse_below_one(
        global_batch_size=request.global_batch_size, sequence_length=request.sequence_length, gpus=request.gpus,
        nodes=request.nodes,
    )  # fmt: skip
    if request.model is not None:
        refuse_absent(request.model)
    nvme_path = request.nvme_path or DEFAULT_NVME
    machine = described_machine(request.gpu, request.gpu_memory, request.ram, nvme_path)
    facts = None
    if request.model is not None:
        use_hub = hub_reachable() if use_hub is None else use_hub
        facts = describe(request.model, use_hub=use_hub, use_built_in=True)
    longest = facts.maximum_length if facts is not None else None
    refuse_too_long(request.model or "", request.sequence_length, longest)
    length = request.sequence_length or min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    job = Job(facts, machine, DEFAULT_MICRO_BATCH, length, nvme_path, request.values, request.gpus or 1, request.nodes)
    return preset_for(job, request)


def preset_for(job: Job, request: Request) -> Setup:
    """The requested preset for a job with known model and machine; up to three setups are traced to compute a size.
    Raises SettingError with everything that contradicts, cannot be exact, or would have no effect or harm."""
    name = request.preset
    facts = job.model
    own = {key: value for key, value in request.arguments.items() if is_field(key)}
    parts = [PRESETS[part.strip()] for part in name.split("+") if part.strip() in PRESETS]

    def with_own(setup: Setup) -> Setup:
        changed, replaced = apply_own_arguments(setup, own)
        return dataclasses.replace(changed, replaced=replaced)

    def with_sizes(sizes: Sizes) -> Setup:
        sized = dataclasses.replace(job, micro_batch_size=sizes.micro_batch, accumulation=sizes.accumulation)
        sized = dataclasses.replace(sized, sequence_length=sizes.sequence_length)

        def build(left_out: Mapping[str, str]) -> Setup:
            # The user's own come before the ledger, which depends on them.
            setup = apply_preset(name, sized, request.techniques, left_out=left_out, change=with_own)
            setup = sizes.put(share_among_processes(dataclasses.replace(setup, request=request), sized))
            return setup.put_model(facts.name, facts.origin, facts.config) if facts is not None else setup

        return leave_out_impossible(name, request.techniques, build)

    def with_largest_sizes(judge: Judge | None) -> Setup:
        return solve(
            with_sizes,
            job,
            solves_for=next((p.solves_for for p in parts if p.solves_for != "micro-batch"), "micro-batch"),
            global_batch_size=request.global_batch_size,
            sequence_length=request.sequence_length,
            own=own,
            judge=judge,
        )

    _refuse_mistakes(with_largest_sizes(None))  # before anything is traced
    setup = with_largest_sizes(predict)
    hints = _refuse_mistakes(setup)
    return setup.with_notes(*(f"Hint: {problem}" for problem in hints)).with_problems(map(str, mistakes_of(setup)[1]))


def _refuse_mistakes(setup: Setup) -> list[Problem]:
    """Raise the mistakes that refuse the setup; return the others."""
    mistakes, _ = mistakes_of(setup)
    if refused := [str(problem) for problem in mistakes if problem.refuses]:
        raise SettingError("\n".join(refused))
    return mistakes


def _check_values(name: str, extra: Iterable[str], values: Mapping[str, Any]) -> None:
    techniques = compose(name, extra)
    allowed = {key for technique in techniques for key in technique.values}
    problems = []
    for key, value in values.items():
        if key not in allowed:
            owners = [technique.name for technique in TECHNIQUES.values() if key in technique.values]
            belongs = f"; it belongs to {owners[0]}" if owners else did_you_mean(key, allowed)
            problems.append(f"values: {key!r} is not a value of preset {name!r}{belongs}")
        elif wrong := wrong_value(techniques, key, value):
            problems.append(f"{key}={value!r} {wrong}")
    if problems:
        raise SettingError("\n".join(problems))
