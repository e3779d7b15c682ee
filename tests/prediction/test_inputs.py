"""An example of what each kind of model is trained on: names and sizes, and a refusal where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_memkit.common.errors import InputError
from hf_memkit.prediction.child.example_inputs import Rows, example, shortened

TEXT: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
WAVE: dict[str, Any] = {**TEXT, "conv_dim": [8] * 7, "num_conv_pos_embedding_groups": 2}


def build(name: str, config: dict[str, Any]) -> Any:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**config))


def shape(value: Any) -> tuple[int, ...]:
    return tuple(torch.tensor(value).shape)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (
            "GPT2LMHeadModel",
            {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2},
            {"input_ids": (12,), "labels": (12,)},
        ),
        ("BertForSequenceClassification", TEXT, {"input_ids": (12,), "attention_mask": (12,), "labels": ()}),
        (
            "BertForSequenceClassification",
            {**TEXT, "problem_type": "multi_label_classification", "num_labels": 7},
            {"labels": (7,)},
        ),
        ("BertForTokenClassification", TEXT, {"labels": (12,)}),
        ("BertForQuestionAnswering", TEXT, {"start_positions": (), "end_positions": ()}),
        ("BertForMultipleChoice", TEXT, {"input_ids": (2, 12), "labels": ()}),
        ("BertForPreTraining", TEXT, {"labels": (12,), "next_sentence_label": ()}),
        ("BartForConditionalGeneration", BART, {"input_ids": (12,), "attention_mask": (12,), "labels": (12,)}),
        (
            "ViTForImageClassification",
            {**TEXT, "image_size": 32, "num_channels": 1},
            {"pixel_values": (1, 32, 32), "labels": ()},
        ),
        (
            "VideoMAEForVideoClassification",
            {**TEXT, "image_size": 32, "num_frames": 4},
            {"pixel_values": (4, 3, 32, 32)},
        ),
        ("SegformerForSemanticSegmentation", {"image_size": 32}, {"pixel_values": (3, 32, 32), "labels": (32, 32)}),
        (
            "WhisperForConditionalGeneration",
            {**BART, "num_mel_bins": 8, "max_source_positions": 20, "pad_token_id": 0},
            {"input_features": (8, 40), "labels": (12,)},
        ),
        ("Wav2Vec2ForCTC", WAVE, {"input_values": (160_000,), "labels": (12,)}),
        ("Wav2Vec2ForSequenceClassification", WAVE, {"labels": ()}),
    ],
)
def test_sizes(name: str, config: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    found = example(build(name, config), 12)
    assert {key: shape(found[key]) for key in expected} == expected


def test_values_that_models_look_at() -> None:
    model = build("BartForSequenceClassification", BART)
    tokens = example(model, 12)["input_ids"]
    assert tokens[-1] == model.config.eos_token_id and tokens.count(tokens[-1]) == 1, "classified at its end"
    assert not set(tokens[:-1]) & {model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id}
    speech = build("Wav2Vec2ForCTC", WAVE)
    labels = example(speech, 5000)["labels"]
    assert len(labels) == 100 and 0 < labels[0] < 50 and labels[0] != speech.config.pad_token_id


def test_an_adapter_s_wrapper_is_looked_through() -> None:
    from peft import LoraConfig, get_peft_model

    model = build("BertForSequenceClassification", TEXT)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["query"]))
    assert example(wrapped, 12) == example(model, 12)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("BertModel", TEXT, "BertForSequenceClassification"),
        ("CLIPModel", {}, "together with images"),
        ("EncodecModel", {}, "labels"),
    ],
)
def test_what_there_is_no_example_of(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        example(build(name, config), 12)
    assert name in str(refused.value) and "\n" not in str(refused.value)


GPT2: dict[str, Any] = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2}


def test_a_shorter_row_is_padded_to_the_length_of_the_others() -> None:
    model = build("BartForConditionalGeneration", BART)
    row = example(model, 12)
    shorter = shortened(model, row)
    assert shorter is not None and shorter.keys() == row.keys()
    assert shorter["input_ids"][-2:] == [model.config.eos_token_id, model.config.pad_token_id]
    assert shorter["attention_mask"] == [1] * 11 + [0] and shorter["labels"][-2:] == [row["labels"][0], -100]
    assert all(shape(shorter[name]) == shape(row[name]) for name in row)
    causal = build("GPT2LMHeadModel", GPT2)
    assert shortened(causal, example(causal, 12, with_mask=True))["attention_mask"][-1] == 0  # type: ignore[index]


def test_what_is_no_text_is_not_padded() -> None:
    image = build("ViTForImageClassification", {**TEXT, "image_size": 32})
    assert shortened(image, example(image, 12)) is None
    choices = build("BertForMultipleChoice", TEXT)
    assert shortened(choices, example(choices, 12)) is None


def test_the_first_row_of_each_batch_is_the_longest() -> None:
    rows = Rows({"long": 1}, 6, {"short": 1}, batch_size=3)
    assert [next(iter(row)) for row in rows] == ["long", "short", "short"] * 2
    assert {next(iter(row)) for row in Rows({"long": 1}, 3, {"short": 1}, batch_size=1)} == {"long"}


def test_rows_are_copies() -> None:
    rows = Rows({"labels": 0}, 3)
    rows[0]["labels"] = 1
    assert len(rows) == 3 and list(rows) == [{"labels": 0}] * 3
