"""Padding, packing and sampling by length: settings that are ignored, or that change the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.checks.rule import Match, Rules, any_job
from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.setup.techniques.sequences import LEAKING

_grouping: Final = Rules(techniques=("length-grouped",))
_PACKED: Final = "trainer_parts.packed_batches"
_BY_LENGTH: Final = ("group_by_length", "batch_rebalance")
_STRATEGIES: Final = ("random", "sequential", *_BY_LENGTH)
_LENGTH: Final = "length"  # transformers 5.23.0: training_args.py, the default of length_column_name


@any_job.warning(
    why="Trainer drops the last partial batch of evaluation and prediction too: the metrics cover fewer samples",
    fix="delete it: accumulation and the loss are correct with a partial batch",
    source="transformers 5.23.0: trainer.py 1042, for every DataLoader",
)
def drop_last_in_evaluation(subject: Subject) -> Iterator[Match]:
    strategy = str(subject.argument("eval_strategy", "no")).lower()
    evaluated = strategy not in ("no", "none", "false") or subject.on("do_eval") or subject.on("do_predict")
    if subject.on("dataloader_drop_last") and evaluated:
        yield Match("dataloader_drop_last", True, argument=True)


@_grouping.warning(
    why="unknown strategy: Trainer silently samples at random (only the command line checks the value)",
    fix="write random, sequential, group_by_length or batch_rebalance",
    source="transformers 5.23.0: trainer.py 1142-1145",
)
def sampling_strategy_unknown(subject: Subject) -> Iterator[Match]:
    value = subject.argument("train_sampling_strategy", "random")
    if value not in _STRATEGIES:
        yield Match("train_sampling_strategy", value, argument=True)


@_grouping.error(
    why="Trainer groups evaluation and prediction by length too: predict() returns rows in another order than the "
    "data set's",
    fix='predict with a Trainer whose train_sampling_strategy is "random"',
    source="transformers 5.23.0: trainer.py 1152-1172, 975-991",
)
def grouping_reorders_predictions(subject: Subject) -> Iterator[Match]:
    value = subject.argument("train_sampling_strategy")
    if value == "group_by_length" and subject.on("do_predict"):
        yield Match("train_sampling_strategy", value, argument=True)


@_grouping.warning(
    why="Trainer removes unused columns before the sampler looks for the lengths: it reads and counts the whole data "
    "set again",
    fix="delete it, or write remove_unused_columns: false with a collator that drops the column",
    source="transformers 5.23.0: trainer.py 1020 before 1038",
)
def length_column_removed(subject: Subject) -> Iterator[Match]:
    column = subject.argument("length_column_name", ABSENT)
    by_length = subject.argument("train_sampling_strategy") in _BY_LENGTH
    if column is not ABSENT and by_length and subject.argument("remove_unused_columns", True) is True:
        yield Match("length_column_name", column, argument=True)


@any_job.warning(
    why="Trainer reads the lengths only if it groups samples by length",
    fix="delete it, or write train_sampling_strategy: group_by_length",
    source="transformers 5.23.0: trainer.py 1088-1115, read nowhere else",
)
def length_column_without_grouping(subject: Subject) -> Iterator[Match]:
    column = subject.argument("length_column_name", _LENGTH)
    if column != _LENGTH and subject.argument("train_sampling_strategy") not in _BY_LENGTH:
        yield Match("length_column_name", column, argument=True)


@_grouping.warning(
    why="Trainer cannot group streamed data: it reads them in their own order, and logs that it ignores the setting",
    fix="delete it, or load the data without streaming",
    source="transformers 5.23.0: trainer.py 735-739, 1036, 1075-1083",
)
def grouping_streamed_data(subject: Subject) -> Iterator[Match]:
    value = subject.argument("train_sampling_strategy")
    if value in _BY_LENGTH and (subject.on("streaming") or subject.on("dataset_streaming")):
        yield Match("train_sampling_strategy", value, argument=True)


@any_job.error(
    why="in this model samples that share a row silently see each other: the loss changes",
    fix="pad instead: pad-to-multiple, with length-grouped",
    source="transformers 5.23.0: masking_utils.py 873-883, and the models that do not come there",
    techniques=("packing", "padding-free"),
)
def packed_samples_leak(subject: Subject) -> Iterator[Match]:
    kind = subject.model_type
    if subject.has_setting(_PACKED) and kind in LEAKING:
        why = f"{kind} {LEAKING[kind]}: samples that share a row silently see each other"
        yield Match(_PACKED, why=why)


@any_job.error(
    why="with a cache transformers makes no mask from position ids: the samples of a row silently see each other",
    fix="write use_cache: false",
    source="transformers 5.23.0: masking_utils.py 876",
    techniques=("packing", "padding-free"),
)
def packed_samples_and_cache(subject: Subject) -> Iterator[Match]:
    if subject.has_setting(_PACKED) and subject.on("use_cache"):
        yield Match("use_cache", True, argument=True)


@any_job.error(
    why="flash attention separates samples only in a batch of one row: in more rows they see each other",
    fix="use padding-free instead of packing",
    source="transformers 5.23.0: modeling_flash_attention_utils.py 573, 855",
    techniques=("packing",),
)
def packed_rows_and_flash_attention(subject: Subject) -> Iterator[Match]:
    options = subject.setting(_PACKED)
    attention = str(subject.setting("model.attn_implementation", ""))
    if options and options.get("length") is not None and "flash" in attention:
        yield Match("model.attn_implementation", attention)


@any_job.warning(
    why="eager attention keeps the scores of the whole row, which grow with the square of the micro-batch; those of "
    "padded samples grow linearly",
    fix="use the technique sdpa-attention, or better flash-attention",
    source="transformers 5.23.0: models/gpt2/modeling_gpt2.py, eager_attention_forward",
    techniques=("padding-free",),
)
def padding_free_and_eager_attention(subject: Subject) -> Iterator[Match]:
    options = subject.setting(_PACKED)
    eager = subject.setting("model.attn_implementation") == "eager"
    if eager and options is not None and options.get("length") is None:
        yield Match("model.attn_implementation", "eager")


@any_job.warning(
    why="nothing is padded, so grouping saves nothing; with one row, a batch of the longest samples sets the peak",
    fix="leave out length-grouped",
    source="transformers 5.23.0: trainer_pt_utils.py, get_length_grouped_indices",
    techniques=("length-grouped", "padding-free", "packing"),
)
def grouping_packed_samples(subject: Subject) -> Iterator[Match]:
    value = subject.argument("train_sampling_strategy")
    if subject.has_setting(_PACKED) and value == "group_by_length":
        yield Match("train_sampling_strategy", value, argument=True)


@any_job.warning(
    why="a text recipe's data are full blocks of equal length: nothing is padded, so there is nothing to save",
    fix="leave the technique out",
    source="hf_memkit/recipes/export/scripts/train_text.py, blocks_of",
    techniques=("pad-to-multiple", "length-grouped", "packing", "padding-free"),
)
def blocks_need_no_padding(subject: Subject) -> Iterator[Match]:
    # Examples of other tasks differ in length.
    blocks = subject.has_setting("data.text_column") and not subject.has_setting("data.task")
    for part in ("pad_batches", "packed_batches", "check_length_grouping"):
        key = f"trainer_parts.{part}"
        if blocks and subject.has_setting(key):
            yield Match(key)
