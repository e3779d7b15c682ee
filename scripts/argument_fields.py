#!/usr/bin/env python3
"""Writes which fields TrainingArguments and TRL's configs had in which versions, from the published wheels.

Downloads the last patch of each minor version (about 110 wheels, 700 MB, a few minutes) and reads the source of the
classes; installs and imports nothing. What to write instead of a removed field: hf_memkit/catalog/former_arguments.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from docs_blocks import ROOT, compact_json
from packaging.version import Version

TARGET = ROOT / "hf_memkit" / "catalog" / "argument_fields.json"
FIRST = {"transformers": Version("4.0"), "trl": Version("0.7")}
"""The oldest versions that are read."""

FILES = {
    "transformers": ["training_args.py", "training_args_seq2seq.py"],
    "trl": [
        "trainer/*_config.py",
        "trainer/training_configs.py",
        "experimental/*_config.py",
        "scripts/utils.py",
        "utils.py",
        "commands/cli_utils.py",
    ],
}
"""Where the classes are, in one of the versions; `*` also matches folders."""

ROOTS = {"TrainingArguments", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"}
"""Classes whose fields, and those of their subclasses, a file of arguments may hold."""


def pip(*arguments: str) -> str:
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def versions(library: str) -> list[Version]:
    """The last patch of each minor version, the oldest first."""
    listed = next(line for line in pip("index", "versions", library).splitlines() if "Available versions:" in line)
    known = sorted(Version(text) for text in listed.partition(":")[2].split(","))
    return list({version.release[:2]: version for version in known if version >= FIRST[library]}.values())


def classes(library: str, version: Version, folder: Path) -> Iterator[ast.ClassDef]:
    """Every class in the files of that version's wheel that may declare arguments."""
    options = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(folder))
    pip("download", *options, f"{library}=={version}")
    with zipfile.ZipFile(next(folder.glob(f"{library}-{version}-*.whl"))) as archive:
        for name in sorted(archive.namelist()):
            inside = name.removeprefix(f"{library}/")
            if inside != name and any(fnmatchcase(inside, each) for each in FILES[library]):
                yield from (node for node in ast.parse(archive.read(name)).body if isinstance(node, ast.ClassDef))


def is_field(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(node.annotation)
        and "init=False" not in ast.unparse(node.value or node.target)
    )


def fields(nodes: Iterable[ast.ClassDef]) -> dict[str, set[str]]:
    """Class → the fields that it declares or inherits within the library."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for node in nodes:
        own.setdefault(node.name, set()).update(each.target.id for each in node.body if is_field(each))
        bases.setdefault(node.name, []).extend(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def ancestors(name: str) -> list[str]:
        """The class and all that it inherits from."""
        return [name, *(each for base in bases.get(name, ()) if base != name for each in ancestors(base))]

    result = {}
    for name in own:
        line = ancestors(name)
        if ROOTS.intersection(line) and not name.startswith("_"):
            result[name] = set().union(*(own.get(each, set()) for each in line))
    return result


def history(library: str, folder: Path) -> dict[str, Any]:
    """Class → "FIRST-LAST" version → its fields; LAST is empty for fields of the newest version."""
    first_and_last: dict[tuple[str, str], list[str]] = {}
    read = versions(library)
    for version in read:
        short = f"{version.major}.{version.minor}"
        for name, declared in fields(classes(library, version, folder)).items():
            for field in declared:
                first_and_last.setdefault((name, field), [short, short])[1] = short
        print(f"{library} {version}", file=sys.stderr)

    newest = f"{read[-1].major}.{read[-1].minor}"
    spans: dict[str, dict[str, list[str]]] = {}
    for (name, field), (first, last) in sorted(first_and_last.items()):
        span = f"{first}-{'' if last == newest else last}"
        spans.setdefault(name, {}).setdefault(span, []).append(field)
    return {"read": [str(read[0]), str(read[-1])], "classes": spans}


def content(folder: Path) -> dict[str, Any]:
    """What the file holds. Only TrainingArguments repeat the fields of TrainingArguments."""
    libraries = {library: history(library, folder) for library in FILES}
    base = libraries["transformers"]["classes"].pop("TrainingArguments")
    common = {field for names in base.values() for field in names}
    for library in libraries.values():
        own: dict[str, dict[str, list[str]]] = {}
        for name, spans in library["classes"].items():
            for span, names in spans.items():
                if special := [each for each in names if each not in common]:
                    own.setdefault(name, {})[span] = special
        library["classes"] = own
    libraries["transformers"]["classes"] = {"TrainingArguments": base, **libraries["transformers"]["classes"]}
    return libraries


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TARGET.write_text(compact_json(content(Path(folder))))
