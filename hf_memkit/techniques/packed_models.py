"""Models in which samples that share a row see each other."""

from __future__ import annotations

from typing import Final

__all__ = ["LEAKING"]

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
"""Model type → why. Measured with transformers 5.23.0: the loss of three samples in a row
differs from their losses one by one (tests/check/proofs_sequences.py). The trainer part tries every model that is not
listed."""
