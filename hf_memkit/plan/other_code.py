"""Changes of the user's script for methods that no argument turns on: a unified diff, or lines of code to add.

In: the places of the calls to change, recorded while tracing (`prediction/child/libraries/adapters.py`), and the
settings. Out: text for `patch -p0`. The script is parsed with `ast`; where the right change is not certain there is no
diff.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.prediction.traced_training import CallPlace, PlanFacts, TrainerCall
from hf_memkit.setup.script_overrides import Overrides

_LORA: Final = "LoraConfig"
_WRAP: Final = "get_peft_model"
_PREPARE: Final = "prepare_model_for_kbit_training"
_BITS: Final = "BitsAndBytesConfig"
_WIDTH: Final = 110
"""Longer lines are broken."""
_CONFIG, _QUANTIZATION = "peft_config", "quantization_config"
_CHUNKED = "hf_memkit.components.chunked_loss"
_INSTALL: Final = "install as chunk_loss"

CHUNKED_LOSS: Final = f"from {_CHUNKED} import {_INSTALL}\n# before Trainer(...):\nchunk_loss(model)"
"""The lines of code for a chunked loss, used without a diff."""


def lines(made: TrainerCall | None, adapter: Mapping[str, Any], quantization: Mapping[str, Any] | None = None) -> str:
    """Lines of code for an adapter, with comments that say where they go; used without a diff.

    Args:
        made: the call that makes the Trainer.
        adapter: fields of the `LoraConfig`.
        quantization: fields of the `BitsAndBytesConfig`; None: the weights are not quantised.
    """
    by_trainer = made is not None and _CONFIG in made.takes
    peft = [_LORA, *([] if by_trainer else [_WRAP])]
    code = []
    if quantization is not None:
        peft += [] if by_trainer else [_PREPARE]
        code = [
            f"from transformers import {_BITS}",
            f"model = AutoModel….from_pretrained(..., {_QUANTIZATION}={_call(_BITS, quantization)})",
        ]
    code.insert(0, f"from peft import {', '.join(sorted(peft))}")
    if by_trainer:
        keywords = f"{_CONFIG}={_call(_LORA, adapter)}"
        if quantization is not None and made is not None and made.named:
            code.pop()  # the Trainer loads the model
            keywords += f", {_QUANTIZATION}={_call(_BITS, quantization)}"
        return "\n".join([*code, f"trainer = …Trainer(..., {keywords})"])
    where = (
        "at the end of what model_init calls"
        if made is not None and made.model == "model_init"
        else "before Trainer(...)"
    )
    return "\n".join([*code, f"# {where}:", *_wrap_lines("model", adapter, quantization)])


def diff(facts: PlanFacts, overrides: Overrides) -> str:
    """A unified diff of the user's script (one or two files, with relative paths) that trains with the adapter or loss
    of `overrides` and loads the model with its options. Empty where the right change is not certain."""
    made, adapter, options = facts.made_at, overrides.adapter, dict(overrides.model)
    if made is None or not (adapter or overrides.loss):
        return ""
    quantization = options.get(_QUANTIZATION)
    files: dict[str, _EditedFile] = {}

    def file_of(place: CallPlace) -> _EditedFile:
        return files.setdefault(place.file, _EditedFile(place.file))

    try:
        script = file_of(made.place)
        call = script.call(made.place)
        if overrides.loss:
            script.chunk_loss(call, made.model)
            script.add_import(_CHUNKED, [_INSTALL])
        elif _CONFIG in made.takes:
            script.set_keyword(call, _CONFIG, _call(_LORA, adapter))
            script.add_import("peft", [_LORA])
        else:
            script.wrap_model(call, made.model, adapter, quantization)
            script.add_import("peft", [_LORA, _WRAP, *([_PREPARE] if quantization is not None else [])])
        if options:
            _set_model_options(options, made, facts.model.loaded_at, file_of, script, call)
        return "".join(file.diff() for file in files.values())
    except (_NotCertain, OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _set_model_options(
    options: Mapping[str, Any], made: TrainerCall, loaded: CallPlace | None,
    file_of: Callable[[CallPlace], _EditedFile], script: _EditedFile, call: ast.Call,
) -> None:  # fmt: skip
    """Adds options to the call that loads the model: `call` if the Trainer loads it, else the one at `loaded`."""
    code = {name: _call(_BITS, value) if name == _QUANTIZATION else _literal(value) for name, value in options.items()}
    if made.named:  # TRL loads it
        if set(options) != {_QUANTIZATION} or _QUANTIZATION not in made.takes:
            raise _NotCertain
        file = script
    elif loaded is not None:
        file = file_of(loaded)
        call = file.call(loaded)
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "from_pretrained":
            raise _NotCertain
    else:
        raise _NotCertain
    for name, value in code.items():
        file.set_keyword(call, name, value)
    if _QUANTIZATION in options:
        file.add_import("transformers", [_BITS])


def _call(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in values.items())})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _wrap_lines(model: str, adapter: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> list[str]:
    """Lines that add the adapter to the model of a variable."""
    prepare = [f"{model} = {_prepared(model)}"] if quantization is not None else []
    return [*prepare, f"{model} = {_wrapped(model, adapter)}"]


def _wrapped(model: str, adapter: Mapping[str, Any]) -> str:
    return f"{_WRAP}({model}, {_call(_LORA, adapter)})"


def _prepared(model: str) -> str:
    # Otherwise PEFT turns on checkpointing, also if Trainer's arguments turn it off.
    return f"{_PREPARE}({model}, use_gradient_checkpointing=False)"


class _NotCertain(Exception):
    """The right change of the script is not certain."""


class _EditedFile:
    """A file and the changes to make in it.

    Raises:
        OSError, SyntaxError, UnicodeDecodeError: the file cannot be read or parsed.
        _NotCertain: it has CR characters, or no newline at its end.
    """

    def __init__(self, file: str) -> None:
        self._path = Path(file)
        source = self._path.read_bytes()
        if b"\r" in source or not source.endswith(b"\n"):
            raise _NotCertain  # a diff in a terminal would not show them
        source.decode()
        self._lines = source.splitlines(keepends=True)
        self._tree = ast.parse(source)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._edits: dict[tuple[int, int], list[tuple[tuple[int, int], str]]] = {}  # begin → [(end, text)]
        self._imports: dict[str, list[str]] = {}
        self._first = len(self._lines)  # index of the first line with a changed call

    def call(self, place: CallPlace) -> ast.Call:
        """The call that ends at `place`."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _end(node) == (place.line, place.column):
                self._first = min(self._first, node.lineno - 1)
                return node
        raise _NotCertain

    def set_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Adds a keyword argument to the call, or replaces its value."""
        keyword = next((each for each in call.keywords if each.arg == name), None)
        if keyword is not None:
            self._put(_begin(keyword.value), _end(keyword.value), value)
            return
        if any(each.arg is None for each in call.keywords):
            raise _NotCertain  # `**kwargs` may contain it
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
            self._put(_end(last), _end(last), f", {name}={self._variable(call, name, value)}")
            return
        # Each argument is on a separate line.
        if not comma.strip() and not self._edits.get(_end(last)):
            self._put(_end(last), _end(last), ",")
        if len(indent) + len(name) + len(value) > _WIDTH:
            function, _, inside = value.partition("(")
            value = f"{function}(\n{indent}    {inside.removesuffix(')')}\n{indent})"
        below = (_end(last)[0] + 1, 0)
        self._put(below, below, f"{indent}{name}={value},\n")

    def _variable(self, call: ast.Call, name: str, value: str) -> str:
        """Assigns the value to a variable in a line before the call, and returns the variable's name; returns the
        value itself if that is not possible."""
        statement = self._statement(call)
        used = any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(self._tree))
        if statement is None or used or "(" not in value:
            return value
        return name if self._insert_before(statement, [f"{name} = {value}"]) else value

    def _insert_before(self, statement: ast.stmt, lines: list[str]) -> bool:
        """Inserts lines before a statement, if nothing precedes it on its line. Returns whether it did."""
        begin = _begin(statement)
        indent = self._lines[begin[0] - 1][: begin[1]].decode()
        if indent.strip():
            return False
        self._put(begin, begin, "".join(f"{line}\n{indent}" for line in lines))
        return True

    def wrap_model(
        self, call: ast.Call, at: int | str | None, adapter: Mapping[str, Any], quantization: Mapping[str, Any] | None
    ) -> None:
        """Adds the adapter to the model argument of the call: in a line before it if the model is a variable."""
        model = _argument(call, at)
        statement = self._statement(call)
        if (
            isinstance(model, ast.Name)
            and statement is not None
            and self._binds(statement, model.id)
            and self._insert_before(statement, _wrap_lines(model.id, adapter, quantization))
        ):
            return
        inner = _prepared("\0") if quantization is not None else "\0"
        before, _, after = _wrapped(inner, adapter).partition("\0")
        self._put(_begin(model), _begin(model), before)
        self._put(_end(model), _end(model), after)

    def chunk_loss(self, call: ast.Call, at: int | str | None) -> None:
        """Changes the model's loss in a line before the call, if that line runs only once."""
        model, statement = _argument(call, at), self._statement(call)
        owner = model
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not isinstance(owner, ast.Name) or statement is None or self._is_in_loop(statement):
            raise _NotCertain
        if not self._insert_before(statement, [f"chunk_loss({ast.unparse(model)})"]):
            raise _NotCertain

    def _is_in_loop(self, node: ast.AST) -> bool:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.For | ast.AsyncFor | ast.While):
                return True
        return False

    def add_import(self, module: str, names: list[str]) -> None:
        imported = self._imports.setdefault(module, [])
        imported += [name for name in names if name not in imported]

    def diff(self) -> str:
        """The changes as a unified diff.

        Raises:
            _NotCertain: the changed file would not be valid Python.
        """
        self._put_imports()
        after = self._changed_lines()
        text = "".join(after)
        try:
            ast.parse(text)
        except SyntaxError:
            raise _NotCertain from None
        name = os.path.relpath(self._path)
        if name.startswith(".."):
            name = str(self._path)
        return "".join(difflib.unified_diff([line.decode() for line in self._lines], after, name, name))

    def _put(self, begin: tuple[int, int], end: tuple[int, int], text: str) -> None:
        self._edits.setdefault(begin, []).append((end, text))

    def _changed_lines(self) -> list[str]:
        lines = list(self._lines)
        for begin in sorted(self._edits, reverse=True):  # the last one first: the places of the others stay valid
            for end, text in reversed(self._edits[begin]):
                tail = lines[end[0] - 1][end[1] :]
                head = lines[begin[0] - 1][: begin[1]] if begin[0] <= len(lines) else b""
                lines[begin[0] - 1 : end[0]] = [head + text.encode() + tail]
        return [line.decode() for line in b"".join(lines).splitlines(keepends=True)]

    def _put_imports(self) -> None:
        """Adds the missing imports below those at the head of the file."""
        head, line = self._head()
        known = {
            (statement.module, name.asname or name.name)
            for statement in head
            if isinstance(statement, ast.ImportFrom)
            for name in statement.names
        }
        text = ""
        for module, names in sorted(self._imports.items()):
            missing = sorted(name for name in names if (module, name) not in known)
            text += f"from {module} import {', '.join(missing)}\n" if missing else ""
        if text:
            begin = (line + 1, 0)  # before other changes at this place, which use the imports
            self._edits.setdefault(begin, []).insert(0, (begin, text))

    def _head(self) -> tuple[list[ast.stmt], int]:
        """(imports at the head of the file, number of the line after which further imports go)."""
        imports: list[ast.stmt] = []
        last = next((at for at, line in enumerate(self._lines) if not line.startswith(b"#")), 0)
        for at, statement in enumerate(self._tree.body):
            is_docstring = at == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if statement.lineno - 1 >= self._first or isinstance(statement, ast.FunctionDef | ast.ClassDef):
                break
            if isinstance(statement, ast.Import | ast.ImportFrom):
                imports.append(statement)
            if isinstance(statement, ast.Import | ast.ImportFrom) or is_docstring:
                last = statement.end_lineno or 0
        return imports, last

    def _statement(self, node: ast.AST) -> ast.stmt | None:
        """The simple statement that contains a node; None if the node may run later or more than once."""
        while not isinstance(node, ast.stmt):
            if isinstance(node, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
                return None
            node = self._parents[node]
        simple = isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return)
        return node if simple else None

    def _binds(self, statement: ast.stmt, name: str) -> bool:
        """Whether a variable may be assigned before a statement: it belongs to the statement's scope, and no loop
        around the statement would assign it again."""
        node: ast.AST = statement
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.For | ast.While | ast.ClassDef):
                return False
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters = node.args
                arguments = {each.arg for each in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)}
                return name in arguments or any(
                    isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == name
                    for each in ast.walk(node)
                )
        return True


def _argument(call: ast.Call, at: int | str | None) -> ast.expr:
    """The argument with this index or name."""
    if isinstance(at, int) and at < len(call.args) and not any(isinstance(x, ast.Starred) for x in call.args):
        return call.args[at]
    if isinstance(at, str) and at != "model_init":
        for each in call.keywords:
            if each.arg == at:
                return each.value
    raise _NotCertain


def _begin(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
