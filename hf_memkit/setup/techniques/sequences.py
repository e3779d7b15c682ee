"""Less padding: padding to a multiple, batches of similar lengths, several sequences in a row."""

from __future__ import annotations

from typing import Final

from hf_memkit.catalog.hardware import Gpu
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.errors import SettingError
from hf_memkit.common.units import format_size
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique

LEAKING: Final[dict[str, str]] = {
    "bert": "builds its mask without position ids",
    "biogpt": "builds its mask without position ids",
    "bloom": "takes no position ids: ALiBi counts from the row's start",
    "falcon": "builds its mask without position ids",
    "lfm2": "its convolutions run over the whole row",
    "mamba": "its state runs over the whole row",
    "mamba2": "its state runs over the whole row",
    "mpt": "takes no position ids: ALiBi counts from the row's start",
    "opt": "builds its mask without position ids",
    "rwkv": "its state runs over the whole row",
    "xglm": "builds its mask without position ids",
}
"""Model type → why samples in one row affect each other. Measured with transformers 5.23.0: three samples in a row
have another loss (tests/checks/proofs_sequences.py). The trainer part tests other models before training."""

_WHOLE_LINES: Final = (8.0, 9.0, 10.0, 10.3)
"""Compute capabilities of A100, H100/H200 and B200/B300. NVIDIA gives 128 bytes as the multiple for A100, and 16 bytes
for other GPUs (DU-09799-001, "Matrix Multiplication Background", section 2.2); for its successors it is assumed."""


def multiple_for(gpu: Gpu | None, bytes_per_number: int = 2) -> tuple[int, str]:
    """(fast multiple for the sides of a matrix, why): 16 bytes of numbers, or 128 on large GPUs.

    >>> multiple_for(None)[0]
    8
    """
    if gpu is not None and gpu.capability in _WHOLE_LINES:
        return 128 // bytes_per_number, f"{gpu.name} multiplies in pieces of 128 bytes"
    return 16 // bytes_per_number, "tensor cores multiply in pieces of 16 bytes"


def odd_sizes(model: ModelFacts, multiple: int) -> list[str]:
    """The model's sizes that are not a multiple, as text: `vocabulary 50257 (the next is 50304)`."""
    sides = {"hidden size": model.width, "vocabulary": model.vocabulary}
    return [
        f"{name} {size} (the next is {-(-size // multiple) * multiple})"
        for name, size in sides.items()
        if size % multiple
    ]


def packed_mask_bytes(row_tokens: int) -> int:
    """Bytes of the boolean mask of a packed row without flash attention: tokens².

    Source: transformers 5.23.0, masking_utils.py, sdpa_mask: (rows, 1, tokens, tokens), made once a forward pass.
    """
    return row_tokens * row_tokens


_COMPILED_MULTIPLE = 128  # assumed: few shapes, at most 127 tokens of padding


@technique(
    "pad-to-multiple",
    slot="collator",
    saves="the padding of every batch up to the longest sample of the whole data set",
    costs="a few tokens of padding a sample, up to the multiple",
    not_when="all samples have one length already (packed, or a recipe for text)",
    values={"pad_multiple": int},
    bounds={"pad_multiple": (1, None)},
)
def pad_to_multiple(setup: Setup) -> Setup:
    """A collator that pads each batch to its own longest sample, rounded up to what the GPU multiplies fast.

    Value: `pad_multiple` (default 8, 64 on A100, H100 and later of their kind, 128 with torch.compile).
    """
    job = setup.resolved_for
    if "pad_multiple" in job.values:
        multiple, why = int(job.values["pad_multiple"]), "given"
    elif setup.get("arguments.torch_compile"):
        multiple, why = _COMPILED_MULTIPLE, "few shapes, so that little is compiled again"
    else:
        multiple, why = multiple_for(job.machine.gpu)
    if multiple % 8 and multiple > 1:
        setup = setup.with_notes(f"{multiple} is not a multiple of 8, which tensor cores need to be fast.")
    if job.model is not None:
        for odd in odd_sizes(job.model, multiple_for(job.machine.gpu)[0]):
            setup = setup.with_notes(f"Slower on tensor cores than it could be: {odd}.")
    return setup.put("trainer_parts.pad_batches", {"multiple": multiple}, why)


@technique(
    "length-grouped",
    slot="sampling",
    saves="padding: a batch holds samples of about one length",
    costs="batches are less random, and the first one is the longest; lengths are counted before training begins",
    not_when="samples are packed, padding-free or of one length, nothing pads them, or the predictions' order matters",
)
def length_grouped(setup: Setup) -> Setup:
    """`train_sampling_strategy="group_by_length"`, and a check that it groups."""
    # The setup does not know the user's collator; a preset may name pad-to-multiple before or after this one.
    if "trainer_parts.pad_batches" not in setup and "pad-to-multiple" not in setup.preset:
        setup = setup.with_notes(
            "length-grouped: nothing pads the batches: add pad-to-multiple, or give a data_collator that pads inputs "
            "and labels; without one, batches of unequal lengths stop the run."
        )
    return setup.put(
        "arguments.train_sampling_strategy", "group_by_length",
        "samples of like length share a batch, within 50 batches drawn at random (transformers: trainer_pt_utils.py)",
    ).put(
        "trainer_parts.check_length_grouping", {},
        "stops the run where Trainer would not group (an IterableDataset), or all lengths are equal",
    ).with_notes(
        "Evaluations are grouped by length too: eval_loss, the mean of its batches' losses, differs from that in the "
        "data set's order."
    )  # fmt: skip


@technique(
    "packing",
    slot="collator",
    saves="padding: rows of one fixed length hold as many whole samples as fit",
    costs="without flash attention a mask of tokens × tokens a row, and attention over it",
    not_when="the model does not build its mask from position ids (tried before training), or samples fill rows alone",
    values={"pack_length": int},
    bounds={"pack_length": (2, None)},
    planned=InPlans(
        "", "packing", never="it changes which tokens an optimizer step has, and so how many steps an epoch has"
    ),
)
def packing(setup: Setup) -> Setup:
    """A collator that packs the samples of a micro-batch into rows of `pack_length` tokens (a value; default: the
    sequence length). Give a larger `per_device_train_batch_size`: it counts samples, and fewer rows come out."""
    job = setup.resolved_for
    length = int(job.values.get("pack_length", job.sequence_length))
    longest = job.model.maximum_length if job.model is not None else None
    if longest is not None and length > longest:
        raise SettingError(f"pack_length={length}: must be at least 2 and at most {longest}")
    return setup.put(
        "trainer_parts.packed_batches", {"length": length},
        f"rows of {length} tokens; position ids that begin again keep the samples of a row apart",
    )  # fmt: skip


@technique(
    "padding-free",
    slot="collator",
    saves="all padding: the samples of a micro-batch share one row, as long as their sum",
    costs="without flash attention a mask of tokens × tokens over the whole micro-batch, and attention over it",
    not_when="there is no flash attention and micro-batches are large, or the model does not build its mask from "
    "position ids (tried before training)",
    group="nearly the same",
    settings={"arguments.padding_free": True},
    planned=InPlans("padding", "padding-free"),
)
def padding_free(setup: Setup) -> Setup:
    """A collator that makes one row of a micro-batch, with position ids that begin again at each sample."""
    job = setup.resolved_for
    attention = str(setup.get("model.attn_implementation", ""))
    if "flash" not in attention:
        mask = packed_mask_bytes(job.tokens)
        setup = setup.with_notes(
            f"Without flash attention {job.tokens} tokens in a row take a mask of {job.tokens}² bytes "
            f"({format_size(mask)}), and attention computes all of it: add flash-attention where the GPU has it."
        )
    return setup.put(
        "trainer_parts.packed_batches", {},
        "one row a micro-batch; position ids that begin again keep the samples apart",
    )  # fmt: skip


_LENGTH: Final = {
    "logits": 4, "attention": 3, "recomputation": 2, "larger than the GPU": 4, "one large tensor": 5, "anything": 4,
    "host/forward": 3,
}  # fmt: skip

advice(
    "shorter-sequences", "sequences", {"data.max_length": "half"},
    saves="all texts of a batch are padded to its longest; activations and logits grow with it, attention scores with "
    "its square",
    costs="longer texts are truncated; the model does not learn from the rest",
    group="another method", frees={"activations": 0.5, "loss": 0.5}, offered=_LENGTH,
    unless=("diffusers", "vision tower"),
)  # fmt: skip
advice(
    "smaller-images", "sequences", {"processor.max_pixels": "half"},
    saves="in the vision tower, activations grow with an image's pixels and attention scores with their square, at "
    "any length of the text",
    costs="coarser images",
    group="another method", offered=_LENGTH, only_with=("vision tower",), unless=("diffusers",),
)  # fmt: skip
advice(
    "smaller-pictures", "sequences", {"arguments.resolution": "smaller"},
    saves="activations grow with the square of it", costs="smaller pictures",
    group="another method", offered=_LENGTH, only_with=("diffusers",),
)  # fmt: skip
