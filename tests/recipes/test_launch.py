"""Where the processes run: from the options, a launcher's environment, and to torchrun's own options."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hf_memkit.cli.recipe_options import RecipeOptions
from hf_memkit.common.errors import InputError, RunError
from hf_memkit.presets.sharing import threads_per_process
from hf_memkit.run.launch import torchrun_options
from hf_memkit.run.ranks import FOLDER_VARIABLE, LaunchLayout, Ranks, ranks_from_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_launcher_s_environment_says_which_rank_this_is() -> None:
    ranks = ranks_from_environment(TORCHRUN)
    assert ranks == Ranks(3, 4, 1, 2, launched=True) and ranks.nodes == 2
    assert not ranks.is_first and not ranks.leads_machine
    deepspeed = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    assert ranks_from_environment(deepspeed) == Ranks(2, 4, 0, 2, launched=True)
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert ranks_from_environment(one) == Ranks(launched=True)


def test_no_launcher_is_one_rank() -> None:
    ranks = ranks_from_environment({"WORLD_SIZE": "4", "SLURM_PROCID": "2"})
    assert ranks == Ranks() and not ranks.launched
    assert ranks.share("x", {"a": 1}) == {"a": 1}
    with ranks.leader_first("y"):
        ranks.wait_for_all("z")


def test_a_launcher_that_says_too_little_is_refused() -> None:
    with pytest.raises(RunError, match="LOCAL_WORLD_SIZE"):
        ranks_from_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, LaunchLayout()),
        ({"gpus": 4}, LaunchLayout(gpus=4)),
        ({"gpus": 2, "nodes": 3, "node_rank": 1, "master_addr": "a"}, LaunchLayout(2, 3, 1, "a", 29500)),
        ({"nodes": 2, "dry_run": True}, LaunchLayout(nodes=2)),
    ],
)
def test_the_options_say_where_processes_run(asked: dict[str, Any], expected: LaunchLayout) -> None:
    assert RecipeOptions(name="r", **asked).place(Ranks()) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nodes": 2}, "on every machine, add --master-addr ADDRESS (of machine 0) and --node-rank N (0 to 1)"),
        ({"nodes": 2, "master_addr": "a"}, "add --node-rank N (0 to 1)"),
        ({"nodes": 2, "master_addr": "a", "node_rank": 2}, "--node-rank 2: too large. Write 0 to 1"),
        ({"gpus": 2, "master_addr": "a", "master_port": 1}, "--master-addr, --master-port: only for several machines"),
    ],
)
def test_options_that_lack_or_contradict_something_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        RecipeOptions(name="r", **asked).place(Ranks())


def test_a_launcher_comes_before_the_options() -> None:
    ranks = ranks_from_environment(TORCHRUN)
    assert (
        RecipeOptions(name="r").place(ranks)
        == LaunchLayout(2, 2)
        == RecipeOptions(name="r", gpus=2, nodes=2).place(ranks)
    )
    with pytest.raises(InputError, match="--gpus 4: the launcher started 2 processes"):
        RecipeOptions(name="r", gpus=4).place(ranks)
    with pytest.raises(InputError, match="--nodes 1: the launcher started"):
        RecipeOptions(name="r", nodes=1).place(ranks)
    with pytest.raises(InputError, match="--master-addr: set by the launcher"):
        RecipeOptions(name="r", master_addr="a").place(ranks)
    with pytest.raises(InputError, match="the same number on each"):
        RecipeOptions(name="r").place(Ranks(0, 3, 0, 2, launched=True))


def test_a_rank_of_memkit_s_own_has_the_command_line_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: several machines, whose ranks refuse what the user typed."""
    monkeypatch.setenv(FOLDER_VARIABLE, "x")
    options = RecipeOptions(name="r", gpus=2, nodes=2, node_rank=1, master_addr="a", master_port=1)
    assert options.place(ranks_from_environment(TORCHRUN)) == LaunchLayout(2, 2)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (LaunchLayout(gpus=4), {"standalone": True, "nproc_per_node": "4", "nnodes": "1:1"}),
        (
            LaunchLayout(2, 3, 1, "10.0.0.7", 4711),
            {"standalone": False, "nproc_per_node": "2", "nnodes": "3", "node_rank": 1, "master_port": 4711,
             "master_addr": "10.0.0.7"},
        ),
    ],
)  # fmt: skip
def test_torchrun_understands_its_options(place: LaunchLayout, expected: dict[str, Any]) -> None:
    import torch.distributed.run

    torchrun: Any = torch.distributed.run
    parsed = vars(torchrun.parse_args([*torchrun_options(place), "-m", "hf_memkit"]))
    assert {name: parsed[name] for name in expected} == expected


def test_cores_are_shared_among_processes() -> None:
    assert [threads_per_process(16, gpus) for gpus in (1, 4, 5, 32)] == [16, 4, 3, 1]
