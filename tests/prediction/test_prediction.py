"""A prediction as data, and its verdict; the numbers of the verdicts are worked out by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from hf_memkit.catalog.hardware import Gpu, Machine, described_gpu
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import GIB, MIB
from hf_memkit.prediction.confidence import Confidence
from hf_memkit.prediction.prediction import Prediction, with_rest
from hf_memkit.prediction.trace.trace import ZEROS
from hf_memkit.prediction.traced_training import Compilation
from hf_memkit.setup.bf16_on_gpus import emulated_bf16
from tests.conftest import ROOT

TRACE = Confidence("trace", "two optimizer steps of transformers.Trainer on fake CUDA tensors")
GPU = Gpu("a GPU", 16 * GIB, bf16=True, source="by size")
MACHINE = Machine(GPU, ram_bytes=64 * GIB, disk_free_bytes=100 * GIB, disk_path="/data", cpu_count=8)


def made(**changes: Any) -> Prediction:
    values: dict[str, Any] = {
        "peak_allocated_bytes": 10 * GIB + 512,
        "peak_reserved_bytes": (11 * GIB, 12 * GIB + 2 * MIB),
        "outside_allocator_bytes": 500 * MIB,
        "smallest_cap_bytes": 11 * GIB,
        "phases": {"backward": (10 * GIB + 512, 12 * GIB), "load": (3 * GIB, None)},
        "categories": with_rest({"weights": 3 * GIB, "activations": 6 * GIB + 1}, 10 * GIB + 512),
        "peak_phase": "backward",
        "peak_operation": "aten._log_softmax_backward_data.default",
        "peak_module": "lm_head",
        "confidence": TRACE,
        "source": "torch, transformers",
        "host_rss_bytes": 5 * GIB + 1,
        "notes": ("compiled kernels are not modelled",),
    }
    return Prediction(**{**values, **changes})


def names_in_the_reference() -> set[str]:
    text = (ROOT / "docs" / "reference.md").read_text()
    sentence = re.search(r"A prediction: (`peak_allocated_gib`.*?)\n\n", text, re.DOTALL)
    assert sentence is not None
    return set(re.findall(r"`([a-z_]+)`", sentence[1])) - {"fits", "tight"}


def test_printed_and_in_a_notebook_it_is_its_answer() -> None:
    prediction = made(peak_module="lm_head<0>").with_verdict(MACHINE)
    shown, page = str(prediction), prediction._repr_html_()
    assert shown.startswith("FITS") and "activations 6.00 GiB" in shown
    assert "<b>FITS" in page and "6.00 GiB" in page and "lm_head&lt;0&gt;" in page
    assert str(made()).startswith("NO VERDICT")


def test_notes_say_what_compiled_code_holds_at_the_peak() -> None:
    graphs = Compilation(graphs=2, calls=100)
    step = Counter({"kept": 3 * GIB, "made": 2 * GIB, ZEROS: GIB})
    _, parts, remedy = made(activations=step).with_compilation(graphs).notes
    assert re.findall(r"\d\.\d\d GiB of \w+", parts) == ["3.00 GiB of kept", "2.00 GiB of made", "1.00 GiB of zeros"]
    assert "chunked_loss.install(model)" in remedy
    assert made(activations=step).with_compilation(None).notes[1:] == (parts, remedy), "another backend than inductor"

    _, parts = made(activations=Counter({"kept": 3 * GIB, ZEROS: MIB})).with_compilation(graphs).notes
    assert re.findall(r"\d\.\d\d GiB of \w+", parts) == ["3.00 GiB of kept"]
    assert len(made(activations=Counter({"kept": 3 * GIB})).with_compilation(None).notes) == 1, "nothing is compiled"


def test_json_has_the_names_of_the_reference() -> None:
    told = made().with_verdict(MACHINE).to_json()
    named = names_in_the_reference()
    assert named <= set(told)
    assert set(told) - named <= {"why", "source"}
    assert list(told["categories"]) == [f"{name}_gib" for name in CATEGORIES], "as in a step record"
    assert list(told["phases"]) == ["load", "backward"], "in the order of the phases"
    assert told["phases"]["load"] == {"peak_allocated_gib": 3.0, "peak_reserved_gib": None}
    assert told["pinned_gib"] is None and told["disk_gib"] is None, "what is not modelled is not zero"
    assert sum(told["categories"].values()) == told["peak_allocated_gib"]


@pytest.mark.parametrize("card", [GPU, None])
def test_a_prediction_survives_json_to_the_byte(card: Gpu | None) -> None:
    prediction = made(host_rss_bytes=123_456_789_011, disk_bytes=7).with_verdict(MACHINE.with_gpu(card))
    assert Prediction.from_json(json.loads(json.dumps(prediction.to_json()))) == prediction


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_allocated_bytes": 10 * GIB}, "categories add up to"),
        ({"categories": {"weights": 10 * GIB + 512}}, "must be all of"),
        ({"peak_reserved_bytes": (12 * GIB, 11 * GIB)}, "the low end is above"),
        ({"phases": {"warmup": (1, 1)}}, "warmup"),
        ({"verdict": "maybe"}, "maybe"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**changes)


def test_what_the_allocator_rounds_up_is_other() -> None:
    found = with_rest({"weights": 100, "other": 7}, 512)
    assert found["other"] == 412 and sum(found.values()) == 512 and set(found) == set(CATEGORIES)
    with pytest.raises(ValueError, match="more than 99"):
        with_rest({"weights": 100}, 99)


def sized(reserved: int, cap: int, **more: Any) -> Prediction:
    sizes = {"peak_reserved_bytes": (cap, reserved), "smallest_cap_bytes": cap, "outside_allocator_bytes": GIB}
    return made(**sizes, **more).with_verdict(MACHINE)


def test_verdicts_say_why_with_their_numbers() -> None:
    assert sized(12 * GIB, 11 * GIB).headline == "FITS: needs up to 13.0 GiB; a GPU has 16.0 GiB"
    tight = sized(15 * GIB, 11 * GIB).headline
    assert tight.startswith("TIGHT: needs up to 16.0 GiB; a GPU has 16.0 GiB; it completes, but above 92 % of that")
    close = sized(15 * GIB, 15 * GIB - MIB)
    assert "16.9 GiB with 5 % and 200 MiB of slack" in close.why and close.why.endswith("too close")
    assert sized(20 * GIB, 16 * GIB).headline == "DOES NOT FIT: needs at least 17.0 GiB; a GPU has 16.0 GiB"
    near = sized(15 * GIB + 10 * MIB, 15 * GIB + 10 * MIB)
    assert near.headline == "DOES NOT FIT: needs at least 16.01 GiB; a GPU has 16.00 GiB"
    half = sized(9 * GIB, 9 * GIB, memory_fraction=0.5)
    assert half.verdict == "does not fit" and "per_process_memory_fraction 0.5 allows 9.0 GiB of a GPU" in half.why


def test_ram_and_disk_count_too() -> None:
    for more, short in (
        ({"host_rss_bytes": 40 * GIB, "pinned_bytes": 30 * GIB}, "70.00 GiB of RAM"),
        ({"disk_bytes": 101 * GIB}, "101.0 GiB of disk"),
    ):
        judged = sized(12 * GIB, 11 * GIB, **more)
        assert judged.verdict == "does not fit" and short in judged.why
        assert "on the GPU it needs up to 13.0 GiB" in judged.why


def test_without_a_gpu_there_is_no_verdict() -> None:
    prediction = made().with_verdict(MACHINE.with_gpu(None))
    assert prediction.verdict is None and prediction.capacity_bytes is None and "--gpu NAME" in prediction.why
    assert made(host_rss_bytes=65 * GIB).with_verdict(MACHINE.with_gpu(None)).verdict is None


def test_a_confidence_says_what_it_rests_on() -> None:
    assert str(TRACE) == (
        "trace (two optimizer steps of transformers.Trainer on fake CUDA tensors); not yet checked on a GPU"
    )
    measured = Confidence("trace", "a trace", measured_on="H200 (benchmarks/results/gpu.json)")
    assert "checked on H200" in str(measured) and "not yet" not in str(measured)
    assert Confidence.from_json(measured.to_json()) == measured
    for level, rests_on in (("guess", "x"), ("trace", "")):
        with pytest.raises(ValueError, match="confidence"):
            Confidence(level, rests_on)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "weights", "trained", "config", "instead"),
    [
        ({"bf16": True}, "float32", "float32", None, "fp16=True instead of bf16=True"),
        ({"bf16": True}, "bfloat16", "bfloat16", None, 'dtype="float32"'),
        ({}, "bfloat16", "bfloat16", None, 'dtype="float32"'),
        ({"bf16": True}, "bfloat16", "float32", None, "fp16=True instead of bf16=True"),  # LoRA
        ({"fp16": True}, "bfloat16", "float32", None, ""),
        ({"fp16": True}, "float32", "float32", None, ""),
        ({}, "float32", "float32", None, ""),
        ({"bf16": True}, "bfloat16", "bfloat16", {"bf16": {"enabled": "auto"}}, "fp16=True instead of bf16=True"),
        ({"fp16": True}, "bfloat16", "bfloat16", {"bf16": {"enabled": "auto"}}, ""),
        ({}, "float32", "float32", {"bf16": {"enabled": True}}, '"fp16": {"enabled": "auto"}'),
        (
            {},
            "float32",
            "float32",
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "zero2-offload",
        ),
        ({}, "float32", "float32", {}, ""),
    ],
)
def test_where_bf16_is_emulated_and_what_works_instead(
    arguments: dict[str, Any], weights: str, trained: str, config: dict[str, Any] | None, instead: str
) -> None:
    """Would notice: advice that leads to fp16 with bf16 gradients, which no CUDA kernel unscales."""

    def of(gpu: str | None) -> str:
        described = described_gpu(gpu) if gpu else None
        return emulated_bf16(described, arguments, dtypes=(weights,), trained=(trained,), config=config)

    assert of("A10G") == "" == of(None)
    for gpu in ("T4", "V100 32GB"):
        found = of(gpu)
        assert instead in found and bool(found) is bool(instead)
        assert ('dtype="float32"' in found) is (instead == 'dtype="float32"')
