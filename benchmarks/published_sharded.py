"""Predicts sharded trainings that others published: memory and the time of a step, beside what they measured.

    python benchmarks/published_sharded.py                        # results/published_sharded.json; needs no GPU
    python benchmarks/published_sharded.py --torchtitan FOLDER    # also torchtitan's rows; else the file's are kept
    python scripts/docs.py predict.md                             # the table

FOLDER: `git clone https://github.com/pytorch/torchtitan`, and `git checkout 9dec370`, whose model the rows trained.
Its training loop is written as a Trainer here: same policy of checkpointing, wrapping, precision, loss and optimizer.
The torch of that day ran flash attention on an H100; today's would run cuDNN's, which that policy does not know. The
rows' H100 have slower memory than the catalogue's, which is taken into account, and 500 W for 700, which is not.

Rows of FSDP1 are traced with torch's FSDP1, which accelerate wraps as it did then (`fsdp1_on_fake_tensors.py`). It is
refused in users' scripts. Imitated is what the libraries of that day held in memory and those of today do not: copies
of the logits, whole outputs during backward, a KV cache, tables of rotary embeddings, checkpoints around a unit.
Left out are experts (another structure today), kernels of their own, models whose config is not kept here, and whole
copies on each GPU.

Each row is traced once. Its memory is predicted with torch's default allocator, and with `expandable_segments:True`,
because torchtitan's rows do not name theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks import published_models as models  # noqa: E402
from benchmarks.provenance import RESULTS, provenance  # noqa: E402
from benchmarks.published_models import FOLDER, Row  # noqa: E402
from benchmarks.sharding import FSDP_VARIABLES, write_checkpoint  # noqa: E402
from hf_memkit.catalog.hardware import Machine, described_machine  # noqa: E402
from hf_memkit.catalog.rates import Figure, GpuRates  # noqa: E402
from hf_memkit.common.user_script import UserScript  # noqa: E402
from hf_memkit.plan.candidate import Candidate  # noqa: E402
from hf_memkit.plan.candidate_time import Speeds  # noqa: E402
from hf_memkit.plan.judge_trace import judge_trace  # noqa: E402
from hf_memkit.prediction.running_scripts import ScriptJob  # noqa: E402
from hf_memkit.prediction.trace.request import ScriptRequest  # noqa: E402
from hf_memkit.prediction.waiting_script import TraceFile  # noqa: E402
from hf_memkit.prediction.worker import Worker  # noqa: E402

FILE: Final = RESULTS / "published_sharded.json"
ROWS: Final = ("memory", "torchtitan")
NODE_GPUS: Final = 8
ALLOCATORS: Final = {"default": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}

FSDP_QLORA_TARGETS: Final = "k_proj,q_proj,v_proj,up_proj,down_proj,gate_proj"
"""What its `--lora_target_modules all` adapts (AnswerDotAI/fsdp_qlora @ 50efa1e, 2024-03-26: train.py 1025)."""

TORCHTITAN: Final = """
import json
import sys
from collections import defaultdict

row = json.load(open("row.json"))
sys.path.insert(0, row["torchtitan"])

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.models.llama import llama3_configs
from torchtitan.models.llama.model import Transformer
from transformers import HfArgumentParser, Trainer, TrainingArguments

torch.backends.cuda.enable_cudnn_sdp(False)
ATEN = torch.ops.aten
KEPT = {ATEN.mm.default, ATEN._scaled_dot_product_flash_attention.default}


def contexts():
    products = defaultdict(int)

    def policy(context, operation, *args, **kwargs):
        is_product = operation == ATEN.mm.default
        products[context.is_recompute] += is_product
        is_second = is_product and products[context.is_recompute] % 2 == 0
        keeps = operation in KEPT and not is_second
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        layer = checkpoint_wrapper(layer, context_fn=contexts, preserve_rng_state=False)
        self.layer = torch.compile(layer, fullgraph=True) if row["compile"] else layer

    def forward(self, *args):
        return self.layer(*args)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = Transformer(config)
        layers = self.transformer.layers
        for name, layer in layers.named_children():
            layers.register_module(name, Layer(layer))
        self.last = name

    def forward(self, input_ids, labels):
        self.transformer.layers[self.last].set_reshard_after_forward(False)
        logits = self.transformer(input_ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))}


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = llama3_configs["8B"]
config.norm_type, config.vocab_size, config.max_seq_len = "rmsnorm", 128256, row["length"]
rows = [{"input_ids": torch.arange(row["length"]), "labels": torch.arange(row["length"])}] * 8192
trainer = Trainer(Model(config), arguments, train_dataset=rows)
trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
trainer.train()
"""

TRANSFORMERS: Final = """
import json
import sys

row = json.load(open("row.json"))
sys.path.insert(0, row["root"])

import torch
import torch.nn.functional as F
from benchmarks import fsdp1_on_fake_tensors as fsdp1
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments

fsdp1.allow()


def shifted_loss(logits, labels, vocab_size, **options):
    if row["loss"] != "of gpt_bigcode":
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].reshape(-1))


class KeepsOutputs(Trainer):
    def compute_loss(self, model, inputs, *args, **options):
        self.outputs = None
        loss, self.outputs = super().compute_loss(model, inputs, return_outputs=True)
        return loss


class KeepsCache(Trainer):
    cache = []

    def compute_loss(self, *args, **options):
        loss = super().compute_loss(*args, **options)
        self.cache.clear()
        return loss


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
options = {}
if row["in_4_bits"]:
    options["device_map"] = "cpu"
    options["quantization_config"] = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16, bnb_4bit_use_double_quant=row["double_quantization"],
    )
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16, **options)
model.loss_function = shifted_loss
trainer_class = Trainer
if row["in_4_bits"]:
    fsdp1.keep_weights_in_ram(model)
if row["loss"] == "of 2024-03":
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.float())
    fsdp1.add_rotary_tables(model, torch.float32 if row["in_4_bits"] else torch.bfloat16)
    trainer_class = KeepsOutputs
if row["lora"]:
    model.enable_input_require_grads()
    config = LoraConfig(task_type="CAUSAL_LM", **row["lora"])
    model = get_peft_model(model, config, autocast_adapter_dtype=row["fp32_adapters"])
if row["loss"] == "of gpt_bigcode":
    fsdp1.keep_first_outputs(model, "c_attn", KeepsCache.cache)
    trainer_class = KeepsCache
rows = [{"input_ids": torch.arange(row["length"]), "labels": torch.arange(row["length"])}] * 4096
trainer = trainer_class(model, arguments, train_dataset=rows)
if row["checkpointed_units"]:
    fsdp1.checkpoint_units(trainer)
trainer.train()
"""


def rows_to_predict() -> dict[str, Row]:
    """The published rows by id, with the seconds of a step where they were measured."""
    seconds = {name: row["step_seconds"] for name, row in models.read_rows(FOLDER / "speed.jsonl").items()}
    for group in map(json.loads, (FOLDER / "groups.jsonl").read_text().splitlines()):
        seconds |= {row["id"]: row["step_seconds"] for row in group["rows"] if row.get("step_seconds")}
    rows = models.read_rows(*(FOLDER / f"{name}.jsonl" for name in ROWS))
    return {name: {"step_seconds": seconds.get(name), **row} for name, row in rows.items() if is_predicted(row)}


def is_predicted(row: Row) -> bool:
    """Whether a row is of a sharded training that can be written as a Trainer's with FSDP."""
    if not row["sharding"].startswith("FSDP") or "NO_SHARD" in row["sharding"]:
        return False
    if row["id"].startswith("titan-"):
        return True
    plain = row["vanilla_hf"] or row["id"].startswith("fsdpqlora-")
    return plain and models.family_of(row) not in ("", "mixtral")


def settings_of(row: Row, torchtitan: Path | None) -> dict[str, Any]:
    """What the script reads."""
    if row["id"].startswith("titan-"):
        return {"torchtitan": str(torchtitan), "length": row["seq_len"], "compile": "compile" in row}
    lora = None
    if kind_of(row) != "full":
        method = row["method"].replace("targets all linear", f"targets {FSDP_QLORA_TARGETS}")
        adapter = models.adapter_of({**row, "method": method})
        assert adapter is not None
        del adapter["peft_type"]
        lora = adapter
    return {
        "root": str(ROOT),
        "checkpointed_units": checkpoints_units(row),
        "length": row["seq_len"],
        "lora": lora,
        "in_4_bits": kind_of(row) == "QLoRA",
        "double_quantization": "double quant" in row["method"],
        "fp32_adapters": "fp32 LoRA" in row["weights_dtype"],
        "loss": loss_of(row),
    }


def loss_of(row: Row) -> str:
    """Which loss the row's library had.

    2024-03: fp32 logits, and their shifted copy (transformers 4.38: models/llama/modeling_llama.py); the loop of
    fsdp_qlora holds the model's outputs during backward (train.py, `output = model(…)`). 4.48.1: 16-bit logits are
    held beside both (loss/loss_utils.py). gpt_bigcode had its own, of 16-bit logits
    (models/gpt_bigcode/modeling_gpt_bigcode.py).
    """
    if row["id"].startswith("fsdpqlora-"):
        return "of 2024-03"
    return "of gpt_bigcode" if models.family_of(row) == "gpt_bigcode" else "of 4.48.1"


def kind_of(row: Row) -> str:
    return models.kind_of(row).partition(",")[0]


def arguments_of(row: Row) -> list[str]:
    """Arguments of Trainer."""
    words = [
        "--output_dir", "out", "--per_device_train_batch_size", str(row["micro_batch"]), "--optim", "adamw_torch",
        "--max_steps", "10", "--save_strategy", "no", "--fsdp", "full_shard", "--fsdp_config", "fsdp.json",
    ]  # fmt: skip
    if row["mixed_precision"].startswith("bf16 autocast"):
        words += ["--bf16", "True"]
    if row["id"].startswith("fsdpqlora-"):
        # Within a unit, and no clipping: train.py, `reentrant_checkpointing`, `apply_gradient_clipping`.
        words += ["--gradient_checkpointing_kwargs", json.dumps({"use_reentrant": True}), "--max_grad_norm", "0"]
    if row["checkpointing"] is True and not checkpoints_units(row):
        words += ["--gradient_checkpointing", "True"]
    return words


def checkpoints_units(row: Row) -> bool:
    """Whether a checkpoint was around each unit of FSDP: transformers 4.48.1, not fsdp_qlora's loop."""
    return row["id"].startswith("fms-") and row["checkpointing"] is True


def fsdp_config_of(row: Row) -> dict[str, Any]:
    config: dict[str, Any] = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if row["id"].startswith("titan-"):
        config["transformer_layer_cls_to_wrap"] = ["Layer"]
    else:
        # Both libraries wrap layers and each adapter's matrix (peft 0.13.2: utils/other.py, `fsdp_auto_wrap_policy`;
        # fsdp_qlora: train.py, `get_wrapping_policy`), as accelerate does for PEFT.
        config |= {
            "version": 1, "cpu_ram_efficient_loading": True, "backward_prefetch": "BACKWARD_PRE",
            "use_orig_params": not row["id"].startswith("fsdpqlora-"), "limit_all_gathers": True,
        }  # fmt: skip
    if "CPU offload" in row["sharding"]:
        config["cpu_offload"] = True
    return config


def write_folder(row: Row, torchtitan: Path | None) -> None:
    """Writes script, config and checkpoint into the current folder."""
    is_titan = row["id"].startswith("titan-")
    Path("train.py").write_text(TORCHTITAN if is_titan else TRANSFORMERS)
    Path("row.json").write_text(json.dumps(settings_of(row, torchtitan)))
    Path("fsdp.json").write_text(json.dumps(fsdp_config_of(row)))
    if is_titan:
        return
    config = models.config_of(row)
    assert config is not None
    if (config.get("sliding_window") or 0) >= row["seq_len"]:
        config["sliding_window"] = None  # a window as long as a sequence; SDPA would get a mask
    write_checkpoint(Path("model"), config)


def machines_of(row: Row) -> tuple[str, str]:
    """The GPUs whose memory and whose speed are used. No GPU of the catalogue has torchtitan's 95 GiB."""
    if row["id"].startswith("titan-"):
        return "H200", "H100 80GB"
    gpu = row["gpu"].removeprefix("2x ")
    return gpu, gpu


def with_memory_of_96gb(rates: GpuRates) -> GpuRates:
    """The rates of an H100 with HBM2e, of which a copy reaches the same share."""
    memory = Figure(2400, "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md")
    share = memory.value / rates.memory_gb_per_s.value
    copies = replace(rates.achievable_memory_gb_per_s, value=share * rates.achievable_memory_gb_per_s.value)
    return replace(rates, memory_gb_per_s=memory, achievable_memory_gb_per_s=copies)


def predict(row: Row, torchtitan: Path | None) -> dict[str, Any]:
    """Memory and the time of a step of one row. The current folder is empty."""
    write_folder(row, torchtitan)
    memory_of, speed_of = machines_of(row)
    gpus = min(row["gpus"], NODE_GPUS)
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    if not row["id"].startswith("titan-"):
        environment |= {**FSDP_VARIABLES, "FSDP_VERSION": "1"}
    job = ScriptJob(
        UserScript.at("train.py", arguments_of(row)), described_machine(memory_of, None, "1024GB", None), gpus,
        row["gpus"] // gpus, environment=environment, ram_is_given=True,
    )  # fmt: skip
    speed_machine = described_machine(speed_of, None, "1024GB", None)
    trace = TraceFile(traced(job, speed_machine))
    speeds = Speeds.of(speed_machine)
    if row["id"].startswith("titan-"):
        assert speeds.rates is not None
        speeds = replace(speeds, rates=with_memory_of_96gb(speeds.rates))

    figures: dict[str, dict[str, Any]] = {}
    for name, setting in ALLOCATORS.items():
        with_allocator = replace(job, environment={**environment, **setting})
        judgement = judge_trace(trace, "cuda", (), Candidate(0, 0), with_allocator, speeds)
        assert judgement.prediction is not None
        figures[name] = judgement.prediction.to_json()
    step_time = judgement.step_time
    assert step_time is not None

    # What is held while a model is loaded and sharded was not measured.
    allocated = {name: peaks["peak_allocated_gib"] for name, peaks in figures["default"]["phases"].items()}
    loading = allocated.pop("load")
    phase = max(allocated, key=allocated.__getitem__)
    return {
        "peak_reserved_gib": {name: figures[name]["peak_reserved_gib"] for name in ALLOCATORS},
        "peak_allocated_gib": allocated[phase],
        "peak_phase": phase,
        "loading_gib": loading,
        "step_s": list(step_time.seconds),
        "exposed_s": step_time.exposed_s,
    }


def traced(job: ScriptJob, machine: Machine) -> Path:
    """The file with the outcome of the script, run once as one rank on the machine's GPU."""
    gpu = machine.gpu
    assert gpu is not None and gpu.capability is not None
    request = ScriptRequest(
        job.script, str(Path.cwd()), dict(job.environment), gpu_name=gpu.name, capacity_bytes=gpu.capacity_bytes,
        capability=(int(gpu.capability), round(10 * gpu.capability) % 10), processes=job.gpus * job.nodes,
        per_node=job.gpus, for_plan=True,
    )  # fmt: skip
    result = Path("outcome", "result.json").resolve()
    result.parent.mkdir()
    worker = Worker()
    died = worker.run_to_file(request, result)
    worker.close()
    assert died is None, died
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose id begins so; the others are kept")
    options = parser.parse_args(argv)
    torchtitan = options.torchtitan and options.torchtitan.resolve()

    before: Mapping[str, Row] = {}
    if FILE.exists():
        before = {row["id"]: row for row in json.loads(FILE.read_text())["rows"]}
    kept = ("id", "source", "versions", "date", "model", "method", "micro_batch", "seq_len", "gpus", "gpu",
            "sharding", "measured", "gib", "step_seconds", "also")  # fmt: skip
    answers = []
    for name, row in rows_to_predict().items():
        facts = {key: row[key] for key in kept if row.get(key) is not None}
        is_kept = not name.startswith(options.only) or (name.startswith("titan-") and torchtitan is None)
        if is_kept:
            prediction = before[name]["prediction"]
        else:
            with tempfile.TemporaryDirectory() as folder, chdir(folder):
                prediction = predict(row, torchtitan)
        if not name.startswith("titan-"):
            facts["loss"] = loss_of(row)
        answers.append({**facts, "prediction": prediction})
        if not is_kept:
            print(name, facts["gib"], row.get("step_seconds"), json.dumps(prediction), flush=True)

    command = "python benchmarks/published_sharded.py --torchtitan FOLDER"
    content = {"command": command, **provenance(), "rows": answers}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
