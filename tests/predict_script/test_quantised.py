"""Quantised models of scripts, where a CPU does something else than a GPU, and what is refused.

What both do is in `test_jobs.py`: the jobs that begin with qlora and lora train on the CPU with bitsandbytes' and
torchao's own kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks import published_models
from hf_memkit.common.units import GIB, format_size
from hf_memkit.prediction.traced_training import Outcome, Untrained
from tests.predict_script.conftest import Predict
from tests.prediction.test_child_libraries import alive, most

pytestmark = pytest.mark.tracing

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LINEAR: Final = 2 * (4 * 64 * 64 + 3 * 64 * 128)

TRAIN: Final = """
import json, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

def load(name="model", **options):
    return AutoModelForCausalLM.from_pretrained(name, **options)

def train(model, length=128, **options):
    rows = [{"input_ids": [1] * length, "labels": [1] * length}] * 64
    arguments = TrainingArguments(
        "out", max_steps=2, bf16=True, report_to="none", save_strategy="no", **options)
    Trainer(model, arguments, train_dataset=rows).train()
"""


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Saves a config with more values in it; its folder's name."""

    def saved(name: str = "model", **values: Any) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **values}))
        return name

    return saved


STORED: Final[dict[str, dict[str, Any]]] = {
    "gptq": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {}},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
REFUSED: Final = """
from torchao.quantization import Int4WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig
from transformers import GPTQConfig, TorchAoConfig

cases = {name: dict(name=name) for name in sys.argv[1:]}
cases |= {name: dict(quantization_config=given) for name, given in {
    "GPTQConfig": GPTQConfig(bits=4, dataset="c4", tokenizer=None),
    "Int4WeightOnlyConfig": TorchAoConfig(Int4WeightOnlyConfig()),
    "Int8DynamicActivationInt8WeightConfig": TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "llm_int8_has_fp16_weight": BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True),
}.items()}
results = {}
for name, case in cases.items():
    try:
        load(**case)
        results[name] = "loaded"
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"
Path("results.json").write_text(json.dumps(results))
"""


def test_what_is_not_modelled_is_refused_in_a_line(
    predict: Predict, model: Callable[..., str], tmp_path: Path
) -> None:
    """Would notice: a model that is predicted as if it were not quantised, or an error of a library that is not
    installed in place of what to do."""
    model()
    for method, values in STORED.items():
        model(method, quantization_config={"quant_method": method, **values})
    found = predict(TRAIN + REFUSED, *STORED, capability=(9, 0))
    assert found == Outcome(untrained=Untrained(None)), found
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(STORED) < set(results)
    for name, line in results.items():
        what = {"GPTQConfig": "gptq"}.get(name, name)
        assert line.startswith("Unmodelled: ") and what in line.partition("this quantisation")[0], line
        assert "BitsAndBytesConfig" in line and "\n" not in line
    (tmp_path / "results.json").unlink()
    found = predict(TRAIN + "load('gptq')")
    assert found.failed.type == "Unmodelled" and "train.py, line" in found.failed.place, found


@pytest.mark.slow
def test_what_is_dequantised_when_it_is_loaded_is_no_quantised_model(
    predict: Predict, model: Callable[..., str]
) -> None:
    """FP8 checkpoints on a GPU without FP8, and where it is asked for; MXFP4 checkpoints (gpt-oss) to train them.

    Would notice: fp8 sizes, or a refusal.
    """
    model("plain")
    model("fp8", quantization_config={"quant_method": "fp8", **STORED["fp8"]})
    model("mxfp4", quantization_config={"quant_method": "mxfp4"})
    text = (
        "from transformers import FineGrainedFP8Config, Mxfp4Config\nfound = load({}).to('cuda')\n"
        "assert not hasattr(found.config, 'quantization_config') and not getattr(found, 'is_quantized', False)\n"
        "train(found)"
    )
    loads = {
        "'plain'": (8, 0),
        "'fp8'": (8, 0),
        "'plain', device_map='auto'": (9, 0),
        "'fp8', quantization_config=FineGrainedFP8Config(dequantize=True)": (9, 0),
        "'mxfp4', quantization_config=Mxfp4Config(dequantize=True)": (9, 0),
    }
    found = [predict(TRAIN + text.format(each), capability=capability) for each, capability in loads.items()]
    peaks = [each.training.trace.peak().categories for each in found]
    assert peaks[0] == peaks[1] and peaks[2] == peaks[3] == peaks[4]


def test_peft_knows_what_is_packed_in_16_bits(predict: Predict, model: Callable[..., str]) -> None:
    """4 bits stored as bf16, for FSDP: PEFT's upcast leaves them alone, by the name of the parameter's class.

    Would notice: weights of another class, which take twice their memory after the upcast; parameters miscounted; a
    merge below `train()` whose bytes are not mentioned.
    """
    model()
    found = predict(
        TRAIN
        + """
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
found = prepare_model_for_kbit_training(load(quantization_config=config))
weight = found.model.layers[0].mlp.up_proj.weight
assert type(weight).__name__ == "Params4bit" and weight.dtype is torch.bfloat16, weight.dtype
assert weight.numel() == 64 * 128 // 4 and weight.quant_state.shape == (128, 64) and weight.device.type == "cuda"
assert found.model.norm.weight.dtype is torch.float32
adapted = get_peft_model(found, LoraConfig(target_modules=["q_proj"]))
train(adapted, gradient_checkpointing=True)
adapted.merge_and_unload()
"""
    )
    assert found.training, found
    assert f"the 4-bit weights take {format_size(2 * LINEAR)} in bfloat16" in " ".join(found.training.notes)
    assert found.training.model.parameters == LINEAR + 2 * 64 * 64 + 5 * 64 + 2 * 2 * 8 * 64


def test_layers_that_a_script_makes_itself_are_quantised(predict: Predict) -> None:
    """Would notice: bitsandbytes' parameters that cannot hold what has no memory, or scales that stay on the CPU."""
    found = predict(
        TRAIN
        + """
import bitsandbytes as bnb

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1, 128)
        self.second = bnb.nn.Linear4bit(128, 256, compute_dtype=torch.bfloat16, quant_type="nf4")
        self.third = bnb.nn.Linear8bitLt(256, 64, has_fp16_weights=False, threshold=6.0)

    def forward(self, input_ids, labels):
        return {"loss": self.third(self.second(self.first(input_ids.unsqueeze(-1).float()))).mean()}

own = Own().to("cuda")
scales = own.second.weight.quant_state
assert {each.device.type for each in (scales.absmax, scales.code, own.third.weight.SCB)} == {"cuda"}
train(own)
"""
    )
    assert found.training, found
    codes, others = {128 * 256 // 2, 256 * 64}, 256 + 256 + 64  # weight and biases
    assert codes < set(alive(found.training.trace, "weights"))
    assert found.training.model.parameters == 128 * 256 + 256 * 64 + others


def test_8_bits_take_on_a_gpu_what_its_kernels_take(predict: Predict, model: Callable[..., str]) -> None:
    """int32 sums and the fp16 result beside a product's own; absolute values and a mask to find outliers
    (bitsandbytes 0.50.2: backends/cuda/ops.py). Would notice: scratch that is left out, or of another type."""
    model()
    found = predict(
        TRAIN
        + """
found = prepare_model_for_kbit_training(load(quantization_config=BitsAndBytesConfig(load_in_8bit=True)))
train(get_peft_model(found, LoraConfig(target_modules=["q_proj"])), per_device_train_batch_size=2)
"""
    )
    trace, rows = found.training.trace, 2 * 128
    name = "bitsandbytes.int8_{}.default (scratch)"
    sizes: dict[str, set[int]] = {}
    for size, operation in zip(trace.sizes_bytes, trace.operation_of, strict=True):
        sizes.setdefault(trace.operations[operation], set()).add(size)
    assert sizes[name.format("mixed_scaled_mm")] == {rows * 64 * 6, rows * 128 * 6}
    assert sizes[name.format("vectorwise_quant")] == {rows * 64 * 3, rows * 128 * 3}
    assert any("7 columns" in note for note in found.training.notes)


@pytest.mark.slow
def test_inputs_of_8_bits_are_kept_in_spite_of_checkpointing(predict: Predict, model: Callable[..., str]) -> None:
    """As the job lora_int8 keeps them on the CPU. Would notice: a note that is missing, or that is wrong of reentrant
    checkpointing."""
    model()
    text = """
found = load(quantization_config=BitsAndBytesConfig(load_in_8bit=True))
kwargs = {"use_reentrant": sys.argv[1] == "reentrant"}
found = prepare_model_for_kbit_training(found, gradient_checkpointing_kwargs=kwargs)
train(get_peft_model(found, LoraConfig(target_modules=["q_proj"])), 512, gradient_checkpointing=True,
      gradient_checkpointing_kwargs=kwargs)
"""
    activations, results = [], []
    for kind in ("reentrant", "other"):
        found = predict(TRAIN + text, kind)
        activations.append(most(found.training.trace, "activations", "forward"))
        results.append(any('{"use_reentrant": True}' in note for note in found.training.notes))
    inputs = 8 * 512 * 2 * (3 * 64 + 128) * 2  # of two layers, in at least 16 bits; queries, keys and values share one
    assert results == [False, True] and activations[1] - activations[0] > inputs, (activations, inputs)


@pytest.mark.slow
def test_8_bits_on_a_gpu_keep_what_the_same_function_keeps_on_a_cpu() -> None:
    """bitsandbytes trains by another function on a CPU; there that of a GPU runs in layers that are not in training.
    Seven columns of the inputs are outliers, as is assumed.

    Would notice: another type or size of what an operation makes, or what is kept for the backward pass.
    """
    command = [sys.executable, "-m", "tests.predict_script.eight_bits_child"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-3000:]
    real, fake = json.loads(ran.stdout.splitlines()[-1])
    assert real == fake and len(real) > 15


PUBLISHED: Final = """
found = load(dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16))
found = prepare_model_for_kbit_training(found, gradient_checkpointing_kwargs={"use_reentrant": True})
options = json.loads(sys.argv[1])
found = get_peft_model(found, LoraConfig(task_type=options.pop("peft_type") and "CAUSAL_LM", **options))
for name, module in found.named_modules():  # as TRL did (trl 0.11.4: trainer/utils.py, `peft_module_casting_to_bf16`)
    if name.endswith(("embed_tokens", "lm_head")):
        module.to(torch.bfloat16)
train(found, 4096, per_device_train_batch_size=4, gradient_checkpointing=True,
      gradient_checkpointing_kwargs={"use_reentrant": True})
"""


@pytest.mark.slow
def test_published_qlora_as_a_script_writes_it(predict: Predict, model: Callable[..., str]) -> None:
    """Mistral-7B on an A100, measured by others, within 2 %. Would notice: PEFT's upcast of what is not quantised that
    is not followed, 4 bits that are kept in 16, inputs of frozen weights that are kept."""
    measured = published_models.read_rows(published_models.FOLDER / "memory.jsonl")["fms-2024-09-16-056"]
    config = published_models.config_of(measured)
    assert config is not None
    model(**{**config, "sliding_window": None})  # at its length, and the flash-attn package sees none
    adapter = json.dumps(published_models.adapter_of(measured))
    found = predict(TRAIN + PUBLISHED, adapter, capability=(8, 0))
    assert found.training, found
    peak = sum(found.training.trace.peak().categories.values()) / GIB
    assert peak == pytest.approx(measured["gib"], rel=0.02)
