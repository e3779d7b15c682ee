"""A model's name and documents in, a tokenizer out: the model's own, or one that is trained here and says so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memkit.errors import DataError
from hf_memkit.recipe.text_readers import in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_memkit.recipe.data import Documents


END_OF_TEXT = "<|endoftext|>"

_SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end of a text
_TRAINING_CHARACTERS = 100 * 2**20
# Training takes time in the square of the longest word: 4 minutes for one of a million characters. Encoding does not.
_LONGEST_WORD = 256
_LONG_WORD = re.compile(rf"(\S{{{_LONGEST_WORD}}})(?=\S)")
_LONG_SPACE = re.compile(rf"(\s{{{_LONGEST_WORD}}})\s+")


@dataclass(frozen=True)
class Framing:
    """What a tokenizer that is trained here puts around a text.

    Attributes:
        tokens: special tokens in the order of their IDs, by what transformers calls them (`pad_token` …).
        single, pair: what becomes of one text (`$A`) and of two (`$B`), as `TemplateProcessing` of tokenizers has it;
            empty: nothing stands around it.
    """

    tokens: Mapping[str, str]
    single: str = ""
    pair: str = ""

    @property
    def listed(self) -> list[str]:
        """Each special token once, in the order of their IDs."""
        return list(dict.fromkeys(self.tokens.values()))


CONTINUED = Framing({"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})
"""For language models that go on with a text: packing puts the end between documents."""


@dataclass(frozen=True)
class ChosenTokenizer:
    """`reason` tells a person why it is this one; `trained_here` is True if it is not the model's own."""

    tokenizer: PreTrainedTokenizerBase
    reason: str
    trained_here: bool


def get_tokenizer(
    name: str | None,
    documents: Documents,
    *,
    vocabulary_size: int,
    allow_download: bool,
    framing: Framing = CONTINUED,
) -> ChosenTokenizer:
    """The tokenizer of the model `name`, a local path or a hub ID; without one, a tokenizer trained on `documents`.

    Args:
        name: None means: train one.
        documents: what a tokenizer is trained on.
        vocabulary_size: entries that the model has embeddings for.
        allow_download: if False, only local paths and the hub's cache are looked at.
        framing: of a tokenizer that is trained.

    Raises:
        DataError: the tokenizer has more entries than the model, or the model fewer than a tokenizer needs.
    """
    if name is None:
        trained = train_tokenizer(documents, vocabulary_size, framing)
        reason = f"a byte-level BPE of {len(trained)} entries, trained here on {documents.source}"
        return ChosenTokenizer(trained, reason, True)
    own, problem = _load(name, documents, allow_download)
    if own is not None:
        check_vocabulary(own, vocabulary_size)
        if own.pad_token is None:  # GPT-2's, Llama's: Trainer's collator asks for one even where nothing is padded
            own.pad_token = own.eos_token
        return ChosenTokenizer(own, f"the model's own ({name}, {len(own)} entries)", False)
    trained = train_tokenizer(documents, vocabulary_size, framing)
    reason = (
        f"NOT THE MODEL'S OWN: {name} gave none ({problem}), so a byte-level BPE of {len(trained)} entries was "
        f"trained here on {documents.source}; its losses compare with no other tokenizer's, and weights trained with "
        "another one do not fit it"
    )
    return ChosenTokenizer(trained, reason, True)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocabulary_size: int) -> None:
    """Raises DataError if `tokenizer` has more entries than the model has embeddings for."""
    count = len(tokenizer)
    if count > vocabulary_size:
        whose = f"model {tokenizer.name_or_path!r}: its tokenizer" if tokenizer.name_or_path else "the tokenizer"
        raise DataError(
            f"{whose} has {count} entries, and the model has embeddings for {vocabulary_size}. Call "
            f"model.resize_token_embeddings({count}) and save the model, or give a --model whose vocab_size is "
            f"{count} or more"
        )


def train_tokenizer(
    documents: Documents, vocabulary_size: int, framing: Framing = CONTINUED
) -> PreTrainedTokenizerBase:
    """A byte-level BPE with at most `vocabulary_size` entries: any text can be written in it and read back unchanged.

    Of `documents` the first 100 Mi characters are used. The same documents give the same vocabulary, in every process.

    Raises:
        DataError: `vocabulary_size` is below 257, or no document holds text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size={vocabulary_size}: too small; a byte-level tokenizer needs {_SMALLEST_VOCABULARY}"
        )
    if next(iter(documents), None) is None:
        raise DataError(f"{documents.source}: no text to train a tokenizer on; give a file with text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=framing.listed,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(documents), trainer)
    inputs = ["input_ids", "attention_mask"]
    if framing.single:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=framing.single,
            pair=framing.pair or None,
            special_tokens=[(token, number) for number, token in enumerate(framing.listed)],
        )
        inputs += ["token_type_ids"] if ":1" in framing.pair else []
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **framing.tokens,
        **({"model_input_names": inputs} if framing.single else {}),
    )


def _training_texts(documents: Iterable[str]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for text in documents:
        yield _LONG_SPACE.sub(r"\1", _LONG_WORD.sub(r"\1\n", text[:left]))
        left -= len(text)
        if left <= 0:
            return


def _load(
    name: str, documents: Documents, allow_download: bool
) -> tuple[PreTrainedTokenizerBase, str] | tuple[None, str]:
    """(the tokenizer, "") or (None, why there is none)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not allow_download)
    except Exception as error:
        # Missing, gated or broken files, a missing package, a class that is not known: no common base class, and all
        # of them end the same way, with a tokenizer trained here and this message shown.
        if not allow_download and not Path(name).exists():
            return None, "not on this machine, and the hub is not asked"
        return None, in_one_line(error)
    # From a folder with a config and no tokenizer files transformers makes a tokenizer that knows no word.
    sample = next(iter(documents), "")[:1000]
    ids = set(tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"])
    if not ids - set(tokenizer.all_special_ids):
        return None, "its tokenizer knows no token of this text; check its files"
    return tokenizer, ""
