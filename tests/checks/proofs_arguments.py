"""Proofs about names and values of arguments: what the real parsers, TrainingArguments and Trainers refuse."""

from __future__ import annotations

import importlib.util
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import HfArgumentParser, PreTrainedTokenizerFast, TrainingArguments

from tests.checks.plain import plain_proof
from tests.checks.real import arguments, model, refusals, refused, trainer


def parse_json(**content: Any) -> TrainingArguments:
    path = Path(tempfile.mkdtemp()) / "args.json"
    path.write_text(json.dumps({"output_dir": "x", "use_cpu": True, **content}))
    return HfArgumentParser(TrainingArguments).parse_json_file(str(path))[0]  # type: ignore[no-any-return]


def parse_with_trl(**content: Any) -> Any:
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    path = Path(tempfile.mkdtemp()) / "args.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "x", "dataset_name": "y", "use_cpu": True, **content}))
    return TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(["--config", str(path)])[1]


refusals(
    "loud", lambda content: parse_json(**content),
    ("misspelt-argument", "gradient_acumulation_steps", {"gradient_acumulation_steps": 4}),
    ("value-not-allowed", "step", {"eval_strategy": "step"}),
    ("value-not-allowed", "epochs", {"save_strategy": "epochs"}),
    ("value-not-allowed", "cosin", {"lr_scheduler_type": "cosin"}),
    ("value-not-allowed", "adamw_apex_fused", {"optim": "adamw_apex_fused"}),
    ("value-not-allowed", "all", {"hub_strategy": "all"}),
    ("value-not-allowed", "False", {"eval_strategy": False}),  # YAML's bare `no`
    ("steps-refused", "requires non-zero --logging_steps", {"logging_steps": 0}),
    ("steps-refused", "must be an integer if bigger than 1", {"save_steps": 2.5}),
    ("steps-refused", "warmup_steps >= 0", {"warmup_steps": -1}),
    ("steps-refused", "bigger than 0", {"torch_empty_cache_steps": 0}),
    ("schedule-needs-evaluation", "requires an eval strategy", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
    ("schedule-needs-evaluation", "requires an eval strategy", {"lr_scheduler_type": "greedy"}),
    by=plain_proof,
)  # fmt: skip


@plain_proof("argument-of-transformers-4", fails="loud")
def argument_of_transformers_4() -> None:
    gone: dict[str, Any] = {
        "evaluation_strategy": "steps", "warmup_ratio": 0.1, "overwrite_output_dir": True, "no_cuda": True,
        "per_gpu_train_batch_size": 8, "logging_dir": "logs", "save_safetensors": False, "dispatch_batches": None,
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block", "group_by_length": True, "jit_mode_eval": True,
    }  # fmt: skip
    for name, value in gone.items():
        refused(name, lambda name=name, value=value: parse_json(**{name: value}))
    assert parse_json(warmup_steps=0.1).get_warmup_steps(200) == 20


@plain_proof("argument-of-older-trl", fails="loud")
def argument_of_older_trl() -> None:
    parse_with_trl(max_length=512, dtype="bfloat16")
    refused("max_seq_length", lambda: parse_with_trl(max_seq_length=512))
    refused("torch_dtype", lambda: parse_with_trl(torch_dtype="bfloat16"))


@plain_proof("unknown-argument", fails="loud")
def unknown_argument() -> None:
    refused("my_own", lambda: parse_json(my_own=1))
    refused("my_own", lambda: parse_with_trl(my_own=1))
    refused("fsdp_strategy", lambda: parse_json(fsdp_strategy="full_shard"))
    # TRL's command line gives what its parser does not know to `accelerate launch`.
    from trl.cli.commands import training

    assert "resolve_accelerate_config_argument(config_remaining + cli_remaining)" in inspect.getsource(training)


@plain_proof("best-model-strategies", fails="loud")
def best_model_strategies() -> None:
    refused("requires the save and eval strategy to match", lambda: parse_json(load_best_model_at_end=True))
    parse_json(load_best_model_at_end=True, eval_strategy="steps")


@plain_proof("best-model-steps", fails="loud")
def best_model_steps() -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    refused("round multiple", lambda: parse_json(**best, eval_steps=200))
    refused("mixing ratio and absolute", lambda: parse_json(**best, eval_steps=0.1, save_steps=100))
    parse_json(**best, eval_steps=0.1, save_steps=0.3)


@plain_proof("optimizer-not-installed", fails="late")
def optimizer_not_installed() -> None:
    for optim, package in (("schedule_free_radam", "schedulefree"), ("grokadamw", "grokadamw")):
        assert importlib.util.find_spec(package) is None
        refused(package, lambda optim=optim: trainer(None, optim=optim).train())


@plain_proof("checkpointing-reentrant-ddp", fails="late")
def checkpointing_reentrant_ddp() -> None:
    """One process is enough: the group's size changes nothing in what is marked."""
    own_group = not dist.is_initialized()
    if own_group:
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(4, 4)

        class Network(torch.nn.Module):
            def __init__(self, again: bool) -> None:
                super().__init__()
                self.first, self.layer, self.again = torch.nn.Linear(4, 4), layer, again

            def forward(self, value: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.layer, self.first(value), use_reentrant=self.again)  # type: ignore[no-any-return]

        def step(again: bool, search: bool) -> None:
            network = DistributedDataParallel(Network(again), find_unused_parameters=search)
            network(torch.ones(2, 4)).sum().backward()

        step(False, True)
        step(True, False)
        refused("mark a variable ready only once", lambda: step(True, True))
    finally:
        if own_group:
            dist.destroy_process_group()


@plain_proof("grouping-streamed-data", fails="silent")
def grouping_streamed_data() -> None:
    from transformers import Trainer

    from tests.checks.real import model, rows

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows())

    args = arguments(None, train_sampling_strategy="group_by_length")
    made = Trainer(model=model(), args=args, train_dataset=Stream())
    assert made._get_train_sampler() is None
    made.train()


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


_ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}


@plain_proof("trl-value-not-allowed", fails="late")
def trl_value_not_allowed() -> None:
    from trl import SFTConfig, SFTTrainer
    from trl.generation import vllm_generation

    def packed(strategy: str) -> Any:
        args = SFTConfig(tempfile.mkdtemp(), packing=True, packing_strategy=strategy, max_length=8, **_ON_CPU)
        rows = Dataset.from_list([{"input_ids": [2, 2, 1]}] * 4)
        return SFTTrainer(model(), args=args, train_dataset=rows, processing_class=_tokenizer())

    refused("Invalid packing strategy 'ffd'", lambda: packed("ffd"))
    packed("wrapped")
    packed("bfd-requeue")
    assert "vllm_mode must be either 'server' or 'colocate'" in inspect.getsource(vllm_generation)


@plain_proof("generations-split", fails="loud")
def generations_split() -> None:
    from trl import GRPOConfig, RLOOConfig

    def made(cls: Any = GRPOConfig, **more: Any) -> Any:
        return cls(tempfile.mkdtemp(), **{"num_generations": 8, **_ON_CPU, **more})

    for cls in (GRPOConfig, RLOOConfig):
        refused("must be divisible by num_generations (8)", lambda cls=cls: made(cls, per_device_train_batch_size=4))
        made(cls, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        made(cls, per_device_train_batch_size=4, steps_per_generation=4)
        refused("at least 2 generations", lambda cls=cls: made(cls, num_generations=1))
        refused("divisible", lambda cls=cls: made(cls, generation_batch_size=12, per_device_train_batch_size=4))
        small = {"eval_strategy": "steps", "per_device_eval_batch_size": 4}
        refused("global eval batch size", lambda cls=cls, small=small: made(cls, **small))
        made(cls, **small, num_generations_eval=4)
        made(cls, **{**small, "eval_strategy": "no"})


@plain_proof("padding-free-ignored", fails="silent")
def padding_free_ignored() -> None:
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_list([{"prompt": "a", "chosen": "a a", "rejected": "a"}] * 2)
    args = DPOConfig(tempfile.mkdtemp(), padding_free=True, max_length=8, **_ON_CPU)
    made = DPOTrainer(model(), model(), args=args, train_dataset=rows, processing_class=_tokenizer())
    assert made.padding_free is False


@plain_proof("kto-batch-of-one", fails="late")
def kto_batch_of_one() -> None:
    from trl import KTOConfig, KTOTrainer

    def made(**more: Any) -> Any:
        args = KTOConfig(tempfile.mkdtemp(), per_device_train_batch_size=1, max_length=8, **_ON_CPU, **more)
        rows = Dataset.from_list([{"prompt": "a", "completion": "a a", "label": label} for label in (True, False)])
        return KTOTrainer(model(), model(), args=args, train_dataset=rows, processing_class=_tokenizer())

    refused("batch size must be > 1", made)
    made(loss_type="apo_zero_unpaired")
