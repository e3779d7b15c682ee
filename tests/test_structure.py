"""What holds of the code as a whole: no circle of imports, no name for two ideas."""

from __future__ import annotations

import ast
from collections import defaultdict

import grimp

from tests.conftest import ROOT


def circles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """The sets of modules that all import one another, directly or through others; also inside functions, and for
    types alone."""
    below = {module: graph.find_upstream_modules(module) for module in graph.modules}
    return {
        frozenset([module, *(other for other in imported if module in below[other])])
        for module, imported in below.items()
        if any(module in below[other] for other in imported)
    }


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles(grimp.build_graph("hf_memkit", "benchmarks", cache_dir=None)) == set()


def test_a_circle_is_seen() -> None:
    """Of two modules, and of three of which one pair is none."""
    graph = grimp.ImportGraph()
    for importer, imported in ("ab", "ba", "cd", "de", "ec", "af"):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == {frozenset("ab"), frozenset("cde")}


def test_no_two_public_classes_have_one_name() -> None:
    found = defaultdict(list)
    for path in (ROOT / "hf_memkit").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
