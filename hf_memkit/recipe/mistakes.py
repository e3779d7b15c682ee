"""The rules of `hf_memkit.check`, applied to a run before any model is loaded.

Folders are not looked at here: `hf_memkit.recipe.swap` tries them.
"""

from __future__ import annotations

from hf_memkit.check import Problem, Subject, check
from hf_memkit.recipe.resolve import Resolved
from hf_memkit.recipe.run import Run

__all__ = ["mistakes_of_run", "mistakes_of_target"]

_IN_THE_SETUP = ("card-too-small", "ram-too-small", "disk-too-small")
"""The setup's own problems say these, with activations and processes added to what DeepSpeed holds."""


def mistakes_of_run(job: Run, resolved: Resolved | None) -> list[Problem]:
    """Known mistakes in what runs here. `resolved` is None for a run that goes on."""
    if resolved is not None and not job.is_rehearsal:
        return mistakes_of_target(resolved)
    return check(Subject(job.setup.get("deepspeed.config"), job.setup.arguments, gpus=job.gpus, nodes=job.nodes))


def mistakes_of_target(resolved: Resolved) -> list[Problem]:
    """Known mistakes in the setup for the card in question, which need not be here."""
    subject = Subject.of_setup(
        resolved.setup, resolved.model, resolved.machine, gpus=resolved.gpus, nodes=resolved.nodes, here=False
    )
    return [problem for problem in check(subject) if problem.rule not in _IN_THE_SETUP]
