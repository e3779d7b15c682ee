"""Proofs about torch.compile: what real Trainers compile, ignore and refuse."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import Trainer

from hf_memkit.setup.techniques.compiling import BACKENDS, GRAPH_MODES, MODES, RETIRED
from tests.checks.configs import ADAMW, ds
from tests.checks.plain import plain_proof
from tests.checks.real import arguments, refused
from tests.checks.registry import proof


class Little(nn.Module):
    """A model that compiles in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) ** 2).mean()}


class Stack(Little):
    """Five layers, for which one graph does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


def compiled(model: nn.Module, config: Any, **more: Any) -> tuple[int, float]:
    """Graphs that were compiled in a step of a real Trainer, and its loss."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(2)]
    trainer = Trainer(model=model, args=arguments(config, **more), train_dataset=data)
    trainer.train()
    return counters["stats"]["unique_graphs"] - before, trainer.state.log_history[-1]["train_loss"]


def trained(**more: Any) -> int:
    """Graphs that were compiled in a step without DeepSpeed."""
    return compiled(Little(), None, **more)[0]


@plain_proof("compile-turned-on-unseen", fails="silent")
def compile_turned_on_unseen() -> None:
    assert trained(torch_compile=False) == 0
    assert trained(torch_compile=False, torch_compile_backend="eager") > 0
    assert arguments(None, torch_compile=False, torch_compile_mode="max-autotune").torch_compile is True


@plain_proof("compile-backend-no", fails="silent")
def compile_backend_no() -> None:
    assert trained(torch_compile=True, torch_compile_backend="no") == 0


@plain_proof("compile-backend", fails="late")
def compile_backend() -> None:
    refused("is not a valid DynamoBackend", lambda: trained(torch_compile_backend="nvfuser"))
    refused("Invalid backend: 'nvprims_nvfuser'", lambda: trained(torch_compile_backend="nvprims_nvfuser"))
    for name in ("eager", "aot_eager"):
        assert trained(torch_compile_backend=name) > 0
    known = torch._dynamo.list_backends(exclude_tags=())
    assert set(BACKENDS) <= set(known)
    assert not {"nvfuser", "aot_ts_nvfuser", "nvprims_nvfuser", "ipex", "ofi"} & set(known)
    assert not set(RETIRED) & set(BACKENDS)


@plain_proof("compile-mode", fails="late")
def compile_mode() -> None:
    refused("Unrecognized mode=max_autotune", lambda: trained(torch_compile_mode="max_autotune"))
    assert set(MODES) <= set(torch._inductor.list_mode_options())


@plain_proof("compile-mode-ignored", fails="silent")
def compile_mode_ignored() -> None:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    keep, logger = Keep(), logging.getLogger("torch._dynamo.backends.common")
    logger.addHandler(keep)
    try:
        assert trained(torch_compile_backend="aot_eager", torch_compile_mode="max_autotune") > 0  # not even a mode
    finally:
        logger.removeHandler(keep)
    assert any("ignoring extra kwargs {'mode': 'max_autotune'}" in line for line in messages)


@plain_proof("compile-graphs-of-many-shapes", fails="unshown")
def compile_graphs_of_many_shapes() -> None:
    options = torch._inductor.list_mode_options()
    assert {mode for mode, one in options.items() if one.get("triton.cudagraphs")} >= set(GRAPH_MODES)
    assert not options["max-autotune-no-cudagraphs"].get("triton.cudagraphs")
    assert torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit == 8


@proof("compile-at-stage-3", fails="silent")
def compile_at_stage_3() -> None:
    done = {}
    for stage in (2, 3):
        for backend in ("no", "eager"):
            done[stage, backend] = compiled(Stack(), ds(stage, {"optimizer": ADAMW}), torch_compile_backend=backend)
    assert done[2, "eager"][0] == 1 and done[3, "eager"][0] >= 5, done  # of five layers
    for stage in (2, 3):
        assert done[stage, "eager"][1] == done[stage, "no"][1]
