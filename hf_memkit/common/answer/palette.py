"""The colours of categories and phases, the same on a terminal and on a page.

Categories have the colours of M. Okabe and K. Ito, "Color Universal Design" (2008), which people with common kinds of
colour blindness can distinguish. Phases have others, mostly of P. Tol's muted scheme. Grey is for the rest.
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
    "resume": "#a6a6a6",
    "data": "#c2a83e",
    "generate": "#55aa55",
    "log_probabilities": "#6699cc",
    "forward": "#44aa99",
    "backward": "#cc6677",
    "optimizer": "#999933",
    "evaluate": "#aa4499",
    "save": "#7788cc",
    "best_model": "#9a8fd0",
    "merge": "#bb7744",
    "after": "#777777",
}

COLOURS: Final[dict[str, str]] = {
    **{str(category): colour for category, colour in CATEGORY_COLOURS.items()},
    **{f"phase-{phase}": colour for phase, colour in PHASE_COLOURS.items()},
}
"""CSS variable of the page → colour."""
