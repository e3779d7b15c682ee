"""Names of the tasks, without their modules, for a recipe's schema."""

from __future__ import annotations

from typing import Final

DEFAULT_TASK: Final = "language-modeling"

TASKS: Final[dict[str, str]] = {
    DEFAULT_TASK: "text",
    "chat": "chat",
    "image-classification": "image_classification",
    "speech-recognition": "speech_recognition",
    "text-classification": "text_classification",
    "text-pairs": "text_pairs",
}
"""Task → its module in `hf_memkit/recipes/tasks`, which defines `TASK`. Modules import their libraries on demand."""
