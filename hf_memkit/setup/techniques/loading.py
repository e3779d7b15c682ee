"""Loading of weights and data."""

from __future__ import annotations

from typing import Final

from hf_memkit.common.units import MIB
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import advice, technique

DEFAULT_WORKERS: Final = 2  # assumed
PREFETCH: Final = 2
"""Batches that a worker prefetches: torch's default (torch/utils/data/dataloader.py, `prefetch_factor`)."""

_COLUMNS: Final = 3
_TOKEN_BYTES: Final = 8
"""Token IDs, labels and attention mask, int64 each, as transformers' collators make them."""


@technique(
    "load-in-training-dtype",
    saves="weights in an unexpected dtype, the checkpoint's; RAM where 16-bit weights are made rather than read",
    costs="nothing",
    not_when="the weights are loaded quantised: their dtype is the quantisation's",
)
def training_dtype(setup: Setup) -> Setup:
    """Loads the weights in the dtype of the setup's precision, by default fp32.

    transformers 5 takes the checkpoint's dtype by default (modeling_utils.py, `dtype = "auto"`): a
    checkpoint saved in fp16 then trains with fp16 weights, in which AdamW ends in NaN.
    """
    decided = setup.get("model.dtype")
    if decided is None:
        return setup.put(
            "model.dtype", "float32", "no precision was chosen; the checkpoint's dtype does not decide it"
        )
    return setup.put("model.dtype", decided, f"read or made as {decided}, not in the dtype of the checkpoint")


@technique(
    "low-host-ram",
    saves="from_pretrained puts each shard on this process's GPU as it reads it, instead of the whole model in RAM",
    costs="the weights must fit on the GPU; not with DeepSpeed or FSDP",
    not_when="DeepSpeed's ZeRO-3 or FSDP loads the model, or the checkpoint is not a safetensors file",
    slot="",
    gpu_only="on a CPU the weights must be in RAM anyway",
    proof="gpu",
    settings={"model.device_map": '{"": PartialState().process_index}'},
    offered={"host/load": 2},
    unless=("device_map", "DeepSpeed", "FSDP"),
)
def low_host_ram(setup: Setup) -> Setup:
    """Loads safetensors files tensor by tensor to this process's GPU.

    Otherwise every process first makes the whole model in RAM, unless the file has the training dtype, and Trainer
    moves it (docs/techniques/loading.md has the bytes). ZeRO-3 refuses it: rule device-map-with-stage-3.
    """
    return setup.put_all(
        "model",
        device_map=("cuda", "the whole model on this process's GPU, without a copy in RAM"),
        use_safetensors=(True, "a pickled checkpoint cannot be read tensor by tensor"),
    )


@technique(
    "pinned-workers",
    saves="time, not memory: batches are made and page-locked while the GPU computes",
    costs="RAM: a process a worker, and `workers × 2` batches ahead; twice that while evaluating",
    not_when="there is no GPU, or batches cost nothing to make (tokens already in memory)",
    slot="",
    values={"data_workers": int},
    bounds={"data_workers": (0, None)},
    gpu_only="it takes RAM rather than saving it; the page-locked copy needs a GPU",
)
def pinned_workers(setup: Setup) -> Setup:
    """Persistent data loader workers with page-locked batches. Value: `data_workers` (2, at most the cores)."""
    job = setup.resolved_for
    asked = int(job.values.get("data_workers", DEFAULT_WORKERS))
    if asked < 1:
        return setup.with_problems([f"data_workers={asked}: pinned-workers needs at least 1"])
    cores = max(1, job.machine.cpu_count // job.gpus)
    workers = min(asked, cores)
    reason = f"{workers} processes make batches while the GPU computes"
    if workers < asked:
        reason += f"; {asked} would be more than the {cores} cores of each of {job.gpus} processes"
    ahead = prefetched_bytes(workers, job.micro_batch_size, job.sequence_length)
    return setup.put_all(
        "arguments",
        dataloader_num_workers=(workers, reason),
        dataloader_pin_memory=(True, "page-locked batches are copied to the GPU while it computes"),
        dataloader_persistent_workers=(True, "workers keep running between epochs"),
        dataloader_prefetch_factor=(
            PREFETCH,
            f"{workers} × {PREFETCH} batches ahead: {ahead / MIB:.1f} MiB of tokens, labels and masks",
        ),
    )


def prefetched_bytes(workers: int, micro_batch_size: int, sequence_length: int) -> int:
    """Bytes of prefetched batches: workers × prefetch × sequences × tokens × 3 columns × 8 bytes."""
    return workers * PREFETCH * micro_batch_size * sequence_length * _COLUMNS * _TOKEN_BYTES


advice(
    "one-rank-loads", "loading", {"arguments.fsdp_config": {"cpu_ram_efficient_loading": True}},
    saves="with fsdp: true, one rank loads the weights in RAM and each GPU gets its share, instead of a copy "
    "for each process; make TrainingArguments before from_pretrained, and set no device_map. torchrun needs "
    "ACCELERATE_USE_FSDP=true in the environment, which accelerate launch sets. Or start fewer processes",
    costs="nothing on a model that from_pretrained loads; not with 4-bit weights",
    offered={"load": 3, "host/load": 3},
)  # fmt: skip
advice(
    "zero3-while-loading", "loading", {"model.from_pretrained": "after TrainingArguments"},
    saves="ZeRO-3 splits the weights while they load only if TrainingArguments exists before from_pretrained; "
    "otherwise every process holds the whole model in RAM",
    costs="nothing",
    offered={"host/load": 3}, only_with=("ZeRO-3",),
)  # fmt: skip
advice(
    "layers-over-gpus", "loading", {"model.device_map": "auto"},
    saves="splits the layers over the GPUs of one process",
    costs="several GPUs, of which one computes at a time; not with torchrun, DeepSpeed or FSDP",
    offered={"load": 3}, only_with=("quantized weights",), unless=("FSDP", "ZeRO-3"),
)  # fmt: skip
advice(
    "all-on-one-gpu", "loading", {"model.device_map": '{"": 0}'},
    saves="places all weights on one GPU, or fails with sizes if they do not fit", costs="nothing",
    offered={"dispatched": 3},
)  # fmt: skip
advice(
    "smaller-model", "loading", {"model.name": "a smaller model"},
    saves="these weights alone do not fit, with any batch size", costs="another model",
    group="another method", offered={"load": 5, "dispatched": 4, "else": 3},
)  # fmt: skip
