"""`preset(name, …)`: a preset, or several joined by `+`, resolved for a model and a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from hf_memkit.errors import InputError, SettingError, did_you_mean
from hf_memkit.hardware import described_machine
from hf_memkit.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH, DEFAULT_NVME, Job
from hf_memkit.models import describe, hub_reachable, refuse_absent
from hf_memkit.own_arguments import is_field, of_mapping, wrong_counts
from hf_memkit.presets.compose import apply_preset, compose, leave_out_impossible
from hf_memkit.presets.named import PRESETS
from hf_memkit.presets.own import settle
from hf_memkit.presets.setup import PresetSetup
from hf_memkit.presets.sharing import share_among_processes
from hf_memkit.presets.sizes import Sizes, solve
from hf_memkit.request import Request, refuse_below_one, refuse_too_long
from hf_memkit.setup import Setup
from hf_memkit.technique import TECHNIQUES, wrong_value

__all__ = ["preset", "resolve_preset"]


def preset(
    name: str,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    global_batch_size: int | None = None,
    sequence_length: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    nvme_path: str = DEFAULT_NVME,
    techniques: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_hub: bool | None = None,
) -> PresetSetup:
    """A preset, or several presets and techniques joined by `+`, as one setup with a reason for each choice.

    Args:
        name: such as `"8bit"`, `"lean+lora"`, `"checkpointed+chunked-loss"`; `memkit preset list` names all.
        model: hub ID, local folder, or the name of a built-in architecture; None: settings only, no ledger.
        gpu: a card by name, such as `"RTX 4090"`; None and no `gpu_memory`: this machine's.
        gpu_memory: a card by its marketing size, such as `"16GB"`, with bf16.
        ram: this much RAM instead of this machine's.
        global_batch_size: sequences an optimizer step, all processes together: micro-batch × accumulation × processes
            come to exactly this.
        sequence_length: tokens; None: the model's longest up to 1024, or with `longest-sequence` what fits.
        gpus, nodes: processes on each machine, one card each, and machines.
        nvme_path: folder for what ZeRO-Infinity puts on disk.
        techniques: techniques that take the place of those that decide the same thing.
        values: values of techniques, such as `{"rank": 32}`.
        arguments: fields of TrainingArguments that win over the preset's; the reason then says what they replaced.
        use_hub: whether the hub may be asked for the model's config; None: if it answers.

    Returns:
        The setup; what the machine lacks for it is in its `problems`.

    Raises:
        InputError: an unknown preset, technique, card or model, or a number that is none.
        SettingError: presets that contradict each other (both are named), an unknown value or argument, or a batch
            that does not come out exactly; what would have no effect, or harm, with the reason
            (`hf_memkit.checks`). All are listed at once.
    """
    techniques = (techniques,) if isinstance(techniques, str) else tuple(techniques)
    _check_texts(model=model, gpu=gpu, gpu_memory=gpu_memory, ram=ram)
    request = Request(
        preset=name, techniques=techniques, values=values or {}, model=model, gpu=gpu, gpu_memory=gpu_memory, ram=ram,
        gpus=gpus, nodes=nodes, global_batch_size=global_batch_size, sequence_length=sequence_length,
        nvme_path=nvme_path, arguments=of_mapping(arguments or {}, "arguments"),
    )  # fmt: skip
    return resolve_preset(request, use_hub=use_hub)


def resolve_preset(request: Request, *, use_hub: bool | None = None) -> PresetSetup:
    """As `preset`, of what was asked for; of `arguments`, those of the user's script are left alone."""
    name, techniques = request.preset, request.techniques
    _check_values(name, techniques, request.values)
    own = {key: value for key, value in request.arguments.items() if is_field(key)}
    if problems := wrong_counts(own):
        raise SettingError("\n".join(f"arguments: {problem}" for problem in problems))
    refuse_below_one(
        global_batch_size=request.global_batch_size, sequence_length=request.sequence_length, gpus=request.gpus,
        nodes=request.nodes,
    )  # fmt: skip
    facts = None
    if request.model is not None:
        refuse_absent(request.model)
    nvme_path = request.nvme_path or DEFAULT_NVME
    machine = described_machine(request.gpu, request.gpu_memory, request.ram, nvme_path)
    if request.model is not None:
        use_hub = hub_reachable() if use_hub is None else use_hub
        facts = describe(request.model, use_hub=use_hub, use_built_in=True)
    longest, length = facts.maximum_length if facts is not None else None, request.sequence_length
    refuse_too_long(request.model or "", length, longest)
    parts = [PRESETS[part.strip()] for part in name.split("+") if part.strip() in PRESETS]
    length = length or min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    job = Job(facts, machine, DEFAULT_MICRO_BATCH, length, nvme_path, request.values, request.gpus or 1, request.nodes)

    def with_own(setup: Setup) -> Setup:
        settled, replaced = settle(setup, own)
        assert isinstance(settled, PresetSetup)
        return dataclasses.replace(settled, replaced=replaced)

    def build(left_out: Mapping[str, str]) -> PresetSetup:
        def of_sizes(sizes: Sizes) -> PresetSetup:
            sized = dataclasses.replace(
                job,
                micro_batch_size=sizes.micro_batch,
                accumulation=sizes.accumulation,
                sequence_length=sizes.sequence_length,
            )
            # The user's own come before the ledger: what fits is computed with them.
            empty = PresetSetup(preset=name, request=request)
            setup = apply_preset(name, sized, techniques, left_out=left_out, empty=empty, change=with_own)
            setup = share_among_processes(setup, sized)
            assert isinstance(setup, PresetSetup)
            return sizes.put(setup)

        setup = solve(
            of_sizes,
            job,
            solves_for=next((p.solves_for for p in parts if p.solves_for != "micro-batch"), "micro-batch"),
            global_batch_size=request.global_batch_size,
            sequence_length=request.sequence_length,
            own=own,
        )
        return setup.put_model(facts.name, facts.origin, facts.config) if facts is not None else setup

    setup = leave_out_impossible(name, techniques, build)
    mistakes, lacks = setup.mistakes()
    if refused := [str(problem) for problem in mistakes if problem.refuses]:
        raise SettingError("\n".join(refused))
    hints = [f"Hint: {problem}" for problem in mistakes]
    return setup.with_notes(*hints).with_problems(map(str, lacks))


def _check_values(name: str, extra: Iterable[str], values: Mapping[str, Any]) -> None:
    techniques = compose(name, extra)
    allowed = {key for one in techniques for key in one.values}
    problems = []
    for key, value in values.items():
        if key not in allowed:
            owners = [one.name for one in TECHNIQUES.values() if key in one.values]
            belongs = f"; it belongs to {owners[0]}" if owners else did_you_mean(key, allowed)
            problems.append(f"values: {key!r} is no value of preset {name!r}{belongs}")
        elif wrong := wrong_value(techniques, key, value):
            problems.append(f"{key}={value!r} {wrong}")
    if problems:
        raise SettingError("\n".join(problems))


def _check_texts(**given: Any) -> None:
    for key, value in given.items():
        if value is None or isinstance(value, str):
            continue
        if key == "model":
            raise InputError(
                f"model: must be a hub ID or a folder, and is a {type(value).__name__}; give a model of your own to "
                f"setup.trainer(…, model=model)"
            )
        example = "'RTX 4090'" if key == "gpu" else "'16GB'"
        raise InputError(f"{key}={value!r}: must be text, such as {example}")
