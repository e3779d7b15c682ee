"""What holds of the code as a whole: no circle of imports, no name for two ideas, no test of a machine's speed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import grimp
import pytest

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


CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "os.times", "ru_utime", "ru_stime"}
WAITS = {"timeout", "wait", "result", "join", "communicate", "run"}
LEAST_S = 120


def judging_a_machine(code: str) -> Iterator[int]:
    """Lines that read a clock, have the time of day in an assertion, or end a wait in under two minutes."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            try:  # a script that a test runs
                yield from (node.lineno for _ in judging_a_machine(node.value))
            except SyntaxError:
                continue
        if isinstance(node, ast.Assert):
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            if any(isinstance(each, ast.Attribute) and each.attr == "time" for each in calls):
                yield node.lineno
        elif isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            if {name, name.rpartition(".")[2].removesuffix("_ns")} & CLOCKS:
                yield node.lineno
        elif isinstance(node, ast.Call):
            waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and len(node.args) == 1
            limits = [*(node.args if waits else []), *(each.value for each in node.keywords if each.arg == "timeout")]
            if any(
                isinstance(each, ast.Constant) and type(each.value) in (int, float) and each.value < LEAST_S
                for each in limits
            ):
                yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "assert time.monotonic() - began < 3",
        "began = perf_counter_ns()",
        "until = os.times()[0]",
        "assert time.time() < 3",
        "process.communicate(timeout=60)",
        "process.wait(10)",
        "pytestmark = [slow, pytest.mark.timeout(60)]",
        "SCRIPT = 'import time; print(time.process_time())'",
    ],
)
def test_what_judges_a_machine_is_seen(code: str) -> None:
    assert [*judging_a_machine(code)] == [1]


def test_tests_judge_no_machine() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("cpu_time.py", "test_structure.py")]
    found = {path.relative_to(ROOT).as_posix(): [*judging_a_machine(path.read_text())] for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}
