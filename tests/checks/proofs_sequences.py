"""Proofs about padding, packing and sampling: real Trainers, and models of many kinds with samples in one row."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import RandomSampler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from hf_memkit.components.pad_batches import PadBatches
from hf_memkit.setup.techniques.sequences import LEAKING
from tests.checks.plain import plain_proof
from tests.checks.real import arguments, model, refused

WORDS = 64
_LENGTHS = (7, 12, 5)
_IDS = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LIKE_LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, **_IDS,
}  # fmt: skip
_LIKE_OPT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, **_IDS}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {**_LIKE_OPT, "intermediate_size": 64, "is_decoder": True},
    "biogpt": {**_LIKE_OPT, "intermediate_size": 64, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, **_IDS},
    "falcon": {**_LIKE_OPT, "alibi": False, "new_decoder_architecture": False},
    "lfm2": {**_LIKE_LLAMA, "layer_types": ["conv", "full_attention"]},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **_IDS},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 16,
               "n_groups": 1, "chunk_size": 8, **_IDS},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, "expansion_ratio": 2, **_IDS},
    "opt": {**_LIKE_OPT, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 64, **_IDS},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64, "max_position_embeddings": 64,
             **_IDS},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **_IDS},
    "llama": _LIKE_LLAMA,
    "qwen2": _LIKE_LLAMA,
}  # fmt: skip


def tiny(kind: str) -> Any:
    """A model without dropout (evaluation mode), with weights large enough to show a leak."""
    set_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPES[kind])).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    made.config.use_cache = False  # as Trainer sets it
    return made


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in _LENGTHS]


def packed_error(made: Any, *, cache: bool = False) -> float:
    """How far the loss of samples in one row is from their losses one by one, a token."""
    made.config.use_cache = cache
    counts = [len(text) - 1 for text in texts()]
    with torch.no_grad():
        alone = [float(made(input_ids=one[None], labels=one[None], use_cache=False).loss) for one in texts()]
        row = DataCollatorWithFlattening()([{"input_ids": one} for one in texts()])
        together = float(made(**row).loss)
    return abs(together - sum(loss * n for loss, n in zip(alone, counts, strict=True)) / sum(counts))


def samples(count: int = 10) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(1, 128, (4 + number % 7,), generator=generator).tolist() for number in range(count)]
    return [{"input_ids": ids, "labels": list(ids)} for ids in made]


def padding_trainer(data: Any = None, collator: Any = None, **more: Any) -> Trainer:
    made = collator or PadBatches(1)
    rows = samples() if data is None else data
    return Trainer(
        model=model(), args=arguments(None, **more), data_collator=made, train_dataset=rows, eval_dataset=rows
    )


def _sampler(trainer: Trainer) -> Any:
    return trainer.get_train_dataloader().batch_sampler.sampler


@plain_proof("drop-last-in-evaluation", fails="silent")
def drop_last_in_evaluation() -> None:
    trainer = padding_trainer(dataloader_drop_last=True, per_device_eval_batch_size=4)
    assert trainer.predict(samples(10)).predictions.shape[0] == 8


@plain_proof("sampling-strategy-unknown", fails="silent")
def sampling_strategy_unknown() -> None:
    trainer = padding_trainer(train_sampling_strategy="by_length")
    assert isinstance(_sampler(trainer), RandomSampler)
    parsed = HfArgumentParser(TrainingArguments).parse_dict(
        {"output_dir": "x", "train_sampling_strategy": "by_length"}
    )
    assert parsed[0].train_sampling_strategy == "by_length"


@plain_proof("grouping-reorders-predictions", fails="silent")
def grouping_reorders_predictions() -> None:
    expected = [sample["labels"][0] for sample in samples()]
    plain = padding_trainer().predict(samples()).label_ids[:, 0].tolist()
    grouped = padding_trainer(train_sampling_strategy="group_by_length").predict(samples()).label_ids[:, 0].tolist()
    assert plain == expected and grouped != expected and sorted(grouped) == sorted(expected)


@plain_proof("length-column-removed", fails="silent")
def length_column_removed() -> None:
    data = datasets.Dataset.from_list([{**sample, "n": 99} for sample in samples()])
    more = {"train_sampling_strategy": "group_by_length", "length_column_name": "n"}
    assert list(_sampler(padding_trainer(data, **more)).lengths) == [len(one["input_ids"]) for one in samples()]
    assert list(_sampler(padding_trainer(data, remove_unused_columns=False, **more)).lengths) == [99] * 10


@plain_proof("length-column-without-grouping", fails="silent")
def length_column_without_grouping() -> None:
    data = datasets.Dataset.from_list([{**sample, "n": 99} for sample in samples()])
    sampler = _sampler(padding_trainer(data, length_column_name="n"))
    assert isinstance(sampler, RandomSampler) and not hasattr(sampler, "lengths")


@plain_proof("packed-samples-leak", fails="silent")
def packed_samples_leak() -> None:
    assert set(LEAKING) <= set(SHAPES)
    for kind in SHAPES:
        error = packed_error(tiny(kind))
        assert error > 1e-3 if kind in LEAKING else error < 1e-5, f"{kind}: {error}"


@plain_proof("packed-samples-and-cache", fails="silent")
def packed_samples_and_cache() -> None:
    for kind in ("gpt2", "llama"):
        assert packed_error(tiny(kind)) < 1e-5 and packed_error(tiny(kind), cache=True) > 1e-3


@plain_proof("packed-rows-and-flash-attention", fails="silent")
def packed_rows_and_flash_attention() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert _is_packed_sequence(positions, 1)
    assert not _is_packed_sequence(positions.repeat(2, 1), 2)


@plain_proof("padding-free-and-eager-attention", fails="unshown")
def padding_free_and_eager_attention() -> None:
    def scores(batch: dict[str, Tensor]) -> int:
        made = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("gpt2", **SHAPES["gpt2"]), attn_implementation="eager"
        )
        made.config.use_cache = False
        result: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2]:
                result[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = made(**batch).loss
        assert loss.requires_grad
        return sum(result.values())

    four = [{"input_ids": torch.arange(1, 17)} for _ in range(4)]
    flat = DataCollatorWithFlattening()(four)
    ids = torch.stack([one["input_ids"] for one in four])
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert scores(flat) == 4 * scores(padded)


@plain_proof("grouping-packed-samples", fails="unshown")
def grouping_packed_samples() -> None:
    lengths = [10 if number % 4 == 0 else 4 for number in range(64)]
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]

    def peak(strategy: str) -> int:
        trainer = padding_trainer(rows, DataCollatorWithFlattening(), train_sampling_strategy=strategy,
                                  per_device_train_batch_size=4)  # fmt: skip
        return max(batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader())

    set_seed(0)
    drawn = peak("random")
    assert peak("group_by_length") == 4 * 10 > drawn


@plain_proof("blocks-need-no-padding", fails="unshown")
def blocks_need_no_padding() -> None:
    collator = PadBatches(8)
    batch = collator([{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8)])
    assert torch.equal(batch["input_ids"], torch.arange(64).reshape(8, 8))
    refused("a sample has no input_ids", lambda: collator([{"text": "x"}]))
