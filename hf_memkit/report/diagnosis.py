"""Memory problems over the steps of a training. In: step records of one rank. Out: findings, mostly none.

Four things make memory grow, and each has its own sign:

| kind | sign | looked for in |
|---|---|---|
| leak | the floor at step end rises and does not level off | `leaks.py`, `trend.py` |
| longer batches | the cost over the floor rises with the size of the inputs | `longer_batches.py` |
| fragmentation | what is reserved over the highest peak so far fills the GPU or is retried | `fragmentation.py` |
| another process | the GPU is used by what is not this process | `other_processes.py` |

Several may be true at once, because the signs do not touch: the floor is what no input's cost is in, the cost has no
floor in it, the gap is what lies over both, and NVML's rest is what PyTorch has not reserved. A false alarm does more
harm than a miss. So every kind asks for a size that matters as well as for a pattern that chance, warm-up, a single
jump or a cache that fills does not make, and each threshold stands in its module with its reason. Nothing is assumed
of distributions: minima, medians, ranks and counts, and a straight line only where the question is straightness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_memkit.report.fragmentation import find_fragmentation
from hf_memkit.report.leaks import find_leaks
from hf_memkit.report.longer_batches import find_longer_batches
from hf_memkit.report.other_processes import find_another_process
from hf_memkit.report.series import Finding, Steps


def diagnose(
    steps: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any] | None = None,
    *,
    ooms: Sequence[Mapping[str, Any]] = (),
) -> list[Finding]:
    """Memory problems over these steps; empty if there are none, or too few steps to tell (about 25).

    Args:
        steps: the `step` records of one rank. Fields may be missing or null, steps may be missing or repeat (the last
            record counts), and one record may stand for several steps.
        run: the last `run` record: where it was resumed and, if the steps do not have it, the GPU's capacity.
        ooms: `oom` records, so that a longer batch that ended the run is recognised.

    Returns:
        Findings in order of the step at which they began. There can be two leaks: the device's and the host's.
    """
    columns = Steps(steps, run)
    if not len(columns):
        return []
    found = [
        *find_leaks(columns),
        find_longer_batches(columns, ooms),
        find_fragmentation(columns),
        find_another_process(columns),
    ]
    return sorted((finding for finding in found if finding is not None), key=lambda finding: finding.first_step)
