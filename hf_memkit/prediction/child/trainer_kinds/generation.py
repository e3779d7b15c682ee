"""What generating holds, on fake tensors: evaluations with `predict_with_generate`, and models that train on their own
answers (TRL's GRPO and RLOO).

Which token comes next is a value, which a trace does not have; so of the loop of `generate` three turns are run, by
its own code: the prompt's, and those of the last two tokens, with keys and values of all tokens before them, of every
beam. That every answer is as long as it may be is a bound: a real one may end earlier.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from hf_memkit.catalog.library_versions import GENERATION_FIELDS
from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.older_libraries import (
    first_turn,
    grown_masks,
    later_arguments,
    longest_cache,
    of_one_turn,
)
from hf_memkit.prediction.child.tracer.work_recorder import turns as work_of_turns
from hf_memkit.setup.setup import Setup


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


def generates_nothing(trainer: Any) -> Iterator[str]:
    """Why evaluations of a Trainer do not generate, which is asked to: a sentence each."""
    if getattr(trainer.args, "predict_with_generate", False):
        if not generates(trainer.args, type(trainer)):
            yield "predict_with_generate has no effect: only Seq2SeqTrainer generates"
        elif trainer.compute_metrics is None:
            yield "predict_with_generate has no effect: evaluations without compute_metrics compute the loss"


def _can_generate(trainer: type) -> bool:
    """Whether it is a Seq2SeqTrainer, which is not imported for that."""
    return any(each.__module__ == "transformers.trainer_seq2seq" for each in trainer.__mro__)


# ---- the loop ----


def answers_are_longest() -> None:
    """Shortens the loop of `generate` in this process. Its answers are as long as they may be, of a token that ends
    none."""
    from transformers import GenerationMixin

    for name in ("_sample", "_beam_search"):
        setattr(GenerationMixin, name, _longest(getattr(GenerationMixin, name)))
    whisper = sys.modules.get("transformers.models.whisper.generation_whisper")
    if whisper is not None:
        _sound_is_one_window(whisper.WhisperGenerationMixin)


def _sound_is_one_window(whisper: Any) -> None:
    """Whisper's own `generate` finds by the values of its answers where in a sound the next window begins, copies it,
    and generates as other models do (transformers 5.23.0: generation_whisper.py, `_get_input_segment`)."""
    from transformers import GenerationMixin

    others = GenerationMixin.generate
    own = inspect.signature(whisper.generate).parameters.keys() - inspect.signature(others).parameters.keys()
    own -= {"attention_mask"}  # what is left decides about windows and words

    def generate(self: Any, input_features: torch.Tensor, *args: Any, **options: Any) -> Any:
        return others(self, input_features.clone(), *args, **{k: v for k, v in options.items() if k not in own})

    whisper.generate = generate


def _longest(loop: Any) -> Any:
    """`GenerationMixin._sample` or `._beam_search` (transformers 5.23.0: generation/utils.py), three turns of it."""

    @functools.wraps(loop)
    def longest(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **options: Any,
    ) -> Any:
        if generation_config.output_attentions or generation_config.output_hidden_states:
            raise Unmodelled("generate(output_attentions, output_hidden_states): not modelled; omit both")
        options, of_the_loop = of_one_turn(options)
        prompt, most, word = input_ids, stopping_criteria.max_length, _word(generation_config)
        rows, given = input_ids.shape
        beams = generation_config.num_beams or 1
        earlier: dict[str, tuple[torch.Tensor, ...]] = {}
        turns = min(most - given, _TURNS)
        skipped = most - given - turns
        if skipped > 0:
            outputs = first_turn(self, input_ids, generation_config, options)
            options = _later(self, outputs, options, skipped)
            if generation_config.return_dict_in_generate:
                kept = [name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}")]
                of_a_token = outputs.logits[:, -1]
                earlier = {
                    name: tuple(torch.empty_like(of_a_token, dtype=torch.float32) for _ in range(skipped))
                    for name in kept
                }
                del of_a_token
            del outputs
            if options["use_cache"]:
                _grow(options["past_key_values"], skipped - 1)
            input_ids = torch.cat([input_ids, input_ids.new_full((rows, skipped), word)], dim=1)
            # Of a turn that is not the first.
            self._prefill = lambda ids, _, given, **__: self(**later_arguments(self, ids, given), return_dict=True)
        # Of which beam each token is: of those that go on, of the best, and of twice as many that are candidates.
        of_beams = input_ids.new_empty((4 if beams > 1 else 0, rows, skipped), dtype=torch.int32)
        again = itertools.repeat(True, turns)
        of_all_turns = work_of_turns("generate (turns that are not traced)")
        self._has_unfinished_sequences = lambda *_, **__: next(again, False)
        try:
            found = loop(
                self, input_ids, logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, **options, **of_the_loop,
            )  # fmt: skip
        finally:
            of_all_turns(skipped / max(1, turns))
            vars(self).pop("_prefill", None)
            del self._has_unfinished_sequences
        del of_beams
        if beams > 1:
            prompt = prompt[: rows // beams * (generation_config.num_return_sequences or 1)]
        answers = torch.cat([prompt, prompt.new_full((prompt.shape[0], most - given), word)], dim=1)
        if isinstance(found, torch.Tensor):
            return answers
        for name, each in {"sequences": answers, **{name: (*earlier[name], *found[name]) for name in earlier}}.items():
            found[name] = each
        return found

    return longest


_TURNS: Final = 2
"""The last ones, so that what the loop keeps from one to the next is there in the last."""


def _later(model: Any, outputs: Any, options: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The arguments of the loop's turns so many tokens later."""
    types = options.pop("token_type_ids", None)
    before = dict(options)
    options = model._update_model_kwargs_for_generation(
        outputs, options, is_encoder_decoder=model.config.is_encoder_decoder, num_new_tokens=tokens
    )
    grown_masks(model, before, options, tokens)
    if types is not None:
        options["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, tokens)], dim=-1)
    return options


def _word(generation_config: Any) -> int:
    """A token that neither ends an answer nor pads it."""
    ends = generation_config.eos_token_id
    special = {generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
    return next(number for number in itertools.count() if number not in special)


def _grow(cache: Any, tokens: int) -> None:
    """Keys and values of so many more tokens, layer by layer (transformers 5.23.0: cache_utils.py, `update`)."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if not getattr(layer, "is_initialized", False) or not hasattr(layer, "keys"):
            continue
        if longest_cache(layer) > 0 and not layer.is_sliding:
            continue  # its memory is there from the begin
        length = layer.keys.shape[-2] + tokens
        if layer.is_sliding:
            length = min(length, layer.sliding_window - 1)
            layer.cumulative_length += tokens
        for name in ("keys", "values"):
            before = getattr(layer, name)
            setattr(layer, name, before.new_empty((*before.shape[:-2], length, before.shape[-1])))
