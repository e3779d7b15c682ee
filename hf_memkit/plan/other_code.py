"""A method that no argument switches on, in the user's own script: as a unified diff, or as lines and where they go.

In: what the child has noted of the calls in question (`prediction/child/libraries/adapters.py`), and the settings.
Out: text, for `patch -p0`. The file is read as Python reads it (`ast`), and what is not surely right is not offered as
a diff.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.prediction.traced_training import CallPlace, PlanFacts, TrainerCall
from hf_memkit.setup.script_overrides import Overrides

_LORA: Final = "LoraConfig"
_WRAP: Final = "get_peft_model"
_PREPARE: Final = "prepare_model_for_kbit_training"
_BITS: Final = "BitsAndBytesConfig"
_WIDTH: Final = 110
"""Characters of a line from which on it is broken."""
_CONFIG, _QUANTIZATION = "peft_config", "quantization_config"
_CHUNKED = "hf_memkit.components.chunked_loss"
_INSTALL: Final = "install as chunk_loss"

CHUNKED_LOSS: Final = f"from {_CHUNKED} import {_INSTALL}\n# before Trainer(...):\nchunk_loss(model)"
"""The code of a loss in chunks; for whoever has no diff."""


def lines(made: TrainerCall | None, adapter: Mapping[str, Any], quantization: Mapping[str, Any] | None = None) -> str:
    """The code of a method, and in comments where it goes; for whoever has no diff. `made`: where the script makes its
    Trainer; `quantization`: fields of the `BitsAndBytesConfig`, None: weights stay as they are."""
    by_trainer = made is not None and _CONFIG in made.takes
    peft = [_LORA, *([] if by_trainer else [_WRAP])]
    found = []
    if quantization is not None:
        peft += [] if by_trainer else [_PREPARE]
        found = [
            f"from transformers import {_BITS}",
            f"model = AutoModel….from_pretrained(..., {_QUANTIZATION}={_call(_BITS, quantization)})",
        ]
    found.insert(0, f"from peft import {', '.join(sorted(peft))}")
    if by_trainer:
        given = f"{_CONFIG}={_call(_LORA, adapter)}"
        if quantization is not None and made is not None and made.named:
            found[-1:] = []
            given += f", {_QUANTIZATION}={_call(_BITS, quantization)}"
        return "\n".join([*found, f"trainer = …Trainer(..., {given})"])
    where = (
        "at the end of what model_init calls"
        if made is not None and made.model == "model_init"
        else "before Trainer(...)"
    )
    return "\n".join([*found, f"# {where}:", *_rebound("model", adapter, quantization)])


def diff(facts: PlanFacts, overrides: Overrides) -> str:
    """What makes the user's script train with these adapters or this loss, and load its model with these options: a
    unified diff of one file or two, by their paths from here. Empty: it cannot be said for sure."""
    made, adapter, options = facts.made_at, overrides.adapter, dict(overrides.model)
    if made is None or not (adapter or overrides.loss):
        return ""
    quantization = options.get(_QUANTIZATION)
    edits: dict[str, _Edited] = {}

    def edited(place: CallPlace) -> _Edited:
        return edits.setdefault(place.file, _Edited(place.file))

    try:
        script = edited(made.place)
        call = script.call(made.place)
        if overrides.loss:
            script.chunk_loss(call, made.model)
            script.imports(_CHUNKED, [_INSTALL])
        elif _CONFIG in made.takes:
            script.give(call, _CONFIG, _call(_LORA, adapter))
            script.imports("peft", [_LORA])
        else:
            script.wrap(call, made.model, adapter, quantization)
            script.imports("peft", [_LORA, _WRAP, *([_PREPARE] if quantization is not None else [])])
        if options:
            _load_with(options, made, facts.model.loaded_at, edited, script, call)
        return "".join(each.diff() for each in edits.values())
    except (_Unsure, OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _load_with(
    options: Mapping[str, Any], made: TrainerCall, loaded: CallPlace | None, edited: Any, script: _Edited, call: Any
) -> None:
    """Gives these options to the call that loads the model; `_Unsure` where nobody knows which that is."""
    written = {
        name: _call(_BITS, value) if name == _QUANTIZATION else _literal(value) for name, value in options.items()
    }
    if made.named:  # TRL loads it
        if set(options) != {_QUANTIZATION} or _QUANTIZATION not in made.takes:
            raise _Unsure
        where = script
    elif loaded is not None:
        where = edited(loaded)
        call = where.call(loaded)
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "from_pretrained":
            raise _Unsure
    else:
        raise _Unsure
    for name, value in written.items():
        where.give(call, name, value)
    if _QUANTIZATION in options:
        where.imports("transformers", [_BITS])


def _call(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in values.items())})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _rebound(model: str, adapter: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> list[str]:
    """Lines that give a name the model with adapters."""
    found = [f"{model} = {_prepared(model)}"] if quantization is not None else []
    return [*found, f"{model} = {_wrapped(model, adapter)}"]


def _wrapped(model: str, adapter: Mapping[str, Any]) -> str:
    return f"{_WRAP}({model}, {_call(_LORA, adapter)})"


def _prepared(model: str) -> str:
    # Trainer switches checkpointing on, as its arguments say; PEFT would do it by itself.
    return f"{_PREPARE}({model}, use_gradient_checkpointing=False)"


class _Unsure(Exception):
    """Nobody knows for sure what to change."""


class _Edited:
    """One file with what is to be put into it.

    Raises:
        OSError, SyntaxError, UnicodeDecodeError: it cannot be read.
        _Unsure: its lines end in an unusual way.
    """

    def __init__(self, file: str) -> None:
        self._path = Path(file)
        source = self._path.read_bytes()
        if b"\r" in source or not source.endswith(b"\n"):
            raise _Unsure  # which a terminal would not show
        source.decode()
        self._lines = source.splitlines(keepends=True)
        self._tree = ast.parse(source)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._edits: dict[tuple[int, int], list[tuple[tuple[int, int], str]]] = {}  # from → to, text
        self._imports: dict[str, list[str]] = {}
        self._first = len(self._lines)  # the line of the first call that is changed

    def call(self, place: CallPlace) -> ast.Call:
        """The call that ends at a place."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _end(node) == (place.line, place.column):
                self._first = min(self._first, node.lineno - 1)
                return node
        raise _Unsure

    def give(self, call: ast.Call, name: str, value: str) -> None:
        """Calls it with this keyword argument, in the place of what it has under the name."""
        given = next((each for each in call.keywords if each.arg == name), None)
        if given is not None:
            self._put(_begin(given.value), _end(given.value), value)
            return
        if any(each.arg is None for each in call.keywords):
            raise _Unsure  # it may be in there
        arguments = sorted([*call.args, *call.keywords], key=_end)
        if not arguments:
            end = _end(call)
            self._put((end[0], end[1] - 1), (end[0], end[1] - 1), f"{name}={value}")
            return
        last = arguments[-1]
        line, column = _begin(last)
        indent = self._lines[line - 1][:column].decode()
        comma, _, _ = self._lines[_end(last)[0] - 1][_end(last)[1] :].decode().partition("#")
        if indent.strip() or line == call.lineno or comma.strip() not in ("", ","):
            self._put(_end(last), _end(last), f", {name}={self._named(call, name, value)}")
            return
        # Each argument has a line of its own.
        if not comma.strip() and not self._edits.get(_end(last)):
            self._put(_end(last), _end(last), ",")
        if len(indent) + len(name) + len(value) > _WIDTH:
            called, _, inside = value.partition("(")
            value = f"{called}(\n{indent}    {inside.removesuffix(')')}\n{indent})"
        below = (_end(last)[0] + 1, 0)
        self._put(below, below, f"{indent}{name}={value},\n")

    def _named(self, call: ast.Call, name: str, value: str) -> str:
        """What stands in a call for a value: a variable, where one can be made in a line before it."""
        statement = self._statement(call)
        used = any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(self._tree))
        if statement is None or used or "(" not in value:
            return value
        begin = _begin(statement)
        indent = self._lines[begin[0] - 1][: begin[1]].decode()
        if indent.strip():
            return value
        self._put(begin, begin, f"{name} = {value}\n{indent}")
        return name

    def wrap(
        self, call: ast.Call, at: int | str | None, adapter: Mapping[str, Any], quantization: Mapping[str, Any] | None
    ) -> None:
        """Gives it the model with adapters: in a line of its own where the model has a name."""
        model = _argument(call, at)
        statement = self._statement(call)
        if isinstance(model, ast.Name) and statement is not None and self._binds(statement, model.id):
            begin = (statement.lineno, statement.col_offset)
            indent = self._lines[begin[0] - 1][: begin[1]].decode()
            if not indent.strip():
                added = _rebound(model.id, adapter, quantization)
                self._put(begin, begin, "".join(f"{line}\n{indent}" for line in added))
                return
        inner = _prepared("\0") if quantization is not None else "\0"
        before, _, behind = _wrapped(inner, adapter).partition("\0")
        self._put(_begin(model), _begin(model), before)
        self._put(_end(model), _end(model), behind)

    def chunk_loss(self, call: ast.Call, at: int | str | None) -> None:
        """Changes the model's loss in a line before the call: once, where that stands in no loop."""
        model, statement = _argument(call, at), self._statement(call)
        owner = model
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not isinstance(owner, ast.Name) or statement is None or self._repeats(statement):
            raise _Unsure
        begin = (statement.lineno, statement.col_offset)
        indent = self._lines[begin[0] - 1][: begin[1]].decode()
        if indent.strip():
            raise _Unsure
        self._put(begin, begin, f"chunk_loss({ast.unparse(model)})\n{indent}")

    def _repeats(self, node: ast.AST) -> bool:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.For | ast.AsyncFor | ast.While):
                return True
        return False

    def imports(self, module: str, names: list[str]) -> None:
        wanted = self._imports.setdefault(module, [])
        wanted += [name for name in names if name not in wanted]

    def diff(self) -> str:
        """
        Raises:
            _Unsure: what came of it is no Python.
        """
        self._put_imports()
        after = self._lines_after()
        text = "".join(after)
        try:
            ast.parse(text)
        except SyntaxError:
            raise _Unsure from None
        name = os.path.relpath(self._path)
        if name.startswith(".."):
            name = str(self._path)
        return "".join(difflib.unified_diff([line.decode() for line in self._lines], after, name, name))

    def _put(self, begin: tuple[int, int], end: tuple[int, int], text: str) -> None:
        self._edits.setdefault(begin, []).append((end, text))

    def _lines_after(self) -> list[str]:
        """With the edits, the last first, so that places stay."""
        found = list(self._lines)
        for begin in sorted(self._edits, reverse=True):
            for end, text in reversed(self._edits[begin]):
                tail = found[end[0] - 1][end[1] :]
                head = found[begin[0] - 1][: begin[1]] if begin[0] <= len(found) else b""
                found[begin[0] - 1 : end[0]] = [head + text.encode() + tail]
        return [line.decode() for line in b"".join(found).splitlines(keepends=True)]

    def _put_imports(self) -> None:
        """Behind the imports at the head of the file, without names that it imports there already."""
        head, line = self._head()
        known = {
            (each.module, name.asname or name.name)
            for each in head
            if isinstance(each, ast.ImportFrom)
            for name in each.names
        }
        text = ""
        for module, names in sorted(self._imports.items()):
            missing = sorted(name for name in names if (module, name) not in known)
            text += f"from {module} import {', '.join(missing)}\n" if missing else ""
        if text:
            begin = (line + 1, 0)  # before what else may be put there, which uses it
            self._edits.setdefault(begin, []).insert(0, (begin, text))

    def _head(self) -> tuple[list[ast.stmt], int]:
        """(imports at the head of the file, the last line of what stands before what uses them)."""
        found: list[ast.stmt] = []
        last = next((at for at, each in enumerate(self._lines) if not each.startswith(b"#")), 0)
        for at, each in enumerate(self._tree.body):
            is_text = at == 0 and isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if each.lineno - 1 >= self._first or isinstance(each, ast.FunctionDef | ast.ClassDef):
                break
            if isinstance(each, ast.Import | ast.ImportFrom):
                found.append(each)
            if isinstance(each, ast.Import | ast.ImportFrom) or is_text:
                last = each.end_lineno or 0
        return found, last

    def _statement(self, node: ast.AST) -> ast.stmt | None:
        """The one that a node is in; None: what is in it runs more than once, or somewhere else."""
        while not isinstance(node, ast.stmt):
            if isinstance(node, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
                return None
            node = self._parents[node]
        simple = isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return)
        return node if simple else None

    def _binds(self, statement: ast.stmt, name: str) -> bool:
        """Whether a name may be given another value before a statement: it is the scope's own, and no loop gives it
        the same one again."""
        node: ast.AST = statement
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.For | ast.While | ast.ClassDef):
                return False
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                arguments = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
                return name in arguments or any(
                    isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == name
                    for each in ast.walk(node)
                )
        return True


def _argument(call: ast.Call, at: int | str | None) -> ast.expr:
    """The argument in that place; `_Unsure` where nobody knows which it is."""
    if isinstance(at, int) and at < len(call.args) and not any(isinstance(x, ast.Starred) for x in call.args):
        return call.args[at]
    if isinstance(at, str) and at != "model_init":
        for each in call.keywords:
            if each.arg == at:
                return each.value
    raise _Unsure


def _begin(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
