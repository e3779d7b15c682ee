"""A training step written by hand, on fake tensors, as memkit's tracer and as torch's own MemTracker see it.

MemTracker (torch.distributed._tools) cannot answer what a model asks of a tensor's values, and knows nothing of
Trainer: it is compared where neither comes up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_memkit.prediction.setup_as_script import SetupTraining


def both_trackers(asked: SetupTraining) -> dict[str, Any]:
    """Peak bytes of two steps: `traced_bytes`, and `mem_tracker_bytes`."""
    return {"traced_bytes": _traced(asked), "mem_tracker_bytes": _mem_tracker(asked)}


def _traced(asked: SetupTraining) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_memkit.prediction.child.tracer.tracer import StorageTracer

    tracer = StorageTracer("cpu")
    with FakeTensorMode(), tracer:
        _steps(asked, *_build(asked))
        trace = tracer.finish("optimizer")
    live = most = 0
    for event in trace.events:
        size = trace.sizes_bytes[abs(event) - 1]
        live += size if event > 0 else -size
        most = max(most, live)
    return most


def _mem_tracker(asked: SetupTraining) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, optimizer = _build(asked)
        tracker = MemTracker()  # type: ignore[no-untyped-call]
        tracker.track_external(model, optimizer)
        with tracker:
            _steps(asked, model, optimizer, tracker.reset_mod_stats)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


def _build(asked: SetupTraining) -> tuple[Any, Any]:
    import torch
    import transformers

    values = asked.setup["model.architecture"]
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = getattr(transformers, asked.setup["model.class"])(config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


def _steps(asked: SetupTraining, model: Any, optimizer: Any, between: Callable[[], object] = lambda: None) -> None:
    import torch

    size = asked.setup["arguments.per_device_train_batch_size"]
    for _ in range(2):
        tokens = torch.ones(size, asked.sequence_length, dtype=torch.int64)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        between()
