"""Whether the allocator's variable can still be set in this process, and what can be changed after that."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping

from hf_memkit.techniques.allocator import VARIABLE, options, user_settings

__all__ = ["set_allocator", "too_late"]


def too_late(text: str) -> str:
    """Why setting the variable to `text` comes too late in this process, and what still works; "" if it does not.

    That torch is imported does no harm: it reads the variable when the card is first used, once a process
    (torch 2.13.0: include/c10/core/AllocatorConfig.h, `AcceleratorAllocatorConfig::instance`).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    if "backend" in options(text):
        return f"CUDA is in use already: its allocator's backend is fixed; set {VARIABLE}={text} before Python starts"
    return (
        f"CUDA is in use already, and the allocator has read its variable. For what is allocated from now on, "
        f'torch._C._accelerator_setAllocatorSettings("{text}") still works, and replaces all options set before; '
        f"segments that are there stay as they are. Better: set {VARIABLE}={text} before Python starts"
    )


def set_allocator(text: str, say: Callable[[str], None], environment: MutableMapping[str, str] | None = None) -> bool:
    """Sets the variable to `text` unless the user has set it, or it is too late; `say` is told of either.

    Args:
        text: options as torch reads them.
        say: told, in one line, what is kept instead or why nothing is set.
        environment: where it is set; None: this process's.

    Returns:
        Whether the allocator will work with `text`.
    """
    target = os.environ if environment is None else environment
    users = user_settings(target)
    if users is not None:
        if options(users[1]) != options(text):
            say(f"The allocator keeps your own setting, {users[1]}, instead of {text}.")
            return False
        return True
    late = too_late(text)
    if late:
        say(late)
        return False
    target[VARIABLE] = text
    return True
