"""Cases of the rules about the YAML of `accelerate launch`."""

from __future__ import annotations

from typing import Any

from hf_memkit.checks import Subject
from tests.checks.case import Case, Cases

DEEPSPEED: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED"}


def yaml_of(arguments: dict[str, Any] | None = None, **content: Any) -> Subject:
    return Subject(launcher={**DEEPSPEED, **content}, launcher_file="acc.yaml", arguments=arguments)


def section(**content: Any) -> dict[str, Any]:
    return {"deepspeed_config": content}


def sizes(processes: int, kind: str = "FSDP", **sizes: int) -> Subject:
    given = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return yaml_of(distributed_type=kind, num_processes=processes, parallelism_config=given)


CASES: Cases = {
    "parallelism-sizes": [
        Case("parallelism_config", sizes(4, cp_size=3), sizes(4, cp_size=2, dp_shard_size=2)),
        Case("parallelism_config", sizes(2, tp_size=2), sizes(4, tp_size=2, dp_shard_size=2)),
        Case("parallelism_config", sizes(2, tp_size=4), sizes(2, "MULTI_GPU", tp_size=2)),
        Case("parallelism_config", sizes(8, dp_shard_size=2), sizes(8, dp_shard_size=1)),
    ],
    "accelerate-main-process-ip": [
        *(Case("main_process_ip", yaml_of(num_machines=2, **more),
               yaml_of(num_machines=2, main_process_ip="10.0.0.1", **more))
          for more in ({"distributed_type": "MULTI_GPU"}, {"distributed_type": "FSDP"},
                       section(deepspeed_multinode_launcher="standard"))),
        Case("main_process_ip", yaml_of(num_machines=2, distributed_type="FSDP"), yaml_of(num_machines=2)),
    ],
    "accelerate-unknown-key": Case("zero_stage", yaml_of(zero_stage=3), yaml_of(dynamo_backend="no", num_processes=2)),
    "accelerate-wrong-value": [
        Case("distributed_type", yaml_of(distributed_type="deepspeed"), yaml_of(distributed_type=False)),
        Case("distributed_type", Subject(launcher={"num_processes": 2}, launcher_file="acc.yaml"), yaml_of()),
        Case("mixed_precision", yaml_of(mixed_precision=False), yaml_of(mixed_precision="no")),
        Case("mixed_precision", yaml_of(mixed_precision="bfloat16"), yaml_of(mixed_precision="BF16")),
        Case("deepspeed_config", yaml_of(deepspeed_config="ds.json"), yaml_of(deepspeed_config=None)),
        Case("num_processes", yaml_of(num_processes="two"), yaml_of(num_processes="2")),
    ],
    "accelerate-json-missing": Case("deepspeed_config.deepspeed_config_file",
                                    yaml_of(**section(deepspeed_config_file="/no/ds.json")),
                                    yaml_of(**section(deepspeed_config_file=__file__))),
    "accelerate-key-unread": [
        Case("deepspeed_config.zero_stge", yaml_of(**section(zero_stge=3)), yaml_of(**section(zero_stage=3))),
        Case("deepspeed_config.overlap_comm", yaml_of(**section(zero_stage=2, overlap_comm=True)),
             yaml_of(**section(zero_stage=2, zero3_init_flag=False, deepspeed_multinode_launcher="standard"))),
    ],
    "accelerate-nvme-path": Case("deepspeed_config.offload_param_device",
                                 yaml_of(**section(offload_param_device="nvme", offload_param_nvme_path="/data")),
                                 yaml_of(**section(offload_param_device="cpu", offload_param_nvme_path="none"))),
    "accelerate-engine-not-chosen": [
        Case("deepspeed_config", yaml_of(**section(zero_stage=3), distributed_type="MULTI_GPU"),
             yaml_of(**section(zero_stage=3))),
        Case("deepspeed_config", yaml_of(**section(zero_stage=3), distributed_type="NO"), yaml_of(**section())),
        Case("fsdp_config", yaml_of(fsdp_config={"fsdp_version": 2}),
             yaml_of(fsdp_config={"fsdp_version": 2}, distributed_type="FSDP")),
    ],
    "accelerate-precision-overruled": [
        Case("mixed_precision", yaml_of({"bf16": True}, mixed_precision="fp16"),
             yaml_of({"bf16": True}, mixed_precision="bf16")),
        Case("mixed_precision", yaml_of({"fp16": True}, mixed_precision="bf16", distributed_type="FSDP"),
             yaml_of({"fp16": True}, mixed_precision="no", distributed_type="FSDP")),
    ],
    "accelerate-key-beside-json": [
        Case("deepspeed_config.zero_stage", yaml_of(**section(deepspeed_config_file="ds.json", zero_stage=3)),
             yaml_of(**section(deepspeed_config_file="ds.json", zero3_init_flag=True))),
        Case("mixed_precision", yaml_of(mixed_precision="bf16", **section(deepspeed_config_file="ds.json")),
             yaml_of(mixed_precision="bf16", **section(zero_stage=3))),
        Case("deepspeed_config.gradient_clipping", yaml_of({"deepspeed": "ds.json"}, **section(gradient_clipping=1.0)),
             yaml_of({"output_dir": "x"}, **section(gradient_clipping=1.0))),
    ],
}  # fmt: skip
