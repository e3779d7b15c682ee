"""Proofs about the YAML of `accelerate launch`: its real launcher, and TrainingArguments in its variables."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from accelerate.commands import launch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.checks.accelerate_launch import launched, trained_with
from tests.checks.plain import plain_proof
from tests.checks.real import refusals, refused

DEEPSPEED: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
}


def named_json() -> str:
    path = Path(tempfile.mkdtemp()) / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}))
    return str(path)


refusals(
    "loud", lambda content: trained_with({**DEEPSPEED, **content}),
    ("accelerate-unknown-key", "had unknown keys (['zero_stage'])", {"zero_stage": 3}),
    ("accelerate-json-missing", "none.json", {"deepspeed_config": {"deepspeed_config_file": "none.json"}}),
    by=plain_proof,
)  # fmt: skip


@plain_proof("accelerate-wrong-value", fails="loud")
def accelerate_wrong_value() -> None:
    refused("not a valid DistributedType", lambda: launched({**DEEPSPEED, "distributed_type": "deepspeed"}))
    refused("Unknown mixed_precision mode", lambda: launched({**DEEPSPEED, "mixed_precision": "bfloat16"}))
    refused("lower", lambda: launched({**DEEPSPEED, "mixed_precision": False}))
    refused("keys", lambda: launched({**DEEPSPEED, "deepspeed_config": "ds.json"}))
    refused("two", lambda: launched({**DEEPSPEED, "num_processes": "two"}))
    refused("`distributed_type` must be specified", lambda: launched({"num_processes": 2}))
    launched({**DEEPSPEED, "distributed_type": False, "num_processes": 1})


@plain_proof("accelerate-key-unread", fails="silent")
def accelerate_key_unread() -> None:
    with_it = launched({**DEEPSPEED, "deepspeed_config": {"zero_stage": 2, "overlap_comm": "seen"}})
    assert with_it["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert not any("overlap" in name.lower() or each == "seen" for name, each in with_it.items())


@plain_proof("accelerate-nvme-path", fails="silent")
def accelerate_nvme_path() -> None:
    swaps = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/seen"}
    config = trained_with({**DEEPSPEED, "deepspeed_config": swaps}).deepspeed_plugin.deepspeed_config
    assert config["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "none"}


@plain_proof("accelerate-engine-not-chosen", fails="silent")
def accelerate_engine_not_chosen() -> None:
    section = {"deepspeed_config": {"zero_stage": 3}}
    assert "ACCELERATE_USE_DEEPSPEED" not in launched({**DEEPSPEED, **section, "distributed_type": "MULTI_GPU"})
    assert launched({**DEEPSPEED, **section})["ACCELERATE_USE_DEEPSPEED"] == "true"
    fsdp = {"fsdp_config": {"fsdp_version": 2}}
    assert "ACCELERATE_USE_FSDP" not in launched({**DEEPSPEED, **fsdp, "distributed_type": "MULTI_GPU"})
    assert launched({**DEEPSPEED, **fsdp, "distributed_type": "FSDP"})["ACCELERATE_USE_FSDP"] == "true"


@plain_proof("accelerate-precision-overruled", fails="silent")
def accelerate_precision_overruled() -> None:
    for kind in ("DEEPSPEED", "FSDP", "MULTI_GPU"):
        content = {**DEEPSPEED, "distributed_type": kind}
        assert trained_with({**content, "mixed_precision": "fp16"}, bf16=True).mixed_precision == "bf16"
        assert trained_with({**content, "mixed_precision": "bf16"}).mixed_precision == "bf16"


@plain_proof("accelerate-key-beside-json", fails="loud")
def accelerate_key_beside_json() -> None:
    own = named_json()
    for name, value in (("zero_stage", 2), ("gradient_accumulation_steps", 1), ("offload_param_device", "none")):
        section = {"deepspeed_config_file": own, name: value}
        refused("deepspeed_config_file", lambda it=section: trained_with({**DEEPSPEED, "deepspeed_config": it}))
    alone = {"deepspeed_config": {"deepspeed_config_file": own, "zero3_init_flag": False}}
    refused("deepspeed_config_file", lambda: trained_with({**DEEPSPEED, **alone, "mixed_precision": "bf16"}))
    trained_with({**DEEPSPEED, **alone})
    by_yaml = {"deepspeed_config": {"zero_stage": 2}}
    refused("deepspeed_config_file", lambda: trained_with({**DEEPSPEED, **by_yaml}, deepspeed=own))


@plain_proof("accelerate-main-process-ip", fails="silent")
def main_process_ip() -> None:
    def meeting_place(content: dict[str, Any], **more: Any) -> str:
        path = Path(tempfile.mkdtemp()) / "acc.yaml"
        content = {**DEEPSPEED, **content, "num_machines": 2, "machine_rank": 1, "main_process_port": 1234, **more}
        path.write_text(json.dumps(content))
        given = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        with mock.patch("torch.cuda.is_available", return_value=True):
            given = launch._validate_launch_command(given)[0]
        given.deepspeed_fields_from_accelerate_config = ""
        prepare = prepare_deepspeed_cmd_env if given.use_deepspeed else prepare_multi_gpu_env
        prepare(given)
        return str(getattr(given, "rdzv_endpoint", ""))

    standard = {"deepspeed_config": {"zero_stage": 2, "deepspeed_multinode_launcher": "standard"}}
    for content in ({"distributed_type": "MULTI_GPU"}, {"distributed_type": "FSDP"}, standard):
        assert meeting_place(content) == "None:1234"
        assert meeting_place(content, main_process_ip="10.0.0.1") == "10.0.0.1:1234"
    assert meeting_place({"deepspeed_config": {"zero_stage": 2}}) == ""


@plain_proof("parallelism-sizes", fails="loud")
def parallelism_sizes() -> None:
    def validated(processes: int, *, fsdp: bool = True, **sizes: int) -> None:
        given = {f"parallelism_config_{name}": size for name, size in sizes.items()}
        content = {**DEEPSPEED, "distributed_type": "FSDP", "num_processes": processes, "parallelism_config": given}
        with mock.patch.dict(os.environ, launched(content)):
            config = ParallelismConfig()  # from the launcher's variables
        config._validate_accelerator(SimpleNamespace(multi_device=not fsdp, is_fsdp2=fsdp, num_processes=processes))

    refused("does not match num_processes (4)", lambda: validated(4, cp_size=3))
    refused("does not match num_processes (8)", lambda: validated(8, dp_shard_size=2))
    refused("no dimension for FSDP to shard across", lambda: validated(2, tp_size=2))
    validated(4, cp_size=2, dp_shard_size=2)
    validated(2, tp_size=2, fsdp=False)
