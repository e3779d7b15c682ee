"""micro-batch × accumulation × processes = sequences a step, exactly or refused with the nearest choices."""

from __future__ import annotations

import pytest

from hf_memkit.common.errors import SettingError
from hf_memkit.setup.techniques.batch import accumulation_for, micro_batch_for, split_batch


@pytest.mark.parametrize("whole", [1, 6, 32, 36, 100])
@pytest.mark.parametrize("variant_s", [1, 3, 4, 8])
def test_the_batch_is_exact_for_every_number_of_processes_that_divides_it(whole: int, variant_s: int) -> None:
    for processes in range(1, whole + 1):
        if whole % processes:
            with pytest.raises(SettingError, match=f"do not divide by {processes} processes"):
                split_batch(whole, variant_s, processes, {})
            continue
        micro, accumulation, reason = split_batch(whole, variant_s, processes, {})
        assert micro * accumulation * processes == whole and 1 <= micro <= variant_s
        assert f"= {whole} sequences a step" in reason
        assert (f"{variant_s} a GPU" in reason) == (micro != variant_s)
        assert (f"× {processes} processes" in reason) == (processes > 1)


def test_the_variant_s_micro_batch_is_kept_where_it_divides() -> None:
    assert split_batch(32, 4, 2, {})[:2] == (4, 4)
    assert split_batch(32, 8, 8, {})[:2] == (4, 1)
    assert split_batch(32, 4, 32, {})[:2] == (1, 1)


def test_the_user_s_values_are_kept_or_refused() -> None:
    assert split_batch(32, 4, 4, {"per_device_train_batch_size": 2})[:2] == (2, 4)
    assert split_batch(32, 4, 4, {"gradient_accumulation_steps": 8})[:2] == (1, 8)
    both = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert split_batch(32, 4, 4, both)[:2] == (2, 4)
    with pytest.raises(SettingError, match=r"2 × gradient_accumulation_steps=4 × 2 processes is 16 sequences a step"):
        split_batch(32, 4, 2, both)


def test_a_refusal_names_the_nearest_choices() -> None:
    both = r"by 5 processes. Use 4 or 8 processes \(--gpus × --nodes\), or 30 or 35 sequences a step$"
    with pytest.raises(SettingError, match=both):
        split_batch(32, 4, 5, {})
    with pytest.raises(SettingError, match=r"Use 2 processes \(--gpus × --nodes\), or 5 sequences a step$"):
        split_batch(2, 4, 5, {})
    with pytest.raises(SettingError, match=r"does not divide the 16 sequences of each process .* 2, 4, 8"):
        accumulation_for(32, 5, processes=2)
    with pytest.raises(SettingError):
        accumulation_for(32, 0)
    with pytest.raises(SettingError, match=r"gradient_accumulation_steps=3 does not divide 32 .* 1, 2, 4"):
        micro_batch_for(32, 3)
