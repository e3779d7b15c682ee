"""Models that generate in the middle of a training: what three turns of the loop hold is what all turns hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.predict_script.conftest import Predict

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, json
import torch
from transformers import (
    BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
    T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments, WhisperConfig, WhisperForConditionalGeneration,
)

kind, options = sys.argv[1], json.loads(sys.argv[2])
bart = dict(vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
llama = dict(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, pad_token_id=0, eos_token_id=2)
model = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**llama)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**llama, sliding_window=16)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**bart)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(
        vocab_size=300, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(
        **bart, num_mel_bins=16, max_source_positions=64, max_target_positions=300, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None)),
}[kind]()
if kind == "whisper":
    rows = [{"input_features": torch.rand(16, 128), "labels": list(range(4, 12))}] * 8
else:
    rows = [{"input_ids": list(range(3, 15)), "attention_mask": [1] * 12, "labels": list(range(3, 15))}] * 8

class Answers(Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        inputs = self._prepare_inputs(inputs)
        model.eval()
        prompt = {name: each for name, each in inputs.items() if name != "labels"}
        with torch.no_grad():
            found = model.generate(**prompt, max_new_tokens=200, min_new_tokens=200, **options)
            if options.get("output_logits"):
                torch.stack(found.logits, 1)
        model.train()
        found = getattr(found, "sequences", found)
        assert found.shape[0] == 4 * options.get("num_return_sequences", 1), found.shape
        return super().training_step(model, inputs, *args, **kwargs)

arguments = TrainingArguments("out", per_device_train_batch_size=4, max_steps=2, report_to="none", save_strategy="no",
                              use_cpu=not torch.cuda.is_available())
Answers(model, arguments, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("llama", '{"do_sample": true}', marks=pytest.mark.exhaustive),
        ("llama", '{"num_beams": 3, "num_return_sequences": 2}'),
        pytest.param("llama", '{"use_cache": false}', marks=pytest.mark.exhaustive),
        pytest.param(
            "llama", '{"output_logits": true, "return_dict_in_generate": true}', marks=pytest.mark.exhaustive
        ),
        pytest.param("mistral", "{}", marks=pytest.mark.exhaustive),
        pytest.param("t5", "{}", marks=pytest.mark.exhaustive),
        ("t5", '{"num_beams": 4}'),
        pytest.param("bart", '{"num_beams": 4, "no_repeat_ngram_size": 3}', marks=pytest.mark.exhaustive),
        ("whisper", '{"language": null}'),
    ],
)
def test_what_generating_holds_is_what_a_real_loop_holds(predict: Predict, kind: str, options: str) -> None:
    """Would notice: keys and values of the answers' tokens, of the beams, or of the encoder's positions that are not
    there; a loop that is left after its first turn; scores that are kept and not counted."""
    peaks: dict[Any, int] = {}
    for device in ("real cpu", "cpu"):
        content = predict(SCRIPT, kind, options, device=device, worst_batch=False)
        assert content.training, content
        peaks[device] = content.training.trace.peaks_by_phase()["generate"]
    assert peaks["real cpu"] <= peaks["cpu"] <= 1.1 * peaks["real cpu"]
    content = predict(SCRIPT, kind, options, worst_batch=False)
    assert content.training, content
