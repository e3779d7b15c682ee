"""LoRA and QLoRA through the real Trainer, PEFT and bitsandbytes, which quantises and trains on a CPU too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

from hf_memkit import preset
from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.catalog.library_versions import to_installed_arguments
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.presets import apply_preset
from hf_memkit.setup.techniques.setup_ledger import (
    adapter_parameters,
    copied_parameters,
    dequantised_bytes,
    quantised_bytes,
    quantised_layers,
)
from tests.techniques.jobs import MACHINE, gpt2_job
from tests.techniques.proving import proves

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 72, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 32},
    "opt": {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0,
            "max_position_embeddings": 32, "word_embed_proj_dim": 64},
}  # fmt: skip
ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models by type, with random weights: only loading quantises."""
    actual = {}
    for kind, shape in SHAPES.items():
        torch.manual_seed(0)
        actual[kind] = tmp_path_factory.mktemp(kind)
        config = AutoConfig.for_model(kind, vocab_size=256, **shape)
        AutoModelForCausalLM.from_config(config).save_pretrained(actual[kind])
    return actual


def load(folder: Path, quantization: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = {} if quantization is None else {"quantization_config": BitsAndBytesConfig(**quantization)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **config)


def adapted(model: Any, **fields: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(**{**ALL, **fields}))


def facts_of(folder: Path) -> ModelFacts:
    return describe(str(folder), use_hub=False)


def rows(count: int = 16) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 256, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def train(model: Any, folder: Path, **more: Any) -> tuple[list[float], Trainer]:
    values: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3,
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
        "optim": "adamw_torch",
    }  # fmt: skip
    trainer = Trainer(
        model=model, args=TrainingArguments(**to_installed_arguments({**values, **more})), train_dataset=rows()
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def trained(model: Any) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_formula_counts_the_adapters_that_peft_makes(folders: dict[str, Path], kind: str) -> None:
    facts = facts_of(folders[kind])
    fields: list[dict[str, Any]] = [{}, {"r": 7, "exclude_modules": ["c_fc", "up_proj", "fc1"]}]
    fields.append({"target_modules": [facts.linears[0].name.rpartition(".")[2], "lm_head"]})
    fields.append({"target_modules": r".*\.0\..*(q_proj|c_attn|down_proj|fc2)"})
    for changes in fields:
        model = adapted(load(folders[kind]), **changes)
        assert sum(p.numel() for p in trained(model).values()) == adapter_parameters(facts, {**ALL, **changes}) > 0
    copied = adapted(load(folders[kind]), modules_to_save=["lm_head"])
    copies = [p for name, p in trained(copied).items() if "modules_to_save" in name]
    assert sum(p.numel() for p in copies) == copied_parameters(facts, {"modules_to_save": ["lm_head"]})
    assert {p.dtype for p in copies} == {torch.bfloat16}, "the ledger and a rule say: in the weights' own dtype"


@proves("memory", "lora")
def test_gradients_and_states_are_those_of_the_adapters_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """Measured on the real optimizer after real steps: 4 + 4 + 8 bytes an adapter parameter, and 2 a frozen one."""
    facts = facts_of(folders["llama"])
    model = adapted(load(folders["llama"]))
    gradients: list[int] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.nbytes))  # type: ignore[union-attr]
    _, trainer = train(model, tmp_path, bf16=True, max_steps=1)
    count = adapter_parameters(facts, ALL)
    states = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
    assert sum(gradients) == 4 * count and sum(value.nbytes for value in states) == 8 * count
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert sum(p.nbytes for p in frozen) == 2 * facts.parameters
    assert sum(p.nbytes for p in trained(model).values()) == 4 * count
    assert count < 0.1 * facts.parameters


@proves("same-result", "lora")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_begin_as_nothing_and_end_as_a_change_of_the_weights(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Before the first step the model computes what it did, bit for bit; afterwards its own weights are the same bits,
    and merged they compute what both did, within fp32's rounding."""
    plain, tokens = load(folders[kind], dtype=torch.float32), torch.arange(16)[None]
    model = adapted(load(folders[kind], dtype=torch.float32))
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    losses, _ = train(model, tmp_path, activation_checkpointing=True)
    assert len(losses) == 3 and all(bool(p.any()) for p in trained(model).values()), "one never moved"
    frozen = {n.replace("base_model.model.", "").replace("base_layer.", ""): p for n, p in model.named_parameters()}
    assert all(torch.equal(frozen[name], parameter) for name, parameter in plain.named_parameters())
    both = model.eval()(tokens).logits
    assert float((both - plain(tokens).logits).abs().max()) > 1e-3
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, both, rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_the_adapter_and_loads_beside_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel

    model, tokens = adapted(load(folders["llama"], dtype=torch.float32)), torch.arange(16)[None]
    _, trainer = train(model, tmp_path / "run")
    trainer.save_model(str(tmp_path / "saved"))
    count = adapter_parameters(facts_of(folders["llama"]), ALL)
    assert 4 * count <= (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size < 4 * count + 10_000
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(load(folders["llama"], dtype=torch.float32), tmp_path / "saved")
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def storages(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@proves("memory", "qlora")
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "quantization", [NF4, {"load_in_4bit": True}, {"load_in_8bit": True}], ids=["nf4", "fp4-once", "int8"]
)
def test_the_formula_is_what_bitsandbytes_holds(
    folders: dict[str, Path], kind: str, quantization: dict[str, Any]
) -> None:
    """Measured: the storages of every weight, and of the scales and tables that no count of parameters shows."""
    facts, model = facts_of(folders[kind]), load(folders[kind], quantization)
    packed = [p for p in model.parameters() if p.dtype in (torch.uint8, torch.int8)]
    plain = [p for p in model.parameters() if p.dtype is torch.bfloat16]
    if "load_in_8bit" in quantization:
        statistics = [p.SCB for p in packed]
    else:
        states = [p.quant_state for p in packed]
        statistics = [tensor for state in states for tensor in (state.absmax, state.code)]
        statistics += [t for s in states if s.nested for t in (s.state2.absmax, s.state2.code, s.offset)]
    expected = quantised_bytes(facts, quantization)
    assert (storages(packed), storages(statistics), storages(plain)) == (
        expected.codes, expected.statistics, expected.kept
    )  # fmt: skip
    assert len(packed) == len(quantised_layers(facts, quantization))
    largest = max(layer.elements for layer in facts.linears if not layer.head)
    assert dequantised_bytes(facts, quantization) == 2 * largest


@proves("same-result", "qlora")
def test_qlora_trains_as_lora_beside_the_dequantised_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    """The same losses as LoRA beside the numbers that the 4-bit codes stand for; products in fp32, so that only the
    order of summation differs: 1e-5."""
    import bitsandbytes.functional as bnb

    exact = {**NF4, "bnb_4bit_compute_dtype": "float32"}
    quantised, plain = (load(folders["llama"], q, torch.float32) for q in (exact, None))
    for name, module in quantised.named_modules():
        if type(module).__name__ == "Linear4bit":
            weight = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.data = weight.float()
    expected, _ = train(adapted(plain), tmp_path)
    losses, trainer = train(adapted(quantised), tmp_path, activation_checkpointing=True)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert all(bool(p.any()) for p in trained(trainer.model).values())


@pytest.mark.parametrize(("card", "dtype"), [("A100 40GB", "bfloat16"), ("T4", "float16")])
def test_qlora_computes_in_what_the_gpu_computes_in(card: str, dtype: str) -> None:
    setup = apply_preset("qlora", gpt2_job(machine=MACHINE.with_gpu(named_gpu(card))))
    assert setup["model.quantization"] == {**NF4, "bnb_4bit_compute_dtype": dtype}
    assert setup["adapter.target_modules"] == "all-linear" and "model.pad_vocabulary_to_multiple_of" not in setup


def test_values_reach_the_adapters() -> None:
    setup = apply_preset("lora", gpt2_job(values={"rank": 4, "dropout": 0.1}))
    assert (setup["adapter.r"], setup["adapter.lora_alpha"], setup["adapter.lora_dropout"]) == (4, 8, 0.1)
    assert apply_preset("lora", gpt2_job(None))["adapter.r"] == 16


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_the_preset_trains_a_saved_model_as_it_is(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """The whole way of a user: preset → model, adapters, optimizer, Trainer → adapters on disk. The rank is large for
    so small a model, because 8-bit optimizers take no state of fewer than 4096 elements."""
    setup = preset(
        name, model=str(folders["llama"]), gpu_memory="16GB", global_batch_size=4, sequence_length=16,
        values={"rank": 64}, arguments={"per_device_train_batch_size": 2},
    )  # fmt: skip
    own = {"use_cpu": True, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none",
           "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    trainer = setup.trainer(str(tmp_path / "run"), arguments=own, train_dataset=rows())
    trainer.train()
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert ("Linear4bit" in kinds) is (name == "qlora")
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    codes_and_kept = [row for row in setup.ledger.rows if row.place == "device" and row.category == "weights"]
    expected = sum(row.size_bytes for row in codes_and_kept if "scales" not in row.term and "adapters" not in row.term)
    assert storages(frozen) == expected
    assert all(bool(p.any()) for p in trained(trainer.model).values()), "every adapter was trained"
    trainer.save_model(str(tmp_path / "adapter"))
    assert {path.name for path in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
