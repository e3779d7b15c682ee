"""What a script's source says of code that is not run: evaluations, and models that are loaded, merged or trained
below `train()`. Read are the files of the frames that lead to `train()`."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.units import format_size
from hf_memkit.prediction.child.users_code import MEMKIT, is_library

_EVALUATES: Final = ("evaluate", "predict")
_MERGES: Final = ("merge_and_unload", "merge_adapter")
_NO_MODEL: Final = ("token", "process", "config", "extract", "dataset")
"""Words in the names of what `from_pretrained` loads, and is no model."""
_SWITCHES: Final = ("do_eval", "do_predict", "eval_strategy")
"""Arguments that scripts ask before they evaluate."""


def calls_not_run(trainer: Any) -> dict[str, str]:
    """The first call of each kind that the script has still to come to: name → `"train.py, line 12"`.

    `evaluate` and `predict` count wherever they stand, unless an argument switches them off; `merge_and_unload`,
    `merge_adapter`, `from_pretrained` of a model, and `train` of a Trainer where the running functions will come to
    them; `loop`: the line of this `train()`, if it is in a loop.
    """
    found: dict[str, str] = {}
    files: dict[str, tuple[set[int], set[int]]] = {}  # lines of the running code: passed, and to come
    running: dict[str, list[int]] = {}
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        is_trainers = file.startswith(MEMKIT) or frame.f_locals.get("self") is trainer
        if is_trainers or (files and is_library(file)):  # the caller itself may be a library's: `-m trl.scripts.sft`
            continue
        passed, to_come = files.setdefault(file, (set(), set()))
        for *_, number in frame.f_code.co_lines():
            (to_come if (number or 0) > line else passed).add(number or 0)
        running.setdefault(file, []).append(line)
    for file, (passed, to_come) in files.items():
        try:
            tree = ast.parse(Path(file).read_bytes())
            calls = list(_calls(tree, trainer.args))
        except (OSError, SyntaxError, ValueError, RecursionError):  # a notebook's cell, code that was made
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.While):
                for line in running[file]:
                    if node.lineno < line <= (node.end_lineno or 0):
                        found.setdefault("loop", f"{Path(file).name}, line {line}")
        for call, name, of in calls:
            line = call.lineno
            if (
                (name in _EVALUATES and of != "super()" and line not in passed)
                or (name in _MERGES and line in to_come)
                or (
                    name == "from_pretrained" and line in to_come and not any(each in of.lower() for each in _NO_MODEL)
                )
                or (name == "train" and line in to_come and "trainer" in of.lower())
            ):
                found.setdefault(name, f"{Path(file).name}, line {line}")
    return found


def _calls(node: ast.AST, arguments: Any) -> Iterator[tuple[ast.Call, str, str]]:
    """Calls of methods, with the method's name and its object: all but those below an `if` that asks a switch which
    is off."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If):
            asked = {each.attr for each in ast.walk(child.test) if isinstance(each, ast.Attribute)} & {*_SWITCHES}
            values = (getattr(arguments, name, False) for name in asked)
            if any(str(getattr(value, "value", value)) in ("False", "no") for value in values):
                yield from _calls(ast.Module(child.orelse, []), arguments)
                continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield child, child.func.attr, ast.unparse(child.func.value)
        yield from _calls(child, arguments)


def notes_on_calls(found: Mapping[str, str], model: Any) -> Iterator[str]:
    """What is not predicted of the calls below `train()`, a sentence each. `found`: by `calls_not_run`."""
    loads = [f"{name}() ({found[name]})" for name in ("from_pretrained", *_MERGES) if name in found]
    if loads:
        yield (
            f"not predicted: {', '.join(loads)} below train(). A model that is loaded or merged there lies beside all "
            "that the training holds. Do it in a script of its own, or on the CPU"
        )
    packed = [each for each in model.parameters() if getattr(each, "quant_state", None) is not None]
    if packed and any(name in found for name in _MERGES):
        dtypes = {each.quant_state.dtype: None for each in packed}
        size = sum(2 * each.element_size() * each.numel() * each.quant_state.dtype.itemsize for each in packed)
        names = " and ".join(str(each).removeprefix("torch.") for each in dtypes)
        yield f"the 4-bit weights take {format_size(size)} in {names}, in which adapters are merged into them"
    if "train" in found:
        yield f"not predicted: a second train() ({found['train']}). Give memkit a script with that training alone"
    if "loop" in found:
        yield f"{found['loop']}: train() is in a loop: its first training is predicted"
