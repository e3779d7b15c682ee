"""Terms of DeepSpeed's memory, each with its category. The ledger computes them (`stages_1_2`, `stage_3`), a live
engine is measured by them (`engine_tensors`), and records and predictions are joined by them."""

from __future__ import annotations

from enum import StrEnum

from hf_memkit.common.terms import Category, Phase, Place
from hf_memkit.setup.ledger import Row


class Term(StrEnum):
    """One kind of tensor that DeepSpeed holds. Its value is shown to users."""

    category: Category

    def __new__(cls, text: str, category: Category) -> Term:
        term = str.__new__(cls, text)
        term._value_ = text
        term.category = category
        return term

    def row(self, place: Place, size_bytes: int, source: str, phase: Phase | None = None) -> Row:
        """A row of the ledger."""
        return Row(place, self.category, self.value, size_bytes, source, phase)

    FLAT_WEIGHTS = "weights, flat", "weights"
    WEIGHT_PARTITION = "weight partition", "weights"
    SECONDARY_PARTITION = "secondary partition", "weights"
    SMALL_PARAMETERS = "small parameters, never split", "weights"
    FROZEN_WEIGHTS = "frozen weights", "weights"
    FROZEN_WEIGHT_PARTITION = "frozen weight partition", "weights"
    WEIGHTS_IN_RAM = "weights kept in RAM", "weights"
    SMALL_WEIGHTS = "weights too small to swap", "weights"
    WEIGHTS = "weights", "weights"
    SAVED_WEIGHTS = "weights of the whole model, for the save", "weights"
    LIVE_PARAMETERS = "live parameters", "buffers"
    HELD_WEIGHTS = "gathered weights that linear layers hold", "buffers"
    ALL_GATHER_BUFFER = "all-gather buffer", "buffers"
    PARAMETER_SWAP_BUFFERS = "parameter swap buffers", "buffers"
    PARAMETER_WRITE_BACK_BUFFER = "parameter write-back buffer", "buffers"
    GRADIENTS = "gradients", "gradients"
    LARGEST_GRADIENT = "largest gradient", "gradients"
    FP64_GRADIENT = "gradient in fp64, for its norm", "gradients"
    GRADIENT_PARTITION = "gradient partition", "gradients"
    FLAT_GRADIENT_PARTITION = "flat gradient partition", "gradients"
    GRADIENT_PARTITION_AGAIN = "gradient partition of a later micro-batch", "gradients"
    FLATTENED_BUCKET = "gradient bucket, flattened to be reduced", "gradients"
    GRADIENT_ACCUMULATORS = "gradient accumulators", "gradients"
    FLATTENED_GRADIENTS = "gradients flattened for the step", "gradients"
    CONVERTED_GRADIENTS = "gradients in the master's type", "gradients"
    FP32_GRADIENTS = "fp32 gradients", "gradients"
    HOST_ACCUMULATORS = "16-bit accumulators", "gradients"
    SMALL_GRADIENTS = "gradients too small to swap", "gradients"
    SHARED_GRADIENTS = "two fp32 gradient buffers, shared", "gradients"
    GRADIENT_BUCKETS = "gradient buckets", "buffers"
    GRADIENT_BUCKET = "gradient bucket", "buffers"
    OUTGOING_GRADIENT = "gradient on its way to the host", "buffers"
    INCOMING_GRADIENT = "gradient from the GPU", "buffers"
    STAGING = "16-bit staging", "buffers"
    ERROR_FEEDBACK = "error feedback", "buffers"
    PINNED_ROUNDING = "rounding of page-locked blocks", "buffers"
    MASTER_WEIGHTS = "master weights", "optimizer"
    MOMENTS = "moments", "optimizer"
    STATES_KEPT_BY_RATIO = "states that ratio keeps on the GPU", "optimizer"
    FP32_MASTER_WEIGHTS = "fp32 master weights", "optimizer"
    FP32_MOMENTS = "fp32 moments", "optimizer"
    STATES = "master weights and moments", "optimizer"
    SELECTED_MOMENTS = "moments of the selected gradients", "optimizer"
    SHARED_MASTER_WEIGHTS = "fp32 master weights, shared", "optimizer"
    STALE_MASTER_WEIGHTS = "stale master weights, shared", "optimizer"
    MOMENTS_TWICE = "fp32 moments, twice", "optimizer"
    OPTIMIZER_SWAP_BUFFERS = "optimizer swap buffers", "buffers"
