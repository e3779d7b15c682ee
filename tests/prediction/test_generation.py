"""Evaluations that generate. The loop itself is compared with a real one in test_generate_in_steps.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)

from hf_memkit.prediction import Prediction, predict_trainer


def no_metrics(prediction: Any) -> dict[str, float]:
    """Without a function evaluations do not generate."""
    return {}


def text_pairs(tmp_path: Path, **options: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    """(a small T5; arguments that generate; rows)."""
    config = T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"], tie_word_embeddings=False,
    )  # fmt: skip
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", eval_strategy="epoch", predict_with_generate=True, **options
    )
    rows = [{"input_ids": list(range(2, 34)), "attention_mask": [1] * 32, "labels": list(range(2, 18))}] * 20
    return T5ForConditionalGeneration(config), arguments, rows


def of_trainer(model: Any, arguments: Any, rows: Any) -> Prediction:
    options = {"data_collator": default_data_collator, "compute_metrics": no_metrics}
    return predict_trainer(
        Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, **options), gpu="16GB"
    )


@pytest.mark.slow
def test_a_trainer_that_generates_is_taken_as_it_is(tmp_path: Path) -> None:
    given = {"generation_max_length": 200, "generation_num_beams": 4}
    model, arguments, rows = text_pairs(tmp_path, **given)
    found = of_trainer(model, arguments, rows)
    assert found.confidence.level == "trace" and any("generate" in note for note in found.notes)
    plain = of_trainer(model, replace(arguments, predict_with_generate=False), rows)
    more = found.phases["evaluate"][0] - plain.phases["evaluate"][0]
    cache = 2 * 4 * (8 * 4) * (200 + 32) * 2 * 4 * 16  # keys and values in fp32, 8 rows × 4 beams, 2 layers × 64
    assert 0 < more < 1.6 * cache and found.categories["loss"] < 0.1 * cache
    fields = {**given, "predict_with_generate": True, "eval_strategy": "epoch"}
    options = {"train_dataset": rows, "data_collator": default_data_collator, "gpu": "16GB"}
    ignored = predict_trainer(model, fields, **options)
    assert any("predict_with_generate has no effect" in note for note in ignored.notes)
    assert ignored.phases["evaluate"][0] <= plain.phases["evaluate"][0]  # which keeps logits for metrics
    special = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    wanted = GenerationConfig(max_new_tokens=199, num_beams=4, **special)  # and the first token
    model, arguments, rows = text_pairs(tmp_path, generation_config=wanted)
    assert of_trainer(model, arguments, rows).phases["evaluate"] == found.phases["evaluate"]


def test_a_checkpoint_with_an_output_layer_of_its_own_has_both_layers(tmp_path: Path) -> None:
    model, _, _ = text_pairs(tmp_path)
    content = {**model.config.to_dict(), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(content))
    fields = {"per_device_train_batch_size": 4}
    loaded = predict_trainer(str(tmp_path), fields, sequence_length=16, gpu="16GB")
    made = predict_trainer(model.config, fields, sequence_length=16, gpu="16GB")
    assert loaded.categories["weights"] - made.categories["weights"] == 4 * 500 * 64
