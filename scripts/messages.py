#!/usr/bin/env python3
"""Lists every message of an error of memkit, by file and line: to read them in one go, by docs/style.md.

.venv/bin/python scripts/messages.py [FOLDER]

What stands in braces in the code stands in braces here. A message that is put together elsewhere is shown as its code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_memkit.common import errors  # noqa: E402

KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def messages(folder: Path) -> Iterator[tuple[Path, int, str, str]]:
    """(file, line, class of the error, message)."""
    for path in sorted(folder.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            if isinstance(call.func, ast.Name) and call.func.id in KINDS and call.args:
                yield path, call.lineno, call.func.id, _text(call.args[0])


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        )
    return ast.unparse(node)


def main(arguments: list[str]) -> int:
    for path, line, kind, text in messages(Path(arguments[0]) if arguments else ROOT / "hf_memkit"):
        print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {kind}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
