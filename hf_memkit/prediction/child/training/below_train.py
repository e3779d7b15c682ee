"""Finds calls in a script's source that are not run: evaluations, and models that are loaded, merged or trained below
`train()`. Reads the files of the frames that lead to `train()`."""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.units import format_size
from hf_memkit.prediction.child.user_code import MEMKIT, is_library

_EVALUATES: Final = ("evaluate", "predict")
_MERGES: Final = ("merge_and_unload", "merge_adapter")
_NOT_MODELS: Final = ("token", "process", "config", "extract", "dataset")
"""Parts of the names of classes that `from_pretrained` loads and that are not models."""
_SWITCHES: Final = ("do_eval", "do_predict", "eval_strategy")  # arguments that scripts check before they evaluate


def calls_not_run(trainer: Any) -> dict[str, str]:
    """The first call of each kind that the script has not reached: name → `"train.py, line 12"`.

    `evaluate` and `predict` count anywhere in the file, unless an argument disables them; `merge_and_unload`,
    `merge_adapter`, `from_pretrained` of a model, and `train` of a Trainer count in the rest of the running functions.
    `loop`: the line of this `train()`, if it is in a loop.
    """
    calls_by_name: dict[str, str] = {}
    files: dict[str, tuple[set[int], set[int]]] = {}  # lines of the running code: passed, and remaining
    running: dict[str, list[int]] = {}
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        is_trainers = file.startswith(MEMKIT) or frame.f_locals.get("self") is trainer
        if is_trainers or (files and is_library(file)):  # the caller may be in a library: `-m trl.scripts.sft`
            continue
        passed, remaining = files.setdefault(file, (set(), set()))
        for *_, number in frame.f_code.co_lines():
            (remaining if (number or 0) > line else passed).add(number or 0)
        running.setdefault(file, []).append(line)
    for file, (passed, remaining) in files.items():
        try:
            tree = ast.parse(Path(file).read_bytes())
            calls = list(_calls(tree, trainer.args))
        except (OSError, SyntaxError, ValueError, RecursionError):  # a notebook's cell, generated code
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.While):
                for line in running[file]:
                    if node.lineno < line <= (node.end_lineno or 0):
                        calls_by_name.setdefault("loop", f"{Path(file).name}, line {line}")
        for call, name, owner in calls:
            line = call.lineno
            if (
                (name in _EVALUATES and owner != "super()" and line not in passed)
                or (name in _MERGES and line in remaining)
                or (
                    name == "from_pretrained"
                    and line in remaining
                    and not any(part in owner.lower() for part in _NOT_MODELS)
                )
                or (name == "train" and line in remaining and "trainer" in owner.lower())
            ):
                calls_by_name.setdefault(name, f"{Path(file).name}, line {line}")
    return calls_by_name


def _calls(node: ast.AST, arguments: Any) -> Iterator[tuple[ast.Call, str, str]]:
    """(call, name of the method, its object) for all calls of methods, except below an `if` on a disabled switch."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If):
            read = {part.attr for part in ast.walk(child.test) if isinstance(part, ast.Attribute)} & {*_SWITCHES}
            values = (getattr(arguments, name, False) for name in read)
            if any(str(getattr(value, "value", value)) in ("False", "no") for value in values):
                yield from _calls(ast.Module(child.orelse, []), arguments)
                continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            yield child, child.func.attr, ast.unparse(child.func.value)
        yield from _calls(child, arguments)


def notes_on_calls(calls: Mapping[str, str], model: Any) -> Iterator[str]:
    """A sentence for each call below `train()` that is not predicted. `calls`: from `calls_not_run`."""
    loads = [f"{name}() ({calls[name]})" for name in ("from_pretrained", *_MERGES) if name in calls]
    if loads:
        yield (
            f"not predicted: {', '.join(loads)} below train(). A model that is loaded or merged there needs memory in "
            "addition to the training's. Do it in a separate script, or on the CPU"
        )
    packed = [weight for weight in model.parameters() if getattr(weight, "quant_state", None) is not None]
    if packed and any(name in calls for name in _MERGES):
        dtypes = {weight.quant_state.dtype: None for weight in packed}
        size = sum(2 * w.element_size() * w.numel() * w.quant_state.dtype.itemsize for w in packed)
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        yield f"the 4-bit weights take {format_size(size)} in {names}, in which adapters are merged into them"
    if "train" in calls:
        yield f"not predicted: a second train() ({calls['train']}). Give memkit a script with that training alone"
    if "loop" in calls:
        yield f"{calls['loop']}: train() is in a loop: its first training is predicted"
