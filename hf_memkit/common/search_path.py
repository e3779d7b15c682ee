"""Keeps the current folder out of `sys.path` until the user's script begins, so that memkit runs no file of it.

Python puts the folder there for `python -m`, and for an empty entry of PYTHONPATH. What Python imports before its
first line of memkit cannot be prevented: with such an entry also a `sitecustomize.py` of the folder.
"""

# Earlier versions of Python read this file, too. An import of anything but os and sys, also of `__future__`, could be
# answered by the current folder.
import os
import sys

_omitted = []  # type: list[tuple[int, str]]  # (index in `sys.path`, entry)


def omit_current_folder() -> None:
    """Takes the current folder out; the first entry becomes the folder of this Python, as in the command `memkit`."""
    try:
        current = os.path.realpath(os.curdir)
    except OSError:  # it was removed
        return
    if not getattr(sys.flags, "safe_path", False) and os.path.realpath(sys.path[0]) == current:
        sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120
    given = os.environ.get("PYTHONPATH", "")
    if given and {"", os.curdir} & set(given.split(os.pathsep)):
        _omitted.extend(each for each in enumerate(sys.path) if os.path.realpath(each[1]) == current)
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != current]


def restore_current_folder() -> None:
    """Puts the entries of PYTHONPATH back, for the user's script."""
    for index, entry in _omitted:
        sys.path.insert(index, entry)
    del _omitted[:]
