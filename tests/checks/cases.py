"""For each rule: a job that breaks it, a job that does not, and the key that the problem must name."""

from __future__ import annotations

from tests.checks.case import Case
from tests.checks.cases_adapters import ADAPTER_CASES
from tests.checks.cases_arguments import ARGUMENT_CASES
from tests.checks.cases_checkpointing import CHECKPOINTING_CASES
from tests.checks.cases_choices import CHOICE_CASES
from tests.checks.cases_keys import KEY_CASES
from tests.checks.cases_launcher import LAUNCHER_CASES
from tests.checks.cases_loss import LOSS_CASES
from tests.checks.cases_optimizer import OPTIMIZER_CASES
from tests.checks.cases_running import RUNNING_CASES
from tests.checks.cases_zero import ZERO_CASES

CASES: dict[str, list[Case]] = {
    **ADAPTER_CASES,
    **ARGUMENT_CASES,
    **CHECKPOINTING_CASES,
    **CHOICE_CASES,
    **KEY_CASES,
    **LAUNCHER_CASES,
    **LOSS_CASES,
    **OPTIMIZER_CASES,
    **RUNNING_CASES,
    **ZERO_CASES,
}
