"""Refuses the words that docs/style.md bans: in code, comments, strings and names, and in pages and recipes.

.venv/bin/python scripts/words.py [PATH…]    # default: everything that a reader meets
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STYLE = ROOT / "docs" / "style.md"
READ = ("README.md", "CHANGELOG.md", "docs", "ds_configs", "recipes", "hf_memkit")
KINDS = {".py", ".md", ".yaml"}
NAMES = re.compile(r"said|told|found|judged")


def banned_phrases() -> re.Pattern[str]:
    """The phrases in code type in the right column of the table in docs/style.md, with any white space between."""
    rows = re.findall(r"^\| .* \| (.*) \|$", STYLE.read_text(), re.MULTILINE)
    phrases = [re.sub(" ", r"[\\s#\"']+", phrase) for row in rows for phrase in re.findall("`([a-z ]+)`", row)]
    if not phrases:
        raise SystemExit(f"{STYLE}: no banned words in its table")
    return re.compile(rf"""(?<!")\b({"|".join(phrases)})\b(?!")""", re.IGNORECASE)  # in quotes: a key of JSON


def problems(path: Path, phrases: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """(line, what to change) for every banned phrase or name of a file."""
    text = path.read_text()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and NAMES.fullmatch(token.string):
                yield token.start[0], f"rename `{token.string}`: a name says what a value is"
    for match in phrases.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, f"write another word for {' '.join(match[1].split())!r}"


def main(arguments: list[str]) -> int:
    phrases, count = banned_phrases(), 0
    for start in map(Path, arguments or (ROOT / name for name in READ)):
        files = sorted(start.rglob("*")) if start.is_dir() else [start]
        for file in (file for file in files if file.suffix in KINDS and file.resolve() != STYLE):
            for line, problem in problems(file, phrases):
                print(f"{file}:{line}: {problem} (docs/style.md)")
                count += 1
    print(f"{count} banned words" if count else "No banned words.")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
