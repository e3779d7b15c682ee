"""The `run` and `modules` records, and what is held where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hf_memkit import MemoryReportCallback
from hf_memkit.measuring.memory.facts import memory_arguments, model_facts, swap_folders
from hf_memkit.measuring.memory.holdings import Inventory, walk
from hf_memkit.measuring.memory.modules import module_rows
from hf_memkit.measuring.memory.optimizer_state import state_summary
from hf_memkit.measuring.memory.records import read_records, steps
from tests.measuring.recorded import QUIET
from tests.tiny_trainer import tiny_gpt2


def test_arguments_of_deepspeed() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
        "offload_param": {"device": "nvme", "nvme_path": "/fast"},
        "unset": None,
    }
    config = SimpleNamespace(config={"zero_optimization": zero})
    args = SimpleNamespace(deepspeed_plugin=SimpleNamespace(hf_ds_config=config))
    result = memory_arguments(args)
    assert result["deepspeed_stage"] == 3 and result["deepspeed_offload_optimizer"] == "nvme"
    assert swap_folders(args) == (Path("/fast"),) and swap_folders(SimpleNamespace()) == ()
    zero["offload_param"] = zero["offload_optimizer"] = None
    assert swap_folders(args) == () and "deepspeed_offload_param" not in memory_arguments(args)


def test_rows_of_equal_layers() -> None:
    model = tiny_gpt2()
    rows = module_rows(model)
    names = [row["name"] for row in rows]
    assert names[:3] == ["transformer.wte", "transformer.wpe", "transformer.h.0…1.ln_1"]
    assert "lm_head" not in names  # tied: counted in wte
    attention = next(row for row in rows if row["name"] == "transformer.h.0…1.attn.c_attn")
    assert attention["class"] == "Conv1D" and attention["repeats"] == 2 and attention["parameters"] == 16 * 48 + 48
    assert attention["places"] == {"host": 4 * attention["parameters"]} and attention["bytes"] == 4 * (16 * 48 + 48)
    model.transformer.h[1].requires_grad_(False)
    parts = {row["name"]: row for row in module_rows(model)}
    assert (
        parts["transformer.h.0.ln_1"]["trainable_parameters"] == 32 and "repeats" not in parts["transformer.h.0.ln_1"]
    )
    assert parts["transformer.h.1.ln_1"]["trainable_parameters"] == 0
    json.dumps(rows)


def test_rows_stay_few() -> None:
    """Experts that all differ: deep modules are added to what they are part of."""
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleDict({f"expert{e}": nn.Sequential(nn.Linear(2, 2 + e + n), nn.ReLU()) for e in range(20)})
        for n in range(30)
    )
    rows = module_rows(model)
    assert 0 < len(rows) <= 300
    total = sum(p.numel() for p in model.parameters())
    assert sum(row["parameters"] * row.get("repeats", 1) for row in rows) == total
    assert sum(row["bytes"] * row.get("repeats", 1) for row in rows) == 4 * total
    assert module_rows(nn.Module()) == []


def test_a_walk_is_repeated_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []

    def counted(*args: Any) -> Any:
        walks.append(1)
        return walk(*args)

    monkeypatch.setattr("hf_memkit.measuring.memory.holdings.walk", counted)
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    inventory = Inventory(model, torch.device("cpu"))
    assert inventory.look(optimizer) == {("weights", "device"): 64 * 64 * 4}
    model(torch.randn(2, 64)).sum().backward()
    assert inventory.gradient_bytes() == 64 * 64 * 4
    assert inventory.look(optimizer)["gradients", "device"] == 64 * 64 * 4 and len(walks) == 1
    optimizer.step()
    full = inventory.look(optimizer)
    assert full["optimizer", "device"] == 2 * 64 * 64 * 4 + 4 and len(walks) == 2
    assert inventory.look(optimizer) == full == walk(model, optimizer, torch.device("cpu")) and len(walks) == 2
    optimizer.zero_grad()
    assert ("gradients", "device") not in inventory.look(optimizer)
    for _ in range(200):
        inventory.look(optimizer)
    assert 3 <= len(walks) <= 4


def test_gradients_of_sparse_embeddings_and_scales_of_quantized_weights() -> None:
    model = nn.Embedding(100, 4, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    assert walk(model)["gradients", "host"] == 2 * 8 + 2 * 4 * 4
    quantized = nn.Linear(8, 8, bias=False)
    nested = SimpleNamespace(absmax=torch.zeros(4), state2=None)
    quantized.weight.quant_state = SimpleNamespace(absmax=torch.zeros(16), state2=nested)  # as bitsandbytes has it
    assert walk(quantized)["weights", "host"] == 8 * 8 * 4 + 16 * 4 + 4 * 4


def test_parameters_that_zero_3_has_gathered() -> None:
    model = nn.Linear(64, 64, bias=False)
    model.weight.ds_tensor = torch.zeros(2048)
    assert walk(model) == {("buffers", "host"): 64 * 64 * 4, ("weights", "host"): 2048 * 4}
    model.weight.ds_persist = True  # small ones stay whole
    assert walk(model) == {("weights", "host"): 64 * 64 * 4 + 2048 * 4}


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def test_shares_of_fsdp2(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model[0] = checkpoint_wrapper(model[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    inventory = Inventory(model, None)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    share = 32 * 64 * 4
    held = {"weights": share, "gradients": share, "optimizer": 2 * share + 4}
    assert inventory.look(optimizer) == {(name, "host"): size for name, size in held.items()}
    assert inventory.gradient_bytes() == share
    assert state_summary(optimizer)["exp_avg"] == {"float32": 1}

    facts = model_facts(model)
    assert (facts["engine"], facts["model_class"], facts["parameters"]) == ("FSDP2", "Sequential", 64 * 64)
    assert [(row["name"], row["class"], row["bytes"]) for row in module_rows(model)] == [("0", "Linear", share)]

    arguments = TrainingArguments(
        output_dir="x", use_cpu=True, fsdp=True, fsdp_config={"cpu_offload": True, "activation_checkpointing": True}
    )
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    state = {"fsdp_plugin": plugin, "distributed_type": DistributedType.FSDP}
    monkeypatch.setattr(AcceleratorState, "_shared_state", state)
    settings = memory_arguments(arguments)["fsdp_config"]
    assert settings == {
        "version": 2, "reshard_after_forward": True, "cpu_offload": True, "activation_checkpointing": True,
        "cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT",
    }  # fmt: skip
    json.dumps(settings)


def test_the_largest_batch_so_far_is_watched(make_trainer: Any, allocator: Any) -> None:
    callback = MemoryReportCallback(**QUIET, readers=[allocator])
    trainer = make_trainer(
        [callback], max_steps=8, per_device_train_batch_size=1, train_sampling_strategy="sequential"
    )
    lengths = [4, 4, 4, 4, 4, 8, 6, 8]
    rows = [torch.arange(length) for length in lengths]
    trainer.train_dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer.train()
    result = {s["longest_sequence"]: s["step"] for s in steps(read_records(callback.path)) if "categories" in s}
    assert result == {4: 3, 8: 6}


def test_a_model_without_an_output_embedding(make_trainer: Any, allocator: Any) -> None:
    """The last layer ends the body there."""
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=64, num_labels=2
    )
    model = BertForSequenceClassification(config)
    model.classifier.register_forward_hook(lambda *_: allocator.use(5))
    callback = MemoryReportCallback(**QUIET, readers=[allocator])
    trainer = make_trainer([callback], model=model)
    trainer.train_dataset = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.tensor(1)}] * 8
    trainer.train()
    first = steps(read_records(callback.path))[0]["categories"]
    assert first["loss_gib"] == pytest.approx(5) and callback.callback_errors == 0
