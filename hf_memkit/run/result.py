"""Result of a run: losses compared with trivial models, metrics, and the classes that did the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.measuring.record_types import EndRecord
from hf_memkit.measuring.report.rank_reader import RankReader
from hf_memkit.run.folder import RecipeRun

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

_PACKED: Final = "language-modeling"
"""The task with rows of packed text."""

_ROWS: Final = 1000

_NO_METRICS: Final = (
    "loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time",
    "num_tokens",  # TRL's: tokens trained on
)  # fmt: skip
"""What an evaluation's log has beside its metrics."""


def result_of(job: RecipeRun, trainer: Trainer) -> dict[str, Any]:
    """The result of a run; losses in nats a token, or an example with one label. Values not measured are None.
    `steps` have run in total, `steps_run` since the last start."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    before = next((each["eval_loss"] for each in evaluations if each["step"] == 0), None)
    last: dict[str, Any] = evaluations[-1] if evaluations else {}
    after = last["eval_loss"] if last.get("step") else None
    metrics = {key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")}

    records = RankReader(Path(job.output) / "memory-rank0.jsonl")
    with suppress(OSError):
        records.read()
    end: EndRecord = (records.attempts[-1].end if records.attempts else None) or {}
    is_packed = job.setup.get("data.task", _PACKED) == _PACKED
    return {
        "steps": trainer.state.global_step,
        "steps_run": end.get("steps"),
        "held_out_loss_before": before,
        "held_out_loss": after,
        "label_frequency_loss": label_frequency_loss(trainer) if job.is_rehearsal and not is_packed else None,
        "unigram_loss": unigram_loss(trainer) if is_packed else None,
        **_of_classes(trainer),
        "metrics": {name: value for name, value in metrics.items() if name not in _NO_METRICS},
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer_classes": end.get("optimizer_classes"),
        "recomputed_layers": end.get("recomputed_layers"),
        "peak_allocated_gib": end.get("peak_allocated_gib"),
        "peak_reserved_gib": end.get("peak_reserved_gib"),
    }


def _of_classes(trainer: Trainer) -> dict[str, Any]:
    """For rows with one class each: the classes (`labels`), and the accuracy of always predicting the most frequent
    class of the training data (`majority_accuracy`); else empty."""
    if "labels" not in trainer.train_dataset.column_names or not isinstance(trainer.train_dataset[0]["labels"], int):
        return {}
    trained, held_out = list(trainer.train_dataset["labels"]), list(trainer.eval_dataset["labels"])
    majority = Counter(trained).most_common(1)[0][0]
    names: dict[int, str] = trainer.model.config.id2label
    return {"labels": list(names.values()), "majority_accuracy": held_out.count(majority) / len(held_out)}


_BATCHES: Final = 500
"""Maximum number of batches from which label frequencies are estimated."""


def label_frequency_loss(trainer: Trainer) -> float | None:
    """The held-out loss, in nats a label, of always predicting the training labels' frequencies. With n(v) the number
    of training labels v, N their sum, and V the number of labels, each label has the probability (n(v) + 1) / (N + V).
    None if several processes share the examples."""
    import torch

    if trainer.args.world_size > 1:
        return None

    def labels_of(rows: Any) -> torch.Tensor:
        return torch.cat(list(_labels(trainer.get_eval_dataloader(rows))))

    trained, held_out = labels_of(trainer.train_dataset), labels_of(trainer.eval_dataset)
    labels = int(max(trained.max(), held_out.max())) + 1
    n = torch.bincount(trained, minlength=labels).double()
    nats = -((n + 1) / (n.sum() + labels)).log()
    return float(nats[held_out].mean())


def unigram_loss(trainer: Trainer) -> float:
    """Entropy, in nats a token, of the tokens that a causal model predicts in the held-out blocks.

    With n(v) the number of times that token v is a label, N the sum of n, and p(v) = n(v) / N, this is -Σ p(v) ln
    p(v): the mean loss of the best model without context, fitted to these blocks. A model with a lower loss uses
    context. It is a bound from hindsight: a unigram model fitted to the training blocks does worse.
    """
    import torch

    n = torch.bincount(torch.cat(list(_labels(trainer.eval_dataset.iter(_ROWS))))).double()
    share = n[n > 0] / n.sum()
    return float(-(share * share.log()).sum())


def _labels(batches: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Labels that count in the loss: transformers ignores -100."""
    for number, batch in enumerate(batches):
        if number == _BATCHES:
            return
        labels = batch["labels"].flatten().cpu()
        yield labels[labels >= 0]
