"""The largest size that fits, of three that are traced: made-up predictions, whose bytes are known at every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GIB
from hf_memkit.prediction import Prediction
from hf_memkit.prediction.prediction import with_rest
from hf_memkit.presets.sizes import MOST_TRACES, find_largest, fits
from tests.prediction.test_prediction import made

MACHINE = Machine(gpu_of_size("24GB"), ram_bytes=GIB, disk_free_bytes=GIB, disk_path=".", cpu_count=2)
BATCHES = (*range(1, 8), *range(8, 4097, 8))
POWERS = tuple(2**exponent for exponent in range(8))


def made_of(held: float, grows: float, step: float) -> Callable[[int], Prediction]:
    """Weights and states of `held` GiB, `grows` a sequence, and in the optimizer's step `step` of gradients, while no
    activations are there."""

    def trace(size: int) -> Prediction:
        backward, optimizer = held + grows * size, held + step
        peak, phase = max((backward, "backward"), (optimizer, "optimizer"))
        kept = {"activations": backward - held} if phase == "backward" else {"gradients": step}
        categories = {"weights": held, **kept}
        gpu = MACHINE.gpu
        assert gpu is not None
        return made(
            peak_allocated_bytes=int(peak * GIB), peak_reserved_bytes=(int(peak * GIB), int(1.03 * peak * GIB)),
            smallest_cap_bytes=int(peak * GIB), peak_phase=phase, capacity_bytes=gpu.capacity_bytes,
            categories=with_rest({name: int(size * GIB) for name, size in categories.items()}, int(peak * GIB)),
            phases={
                "data": (int(held * GIB), None), "forward": (int((held + 0.8 * grows * size) * GIB), None),
                "backward": (int(backward * GIB), None), "optimizer": (int(optimizer * GIB), None),
            },
        ).with_verdict(MACHINE)  # fmt: skip

    return trace


@pytest.mark.parametrize("choices", [BATCHES, POWERS])
@pytest.mark.parametrize(("held", "grows", "step"), [(6, 0.26, 3.5), (10, 2.0, 6), (0.1, 0.004, 0.1)])
def test_three_traces_find_it(choices: tuple[int, ...], held: float, grows: float, step: float) -> None:
    trace, asked = made_of(held, grows, step), list[int]()

    def counted(size: int) -> Prediction:
        asked.append(size)
        return trace(size)

    largest = find_largest(choices, 1, counted, MACHINE)
    true = max(size for size in choices if fits(trace(size), MACHINE))
    assert len(asked) <= MOST_TRACES and asked[0] == 1
    assert largest.size in asked and largest.prediction is not None and fits(largest.prediction, MACHINE)
    assert 0.75 * true <= largest.size <= true, (largest, true)
    assert all(str(size) in largest.why for size in asked), "what was traced is said"


def test_a_prediction_that_does_not_fit_is_not_called_fitting() -> None:
    largest = find_largest(BATCHES, 1, made_of(30, 1, 0), MACHINE)
    assert largest.size == 1 and "does not fit" in largest.why


def test_a_length_that_is_too_long_is_lowered() -> None:
    lengths = range(64, 131073, 64)
    largest = find_largest(lengths, 1024, made_of(6, 0.02, 0), MACHINE)
    assert 0.75 * 700 < largest.size < 1024 and largest.prediction is not None and fits(largest.prediction, MACHINE)


def test_an_untraceable_size_stays_small_with_the_reason() -> None:
    def fails(size: int) -> Prediction:
        raise InputError("a trace needs bitsandbytes")

    largest = find_largest(BATCHES, 1, fails, MACHINE)
    assert largest.size == 1 and largest.prediction is None and "bitsandbytes" in largest.why
