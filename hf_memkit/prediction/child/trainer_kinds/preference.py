"""Trainers that compare a model with a reference (TRL's DPO and KTO), whose log-probabilities may be computed for all
rows before the training (`precompute_ref_log_probs`; trl 1.16: dpo_trainer.py and kto_trainer.py).

| asked for | what there is |
|---|---|
| a hash of all weights | one constant: it names a cache, which is not written |
| log-probabilities of each row, before `train()` | zeros; the pass over the largest batch is traced at `train()` |
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hf_memkit.prediction.child.gpu.cuda_questions import replace_everywhere
from hf_memkit.prediction.child.tracer.tracer import StorageTracer


def nothing_is_hashed() -> None:
    """No weights are read for the name of a cache."""
    found = sys.modules["trl.trainer.utils"]
    if hasattr(found, "hash_module"):
        replace_everywhere(found.hash_module, lambda module: "predicted", ("trl",))


def rows_have_zeros(kind: type) -> None:
    """Log-probabilities that a class of Trainer would compute of all rows are 0."""
    for each in kind.__mro__:
        original = vars(each).get("_precompute_ref_logps")
        if original is None or getattr(original, "memkits", False):
            continue

        def zeros(self: Any, dataset: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if not hasattr(dataset, "add_column") or not hasattr(dataset, "__len__"):
                return original(self, dataset, *args, **kwargs)  # which refuses a stream
            self._set_signature_columns_if_needed()
            for name in self._signature_columns:
                if name.startswith("ref_") and name not in dataset.column_names:
                    dataset = dataset.add_column(name, np.zeros(len(dataset), np.float32))
            return dataset

        zeros.memkits = True  # type: ignore[attr-defined]
        each._precompute_ref_logps = zeros  # type: ignore[attr-defined]


def reference_loaders(trainer: Any) -> Iterator[DataLoader[Any]]:
    """What a Trainer has gone through without gradients before it trains, if it has: the data for the training and for
    evaluations, in batches of `trainer.compute_ref_log_probs`."""
    if not getattr(trainer, "precompute_ref_logps", False):
        return
    arguments, evaluated = trainer.args, trainer.eval_dataset
    several = evaluated if isinstance(evaluated, Mapping) else {"eval": evaluated}
    sizes = [(trainer.train_dataset, arguments.per_device_train_batch_size)]
    sizes += [(each, arguments.per_device_eval_batch_size) for each in several.values() if each is not None]
    for dataset, size in sizes:
        batch_size = arguments.precompute_ref_batch_size or size
        yield DataLoader(dataset, batch_size=batch_size, collate_fn=trainer.data_collator)


def trace_reference(trainer: Any, batches: Iterable[Any], tracer: StorageTracer) -> None:
    """TRL computes log-probabilities of all rows before it trains (1.16: dpo_trainer.py, kto_trainer.py)."""
    tracer.ended("load")
    tracer.default, before = "activations", tracer.default
    for batch in batches:
        trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    tracer.default = before
    tracer.ended("log_probabilities")


def compared_models(trainer: Any) -> list[Any]:
    """Models whose log-probabilities a step computes: the one that trains, as it was or without its adapter, and a
    reference model. Of Trainers without a reference none."""
    if not hasattr(trainer, "ref_model"):
        return []
    return list({id(each): each for each in (trainer.model, trainer.ref_model) if each is not None}.values())
