"""Files that this process cannot change any more, whatever writes to them: also code that is not Python's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_NO_NEW_PRIVILEGES: Final = 38
_BENEATH: Final = 1
_ASK_VERSION: Final = 1

_WRITES: Final = {"write_file": 1, "remove_dir": 4, "remove_file": 5, "make_dir": 7, "make_reg": 8, "make_sym": 12}
"""Bits of what is not allowed elsewhere; by version 2 there is `refer`, by version 3 `truncate`."""
_SINCE: Final = {2: 13, 3: 14}


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def _version() -> int:
    size, ask = ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION)
    return int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, size, ask))


def has_landlock() -> bool:
    """Whether the kernel can do it: Linux 5.13 or later, if it was built with Landlock and no container forbids it."""
    return _version() > 0


def only_these_change(folders: Iterable[str | os.PathLike[str]]) -> bool:
    """From here on this thread, and what it starts, can change files within `folders` alone (landlock(7)).

    Files that are open already stay open. There is no way back.

    Returns:
        Whether the kernel does it.
    """
    call, version = ctypes.CDLL(None, use_errno=True).syscall, _version()
    if version < 1:
        return False
    bits = [*_WRITES.values(), *(bit for since, bit in _SINCE.items() if version >= since)]
    handled = ctypes.c_uint64(sum(1 << bit for bit in bits))
    rules = call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        return False
    try:
        for folder in {Path(each).resolve() for each in folders}:
            if not folder.is_dir():
                continue
            number = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                beneath = _Beneath(handled.value, number)
                call(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_BENEATH), ctypes.byref(beneath), ctypes.c_uint32(0))
            finally:
                os.close(number)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(rules)
