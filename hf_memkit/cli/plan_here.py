"""What `memkit plan --verify` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_memkit.cli.options import tell

if TYPE_CHECKING:
    from hf_memkit.common.user_script import UserScript
    from hf_memkit.plan.measured_steps import Verified
    from hf_memkit.plan.plan import Plan


def verified(
    plan: Plan, script: UserScript, environment: Mapping[str, str] | None
) -> tuple[Plan, tuple[Verified, ...]]:
    """Runs what is proposed, as `verify` does; tells on standard error what runs and what came of it. Ctrl-C ends what
    runs, and the plan stands as far as it is verified."""
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
