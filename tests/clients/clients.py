"""Client scripts as people have them, and what a user adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
STEPS = 4
COMMON = (
    "--output_dir", "out", "--max_steps", str(STEPS), "--logging_steps", "1", "--use_cpu", "--report_to", "none",
    "--disable_tqdm", "true", "--learning_rate", "1e-3",
)  # fmt: skip

ATTACH = (("import hf_memkit; hf_memkit.attach(trainer)", "trainer.train("),)
"""One line before training begins."""


COUNTED = (
    (
        "import hf_memkit, tests.clients.counted; "
        "hf_memkit.attach(trainer, readers=[tests.clients.counted.LIVE], summary=False, html=False)",
        "trainer.train(",
    ),
)


@dataclass(frozen=True)
class Client:
    """A script and its arguments; `{inputs}` in them is the folder of models and data.

    `added`: pairs of a line and a part of the line behind it.
    """

    name: str
    source: str
    added: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...] = COMMON
    times: int = 1

    def in_way(self, way: str) -> str:
        """The script as it runs `without` memkit, `with` it, or `counted`: with it and a reader of every storage."""
        source = self.source
        for line, before in {"with": self.added, "counted": COUNTED}.get(way, ()):
            source = add_line(source, line, before)
        return source


def add_line(source: str, line: str, before: str) -> str:
    """`source` with `line` in front of the only line that has `before` in it, indented as that one is.

    Raises:
        ValueError: there is no such line, or there are several.
    """
    lines = source.splitlines(keepends=True)
    places = [number for number, text in enumerate(lines) if before in text]
    if len(places) != 1:
        raise ValueError(f"{len(places)} lines have {before!r} in them: there is no place for {line!r}")
    behind = lines[places[0]]
    lines.insert(places[0], behind[: len(behind) - len(behind.lstrip())] + line + "\n")
    return "".join(lines)


def script(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def sft_script() -> Path:
    """TRL's own, which `trl sft` runs."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "scripts" / "sft.py"
