"""Predicts one training with DDP, ZeRO and FSDP2 on 2, 4 and 8 GPUs: memory, RAM, bytes sent and time of a step.

    python benchmarks/sharding.py             # results/sharding.json; needs no GPU
    python scripts/docs.py fsdp.md            # the tables

Nothing is measured. The script is traced for each engine and number of GPUs, as `memkit plan` traces it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from benchmarks.provenance import RESULTS, provenance  # noqa: E402
from hf_memkit.catalog.hardware import described_machine  # noqa: E402
from hf_memkit.common.units import GIB  # noqa: E402
from hf_memkit.common.user_script import UserScript  # noqa: E402
from hf_memkit.plan.candidate import Candidate  # noqa: E402
from hf_memkit.plan.candidate_time import Speeds, untraced_traffic  # noqa: E402
from hf_memkit.plan.judge_trace import judge_trace  # noqa: E402
from hf_memkit.plan.judgement import Judgement  # noqa: E402
from hf_memkit.prediction.prediction import Prediction  # noqa: E402
from hf_memkit.prediction.running_scripts import ScriptJob, training_of  # noqa: E402
from hf_memkit.prediction.traced_training import TracedTraining  # noqa: E402
from hf_memkit.prediction.waiting_script import WaitingScript  # noqa: E402
from hf_memkit.setup.script_overrides import Overrides  # noqa: E402

RAM: Final = "1024GB"
MODEL: Final = "Llama 3.1 8B"
CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
SCRIPT: Final = """
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32)
rows = [{"input_ids": torch.arange(2048), "labels": torch.arange(2048)}] * 512
Trainer(model, arguments, train_dataset=rows).train()
"""
ARGUMENTS: Final = (
    "--output_dir", "out", "--bf16", "--per_device_train_batch_size", "2", "--activation_checkpointing",
    "--max_steps", "10", "--save_strategy", "no",
)  # fmt: skip
FSDP_CONFIG: Final[dict[str, Any]] = {
    "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "activation_checkpointing": True,
    "cpu_ram_efficient_loading": True,
}  # fmt: skip
FILE_BYTES: Final = 16 * GIB
"""Of a file of weights, at least. Linux maps no file into memory that is larger than RAM."""

FSDP_VARIABLES: Final = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2",
}  # fmt: skip
"""With the first two, from_pretrained reads the weights in one process a machine; memkit asks for the third."""

ENGINES: Final = (
    "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "FSDP2, weights stay gathered", "ZeRO-3 offload", "FSDP2 offload",
)  # fmt: skip
TWO_BATCHES: Final = tuple(
    f"{name}, 2 micro-batches" for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "FSDP2 and sync_each_batch")
)
CASES: Final = (
    ("H100 80GB", 2, ENGINES),
    ("H100 80GB", 4, ENGINES + TWO_BATCHES),
    ("H100 80GB", 8, ENGINES),
    ("RTX 4090", 8, ENGINES),
)
"""GPU, number of them, setups."""


def arguments_of(setup: str) -> dict[str, Any]:
    """The arguments of Trainer that a setup adds to `ARGUMENTS`."""
    engine, _, batches = setup.partition(", ")
    arguments: dict[str, Any] = {}
    if engine.startswith("ZeRO"):
        name = engine.lower().replace("zero-", "zero").replace(" ", "-")
        arguments["deepspeed"] = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    if engine.startswith("FSDP2"):
        options: dict[str, Any] = {}
        if "offload" in engine:
            options["cpu_offload"] = True
        if batches == "weights stay gathered":
            options["reshard_after_forward"] = False
        arguments |= {"fsdp": True, "fsdp_config": {**FSDP_CONFIG, **options}, "activation_checkpointing": False}
    if "micro-batches" in batches:
        arguments |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    if "sync_each_batch" in engine:
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return arguments


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a model's config, and files of bf16 weights that are all holes: a prediction reads only their headers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))

    files: dict[str, dict[str, Any]] = {}  # header of each
    places: dict[str, str] = {}  # of each weight
    end = FILE_BYTES
    for name, tensor in model.state_dict().items():
        if end >= FILE_BYTES:
            end = 0
            file_name = f"model-{len(files)}.safetensors"
            files[file_name] = {}
        begin, end = end, end + 2 * tensor.numel()
        files[file_name][name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        places[name] = file_name

    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for file_name, header in files.items():
        text = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + max(weight["data_offsets"][1] for weight in header.values()))


def sent_bytes(traced: TracedTraining, gpus: int) -> float:
    """Bytes that one GPU sends to the others in a step: by collectives of the trace, and of engines outside of it."""
    work = traced.trace.work
    assert work is not None
    begin, end = work.steps()[-1]
    calls = [work.operations[call] for call in work.calls[begin:end]]
    in_trace = sum(operation.moved_bytes for operation in calls if operation.kind == "collective")
    traffic = untraced_traffic(traced, gpus, 1)
    assert traffic is not None
    return in_trace + sum(row.moved_bytes for row in traffic.rows if row.link == "gpus")


def ram_bytes(prediction: Prediction, traced: TracedTraining, gpus: int) -> int | None:
    """RAM of the machine. DeepSpeed's ledger has no loading: below stage 3 each process loads a whole model."""
    engine = traced.engine
    if engine is None or engine.stage == 3 or prediction.host_rss_bytes is None:
        return prediction.host_rss_bytes
    assert traced.host is not None
    return prediction.host_rss_bytes + gpus * traced.host.tensor_bytes["load"]


def row(judgement: Judgement, traced: TracedTraining, gpus: int) -> dict[str, Any]:
    """The figures of a setup."""
    prediction, time = judgement.prediction, judgement.step_time
    assert prediction is not None and time is not None
    figures = prediction.to_json()
    names = ("peak_allocated_gib", "peak_reserved_gib", "categories", "peak_phase", "verdict", "why", "notes")
    ram = ram_bytes(prediction, traced, gpus)
    return {
        **{name: figures[name] for name in names},
        "total_gib": judgement.needs_bytes / GIB,
        "ram_gib": ram / GIB if ram is not None else None,
        "sent_bytes": sent_bytes(traced, gpus),
        "step_s": list(time.seconds),
        "exposed_s": time.exposed_s,
        "tokens": judgement.tokens,
        "time_not_known_of": list(time.unknown),
    }


def predict(gpu: str, gpus: int, setups: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each setup. The script runs up to its Trainer once."""
    machine = described_machine(gpu, None, RAM, None)
    variables = FSDP_VARIABLES if setups[0].startswith("FSDP2") else {}
    job = ScriptJob(
        UserScript.at("train.py", ARGUMENTS), machine, gpus, environment={**os.environ, **variables}, ram_is_given=True
    )
    with WaitingScript(job) as script:
        for setup in setups:
            file = script.trace(Overrides(arguments=arguments_of(setup)))
            judgement = judge_trace(file, script.device, script.notes, Candidate(0, 0), job, Speeds.of(machine))
            figures = row(judgement, training_of(job.script, file.outcome()), gpus)
            print(f"{gpus} x {gpu}, {setup}: {figures['verdict']}, {figures['step_s'][1]:.2f} s")
            yield {"gpu": gpu, "gpus": gpus, "setup": setup, **figures}


def main() -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("train.py").write_text(SCRIPT)
        write_checkpoint(Path("llama"), CONFIG)
        for gpu, gpus, setups in CASES:
            by_fsdp = [setup for setup in setups if setup.startswith("FSDP2")]
            others = [setup for setup in setups if setup not in by_fsdp]
            figures = [*predict(gpu, gpus, others), *predict(gpu, gpus, by_fsdp)]
            rows += sorted(figures, key=lambda row: setups.index(row["setup"]))
    content = {
        "command": "python benchmarks/sharding.py", **provenance(), "model": MODEL, "ram": RAM,
        "arguments": list(ARGUMENTS), "script": SCRIPT, "fsdp_config": FSDP_CONFIG, "rows": rows,
    }  # fmt: skip
    (RESULTS / "sharding.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
