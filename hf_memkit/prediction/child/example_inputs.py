"""Example inputs of a model with correct names, shapes and dtypes, and meaningless values.

Text has the requested length; images, videos and sound have the size of the model's config.

Padding changes attention: a mask without padding is dropped, while a mask with padding is expanded to (batch, 1,
tokens, tokens) and excludes torch's flash kernel. In a padded batch the first row has the requested length and the
others are one token shorter: the maximum of work, and a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from hf_memkit.common.errors import InputError
from hf_memkit.setup.setup import Setup

_FIX: Final = "predict your training script: memkit predict train.py"

_ONE_LABEL: Final = (
    "ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForVideoClassification",
    "ForMultipleChoice", "ForXVector", "ForNextSentencePrediction", "ForImageClassificationWithTeacher",
)  # fmt: skip
_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
_LABEL_EACH_TOKEN: Final = (
    *_CAUSAL, "ForConditionalGeneration", "ForSpeechSeq2Seq", "ForMaskedLM", "WithLMHeadModel",
    "ForTokenClassification",
)  # fmt: skip
_NO_LABELS: Final = ("MAEForPreTraining",)
"""Models that reconstruct their input."""

_IGNORED: Final = -100  # label of a token that the loss ignores (torch.nn.functional.cross_entropy, `ignore_index`)
_CHOICES: Final = 2
_WAVE: Final = 16_000 * 10
"""Ten seconds at 16 kHz."""
_FRAMES: Final = 1_000  # ten seconds of a spectrogram with a frame every 10 ms
_LONGEST_TRANSCRIPT: Final = 100  # characters in ten seconds of speech

Values = dict[str, Any]


class Rows:
    """A dataset of `count` copies of one example, or of `shorter` for all but the first row of each batch."""

    def __init__(self, row: Values, count: int, shorter: Values | None = None, batch_size: int = 1) -> None:
        self._row, self._count, self._shorter, self._batch_size = row, count, shorter, batch_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Values:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return dict(self._row if self._shorter is None or index % self._batch_size == 0 else self._shorter)


def pads(setup: Setup, model: Any) -> bool:
    """Whether the texts of a batch are assumed to have different lengths. False if they are packed, and for causal
    language models, which mostly train on blocks of one long text, as in transformers' `run_clm` and memkit's recipes.
    True with a collator that pads, with grouping by length, and for all other models."""
    if "trainer_parts.packed_batches" in setup or setup.get("arguments.packing"):
        return False
    grouped = setup.get("arguments.train_sampling_strategy") == "group_by_length"
    return "trainer_parts.pad_batches" in setup or grouped or not type(base_model(model)).__name__.endswith(_CAUSAL)


def shortened(model: Any, row: Values) -> Values | None:
    """`row` with one token less, padded to the same length; None if it is not text or has fewer than three tokens."""
    tokens = row.get("input_ids")
    if tokens is None or len(tokens) < 3 or isinstance(tokens[0], list):
        return None
    padding = getattr(base_model(model).config.get_text_config(), "pad_token_id", None) or 0
    shorter = {
        **row,
        "input_ids": [*tokens[:-2], tokens[-1], padding],  # the last token stays the last
        "attention_mask": [*row["attention_mask"][:-1], 0],
    }
    if isinstance(row.get("labels"), list) and len(row["labels"]) == len(tokens):
        shorter["labels"] = [*row["labels"][:-1], _IGNORED]
    return shorter


def example(model: Any, length: int, *, with_mask: bool = False) -> Values:
    """One example for a transformers model, as nested lists. Raises InputError if memkit has no example of the model's
    input, or the model computes no loss.

    Args:
        model: an instance of the class that is trained, or a PEFT model.
        length: tokens of text, or of the labels' text if the input is not text.
        with_mask: whether a causal model's text has an attention mask, of ones; other models always get one.
    """
    model = base_model(model)
    makers: dict[str, Callable[[Any, int], Values]] = {
        "input_ids": _text,
        "pixel_values": _image,
        "input_features": _spectrogram,
        "input_values": _sound,
    }
    kind, name = type(model).__name__, model.main_input_name
    if name not in makers:
        raise InputError(f"{kind} takes {name}, of which memkit has no example; {_FIX}")
    if name == "input_ids" and any(hasattr(model.config, f"{other}_config") for other in ("vision", "audio")):
        raise InputError(f"{kind} takes text together with images or sound, of which memkit has no example; {_FIX}")
    inputs = makers[name](model, length) | _labels(model, length)
    if name == "input_ids" and not with_mask and kind.endswith(_CAUSAL):
        del inputs["attention_mask"]
    return inputs


def base_model(model: Any) -> Any:
    """The model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _text(model: Any, length: int) -> Values:
    tokens, mask = [_token(model)] * length, [1] * length
    if getattr(model.config, "is_encoder_decoder", False) and isinstance(model.config.eos_token_id, int):
        tokens[-1] = model.config.eos_token_id  # BART and T5 classify the last token
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {"input_ids": [tokens] * _CHOICES, "attention_mask": [mask] * _CHOICES}
    return {"input_ids": tokens, "attention_mask": mask}


def _token(model: Any) -> int:
    """A token that is not special, such as padding."""
    config = model.config.get_text_config()
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "mask", "sep", "cls")}
    return next((token for token in range(1, config.vocab_size) if token not in special), 0)


def _image(model: Any, length: int) -> Values:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    image: Any = [[[0.5] * width for _ in range(height)] for _ in range(getattr(config, "num_channels", 3))]
    frames = getattr(config, "num_frames", None)
    return {"pixel_values": [image] * frames if frames else image}


def _spectrogram(model: Any, length: int) -> Values:
    config = model.config
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        # Whisper's encoder halves the frames once (modeling_whisper.py: conv2 has stride 2).
        return {"input_features": [[0.5] * (2 * config.max_source_positions)] * config.num_mel_bins}
    for name in ("feature_projection_input_dim", "input_feat_per_channel"):  # Wav2Vec2-BERT; Speech2Text
        if hasattr(config, name):
            return {"input_features": [[0.5] * getattr(config, name)] * _FRAMES}
    raise InputError(f"{type(model).__name__} takes a spectrogram whose size its config does not give; {_FIX}")


def _sound(model: Any, length: int) -> Values:
    config = model.config
    if hasattr(config, "num_mel_bins"):  # the input_values of the Audio Spectrogram Transformer are a spectrogram
        return {"input_values": [[0.5] * config.num_mel_bins] * config.max_length}
    return {"input_values": [0.5] * _WAVE}


def _labels(model: Any, length: int) -> Values:
    kind, config = type(model).__name__, model.config
    takes = inspect.signature(model.forward).parameters
    if kind.endswith("ForQuestionAnswering"):
        return {"start_positions": 0, "end_positions": 1}
    if kind.endswith(_NO_LABELS):
        return {}
    if "labels" in takes:
        if kind.endswith(_ONE_LABEL):
            problem, several = getattr(config, "problem_type", None), [0.0] * config.num_labels
            if problem == "regression":
                return {"labels": 0.0 if config.num_labels == 1 else several}
            return {"labels": several if problem == "multi_label_classification" else 0}
        if kind.endswith(_LABEL_EACH_TOKEN):
            return {"labels": [0 if kind.endswith("ForTokenClassification") else _token(model)] * length}
        if kind.endswith("ForCTC"):
            return {"labels": [_token(model)] * min(length, _LONGEST_TRANSCRIPT)}
        if kind.endswith("ForPreTraining"):  # BERT and similar models
            more = {name: 0 for name in ("next_sentence_label", "sentence_order_label") if name in takes}
            return {"labels": [_token(model)] * length, **more}
        if kind.endswith("ForSemanticSegmentation"):
            image = _image(model, length)["pixel_values"]
            return {"labels": [[0] * len(image[0][0])] * len(image[0])}
    raise InputError(
        f"{kind} computes no loss, or takes labels of which memkit has no example; in its config.json name a class "
        f"with a head, such as {kind.removesuffix('Model')}ForSequenceClassification, or {_FIX}"
    )
