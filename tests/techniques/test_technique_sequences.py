"""Fewer padding tokens: the same losses, fewer bytes, and a word where it would do nothing or harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    Trainer,
    TrainingArguments,
)

from hf_memkit import preset
from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.common.errors import SettingError
from hf_memkit.components import check_length_grouping, packed_batches, pad_batches
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from hf_memkit.setup.techniques.sequences import multiple_for, odd_sizes, packed_mask_bytes
from tests.techniques.cpu_allocations import saved_bytes
from tests.techniques.jobs import MACHINE, gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import VOCABULARY, causal_model, part

LONGEST = 40


def samples(count: int = 48) -> list[dict[str, list[int]]]:
    """Samples of 3 to 40 tokens, most of them short."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3 + (number * number) % (38 if number % 8 == 0 else 12) for number in range(count - 1)] + [LONGEST]
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


Losses = Callable[..., list[float]]


@pytest.fixture
def losses(tmp_path: Path) -> Losses:
    """The losses of three steps of a real Trainer, of two micro-batches of eight samples, and of an evaluation."""

    def run(options: dict[str, Any], data: Any = None, **more: Any) -> list[float]:
        values: dict[str, Any] = {
            "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3,
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "logging_steps": 1,
            "save_strategy": "no", "learning_rate": 1e-2,
        }  # fmt: skip
        trainer = Trainer(
            model=causal_model(), args=TrainingArguments(**{**values, **more}), train_dataset=data or samples(),
            eval_dataset=data or samples(16), **options,
        )  # fmt: skip
        trainer.train()
        trainer.evaluate()
        return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]

    return run


@pytest.mark.parametrize(
    ("component", "options"),
    [(pad_batches, {"multiple": 8}), (packed_batches, {}), (packed_batches, {"length": 64})],
    ids=["pad-to-multiple", "padding-free", "packing"],
)
@proves("same-result", "pad-to-multiple", "packing", "padding-free")
def test_losses_are_those_of_padded_samples(losses: Losses, component: Any, options: dict[str, int]) -> None:
    """Another order of summation, and nothing else: 2e-6 of a loss of 4.6, after three steps of unequal lengths."""
    padded = losses(part(pad_batches, multiple=1))
    assert len(padded) == 4 and padded[3] < padded[0] - 0.1, "the model learns: an update that is lost would show"
    assert losses(part(component, **options)) == pytest.approx(padded, rel=2e-6)


@proves("same-result", "length-grouped")
def test_grouping_changes_the_order_and_nothing_else(losses: Losses, tmp_path: Path) -> None:
    seen: dict[str, list[list[int]]] = {}

    class Seen(pad_batches.PadBatches):
        def __call__(self, rows: Any) -> dict[str, torch.Tensor]:
            seen[strategy] += [list(row["input_ids"]) for row in rows]
            return super().__call__(rows)

    for strategy in ("random", "group_by_length"):
        seen[strategy] = []
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", train_sampling_strategy=strategy
        )
        trainer = Trainer(model=causal_model(), args=args, train_dataset=samples(), data_collator=Seen(8))
        for _ in trainer.get_train_dataloader():
            pass
    assert seen["random"] != seen["group_by_length"] and sorted(seen["random"]) == sorted(seen["group_by_length"])
    # Where one batch is the whole data set, the order is all that there is to change.
    whole = {
        "per_device_train_batch_size": 48, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 16,
    }  # fmt: skip
    plain = losses(part(pad_batches), **whole)
    both = {**part(pad_batches), **part(check_length_grouping)}
    assert losses(both, train_sampling_strategy="group_by_length", **whole) == pytest.approx(plain, rel=2e-6)


def test_the_label_that_nothing_predicts_is_not_counted(losses: Losses) -> None:
    """Trainer counts it for GPT-2, whose class has no loss type, and reports a loss that is too low."""
    own = [{**row, "labels": list(row["input_ids"])} for row in samples()]
    tokens = sum(len(row["input_ids"]) for row in own)
    whole = {
        "per_device_train_batch_size": 48, "gradient_accumulation_steps": 1, "max_steps": 1, "data": own,
    }  # fmt: skip
    theirs, ours = losses({"data_collator": pad_batches.PadBatches(1)}, **whole), losses(part(pad_batches), **whole)
    assert theirs[0] == pytest.approx(ours[0] * (tokens - len(own)) / tokens, rel=1e-5)


def kept_for_backward(collators: list[tuple[Any, list[dict[str, Any]]]]) -> int:
    """Bytes that autograd keeps in one forward pass of each batch, weights left out."""
    model = causal_model()
    model.config.use_cache = False
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = 0
    for collator, rows in collators:
        batch = collator(rows)
        kept += saved_bytes(
            lambda batch=batch: model(**batch).loss,  # type: ignore[misc]
            lambda tensor: tensor.untyped_storage().data_ptr() not in weights,
        )
    return kept


@proves("memory", "pad-to-multiple", "packing", "padding-free")
def test_less_is_kept_for_backward_than_with_padding() -> None:
    rows = [row for row in samples() if len(row["input_ids"]) <= 16][:8]
    tokens = sum(len(row["input_ids"]) for row in rows)
    to_the_longest = kept_for_backward([(pad_batches.PadBatches(LONGEST, causal=True), rows)])
    to_eight = kept_for_backward([(part(pad_batches, multiple=8)["data_collator"], rows)])
    packed = kept_for_backward([(part(packed_batches, length=48)["data_collator"], rows)])
    free = kept_for_backward([(part(packed_batches)["data_collator"], rows)])
    # What is kept grows with the tokens of a batch, padding included.
    width = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
    assert to_eight / to_the_longest == pytest.approx(width / LONGEST, rel=0.1)
    assert free / to_the_longest == pytest.approx(tokens / (len(rows) * LONGEST), rel=0.1)
    assert free < packed < to_eight


@proves("memory", "length-grouped")
def test_grouped_samples_need_less_padding(tmp_path: Path) -> None:
    def padding(strategy: str) -> tuple[int, int]:
        collator = part(pad_batches, multiple=1)["data_collator"]
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", train_sampling_strategy=strategy, seed=3,
            per_device_train_batch_size=4,
        )  # fmt: skip
        rows = [{"input_ids": [3] * (4 + 7 * number % 37)} for number in range(96)]
        trainer = Trainer(model=causal_model(), args=args, train_dataset=rows, data_collator=collator)
        batches = list(trainer.get_train_dataloader())
        kept = kept_for_backward([(lambda batch: batch, batch) for batch in batches])
        return kept, sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)

    random, grouped = padding("random"), padding("group_by_length")
    assert grouped[0] < 0.85 * random[0] and grouped[1] < random[1] / 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


def test_grouping_that_cannot_be_stops_the_run_and_one_without_effect_warns(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        max_steps=1,
        train_sampling_strategy="group_by_length",
    )
    options = {**part(pad_batches), **part(check_length_grouping)}
    with pytest.raises(RuntimeError, match="IterableDataset"):
        Trainer(model=causal_model(), args=args, train_dataset=Stream(), **options).train()
    alike = [{"input_ids": [3] * 9}] * 32
    with pytest.warns(UserWarning, match="9 tokens"):
        Trainer(model=causal_model(), args=args, train_dataset=alike, **options).train()


def test_the_multiple_is_the_gpu_s() -> None:
    pad = TECHNIQUES["pad-to-multiple"]
    multiples = {
        name: pad(Setup("x", job=gpt2_job(machine=MACHINE.with_gpu(named_gpu(name)))))
        for name in ("T4", "RTX 3090", "A100 80GB", "H100 80GB")
    }
    key = "trainer_parts.pad_batches"
    assert {name: setup[key]["multiple"] for name, setup in multiples.items()} == {
        "T4": 8, "RTX 3090": 8, "A100 80GB": 64, "H100 80GB": 64,
    }  # fmt: skip
    assert any("vocabulary 50257 (the next is 50304)" in note for note in multiples["A100 80GB"].notes)
    job = gpt2_job(None)
    assert pad(Setup("x", job=job))[key] == {"multiple": 8} and not pad(Setup("x", job=job)).notes
    assert pad(Setup("x", job=job).put("arguments.torch_compile", True, "x"))[key] == {"multiple": 128}
    assert pad(Setup("x", job=gpt2_job(None, values={"pad_multiple": 20}))).notes
    with pytest.raises(SettingError, match="pad_multiple=0"):
        preset("pad-to-multiple", values={"pad_multiple": 0})
    assert multiple_for(named_gpu("A100 80GB"), bytes_per_number=4)[0] == 32
    assert odd_sizes(gpt2_job().model, 8) == ["vocabulary 50257 (the next is 50264)"]  # type: ignore[arg-type]


def test_packing_says_what_it_takes() -> None:
    packing, free = TECHNIQUES["packing"], TECHNIQUES["padding-free"]
    assert packing(Setup("x", job=gpt2_job()))["trainer_parts.packed_batches"] == {"length": 512}
    with pytest.raises(SettingError, match="at most 1024"):
        packing(Setup("x", job=gpt2_job(values={"pack_length": 2048})))
    assert packed_mask_bytes(4 * 512) == 2048 * 2048
    setup = free(Setup("x", job=gpt2_job()))
    assert setup["trainer_parts.packed_batches"] == {} and "2048² bytes" in setup.notes[0]
    flash = Setup("x", job=gpt2_job()).put("model.attn_implementation", "flash_attention_2", "x")
    assert not free(flash).notes
