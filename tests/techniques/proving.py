"""The marker that a test carries for what it shows of a technique; `test_technique_completeness` looks for it.

@proves("same-result", "chunked-loss")   # the loss, or the update, is that of training without it
@proves("memory", "chunked-loss")        # bytes measured on a CPU
"""

from __future__ import annotations

import pytest


def proves(kind: str, *techniques: str) -> pytest.MarkDecorator:
    """`kind` is `same-result` or `memory`."""
    assert kind in ("same-result", "memory") and techniques
    return pytest.mark.proves(kind, *techniques)
