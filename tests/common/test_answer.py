"""One answer on a terminal, with `--short` and as a page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hf_memkit.cli import environment
from hf_memkit.cli.printing import typed_command
from hf_memkit.common.answer.answer import (
    Answer,
    AnswerBlock,
    Bar,
    Bars,
    Cell,
    Changes,
    Code,
    Item,
    Lines,
    Table,
    View,
)
from hf_memkit.common.answer.page import page
from hf_memkit.common.answer.terminal import plain, show

EVIL = "[red]x[/red] <script>alert(1)</script> \x1b[2J"


def answer(*blocks: AnswerBlock) -> Answer:
    return Answer(title=EVIL, verdict="FITS", reason=EVIL, state="good", blocks=blocks)


def short(made: Answer) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(made, short=True, console=console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_each_view_has_its_blocks_and_nothing_is_markup() -> None:
    """Would notice: a name that a terminal or a browser obeys, a block in a view that it is not for."""
    made = answer(*(Lines([f"{EVIL} {view.name}"], views=view) for view in (View.SHORT, View.TERMINAL, View.PAGE)))
    views = {"SHORT": short(made), "TERMINAL": plain(made, 200), "PAGE": page(made, guide="plan.md")}
    for name, shown in views.items():
        assert [other for other in views if f" {other}\n" in shown or f" {other}<" in shown] == [name]
        assert "\x1b" not in shown and "[red]x[/red]" in shown and "\\x1b[2J" in shown
    assert "<script>alert" not in views["PAGE"] and "&lt;script&gt;alert(1)" in views["PAGE"]


def test_columns_without_a_figure_and_empty_blocks_are_omitted() -> None:
    rows = [(Cell("a", "why", strong=True), "—", "1.00"), ("b", "", "2.00")]
    made = answer(Table(("setup", ">run", ">GiB"), rows, heading="Same result", short_rows=1), Lines([]), Changes([]))
    lines = plain(made, 80).splitlines()
    assert lines[2].split() == ["Same", "result", "GiB"] and len(lines) == 6
    assert "2.00" not in short(made) and "and 1 more" in short(made)
    assert "run" not in page(made, guide="plan.md").partition("<tbody>")[0].partition("<thead>")[2]


def test_what_is_copied_is_whole() -> None:
    """Would notice: a command that a narrow terminal breaks, a page without its button's script."""
    words = ["--activation_checkpointing_kwargs", "'{\"use_reentrant\":false}'", "--optim", "adamw_bnb_8bit"]
    made = answer(Code("Add:", words, words=True), Changes([Item("Because.", "optim = x", "1.00 GiB")], numbered=True))
    lines = plain(made, 40).splitlines()
    begin = lines.index("Add:") + 1
    assert lines[begin : begin + 2] == [f"  {words[0]} \\", f"  {words[1]} {words[2]} \\"]
    assert "1. optim = x   saves 1.00 GiB" in plain(made, 80)
    assert "<script>" in page(made, guide="plan.md") and "<script>" not in page(answer(), guide="plan.md")


def test_bars_show_what_is_small() -> None:
    bars = [Bar("weights", 8.0, ("8 GiB",), "weights"), Bar("loss", 0.01, ("10 MiB",), "loss")]
    lines = plain(answer(Bars("By category", ("category", "size"), bars)), 60).splitlines()
    assert len(lines[-2]) == 60 and lines[-1].endswith("▏")


def test_no_secret_stands_at_the_foot_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["predict", "train.py", "--", "--hub_token", "hf_x", "--api_key=y", "--name", "z w"]
    monkeypatch.setattr("hf_memkit.cli.printing.command_line", typed)
    assert environment.command_line is not typed
    assert typed_command() == 'memkit predict train.py -- --hub_token "$HF_TOKEN" --api_key="$API_KEY" --name \'z w\''
