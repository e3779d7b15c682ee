"""The model that formulas are written out for."""

from __future__ import annotations

import pytest

from hf_memkit.catalog.architectures import ARCHITECTURES
from hf_memkit.catalog.models import ModelFacts, describe


@pytest.fixture(scope="module")
def model() -> ModelFacts:
    name = "openai-community/gpt2-xl"
    return describe(name, ARCHITECTURES[name].config, use_hub=False)
