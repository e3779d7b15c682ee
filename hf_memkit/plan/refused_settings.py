"""Why a rule of `checks/` refuses a script with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_memkit.catalog.hardware import Machine
from hf_memkit.checks.apply import check
from hf_memkit.checks.subject import Subject
from hf_memkit.plan.candidate import training_arguments
from hf_memkit.prediction.traced_training import TracedArguments


def refused(settings: Mapping[str, Any], arguments: TracedArguments, machine: Machine, gpus: int) -> str:
    """The error of a rule about the script with these settings that the script alone does not have; empty: none."""
    before = {each.rule for each in _problems(arguments.known(), machine, gpus)}
    others = {key: value for key, value in settings.items() if key.startswith("adapter.")}
    if "model.quantization_config" in settings:
        others["model.quantization"] = settings["model.quantization_config"]
    problems = _problems({**arguments.known(), **training_arguments(settings)}, machine, gpus, others)
    return next((f"{each.why} (rule {each.rule})" for each in problems if each.rule not in before), "")


def _problems(
    arguments: Mapping[str, Any], machine: Machine, gpus: int, settings: Mapping[str, Any] | None = None
) -> list[Any]:
    config = arguments.get("deepspeed")
    known = {name: value for name, value in arguments.items() if value is not None}
    subject = Subject(
        config=config if isinstance(config, Mapping) else None, arguments=known, machine=machine, gpus=gpus,
        settings=settings or {},
    )  # fmt: skip
    return [each for each in check(subject) if each.severity == "error"]
