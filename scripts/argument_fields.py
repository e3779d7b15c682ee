#!/usr/bin/env python3
"""Writes which fields TrainingArguments and TRL's configs had in which versions, from the published wheels.

.venv/bin/python scripts/argument_fields.py [--check] [--wheels FOLDER]

Downloads the last patch of each minor version (about 110 wheels, 700 MB, a few minutes), and reads the classes from
their source: nothing is installed or imported. `--wheels FOLDER` keeps the wheels there, and reads those that it
finds. `--check` only compares. What to write instead of a removed field is in hf_memkit/catalog/former_arguments.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from evidence_tables import ROOT, update
from packaging.version import Version

TARGET = ROOT / "hf_memkit" / "catalog" / "argument_fields.json"

FIRST = {"transformers": Version("4.0"), "trl": Version("0.7")}
"""The oldest versions that are read."""

FILES = {
    "transformers": ("training_args.py", "training_args_seq2seq.py"),
    "trl": ("trainer/*_config.py", "trainer/training_configs.py", "experimental/*_config.py", "scripts/utils.py",
            "utils.py", "commands/cli_utils.py"),
}  # fmt: skip
"""Where the classes are, in one of the versions; `*` also matches folders."""

ROOTS = {"TrainingArguments", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"}
"""Classes whose fields, and those of their subclasses, a file of arguments may hold."""


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def versions(library: str) -> list[Version]:
    """The last patch of each minor version, the oldest first."""
    listed = next(line for line in pip("index", "versions", library).splitlines() if "Available versions:" in line)
    found = {}
    for version in sorted(Version(text) for text in listed.partition(":")[2].split(",")):
        if version >= FIRST[library]:
            found[version.release[:2]] = version
    return list(found.values())


def wheel(library: str, version: Version, folder: Path) -> Path:
    """The wheel of that version in the folder, downloaded if it is missing."""
    pattern = f"{library}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        options = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(folder))
        pip("download", *options, f"{library}=={version}")
    return next(folder.glob(pattern))


def classes(library: str, file: Path) -> Iterator[ast.ClassDef]:
    """Every class in the files of the wheel that may declare arguments."""
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            inside = name.removeprefix(f"{library}/")
            if inside != name and any(fnmatchcase(inside, pattern) for pattern in FILES[library]):
                body = ast.parse(archive.read(name)).body
                yield from (node for node in body if isinstance(node, ast.ClassDef))


def fields(library: str, file: Path) -> dict[str, set[str]]:
    """Class → the fields that it declares or inherits within the library. TRL's do not repeat transformers' fields."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for node in classes(library, file):
        names = {
            made.target.id
            for made in node.body
            if isinstance(made, ast.AnnAssign) and isinstance(made.target, ast.Name)
            if "ClassVar" not in ast.unparse(made.annotation) and not made.target.id.startswith("_")
            if "init=False" not in ast.unparse(made.value or made.target)
        }
        own[node.name] = own.get(node.name, set()) | names
        bases.setdefault(node.name, []).extend(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def line(name: str) -> list[str]:
        """The class and all that it inherits from."""
        return [name, *(each for base in bases.get(name, ()) if base != name for each in line(base))]

    return {
        name: set().union(*(own.get(each, set()) for each in line(name)))
        for name in own
        if ROOTS & set(line(name)) and not name.startswith("_")
    }


def history(library: str, folder: Path) -> dict[str, Any]:
    """Class → "FIRST-LAST" version → its fields; LAST is empty for fields of the newest version."""
    spans: dict[str, dict[str, list[str]]] = {}
    asked = versions(library)
    for version in asked:
        short = ".".join(map(str, version.release[:2]))
        for name, declared in fields(library, wheel(library, version, folder)).items():
            for field in declared:
                spans.setdefault(name, {}).setdefault(field, [short, short])[1] = short
        print(f"{library} {version}", file=sys.stderr)
    newest = ".".join(map(str, asked[-1].release[:2]))
    classes: dict[str, dict[str, list[str]]] = {}
    for name, declared_in in sorted(spans.items()):
        found = classes.setdefault(name, {})
        for field, (first, last) in sorted(declared_in.items()):
            found.setdefault(f"{first}-{'' if last == newest else last}", []).append(field)
    return {"read": [str(asked[0]), str(asked[-1])], "classes": classes}


def without(found: dict[str, Any], repeated: set[str]) -> dict[str, Any]:
    """The same without fields that another class has already."""
    classes = {
        name: {
            span: kept for span, names in spans.items() if (kept := [each for each in names if each not in repeated])
        }
        for name, spans in found["classes"].items()
    }
    return {**found, "classes": {name: spans for name, spans in classes.items() if spans}}


def content(folder: Path) -> dict[str, Any]:
    """What the file holds. Only TrainingArguments repeat the fields of TrainingArguments."""
    transformers, trl = (history(library, folder) for library in FILES)
    base = transformers["classes"].pop("TrainingArguments")
    common = {field for names in base.values() for field in names}
    transformers = without(transformers, common)
    transformers["classes"] = {"TrainingArguments": base, **transformers["classes"]}
    return {"transformers": transformers, "trl": without(trl, common)}


def written(found: Mapping[str, Any]) -> str:
    """As JSON, a span of versions a line."""
    return re.sub(r"\[[^]]*\]", lambda each: " ".join(each[0].split()), json.dumps(found, indent=1)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--wheels", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.wheels or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = written(content(folder))
    return update({TARGET: text}, "argument_fields.py", check=options.check)


if __name__ == "__main__":
    sys.exit(main())
