"""What a run came to: losses beside those of a model that has learned nothing, metrics, and what did the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.measuring.memory.records import read_records
from hf_memkit.run.folder import RecipeRun

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

_PACKED: Final = "language-modeling"
"""The task whose rows are blocks of text."""

_ROWS: Final = 1000


def result_of(job: RecipeRun, trainer: Trainer) -> dict[str, Any]:
    """What the run came to; losses in nats a token, or an example where it has one label. Whatever was not measured is
    None."""
    losses = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    before = next((loss for step, loss in losses if step == 0), None)
    after = losses[-1][1] if losses and losses[-1][0] > 0 else None
    path = Path(job.output) / "memory-rank0.jsonl"
    records = read_records(path) if path.exists() else []
    end: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "end"), {})
    packed = job.setup.get("data.task", _PACKED) == _PACKED
    compared = job.is_rehearsal and not packed
    return {
        "steps": trainer.state.global_step,
        "held_out_loss_before": before,
        "held_out_loss": after,
        "label_frequency_loss": label_frequency_loss(trainer) if compared else None,
        "unigram_loss": unigram_loss(trainer) if packed else None,
        **_of_classes(trainer),
        "metrics": _last_metrics(trainer),
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer_classes": end.get("optimizer_classes"),
        "recomputed_layers": end.get("recomputed_layers"),
        "peak_allocated_gib": end.get("peak_allocated_gib"),
        "peak_reserved_gib": end.get("peak_reserved_gib"),
    }


def _of_classes(trainer: Trainer) -> dict[str, Any]:
    """If each row has one class: the classes (`labels`), and the accuracy of always answering with the most frequent
    class of the training data (`majority_accuracy`); else empty."""
    if "labels" not in trainer.train_dataset.column_names or not isinstance(trainer.train_dataset[0]["labels"], int):
        return {}
    trained, held_out = list(trainer.train_dataset["labels"]), list(trainer.eval_dataset["labels"])
    majority = Counter(trained).most_common(1)[0][0]
    names: dict[int, str] = trainer.model.config.id2label
    return {"labels": list(names.values()), "majority_accuracy": held_out.count(majority) / len(held_out)}


def _last_metrics(trainer: Trainer) -> dict[str, float]:
    """What the last evaluation measured beside the loss: accuracy and the like, by name."""
    timing = ("loss", "runtime", "samples_per_second", "steps_per_second")
    last: dict[str, Any] = next((each for each in reversed(trainer.state.log_history) if "eval_loss" in each), {})
    named = {key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")}
    return {key: float(value) for key, value in named.items() if key not in timing}


_BATCHES: Final = 500
"""Of training examples: their labels' frequencies are known well enough from so many."""


def label_frequency_loss(trainer: Trainer) -> float | None:
    """The held-out loss, in nats a label, of always answering with the training labels' frequencies.

    With n(v) the number of training labels v, N their sum, and V labels in all, the answer gives each label the
    probability (n(v) + 1) / (N + V). None where the examples are split among several processes.
    """
    import torch

    if trainer.args.world_size > 1:
        return None
    trained, held_out = (
        torch.bincount(torch.cat(list(_labels(trainer.get_eval_dataloader(rows)))))
        for rows in (trainer.train_dataset, trainer.eval_dataset)
    )
    labels = max(len(trained), len(held_out))
    n, seen = (torch.nn.functional.pad(counts, (0, labels - len(counts))).double() for counts in (trained, held_out))
    nats = -((n + 1) / (n.sum() + labels)).log()
    return float((seen * nats).sum() / seen.sum())


def unigram_loss(trainer: Trainer) -> float:
    """The entropy, in nats a token, of the tokens that a causal model has to predict in the held-out blocks.

    With n(v) the number of times that token v is a label, N the sum of n, and p(v) = n(v) / N, this is
    -Σ p(v) ln p(v): the mean loss of the best model that looks at no context, fitted to these very blocks. A model
    with a lower loss uses context. It is a bound from hindsight: a fair unigram model, fitted to the training
    blocks, does worse.
    """
    import torch

    n = torch.bincount(torch.cat(list(_labels(trainer.eval_dataset.iter(_ROWS))))).double()
    share = n[n > 0] / n.sum()
    return float(-(share * share.log()).sum())


def _labels(batches: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Those that count in the loss: transformers leaves out -100."""
    for number, batch in enumerate(batches):
        if number == _BATCHES:
            return
        labels = batch["labels"].flatten().cpu()
        yield labels[labels >= 0]
