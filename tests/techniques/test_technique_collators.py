"""Collators: what a batch holds, which models samples may share a row in, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from hf_memkit.components import packed_batches, pad_batches
from tests.checks.proofs_sequences import SHAPES, tiny
from tests.techniques.tiny_models import causal_model, part


def leaking(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPES[kind]))


@pytest.mark.parametrize("kind", ["opt", "mamba", "bert"])
def test_models_in_which_samples_see_each_other_are_refused(kind: str) -> None:
    model = leaking(kind)
    modes = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="pad-to-multiple"):
        part(packed_batches, model)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi", "mixtral", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_keep_samples_apart_are_accepted(kind: str, dtype: torch.dtype) -> None:
    assert not packed_batches.leaks(causal_model(kind).to(dtype))


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_a_model_that_computes_no_numbers_is_not_taken_for_one_that_keeps_samples_apart(kind: str) -> None:
    model = causal_model(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    assert packed_batches.leaks(model)


def test_what_packing_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="length=65"):
        part(packed_batches, length=65)
    with pytest.raises(ValueError, match="length=1:"):
        part(packed_batches, length=1)
    with pytest.raises(ValueError, match="use_cache"):
        packed_batches.trainer_options(
            model=causal_model(), processing_class=None, arguments=SimpleNamespace(use_cache=True)
        )
    model = causal_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        part(packed_batches, model, length=32)
    (tried,) = part(packed_batches, model)["callbacks"]  # when the model is on its GPU
    arguments = SimpleNamespace(bf16=True, fp16=False)
    tried.on_train_begin(arguments, None, None, model=causal_model())
    with pytest.raises(RuntimeError, match="OPTForCausalLM"):
        tried.on_train_begin(arguments, None, None, model=tiny("opt"))
    rows = part(packed_batches, length=32)["data_collator"]
    with pytest.raises(ValueError, match="40 tokens, and a row 32"):
        rows([{"input_ids": [3] * 40}])
    with pytest.raises(ValueError, match=r"labels: shape \(\)"):
        rows([{"input_ids": [1, 2, 3], "labels": 1}])


def test_rows_are_filled_with_whole_samples() -> None:
    collator = packed_batches.PackedRows(8, padding=9)
    batch = collator(
        [
            {"input_ids": [1, 2, 3]},
            {"input_ids": [4, 5, 6, 7, 8], "labels": [-100, -100, 6, 7, 8]},
            {"input_ids": [0, 0, 1, 2], "attention_mask": [0, 0, 1, 1]},
        ]
    )
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 1, 2, 3], [1, 2, 9, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, -100, 6, 7, 8, -100, 2, 3], [-100, 2, *[-100] * 6]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]


def test_a_row_without_padding_holds_text_only() -> None:
    batch = packed_batches.PaddingFree()(
        [{"input_ids": [1, 2, 3, 0], "attention_mask": [1, 1, 1, 0]}, {"input_ids": [4, 5]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5]]
    flash = packed_batches.PaddingFree(flash=True)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert flash["cu_seq_lens_q"].tolist() == [0, 3, 5] and flash["max_length_q"] == 3


def test_end_of_text_is_not_taken_for_padding() -> None:
    """GPT-2 pads with its end-of-text token, and transformers' own collator drops that token's labels everywhere."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    rows = [{"input_ids": [1, 2, 0]}, {"input_ids": [1]}]
    theirs = DataCollatorForLanguageModeling(tokenizer, mlm=False)([dict(row) for row in rows])
    assert theirs["labels"].tolist() == [[1, 2, -100], [1, -100, -100]]
    options = pad_batches.trainer_options(model=causal_model(), processing_class=tokenizer, arguments=None, multiple=1)
    ours = options["data_collator"](rows)
    assert ours["labels"].tolist() == [[-100, 2, 0], [-100, -100, -100]]
    assert ours["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_padding_takes_care_of_what_a_batch_can_hold() -> None:
    collator = part(pad_batches, multiple=48)["data_collator"]
    batch = collator(
        [{"input_ids": list(range(3, 60)), "length": 57, "note": "x"}, {"input_ids": [0, 5], "length": 2}]
    )
    assert set(batch) == {"input_ids", "attention_mask", "labels"} and batch["input_ids"].shape == (2, 64)
    numbers = pad_batches.PadBatches(4)([{"input_ids": [1, 2, 3], "label": 1}, {"input_ids": [1], "label": 0}])
    assert numbers["labels"].tolist() == [1, 0] and numbers["input_ids"].shape == (2, 4)
    two = pad_batches.PadBatches(4, encoder_decoder=True)([{"input_ids": [1, 2, 3], "labels": [1] * 5}])
    assert two["labels"].tolist() == [[1] * 5 + [-100] * 3] and two["input_ids"].shape == (1, 4)
    before = pad_batches.PadBatches(1)([{"input_ids": [0, 0, 7, 8, 0], "attention_mask": [0, 0, 1, 1, 0]}])
    assert before["input_ids"].tolist() == [[7, 8]] and before["attention_mask"].tolist() == [[1, 1]]
    for rows, output in (
        ([{"text": "x"}], "no input_ids"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"labels: shape \(1,\)"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "labels"),
    ):
        with pytest.raises(ValueError, match=output):
            pad_batches.PadBatches(1)(rows)
    with pytest.raises(ValueError, match="multiple=0"):
        part(pad_batches, multiple=0)
