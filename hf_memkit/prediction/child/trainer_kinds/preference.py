"""Trainers that compare a model with a reference (TRL's DPO and KTO).

They can compute the reference's log-probabilities of all rows before the training (`precompute_ref_log_probs`; trl
1.16: dpo_trainer.py and kto_trainer.py).

| needed by the Trainer | in a trace |
|---|---|
| a hash of all weights | a constant: it names a cache, which is not written |
| log-probabilities of each row, before `train()` | zeros; the pass over the largest batch is traced at `train()` |
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere
from hf_memkit.prediction.child.tracer.tracer import StorageTracer


def patch_reference(kind: type) -> None:
    """Makes the log-probabilities that a class of Trainer would compute of all rows 0, and replaces TRL's hash of all
    weights, which names a cache."""
    utils = sys.modules["trl.trainer.utils"]
    if hasattr(utils, "hash_module"):
        replace_everywhere(utils.hash_module, lambda module: "predicted", ("trl",))
    for base in kind.__mro__:
        original = vars(base).get("_precompute_ref_logps")
        if original is None or getattr(original, "memkits", False):
            continue

        def zeros(self: Any, dataset: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if not hasattr(dataset, "add_column") or not hasattr(dataset, "__len__"):
                return original(self, dataset, *args, **kwargs)  # refuses a stream
            self._set_signature_columns_if_needed()
            for name in self._signature_columns:
                if name.startswith("ref_") and name not in dataset.column_names:
                    dataset = dataset.add_column(name, np.zeros(len(dataset), np.float32))
            return dataset

        zeros.memkits = True  # type: ignore[attr-defined]
        base._precompute_ref_logps = zeros  # type: ignore[attr-defined]


def reference_loaders(trainer: Any) -> Iterator[DataLoader[Any]]:
    """Loaders of the data that a Trainer has processed without gradients before it trains, if it has: training and
    evaluation data, in batches for `trainer.compute_ref_log_probs`."""
    if not getattr(trainer, "precompute_ref_logps", False):
        return
    arguments, evaluated = trainer.args, trainer.eval_dataset
    several = evaluated if isinstance(evaluated, Mapping) else {"eval": evaluated}
    sizes = [(trainer.train_dataset, arguments.per_device_train_batch_size)]
    sizes += [(part, arguments.per_device_eval_batch_size) for part in several.values() if part is not None]
    for dataset, size in sizes:
        batch_size = arguments.precompute_ref_batch_size or size
        yield DataLoader(dataset, batch_size=batch_size, collate_fn=trainer.data_collator)


def trace_reference(trainer: Any, batches: Iterable[Any], tracer: StorageTracer) -> None:
    """Traces the log-probabilities that TRL computes before it trains (1.16: dpo_trainer.py, kto_trainer.py)."""
    tracer.end_phase("load")
    tracer.default, before = "activations", tracer.default
    for batch in batches:
        trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    tracer.default = before
    tracer.end_phase("log_probabilities")


def compared_models(trainer: Any) -> list[Any]:
    """Models whose log-probabilities a step computes: the trained one and a reference model; none without a
    reference. The trained one counts also as its own reference, without its adapter."""
    if not hasattr(trainer, "ref_model"):
        return []
    return list({id(m): m for m in (trainer.model, trainer.ref_model) if m is not None}.values())
