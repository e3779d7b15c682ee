"""Proofs with a Trainer that is independent of DeepSpeed, also after other tests in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.checks.registry import Fails, proof


@contextmanager
def alone(*, end: bool = False) -> Iterator[None]:
    """Without the traces of DeepSpeed and of a launcher that other proofs leave; `end`: and leaves none itself."""
    left = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with mock.patch.dict(os.environ, kept, clear=True):
            yield
    finally:
        if end:
            AcceleratorState._reset_state(reset_partial_state=True)


def plain_proof(rule: str, *, fails: Fails) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """As `proof`, alone."""
    return lambda function: proof(rule, fails=fails)(alone(end=True)(function))
