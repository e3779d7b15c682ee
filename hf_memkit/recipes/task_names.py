"""The names of the tasks, for whoever needs no more of them: a recipe's schema."""

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
"""Task → the module of `hf_memkit/recipes/tasks` that has it, as `TASK`. Each imports its libraries when it is asked
for."""
