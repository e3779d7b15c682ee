"""One colour a category and phase, the same in the terminal and on the page.

The colours are those of M. Okabe and K. Ito, "Color Universal Design" (2008), which people with any of the common
kinds of colour blindness tell apart; grey is added for what is left over.
"""

from __future__ import annotations

from typing import Final

from hf_memkit.common.terms import Category, Phase

CATEGORY_COLOURS: Final[dict[Category, str]] = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "activations": "#e69f00",
    "loss": "#d55e00",
    "buffers": "#cc79a7",
    "other": "#8c8c8c",
}

PHASE_COLOURS: Final[dict[Phase, str]] = {
    "load": "#8c8c8c",
    "resume": "#8c8c8c",
    "data": "#f0e442",
    "generate": "#cc79a7",
    "log_probabilities": "#0072b2",
    "forward": "#56b4e9",
    "backward": "#d55e00",
    "optimizer": "#009e73",
    "evaluate": "#cc79a7",
    "save": "#e69f00",
    "best_model": "#e69f00",
    "merge": "#0072b2",
    "after": "#8c8c8c",
}
