"""The rules of `hf_memkit.checks`, applied to a run before any model is loaded.

Folders are not looked at here: `hf_memkit.recipe.environment` tries them.
"""

from __future__ import annotations

from hf_memkit.checks import Problem, Subject, check
from hf_memkit.recipe.run import RecipeRun
from hf_memkit.setup import Setup

__all__ = ["mistakes_of_run", "mistakes_of_target"]

_IN_THE_SETUP = ("card-too-small", "ram-too-small", "disk-too-small")
"""The setup's own problems say these, with activations and processes added to what DeepSpeed holds."""


def mistakes_of_run(job: RecipeRun) -> list[Problem]:
    """Known mistakes in what runs here. Of a run that goes on, only its settings are known."""
    if job.setup.job is not None and not job.is_rehearsal:
        return mistakes_of_target(job.setup)
    return check(Subject(job.setup.get("deepspeed.config"), job.setup.arguments, gpus=job.gpus, nodes=job.nodes))


def mistakes_of_target(setup: Setup) -> list[Problem]:
    """Known mistakes in the setup for the card in question, which need not be here."""
    return [problem for problem in check(setup) if problem.rule not in _IN_THE_SETUP]
