"""Stops a run if torch.compile compiled nothing or gave up, and warns if it keeps compiling.

torch recompiles a function when its inputs change, for example the number of tokens. After
`torch._dynamo.config.recompile_limit` times it gives up and runs that function uncompiled from then on, with one line
in the log (torch 2.13.0: _dynamo/convert_frame.py 1986-2038): in the middle of a run, its saving is lost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from hf_memkit.components.recompilation_guard_counts import MOST_LATE, SETTLED_AFTER, CompileCounts, compile_counts


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any) -> dict[str, Any]:
    """A callback that raises RuntimeError if nothing was compiled, or if torch gave up compiling."""
    return {"callbacks": [RecompilationGuard()]}


class RecompilationGuard(TrainerCallback):  # type: ignore[misc]
    """Counts graphs (`torch._dynamo.utils.counters["stats"]["unique_graphs"]`, of the whole process).

    Raises RuntimeError after a step in which torch gave up compiling, or after a first step that compiled nothing.
    Does nothing if `torch_compile` is off, as a plan may set it.
    Warns, once, of many graphs that were compiled late.

    Attributes:
        graphs: compiled since training began, as of the last step.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self._before = CompileCounts()
        self._at_settling: int | None = None
        self._steps = 0
        self._warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = compile_counts()
        self._steps = 0
        self._at_settling = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.torch_compile:
            return
        self._steps += 1
        counts = compile_counts()
        self.graphs = counts.graphs - self._before.graphs
        if self._steps == 1 and counts.graphs == 0:
            raise RuntimeError(
                "torch_compile=True, but the first step compiled nothing. Unset TORCHDYNAMO_DISABLE and "
                "TORCH_COMPILE_DISABLE, set torch_compile_backend to another value than 'no', and remove any wrapper "
                "that calls the uncompiled model"
            )
        if counts.given_up > self._before.given_up:
            limit = torch._dynamo.config.recompile_limit
            raise RuntimeError(
                f"torch.compile gave up: it compiled one function {limit} times "
                f"(torch._dynamo.config.recompile_limit) and now runs it uncompiled; {self.graphs} graphs after "
                f"{self._steps} steps. Pad to a larger multiple for fewer shapes (technique pad-to-multiple, "
                "pad_multiple=128). TORCH_LOGS=recompiles prints the reasons"
            )
        if self._at_settling is None and self._steps >= SETTLED_AFTER:
            self._at_settling = self.graphs
        late = self.graphs - self._at_settling if self._at_settling is not None else 0
        if late > MOST_LATE and not self._warned:
            self._warned = True
            logging.get_logger("transformers.memkit").warning(
                f"torch.compile compiled {late} more graphs after step {SETTLED_AFTER}. Each takes as long as a "
                "first step, and memory. Pad to a larger multiple for fewer shapes (pad_multiple=128). "
                "TORCH_LOGS=recompiles prints the reasons"
            )
