"""One rank, or one process, of a small training with the settings of `fsdp2`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_memkit import MemoryReportCallback
from hf_memkit.setup.build import add_adapters, build_arguments, install_model_parts, trainer_options
from hf_memkit.setup.on_cpu import without_gpu
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.techniques.jobs import gpt2_job
from tests.techniques.replicas_worker import start_as_rank
from tests.tiny_trainer import samples

CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.1},
    "checkpointing": {},
    "chunked": {},
    "tied": {},
    "lora": {},
}


def _setup(case: str, processes: int) -> Setup:
    setup = Setup(preset="fsdp2", job=gpt2_job(None, gpus=processes))
    names = ["lora"] if case == "lora" else []
    names += ["fsdp2"] if processes > 1 else []
    names += ["activation-checkpointing"] if case in ("checkpointing", "lora") else []
    for name in names:
        setup = TECHNIQUES[name](setup)
    if case == "chunked":
        setup = setup.put("model_parts.chunked_loss", {"chunk_tokens": 3}, "a test")
    return without_gpu(setup, rehearsal=True)[0]


def train(case: str, folder: str, processes: int, vocabulary: int = 64) -> dict[str, Any]:
    """Losses, norms of gradients, bytes of weights and states on this rank, all-gathers, and what was saved."""
    setup = _setup(case, processes)
    own = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 5,
        "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2, "max_grad_norm": 0.0, "bf16": False,
        "optim": "adamw_torch", **CASES[case],
    }  # fmt: skip
    own["per_device_train_batch_size"] = 8 // processes // int(own.get("gradient_accumulation_steps", 1))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=vocabulary, use_cache=False, tie_word_embeddings=case == "tied",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if setup.section("adapter"):
        model = add_adapters(model, {**setup.section("adapter"), "init_lora_weights": False})
    install_model_parts(model, setup)
    arguments = build_arguments(setup, own)
    options = trainer_options(setup, model=model, arguments=arguments)
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(), **options)
    trainer.add_callback(MemoryReportCallback(log="none"))
    gather = distributed.all_gather_single
    with patch.object(distributed, gather.__name__, side_effect=gather) as gathers:
        trainer.train()
    trainer.save_model(folder)

    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    saved = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    return {
        "losses": [entry["loss"] for entry in log],
        "norms": [float(entry["grad_norm"]) for entry in log],
        "weights": sum(_local(weight).nbytes for weight in trainer.model.parameters()),
        "states": sum(_local(value).nbytes for value in states if value.dim()),
        "gathers": gathers.call_count,
        "saved": sorted(name for tensors in saved for name in tensors),
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_rank(rank: int, port: int, folder: str) -> dict[str, dict[str, Any]]:
    """All cases, as one of two ranks that a launcher started."""
    start_as_rank(rank, port)
    try:
        return {case: train(case, f"{folder}/{case}", 2) for case in CASES}
    finally:
        distributed.destroy_process_group()
