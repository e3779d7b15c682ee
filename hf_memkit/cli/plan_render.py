"""What `memkit plan` prints for a person: the answer, what to paste, then the ranked table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_memkit.cli.tables import plain_table
from hf_memkit.measuring.report.sanitize import text
from hf_memkit.plan import wording
from hf_memkit.plan.pasted import Pasted, pasted
from hf_memkit.plan.prices import price_of, ranked_gpus

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hf_memkit.plan.plan import Plan


_SHORT_ROWS: Final = 4
_LONGEST: Final = 300
"""Characters of a note or a reason, which may hold a library's whole message; `--json` has all of it."""

Lines = list["RenderableType"]


def show(plans: Sequence[Plan], prices: Mapping[str, float], *, compared: bool, short: bool = False) -> None:
    console = Console(highlight=False)
    if compared:
        found = compared_view(plans, prices, console.width, short=short)
    else:
        found = view(plans[0], console.width, price_of(plans[0], prices), short=short)
    console.print(found, crop=False)


def view(plan: Plan, width: int, price: float | None = None, *, short: bool = False) -> Group:
    """One GPU's plan for a Rich console of `width` characters. `short`: the answer, what to paste, and the first rows.
    Names of setups and messages of libraries are never markup."""
    lines: Lines = [*_answer(plan)]
    best, other = plan.proposed, plan.faster()
    changes_it = best is not None and best.candidate != plan.own.candidate
    paste = pasted(best.candidate, command=plan.front_end) if best is not None and changes_it else None
    if paste is not None:
        lines += ["", *_flags(paste, width, plan)]
    if start := wording.start(plan):
        lines += ["", start[0], *_indented(start[1])]
    if other is not None and not short:
        lines += ["", Text(f"For {other.candidate.name} ({other.candidate.group}):")]
        lines += _flags(pasted(other.candidate, command=plan.front_end), width, plan)
    for each in () if short else plan.with_code:
        lines += ["", *_other_code(pasted(each.candidate, plan.own.training), each.candidate.name)]
        lines += _flags(pasted(each.candidate, plan.own.training), width, plan, with_code=True)
    lines += ["", Text(text(wording.subject(plan), 400), style="bold")]
    if said := wording.time_not_known(plan):
        lines.append(Text(f"{said[0].upper()}{said[1:]}."))
    if short:
        first = next(iter(wording.groups(plan, price).items()), None)
        if first is not None:
            lines += ["", _table(plan, wording.TITLES[first[0]], first[1][:_SHORT_ROWS], price, width)]
        lines += [Text(text(line, _LONGEST)) for line in wording.asked(plan)]
        lines.append("Omit --short to see all setups; --json prints every number.")
        return Group(*lines)
    for group, rows in wording.groups(plan, price).items():
        lines += ["", _table(plan, wording.TITLES[group], rows, price, width)]
    if changes := wording.with_code(plan, price):
        lines += ["", _table(plan, "With other code", changes, price, width)]
    if lost := wording.too_large(plan, price):
        lines += ["", _table(plan, "Tight, or does not fit; fastest first", lost, price, width)]
    if paste is not None and not paste.front_end:
        lines += ["", "The same arguments as YAML:", *_indented(paste.yaml)]
        lines += ["In Python:", *_indented(paste.python)]
    notes = [Text(text(line, _LONGEST), style="dim") for line in wording.notes(plan)]
    return Group(*lines, "", *notes)


def compared_view(plans: Sequence[Plan], prices: Mapping[str, float], width: int, *, short: bool = False) -> Group:
    """Several GPUs, ranked, each with its best setup."""
    ranked = ranked_gpus(plans, prices)
    lines: Lines = [_best_gpu(ranked, prices), "", _gpus(ranked, prices)]
    if early := [wording.gpu_of(plan) for plan in ranked if plan.stopped]:
        lines += ["", f"Search not finished, so others may be faster: {', '.join(early)}{wording.longer(ranked)}."]
    if short:
        lines += [Text(f"{line}.") for plan in ranked for line in wording.warnings(plan)]
    else:
        for plan in ranked:
            best = plan.proposed
            lines += ["", Text(text(wording.subject(plan), 400), style="bold")]
            if best is None:
                lines.append(Text(text(": ".join(wording.answer(plan)), _LONGEST) + "."))
            lines += [Text(text(line, _LONGEST)) for line in wording.beside(plan)]
            if best is not None and best.candidate != plan.own.candidate:
                lines += _flags(pasted(best.candidate, command=plan.front_end), width, plan)
    if start := next(filter(None, map(wording.start, ranked)), None):
        lines += ["", start[0], *_indented(start[1])]
    lines += ["", "All setups of one GPU: --gpu NAME instead of --gpus-to-compare."]
    return Group(*lines)


def _answer(plan: Plan) -> Iterator[Text]:
    verdict, said = wording.answer(plan)
    colour = "bold red" if plan.proposed is None else "bold green"
    yield Text.assemble((verdict, colour), f": {text(said, _LONGEST)}.")
    for line in wording.beside(plan):
        yield Text(text(line, _LONGEST))


def _other_code(found: Pasted, name: str) -> Iterator[RenderableType]:
    """What is changed in the script: a diff as `patch` takes it, at the beginning of the line; or lines."""
    if found.diff:
        yield f"Code for {name} (patch -p0 reads this):"
        yield from (Text(line, no_wrap=True, overflow="ignore") for line in found.diff.splitlines())
        yield ""
    else:
        yield f"Code for {name}:"
        yield from _indented(found.code)


def _flags(found: Pasted, width: int, plan: Plan, *, with_code: bool = False) -> Iterator[RenderableType]:
    """What is pasted, in lines that a shell joins."""
    for what, lines in wording.to_paste(plan, found, [*_joined(found.flags, width - 4)], with_code=with_code):
        yield what
        yield from _indented("\n".join(lines))


def _indented(lines: str) -> Iterator[RenderableType]:
    """Lines to be copied: none is broken, however long."""
    return (Text(f"  {line}", no_wrap=True, overflow="ignore") for line in lines.splitlines())


def _joined(flags: Sequence[str], width: int) -> Iterator[str]:
    """Flags in lines of at most `width` characters, of which a shell makes one; a flag that is longer has its own."""
    line = ""
    for flag in flags:
        if line and len(line) + 1 + len(flag) > width:
            yield f"{line} \\"
            line = ""
        line = f"{line} {flag}".strip()
    yield line


def _table(plan: Plan, title: str, rows: Sequence[wording.PlanRow], price: float | None, width: int) -> Table:
    """Setups with the reason of each below its name. A column that has nothing to say is left out."""
    timed = any(row.step != wording.NONE for row in rows)
    runs = any(row.run != wording.NONE for row in rows)
    names = ["GiB", *(["s a step", wording.rate_unit(plan)] if timed else []), *(["run"] if runs else [])]
    names += ["cost"] if runs and price is not None else []
    table = plain_table(title, *names)
    table.padding = (0, 2, 0, 0)
    table.columns[0].ratio = 1
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    table.width = min(width, 110)
    for row in rows:
        mark, style = ("→", "bold") if row.proposed else (" ", "")
        setup = Table.grid(padding=(0, 1, 0, 0))
        setup.add_row(Text(mark, style), Text(text(row.name), style))
        if row.why:
            setup.add_row("", Padding(Text(text(row.why, _LONGEST), style="dim"), (0, 0, 0, 2)))
        step = Text(row.step)
        if row.between:
            step.append(f"\n{row.between}", style="dim")
        cells: dict[str, str | Text] = {
            "GiB": row.peak, "s a step": step, wording.rate_unit(plan): row.rate, "run": row.run, "cost": row.cost,
        }  # fmt: skip
        table.add_row(setup, *(cells[each] for each in names))
    return table


def _best_gpu(ranked: Sequence[Plan], prices: Mapping[str, float]) -> Text:
    verdict, said = wording.best_gpu(ranked, prices)
    colour = "bold red" if ranked[0].proposed is None else "bold green"
    return Text.assemble((verdict, colour), f": {text(said, _LONGEST)}.")


def _gpus(ranked: Sequence[Plan], prices: Mapping[str, float]) -> Table:
    priced = any(price_of(plan, prices) is not None for plan in ranked)
    unit = wording.rate_unit(ranked[0])
    columns = ["GiB", unit, "run", *(["cost", "per 1M tokens"] if priced and unit == "tokens/s" else [])]
    columns += ["cost"] if priced and unit != "tokens/s" else []
    table = plain_table("GPU", "best setup, or what is missing", *columns)
    table.padding = (0, 2, 0, 0)
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for plan in ranked:
        best, name = plan.proposed, Text(wording.gpu_of(plan))
        if plan.stopped:
            name.append("\nsearch not finished", style="dim")
        setup = Text(best.candidate.name) if best is not None else Text(wording.missing(plan), "red")
        if best is not None and best.candidate.group != "same result":
            setup.append(f"\n{best.candidate.group}: {best.candidate.result}", style="dim")
        # The last columns are there with prices only.
        table.add_row(name, setup, *wording.gpu_cells(plan, prices)[: len(columns)])
    return table
