"""The loss: Liger's kernels, and the loss in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from hf_memkit.catalog.liger_support import LIGER_OPTIONS, LIGER_WITH_LOGITS
from hf_memkit.checks.rule import Match, Rules, any_job
from hf_memkit.checks.subject import Subject
from hf_memkit.common.errors import did_you_mean
from hf_memkit.setup.techniques.registry import setting_of

_of_liger: Final = Rules(techniques=("liger",))
_of_chunks: Final = Rules(techniques=("chunked-loss",))
_CHUNKED = "model_parts.chunked_loss"
_PATCHING = "liger-kernel 0.8.5: transformers/monkey_patch.py"


def _liger(subject: Subject) -> bool:
    return subject.on("use_liger_kernel")


@_of_liger.warning(
    why="Liger has no kernels for this model type: it changes nothing, and logs that only at level INFO",
    fix="use the technique chunked-loss, which supports any causal language model",
    source=f"{_PATCHING} 4012-4014",
)
def liger_model_unknown(subject: Subject) -> Iterator[Match]:
    kind = subject.model_type
    if _liger(subject) and kind is not None and kind not in LIGER_OPTIONS:
        why = f"Liger has no kernels for the model type {kind}: it changes nothing, and logs that only at level INFO"
        yield Match("use_liger_kernel", True, why=why, argument=True)


@_of_liger.warning(
    why="Liger silently drops keys that it does not know for this model type",
    fix="write a key that it knows",
    source=f"{_PATCHING} 4016-4020",
)
def liger_key_unknown(subject: Subject) -> Iterator[Match]:
    config = subject.argument("liger_kernel_config")
    if not _liger(subject) or not isinstance(config, Mapping):
        return
    every = frozenset().union(*LIGER_OPTIONS.values())
    kind = subject.model_type
    known = LIGER_OPTIONS.get(kind or "", every)
    what = "any model type" if kind is None else f"the model type {kind}"
    for key in [key for key in config if key not in known]:
        why = f"Liger has no key {key!r} for {what}, and silently drops it"
        fix = f"write one of {', '.join(sorted(known))}{did_you_mean(key, sorted(known))}"
        yield Match(f"liger_kernel_config.{key}", config[key], why=why, fix=fix, argument=True)


@_of_liger.warning(
    why=f"no effect without {setting_of('liger')}: nothing is patched",
    fix=f"add {setting_of('liger')}, or delete the key",
    source="transformers 5.23.0: trainer.py 1494-1495",
)
def liger_config_unused(subject: Subject) -> Iterator[Match]:
    config = subject.argument("liger_kernel_config")
    if config and not _liger(subject):
        yield Match("liger_kernel_config", config, argument=True)


@_of_liger.error(
    why="Liger's two losses exclude each other, and the fused one is on by default: training fails with an assertion "
    "after loading the model",
    fix="delete cross_entropy: the fused loss does more",
    source=f"{_PATCHING} 283-285",
)
def liger_two_losses(subject: Subject) -> Iterator[Match]:
    config = subject.argument("liger_kernel_config")
    if not _liger(subject) or not isinstance(config, Mapping) or config.get("cross_entropy") is not True:
        return
    if config.get("fused_linear_cross_entropy", subject.model_type not in LIGER_WITH_LOGITS) is True:
        yield Match("liger_kernel_config.cross_entropy", True, argument=True)


@_of_liger.warning(
    why="for this model type Liger leaves its fused loss off: all logits are still computed",
    fix="use the technique chunked-loss instead: it repeats the scaling in each chunk",
    source=f"{_PATCHING} 184-240 (Granite), apply_liger_kernel_to_pixtral",
)
def liger_keeps_logits(subject: Subject) -> Iterator[Match]:
    if _liger(subject) and subject.model_type in LIGER_WITH_LOGITS:
        why = f"for the model type {subject.model_type} Liger leaves its fused loss off: all logits are still computed"
        yield Match("use_liger_kernel", True, why=why, argument=True)


@_of_liger.error(
    why="Liger's kernels need Triton and a GPU: without one they fail at import, or when they run",
    fix="use the technique chunked-loss, which runs anywhere, or delete the key",
    source="liger-kernel 0.8.5: ops/cross_entropy.py imports triton",
)
def liger_without_gpu(subject: Subject) -> Iterator[Match]:
    if _liger(subject) and subject.without_gpu:
        yield Match("use_liger_kernel", True, argument=True)


@any_job.warning(
    why="Liger replaces the model's forward after chunked-loss is installed: chunked-loss silently has no effect, "
    "and neither have label_smoothing and chunk_tokens",
    fix="use one of the two: liger if it supports the model type, otherwise chunked-loss",
    source=f"{_PATCHING} 302-306; transformers 5.23.0: trainer.py 1494",
    techniques=("liger", "chunked-loss"),
)
def liger_and_chunked_loss(subject: Subject) -> Iterator[Match]:
    known = subject.model_type in (None, *LIGER_OPTIONS)
    if _liger(subject) and known and subject.has_setting(_CHUNKED):
        yield Match(_CHUNKED)


@any_job.warning(
    why="with label_smoothing_factor Trainer removes the labels and smooths over all logits: a fused or chunked loss "
    "has no effect",
    fix="delete it; chunked-loss has a value label_smoothing for this",
    source="transformers 5.23.0: trainer.py 2155-2156",
    techniques=("liger", "chunked-loss"),
)
def label_smoothing_makes_logits(subject: Subject) -> Iterator[Match]:
    factor = subject.argument("label_smoothing_factor")
    if isinstance(factor, int | float) and factor > 0 and (_liger(subject) or subject.has_setting(_CHUNKED)):
        yield Match("label_smoothing_factor", factor, argument=True)


@_of_chunks.warning(
    why="a micro-batch has no more tokens than one chunk: all its logits are computed at once",
    fix="set chunk_tokens below the tokens of a micro-batch, or omit chunked-loss",
    source="hf_memkit/components/chunked_loss.py; transformers 5.23.0: loss/loss_utils.py 59-85 makes as many",
)
def one_chunk_only(subject: Subject) -> Iterator[Match]:
    options = subject.setting(_CHUNKED) or {}
    rows = subject.argument("per_device_train_batch_size", 8)
    length = subject.setting("data.sequence_length")
    chunk = options.get("chunk_tokens")
    if not isinstance(chunk, int) or not isinstance(length, int) or not isinstance(rows, int):
        return
    if rows * length <= chunk:
        why = f"a micro-batch of {rows} × {length} tokens is one chunk of {chunk}: all its logits are computed at once"
        yield Match(f"{_CHUNKED}.chunk_tokens", chunk, why=why)


@_of_chunks.warning(
    why="TRL's SFTTrainer computes log-probabilities in tiles and bypasses the model's head: chunked-loss, "
    "chunk_tokens and label_smoothing have no effect",
    fix="leave chunked-loss out: SFTTrainer does not hold the logits of a whole batch either",
    source="trl 1.16.0: trainer/sft_trainer.py 1163-1168, trainer/utils.py 1548-1698 (add_fused_lm_head)",
)
def sft_has_its_own_loss(subject: Subject) -> Iterator[Match]:
    if subject.setting("trainer.class") == "trl:SFTTrainer" and subject.has_setting(_CHUNKED):
        yield Match(_CHUNKED)


@_of_chunks.error(
    why="chunked-loss computes the loss of a causal language model; this model has another one, and the run fails, "
    "but only after loading the model",
    fix="leave chunked-loss out",
    source="transformers 5.23.0: loss/loss_utils.py, LOSS_MAPPING; hf_memkit/components/chunked_loss.py",
)
def chunked_loss_needs_causal_model(subject: Subject) -> Iterator[Match]:
    other = subject.model.model_class if subject.model is not None else None
    if other is not None and subject.has_setting(_CHUNKED):
        why = f"chunked-loss computes the loss of a causal language model, and {other} has another one"
        yield Match(_CHUNKED, why=why)
