"""The ranks of a sharded training beside each other: made-up records, and two ranks that really shard on a CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from hf_memkit.common.units import format_size
from hf_memkit.measuring.report.answer import text_report, write_page
from hf_memkit.measuring.report.load import load_run
from hf_memkit.setup.process_group import single_process_environment
from tests.chromium import Watched
from tests.measuring.report import synthetic_records as made
from tests.measuring.report import uneven_ranks


def sharded(folder: Path, weights: list[float | None], **run: Any) -> Path:
    """Ranks that hold so many GiB of weights, and as much of the other shares; None: without a record of them."""
    for rank, size in enumerate(weights):
        records = made.healthy(4, rank=rank, world_size=len(weights), **run)
        for record in records:
            if "held" in record:
                del record["held"]
                if size is not None:
                    record["held"] = {"device": {"weights_gib": size, "optimizer_gib": 2 * size}, "host": {}}
        made.write(folder, records, rank)
    return folder


def rows_below(shown: str, heading: str) -> list[list[str]]:
    lines = shown.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading))
    below = lines[first + 1 :]
    return [line.split() for line in below[: below.index("")]]


@pytest.mark.parametrize(
    ("run", "engine"),
    [
        ({"engine": "FSDP2"}, "FSDP2"),
        ({"engine": "FullyShardedDataParallel"}, "FSDP"),
        ({"engine": "DeepSpeedEngine", "arguments": {"deepspeed_stage": 3}}, "ZeRO-3"),
        ({"engine": "DeepSpeedEngine", "arguments": {}}, ""),
        ({"engine": "DistributedDataParallel"}, ""),
    ],
)
def test_the_shares_stand_under_the_name_of_the_engine(tmp_path: Path, run: dict[str, Any], engine: str) -> None:
    shown = text_report(load_run(sharded(tmp_path, [1.5, 1.49], **run)))
    assert len(rows_below(shown, "By rank")) == 2
    if not engine:
        assert "gathered" not in shown
        return
    # 0.12 GiB of buffers at the peak; no gradients are held, so that they have no column
    expected = [
        ["0", "1.50", "GiB", "3.00", "GiB", "0.12", "GiB"],
        ["1", "1.49", "GiB", "2.98", "GiB", "0.12", "GiB"],
    ]
    assert rows_below(shown, f"{engine} by rank") == expected
    assert "Uneven" not in shown


def test_equal_shares_are_on_the_page_only(tmp_path: Path) -> None:
    """Defect: lines on a terminal that repeat what the job holds between steps."""
    run = load_run(sharded(tmp_path, [1.5, 1.5], engine="FSDP2"))
    assert "FSDP2 by rank" not in text_report(run)
    write_page(run, tmp_path / "page.html")
    assert "FSDP2 by rank" in (tmp_path / "page.html").read_text()


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    shown = text_report(load_run(sharded(tmp_path, [1.5, 1.2, 0.0], engine="FSDP2")))
    assert rows_below(shown, "FSDP2 by rank")[2] == ["2", "0.12", "GiB"]
    uneven = "Uneven: rank 0 holds 4.50 GiB of weights, gradients and optimizer states, rank 2 none."
    assert uneven in " ".join(shown.split())


def test_a_rank_without_a_record_is_not_compared(tmp_path: Path) -> None:
    """Defect: such a rank counted as one that holds nothing."""
    shown = text_report(load_run(sharded(tmp_path, [1.5, None, 1.5], engine="FSDP2")))
    assert rows_below(shown, "FSDP2 by rank")[1] == ["1", "—", "—", "0.12", "GiB"]
    assert "Uneven" not in shown


def test_the_record_of_one_rank_names_it(tmp_path: Path) -> None:
    sharded(tmp_path, [1.5, 1.2], engine="FSDP2")
    (tmp_path / "memory-rank0.jsonl").unlink()
    run = load_run(tmp_path)
    assert run.notes == ("records of 1 of 2 ranks are missing: 0; these figures are of rank 1, and others may differ",)
    assert "these figures are of rank 1" in " ".join(text_report(run).split())
    assert load_run(made.write(tmp_path / "one", made.healthy(4))).notes == ()


@pytest.mark.slow
def test_two_ranks_that_shard(tmp_path: Path, show: Callable[..., tuple[Page, Watched]]) -> None:
    """With 65 words, rank 0 has a row more of both embeddings; FSDP2 pads the weights of rank 1, not its states."""
    port = int(single_process_environment()["MASTER_PORT"])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([uneven_ranks.__name__])
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        ranks = [pool.submit(uneven_ranks.train_rank, rank, port, str(tmp_path / "out")) for rank in range(2)]
        first, second = (rank.result(timeout=300) for rank in ranks)
    row = 2 * 32 * 4
    assert first["weights"] - second["weights"] == row and first["states"] - second["states"] == 2 * row
    run = load_run(tmp_path / "out")
    padded = format_size(first["weights"])
    table = rows_below(text_report(run), "FSDP2 by rank")
    assert [line[:5] for line in table] == [
        ["0", *padded.split(), *format_size(first["weights"]).split()],
        ["1", *padded.split(), *format_size(second["weights"]).split()],
    ]
    assert [float(line[5]) for line in table] == pytest.approx([one["states"] / 1024 for one in (first, second)], 0.01)
    assert table[0][5] != table[1][5]
    tab, watched = show(write_page(run, tmp_path / "page.html"), width=360)
    assert tab.locator("#shares").inner_text().startswith("FSDP2 by rank")
    assert padded in tab.locator("#shares tr").nth(1).inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert watched.problems == []
