"""Models, a tokenizer and texts, as small as the client scripts take them; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

TEXTS = [f"the quick brown fox number {i} jumps over {'the lazy dog and ' * (i % 3)}runs away ." for i in range(200)]


def make_inputs(folder: Path) -> None:
    """Writes tiny-gpt2 and tiny-t5, texts.txt, few.txt, texts.jsonl and sft/."""
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    (folder / "few.txt").write_text("\n".join(TEXTS[:40]))
    rows = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (folder / "sft").mkdir()
    for name in ("texts.jsonl", "sft/train.jsonl"):
        (folder / name).write_text(rows)
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    words = len(tokenizer)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    made = {
        "tiny-gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=words, bos_token_id=0, eos_token_id=0, **size)),
        "tiny-t5": T5ForConditionalGeneration(
            T5Config(
                vocab_size=words, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=1,
                eos_token_id=0, decoder_start_token_id=1,
            )
        ),
    }  # fmt: skip
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "[PAD]"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="[PAD]",
        model_max_length=128,
    )  # fmt: skip
