"""What generating holds, on fake tensors: evaluations with `predict_with_generate`, and models that train on their own
answers (TRL's GRPO and RLOO).

Which token comes next is computed, and a trace has no values; so that the loop of `generate` is not run. In its place
the most that it holds is made and freed, before the forward pass that computes the loss: at the last token, keys and
values of all layers, one layer's copy of them, the encoder's output, the scores in fp32, and under autocast the 16-bit
copies of all weights. The encoder's own pass is part of the loss's. Kept from batch to batch are the tokens, as
Seq2SeqTrainer keeps them. That every answer is as long as it may be is a bound: a real one may end earlier.

Of a decoder that a script calls `generate` of, two forward passes are made: that of the prompt, and that of the last
token, with keys and values of all tokens before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import torch
from transformers import Trainer

from hf_memkit.compat import GENERATION_FIELDS
from hf_memkit.errors import Unmodelled
from hf_memkit.setup import Setup
from hf_memkit.techniques.activation_bytes import cache_bytes

__all__ = ["answers_are_longest", "arguments_class", "generates", "generating", "generation_config"]

_DEFAULT_LENGTH: Final = 20
_HALF_BYTES: Final = 2
_SCORE_BYTES: Final = 4
"""Scores are fp32, whatever the model's type (transformers 5.23.0: generation/utils.py, `_sample`)."""


def arguments_class(setup: Setup, trainer: type) -> type | None:
    """Seq2SeqTrainingArguments, where a user's own training needs them: their Trainer asks for fields of its own, or
    some of those are set. None: as the setup says."""
    if "trainer.arguments_class" in setup:
        return None
    if not _can_generate(trainer) and not any(f"arguments.{name}" in setup for name in GENERATION_FIELDS):
        return None
    from transformers import Seq2SeqTrainingArguments

    return Seq2SeqTrainingArguments  # type: ignore[no-any-return]


def generation_config(setup: Setup) -> dict[str, Any]:
    """The argument of that name as an object, where the setup has its values."""
    given = setup.get("arguments.generation_config")
    if not isinstance(given, Mapping):
        return {}
    from transformers import GenerationConfig

    return {"generation_config": GenerationConfig.from_dict(dict(given))}


def generates(arguments: Any, *trainers: type) -> bool:
    """Whether evaluations generate: asked for (`Seq2SeqTrainingArguments`), by a Trainer that does it."""
    asked = bool(getattr(arguments, "predict_with_generate", False)) and not arguments.prediction_loss_only
    return asked and any(_can_generate(each) for each in trainers)


def _can_generate(trainer: type) -> bool:
    """Whether it is a Seq2SeqTrainer, which is not imported for that."""
    return any(each.__module__ == "transformers.trainer_seq2seq" for each in trainer.__mro__)


def generating(trainer_class: Any) -> Any:
    """A subclass of `trainer_class` whose evaluation holds what generating would."""

    class Generating(trainer_class):  # type: ignore[misc]
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            prepared = self._prepare_inputs(inputs)
            first = prepared[self.model.main_input_name]
            batch, tokens = first.shape[0], longest(self.args, self.model)
            generated = first.new_empty((batch, tokens), dtype=torch.int64)
            first.new_empty(generation_bytes(self.args, self.model, first), dtype=torch.uint8)
            loss, _, _ = Trainer.prediction_step(self, model, prepared, prediction_loss_only=True)
            return loss, generated, prepared.get("labels")

    Generating.__name__ = trainer_class.__name__
    return Generating


def longest(arguments: Any, model: Any) -> int:
    """Tokens of an answer, the one it begins with included: those that the model's generation config asks for by
    `max_new_tokens`, which wins in `generate`; else `generation_max_length`, or the config's (its default: 20)."""
    own = getattr(model, "generation_config", None)
    if new := getattr(own, "max_new_tokens", None):
        return int(new) + 1
    asked = getattr(arguments, "generation_max_length", None)
    return int(asked or getattr(own, "max_length", None) or _DEFAULT_LENGTH)


def _beams(arguments: Any, model: Any) -> int:
    """Answers that are followed at once: `generation_num_beams`, else what the generation config says."""
    own = getattr(getattr(model, "generation_config", None), "num_beams", None)
    return int(getattr(arguments, "generation_num_beams", None) or own or 1)


def generation_bytes(arguments: Any, model: Any, inputs: Any) -> int:
    """Bytes that `generate` holds at its last token, for a batch of these inputs.

    Of an encoder-decoder model the cache has the decoder's own tokens and the encoder's positions, of any other the
    prompt and the answer. Beams multiply all of it.
    """
    config = model.config
    if not hasattr(config, "vocab_size"):  # of several parts; of one part it would make up what it does not find
        config = config.get_text_config(decoder=True)
    layers = _first(config, "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer")
    heads = _first(config, "decoder_attention_heads", "num_attention_heads", "num_heads", "n_head")
    width = _first(config, "d_model", "hidden_size", "n_embd")
    rows = inputs.shape[0] * _beams(arguments, model)
    given, size = positions(config, inputs), model.dtype.itemsize
    cache = cache_bytes(
        batch=rows,
        beams=1,
        tokens=longest(arguments, model) + given,
        layers=layers,
        heads=_first(config, "num_key_value_heads") or heads,
        head_width=_first(config, "d_kv", "head_dim") or width // heads,
        bytes_per_number=size,
    )
    encoded = rows * given * width * size if getattr(config, "is_encoder_decoder", False) else 0
    autocast = (arguments.bf16 or arguments.fp16) and size > _HALF_BYTES
    copies = _HALF_BYTES * sum(each.numel() for each in model.parameters()) if autocast else 0
    return int(cache + cache // layers + encoded + rows * config.vocab_size * _SCORE_BYTES + copies)


def positions(config: Any, inputs: Any) -> int:
    """Keys that come from the inputs: their tokens, or the encoder's positions of a sound."""
    if inputs.is_floating_point():
        return int(getattr(config, "max_source_positions", 0) or inputs.shape[-1])
    return int(inputs.shape[1])


def _first(config: Any, *names: str) -> int:
    """The first of these that the config has; 0 if none."""
    for name in names:
        if value := getattr(config, name, None):
            return int(value)
    return 0


# ---- decoders ----


def answers_are_longest() -> None:
    """Replaces the loop of `generate` in this process. Its answers are as long as they may be, of a token that ends
    none."""
    from transformers import GenerationMixin

    GenerationMixin._sample = _longest_answer
    GenerationMixin._beam_search = _no_beams


def _no_beams(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise Unmodelled("generate() with beams inside a training is not modelled; predict with num_beams=1")


def _longest_answer(
    self: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """In the place of `GenerationMixin._sample` (transformers 5.23.0: generation/utils.py), by its own parts."""
    if self.config.is_encoder_decoder:
        raise Unmodelled("generate() of an encoder-decoder inside a training is not modelled")
    rows, given = input_ids.shape
    word = _word(generation_config)
    unfinished = [input_ids.new_ones(rows), input_ids.new_zeros(rows), input_ids.new_zeros(rows, dtype=torch.bool)]
    outputs = self._prefill(input_ids, generation_config, model_kwargs)
    left = stopping_criteria.max_length - given
    scored = _scored(input_ids, outputs, logits_processor, generation_config)
    if left > 1:
        model_kwargs = self._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        del outputs
        input_ids = torch.cat([input_ids, input_ids.new_full((rows, left - 1), word)], dim=1)
        if (mask := model_kwargs.get("attention_mask")) is not None and mask.dim() == 2:
            rest = mask.new_ones((rows, input_ids.shape[1] - mask.shape[1]))
            model_kwargs["attention_mask"] = torch.cat([mask, rest], dim=1)
        uses_cache = bool(model_kwargs["use_cache"])
        if uses_cache:
            _grow(model_kwargs["past_key_values"], left - 2)
        inputs = self.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 if uses_cache else None, **model_kwargs
        )
        outputs = self(**inputs, return_dict=True)  # while the scores of the token before are there
        scored = _scored(input_ids, outputs, logits_processor, generation_config)
    del scored, unfinished
    found = torch.cat([input_ids, input_ids.new_full((rows, 1), word)], dim=1)
    if not generation_config.return_dict_in_generate:
        return found
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=found, past_key_values=outputs.get("past_key_values"))


def _scored(ids: torch.Tensor, outputs: Any, logits_processor: Any, generation_config: Any) -> list[torch.Tensor]:
    """What the choice of a token makes, and keeps until the next is chosen."""
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    made = [logits, logits_processor(ids, logits)]
    if generation_config.do_sample:
        made.append(torch.nn.functional.softmax(made[-1], dim=-1))
        made.append(torch.multinomial(made[-1], num_samples=1))
    return made


def _word(generation_config: Any) -> int:
    """A token that neither ends an answer nor pads it."""
    ends = generation_config.eos_token_id
    special = {generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
    return next(number for number in itertools.count() if number not in special)


def _grow(cache: Any, tokens: int) -> None:
    """Keys and values of so many more tokens, layer by layer (transformers 5.23.0: cache_utils.py, `update`)."""
    for layer in cache.layers:
        if not getattr(layer, "is_initialized", False) or not hasattr(layer, "keys"):
            continue
        if layer.get_max_length() > 0 and not layer.is_sliding:
            continue  # its memory is there from the begin
        length = layer.keys.shape[-2] + tokens
        if layer.is_sliding:
            length = min(length, layer.sliding_window - 1)
            layer.cumulative_length += tokens
        for name in ("keys", "values"):
            before = getattr(layer, name)
            setattr(layer, name, before.new_empty((*before.shape[:-2], length, before.shape[-1])))
