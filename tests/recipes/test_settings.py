"""`--set`: names, types and conflicts; against the installed transformers' own fields."""

from __future__ import annotations

import pytest

from hf_memkit.catalog.library_versions import argument_types, to_installed_arguments
from hf_memkit.common.errors import SettingError
from hf_memkit.recipes.settings import ELSEWHERE
from hf_memkit.setup.own_arguments import read_pairs


def test_all_mistakes_are_reported_at_once_with_hints() -> None:
    with pytest.raises(SettingError) as caught:
        read_pairs(
            ["learning_rat=1", "max_steps=abc", "optim=adamw_torchh", "foo", "output_dir=x", "bf16=7"], ELSEWHERE
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert "did you mean 'learning_rate'" in lines[0]
    assert "max_steps=abc: expected int, got str" in lines[1]
    assert "did you mean 'adamw_torch'" in lines[2]
    assert "key=value" in lines[3]
    assert "use --output" in lines[4]
    assert "expected bool" in lines[5]


def test_renamed_arguments_reach_the_installed_transformers() -> None:
    """Both transformers that CI runs know the checkpointing fields, each under its own name."""
    from transformers import TrainingArguments

    assert "activation_checkpointing" in argument_types()
    options = to_installed_arguments(
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    )
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, **options)
    name = next(iter(options))
    assert getattr(arguments, name) is True
