"""Real text that every Python has: its own manual and the docstrings of its library, as blocks of BPE tokens."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """`train` and `held_out`: token blocks of (count, length); `characters`: of the text; `sha256`: of all blocks."""

    train: Tensor
    held_out: Tensor
    characters: int
    sha256: str


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text]


def _text() -> list[str]:
    """Documents: the manual's topics, and the docstrings of each top-level module and package of the library."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    files = [path for path in files if path.parent.name not in {"site-packages", "test", "idlelib", "pydoc_data"}]
    documents = ["\n\n".join(_docstrings(path)) for path in files]
    return [topics[name] for name in sorted(topics)] + [text for text in documents if text]


def make_blocks(vocabulary: int, length: int, *, held_out: int = 256) -> Blocks:
    """Byte-level BPE trained on the text itself; every 20th block is held out, up to `held_out` of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = _text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"vocab_size": vocabulary, "special_tokens": ["<end>"], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    tokens: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        tokens += [*encoding.ids, 0]
    count = len(tokens) // length
    blocks = torch.tensor(tokens[: count * length]).view(count, length)
    aside = torch.arange(count) % 20 == 10
    digest = hashlib.sha256(blocks.numpy().tobytes()).hexdigest()
    return Blocks(blocks[~aside], blocks[aside][:held_out], sum(map(len, documents)), digest)
