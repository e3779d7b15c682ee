"""Proofs with a Trainer that knows nothing of DeepSpeed, whatever ran before in this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from unittest import mock

from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.checks.registry import Fails, proof

_LEFT_BEHIND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_")


def plain_proof(rule: str, *, fails: Fails) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """As `proof`, without the traces of DeepSpeed and of a launcher that other proofs leave."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(function)
        def alone() -> None:
            kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_BEHIND)}
            unset_hf_deepspeed_config()
            AcceleratorState._reset_state(reset_partial_state=True)
            try:
                with mock.patch.dict(os.environ, kept, clear=True):
                    function()
            finally:
                AcceleratorState._reset_state(reset_partial_state=True)

        return proof(rule, fails=fails)(alone)

    return add
