"""Traces `generate` on fake tensors: for evaluations with `predict_with_generate`, and models that train on their own
answers (TRL's GRPO and RLOO).

The next token is a value, which a trace does not have. So three turns of the loop of `generate` run, by its own code:
that of the prompt, and those of the last two tokens, with keys and values of all earlier tokens of every beam. Every
answer is assumed to have its maximum length: a bound, because a real one may end earlier.
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
    extend_mask,
    first_turn,
    later_inputs,
    max_cache_length,
    split_loop_options,
)
from hf_memkit.prediction.child.tracer.work_recorder import repetitions
from hf_memkit.setup.setup import Setup


def arguments_class(setup: Setup, trainer: type) -> type | None:
    """Seq2SeqTrainingArguments if the Trainer reads their fields, or the setup sets some; None: as the setup says."""
    if "trainer.arguments_class" in setup:
        return None
    if not _can_generate(trainer) and not any(f"arguments.{name}" in setup for name in GENERATION_FIELDS):
        return None
    from transformers import Seq2SeqTrainingArguments

    return Seq2SeqTrainingArguments  # type: ignore[no-any-return]


def generation_config(setup: Setup) -> dict[str, Any]:
    """The argument of that name as an object, if the setup has its values."""
    given = setup.get("arguments.generation_config")
    if not isinstance(given, Mapping):
        return {}
    from transformers import GenerationConfig

    return {"generation_config": GenerationConfig.from_dict(dict(given))}


def generates(arguments: Any, *trainers: type) -> bool:
    """Whether evaluations generate: requested in the arguments, and supported by one of these Trainers."""
    requested = bool(getattr(arguments, "predict_with_generate", False)) and not arguments.prediction_loss_only
    return requested and any(_can_generate(trainer) for trainer in trainers)


def generation_notes(trainer: Any) -> Iterator[str]:
    """Sentences on why a Trainer's evaluations do not generate although the arguments request it."""
    if getattr(trainer.args, "predict_with_generate", False):
        if not generates(trainer.args, type(trainer)):
            yield "predict_with_generate has no effect: only Seq2SeqTrainer generates"
        elif trainer.compute_metrics is None:
            yield "predict_with_generate has no effect: evaluations without compute_metrics compute the loss"


def _can_generate(trainer: type) -> bool:
    """Whether it is a Seq2SeqTrainer, without importing that class."""
    return any(base.__module__ == "transformers.trainer_seq2seq" for base in trainer.__mro__)


# ---- the loop ----


def patch_generate() -> None:
    """Shortens the loop of `generate` in this process. Its answers have their maximum length and no end token."""
    from transformers import GenerationMixin

    for name in ("_sample", "_beam_search"):
        setattr(GenerationMixin, name, _shortened(getattr(GenerationMixin, name)))
    module = sys.modules.get("transformers.models.whisper.generation_whisper")
    if module is None:
        return
    # Whisper's own `generate` finds the next window of a sound from the values of its answers, and copies it
    # (transformers 5.23.0: generation_whisper.py, `_get_input_segment`).
    whisper, others = module.WhisperGenerationMixin, GenerationMixin.generate
    own = inspect.signature(whisper.generate).parameters.keys() - inspect.signature(others).parameters.keys()
    own -= {"attention_mask"}  # the others concern windows and words

    def generate(self: Any, input_features: torch.Tensor, *args: Any, **options: Any) -> Any:
        return others(self, input_features.clone(), *args, **{k: v for k, v in options.items() if k not in own})

    whisper.generate = generate


def _shortened(loop: Any) -> Any:
    """`GenerationMixin._sample` or `._beam_search` (transformers 5.23.0: generation/utils.py) with three turns."""

    @functools.wraps(loop)
    def shortened(
        self: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **options: Any,
    ) -> Any:
        if generation_config.output_attentions or generation_config.output_hidden_states:
            raise Unmodelled("generate(output_attentions, output_hidden_states): not modelled; omit both")
        options, loop_options = split_loop_options(options)
        prompt, maximum, word = input_ids, stopping_criteria.max_length, _word(generation_config)
        rows, given = input_ids.shape
        beams = generation_config.num_beams or 1
        earlier: dict[str, tuple[torch.Tensor, ...]] = {}
        turns = min(maximum - given, _TURNS)
        skipped = maximum - given - turns
        if skipped > 0:
            outputs = first_turn(self, input_ids, generation_config, options)
            types = options.pop("token_type_ids", None)
            before = dict(options)
            options = self._update_model_kwargs_for_generation(
                outputs, options, is_encoder_decoder=self.config.is_encoder_decoder, num_new_tokens=skipped
            )
            extend_mask(self, before, options, skipped)
            if types is not None:
                options["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, skipped)], dim=-1)
            if generation_config.return_dict_in_generate:
                kept = [name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}")]
                token_logits = outputs.logits[:, -1]
                earlier = {
                    name: tuple(torch.empty_like(token_logits, dtype=torch.float32) for _ in range(skipped))
                    for name in kept
                }
                del token_logits
            del outputs
            if options["use_cache"]:
                _grow(options["past_key_values"], skipped - 1)
            del before, types
            input_ids = torch.cat([input_ids, input_ids.new_full((rows, skipped), word)], dim=1)
            # For all turns but the first.
            self._prefill = lambda ids, _, given, **__: self(**later_inputs(self, ids, given), return_dict=True)
        # The beam of each token: of running beams, of the best ones, and of twice as many candidates.
        beam_indices = input_ids.new_empty((4 if beams > 1 else 0, rows, skipped), dtype=torch.int32)
        unfinished = itertools.repeat(True, turns)
        add_skipped_work = repetitions("generate (turns that are not traced)")
        self._has_unfinished_sequences = lambda *_, **__: next(unfinished, False)
        try:
            result = loop(
                self, input_ids, logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, **options, **loop_options,
            )  # fmt: skip
        finally:
            add_skipped_work(skipped / max(1, turns))
            vars(self).pop("_prefill", None)
            del self._has_unfinished_sequences
        del beam_indices
        if beams > 1:
            prompt = prompt[: rows // beams * (generation_config.num_return_sequences or 1)]
        answers = torch.cat([prompt, prompt.new_full((prompt.shape[0], maximum - given), word)], dim=1)
        if isinstance(result, torch.Tensor):
            return answers
        result["sequences"] = answers
        for name, values in earlier.items():
            result[name] = (*values, *result[name])
        return result

    return shortened


_TURNS: Final = 2  # traced turns at the end: two, so that memory kept from one turn to the next is present in the last


def _word(generation_config: Any) -> int:
    """A token that is neither an end nor padding."""
    ends = generation_config.eos_token_id
    special = {generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
    return next(number for number in itertools.count() if number not in special)


def _grow(cache: Any, tokens: int) -> None:
    """Extends keys and values by `tokens`, layer by layer (transformers 5.23.0: cache_utils.py, `update`)."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if not getattr(layer, "is_initialized", False) or not hasattr(layer, "keys"):
            continue
        if max_cache_length(layer) > 0 and not layer.is_sliding:
            continue  # its memory is allocated at the start
        length = layer.keys.shape[-2] + tokens
        if layer.is_sliding:
            length = min(length, layer.sliding_window - 1)
            layer.cumulative_length += tokens
        for name in ("keys", "values"):
            before = getattr(layer, name)
            setattr(layer, name, before.new_empty((*before.shape[:-2], length, before.shape[-1])))
