"""Costs of a run, and the order of GPUs."""

from __future__ import annotations

import pytest

from hf_memkit.cli.plan_options import read_prices
from hf_memkit.common.errors import InputError
from hf_memkit.plan.answer import plans_json
from hf_memkit.plan.prices import million_tokens_cost, ranked_gpus, run_cost
from tests.plan.made_plans import plan, setup


def test_cost_of_a_run_and_of_a_million_tokens() -> None:
    """Would notice: a price per second, or for one GPU where several train."""
    each = setup(8, 1, 10, 3.6)  # 360 s; 8192 tokens in 3.6 s
    assert run_cost(each, 2.0, 4) == pytest.approx(0.1 * 2 * 4)
    assert million_tokens_cost(each, 2.0, 4) == pytest.approx(1e6 / 8192 * 3.6 / 3600 * 2 * 4)


def test_an_unknown_time_or_price_has_no_cost() -> None:
    """Would notice: a zero where there is no price, no time, or an operation without one."""
    for each, price in (
        (setup(8, 1, 10, 1.0), None),
        (setup(8, 1, 10, None), 2.0),
        (setup(8, 1, 10, 1.0, unknown=("aten.odd",)), 2.0),
        (None, 2.0),
    ):
        assert run_cost(each, price, 1) is None and million_tokens_cost(each, price, 1) is None


def test_gpus_are_ranked_by_speed_or_by_cost() -> None:
    """Would notice: a slow and cheap GPU last although prices are known; a GPU without a price before those with one;
    a GPU on which nothing fits anywhere but last."""
    slow = plan(setup(8, 1, 10, 4.0, gpu="T4"), gpu="T4")
    fast = plan(setup(8, 1, 10, 1.0, gpu="H100 80GB"), gpu="H100 80GB")
    small = plan(setup(8, 1, 30, 1.0, gpu="L4"), gpu="L4")
    untimed = plan(setup(8, 1, 10, None, gpu="A10"), gpu="A10")
    gpus = [untimed, small, slow, fast]

    def names(prices: dict[str, float]) -> list[str]:
        return [each.machine.gpu.name for each in ranked_gpus(gpus, prices) if each.machine.gpu]

    assert names({}) == ["H100 80GB", "T4", "A10", "L4"]
    assert names({"H100 80GB": 5.0, "T4": 1.0}) == ["T4", "H100 80GB", "A10", "L4"]
    assert names({"T4": 9.0}) == ["T4", "H100 80GB", "A10", "L4"]
    plans = plans_json(gpus, {"T4": 1.0})
    assert [each["run_cost"] for each in plans] == [pytest.approx(400 / 3600), None, None, None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0.71", "--price 0.71: write NAME=NUMBER, such as T4=0.71"),
        ("T4=cheap", "--price T4=cheap: not a price"),
        ("T4=nan", "--price T4=nan: not a price"),
        ("T4=", "--price T4=: not a price"),
        ("T4=-1", "--price T4=-1: not a price"),
        ("L4=1", "--price L4=1: no plan for L4; GPUs in this plan: T4, 16GB GPU"),
        ("A100=1", "'A100 40GB' or 'A100 80GB'"),
        ("T4=1,t4=2", "--price t4=2: T4 has two prices"),
    ],
)
def test_a_wrong_price_is_one_line(given: str, message: str) -> None:
    """Would notice: a price that becomes 0 or another GPU's, or that is ignored."""
    with pytest.raises(InputError) as error:
        read_prices([given], ["T4", "16GB GPU"])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_prices_of_named_and_sized_gpus() -> None:
    """Would notice: names that match only in the spelling of `gpu_sizes.py`; a list of which only the first price is
    read."""
    assert read_prices(["nvidia t4=0.35, 16GB=1", "L4=.7"], ["T4", "L4", "16GB GPU"]) == {
        "T4": 0.35, "16GB GPU": 1.0, "L4": 0.7,
    }  # fmt: skip
