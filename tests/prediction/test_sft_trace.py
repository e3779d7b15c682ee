"""TRL's SFTTrainer on fake tensors: on a GPU its head uses the code for a GPU. What it allocates on real ones is
compared in tests/predict_script/test_jobs.py."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_memkit.prediction.child.trainer_kinds.sft import padding_free_change, patch_fused_head
from hf_memkit.prediction.setup_as_script import SetupJob
from hf_memkit.prediction.worker import Worker
from tests.prediction.architectures import CHATTING, of_architecture
from tests.prediction.cases import traced
from tests.prediction.test_child_libraries import most


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "weight_bytes"), [("sft", 2), ("sft, lora", 4)])
def test_the_head_on_a_gpu_makes_a_tile_of_logits(worker: Worker, setting: str, weight_bytes: int) -> None:
    words, length, batch = 40_000, 1024, 8
    setup = of_architecture(CHATTING[0], setting).setup
    setup = setup.put("model.architecture", {**setup["model.architecture"], "vocab_size": words}, "wide")
    setup = setup.put("arguments.per_device_train_batch_size", batch, "large")
    setup = setup.put("model.dtype", {2: "bfloat16", 4: "float32"}[weight_bytes], "compared")
    trace = traced(worker, SetupJob(setup, length))
    # A tile of logits; the inputs of the tokens and their fp32 gradient; the head's, in fp32 beside its own copy (trl
    # 1.16.0: kernels/chunked_logprob.py, trainer/utils.py 1506 and 1645).
    head = (4 + (weight_bytes if weight_bytes < 4 else 0)) * words * 64 if setting == "sft" else 0
    expected = 4096 * 32768 * weight_bytes + (weight_bytes + 4) * batch * length * 64 + head
    found = most(trace, "loss", "backward")
    # The head's gradient in the weights' dtype is what becomes the parameter's own.
    gradient = weight_bytes * words * 64 if setting == "sft" else 0
    assert expected - gradient <= found < 1.02 * expected, (found, expected)
    assert found < 12 * batch * length * words / 5


@pytest.mark.slow
def test_packed_sequences_have_a_mask_of_their_own(worker: Worker) -> None:
    """Without flash attention it is made for the whole row: tokens × tokens, a byte each."""
    peaks = []
    for packing in (False, True):
        setup = of_architecture(CHATTING[0], "sft, bf16").setup
        setup = setup.put("arguments.packing", packing, "compared")
        setup = setup.put("arguments.per_device_train_batch_size", 1, "a row of one is not padded")
        peaks.append(traced(worker, SetupJob(setup, 2048)).peak().size_bytes)
    assert 2048**2 < peaks[1] - peaks[0] < 8 * 2048**2, peaks


def test_without_triton_the_head_takes_the_path_of_a_gpu() -> None:
    """Would notice: predictions of SFTTrainer on a machine without Triton with the larger tiles of TRL's other path
    (five times the memory for a vocabulary of 64,000), or other names in another TRL."""
    import trl.kernels.chunked_logprob as installed

    copy: Any = types.ModuleType("copy")
    source = Path(installed.__file__).read_text()
    with mock.patch("transformers.utils.is_triton_available", lambda: False):
        exec(compile(source, installed.__file__, "exec"), vars(copy))
    kernels = {name: vars(copy)[name] for name in ("_forward_kernel", "_backward_kernel")}
    assert not copy._use_triton(torch.device("cuda")) and not hasattr(copy, "triton")
    patch_fused_head(copy)
    assert copy._use_triton(torch.device("cuda")) and not copy._use_triton(torch.device("cpu"))
    assert all(vars(copy)[name] is not kernel for name, kernel in kernels.items())
    assert set(re.findall(r"\btriton\.(\w+)", source)) <= {"cdiv", "jit", "language"}


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"max_length": None}, "padding_free=True and FLASH"),
        ({"max_length": 2049}, "padding_free=True, max_length=None and FLASH"),
        (
            {"max_length": 2048},
            "padding_free=True, max_length=None, rows cut to 2,048 tokens where they are tokenised, and FLASH",
        ),
        ({"max_length": 2048, "packing": True}, "padding_free=True and FLASH"),
        ({"metrics": True}, ""),
    ],
)
def test_trl_has_a_name_of_its_own_for_no_padding(options: dict[str, Any], change: str) -> None:
    """Would notice: a change that TRL does not take, such as one that leaves it a max_length, or has rows that it cut
    before no longer cut."""
    collator = type("Collator", (), {"__module__": "trl.trainer"})()
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(padding_free=False, **options), padding_free=False, data_collator=collator,
        compute_metrics=options.get("metrics"),
    )  # fmt: skip
    assert padding_free_change(trainer, 2048, "x") == change.replace("FLASH", 'attn_implementation="x"')
