"""Messages that need no arithmetic: what each form means. In: the message. Out: cause, why, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from hf_memkit.oom.change import Remedy
from hf_memkit.oom.message import OomMessage, show

__all__ = ["ANSWERS", "Cause"]

Cause = Literal[
    "size",
    "fragmentation",
    "cap",
    "another process",
    "context and libraries",
    "host memory",
    "shared memory",
    "kernel resources",
    "unknown",
]
"""The causes that a verdict can name."""


Answer = tuple[Cause, str, tuple[Remedy, ...]]

_ROOM: Final = (
    Remedy(
        "arguments.per_device_train_batch_size", "smaller", True,
        "it leaves memory on the card for what asks the driver directly",
    ),
    Remedy(
        "torch.cuda.set_per_process_memory_fraction", "below 1", True,
        "PyTorch then keeps to its part, and its own error, with figures, comes instead of this one",
    ),
)  # fmt: skip
_WORKERS: Final = Remedy(
    "arguments.dataloader_num_workers", "fewer", True, "each worker is a process with its own copy of what it loads"
)
_CONTAINER: Final = Remedy(
    "command", "a larger memory limit", True, "docker --memory, Slurm --mem, Kubernetes limits.memory"
)
_OFFLOAD: Final = Remedy(
    "DeepSpeed offload", "to NVMe, or less of it", True,
    "if states are offloaded: `memkit ds check FILE --ram SIZE` says what they need in RAM",
)  # fmt: skip


def _library(who: str) -> Callable[[OomMessage], Answer]:
    def answer(message: OomMessage) -> Answer:
        asked = f" It asked for {show(message.requested_bytes)}." if message.requested_bytes else ""
        why = (
            f"{who} asks the driver for memory of its own, outside PyTorch's allocator, and the card was full.{asked} "
            "PyTorch's cache is not given back for it, so that this can come long before PyTorch's own limit."
        )
        return "context and libraries", why, _ROOM

    return answer


def _cuda(message: OomMessage) -> Answer:
    why = (
        "The CUDA driver itself had no memory, for a context, a stream, a kernel's stack or page-locked RAM. The text "
        "has no figures. At the start of a job it mostly means that another process holds the card."
    )
    return "context and libraries", why, (Remedy("command", "nvidia-smi", True, "shows who is on the card"), *_ROOM)


def _driver(message: OomMessage) -> Answer:
    why = (
        "The driver refused memory that PyTorch asked for through its virtual memory calls, which only expandable "
        "segments use. The text has no figures: either the card was full, or this platform (WSL2, Jetson) cannot."
    )
    off = Remedy(
        "environment.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", True,
        "if nvidia-smi shows memory free: the job then runs, or fails with PyTorch's own message, which has figures",
    )  # fmt: skip
    return "unknown", why, (off,)


def _cublas_handle(message: OomMessage) -> Answer:
    why = (
        "cuBLAS could not make its handle. Mostly the card was full; an index out of range in an earlier kernel (a "
        "token ID above the vocabulary, a label above the classes) shows in the same way."
    )
    check = Remedy("environment.CUDA_LAUNCH_BLOCKING", "1", True, "names the kernel, if it was an index")
    return "context and libraries", why, (check, *_ROOM)


def _cudnn_algorithm(message: OomMessage) -> Answer:
    why = (
        "cuDNN found no way to run this convolution: mostly because no workspace fits into what is left of the card, "
        "sometimes because the type, the layout or the size is one that it does not support."
    )
    return "unknown", why, _ROOM


def _launch(message: OomMessage) -> Answer:
    why = (
        "The kernel was started with a grid that CUDA does not allow. No memory ran out: a tensor has 2**31 elements "
        "or more, is empty, or bitsandbytes was built for another card."
    )
    return "kernel resources", why, (
        Remedy("arguments.per_device_train_batch_size", "smaller", True, "if a tensor is that large"),
        Remedy("command", "pip install -U bitsandbytes", True, "later versions take larger tensors and newer cards"),
    )  # fmt: skip


def _triton(message: OomMessage) -> Answer:
    need = ""
    if message.requested_bytes is not None and message.limit_bytes is not None:
        need = f": it needs {show(message.requested_bytes)} and the chip has {show(message.limit_bytes)}"
    why = (
        f"A Triton kernel was compiled with blocks too large for the chip's on-chip (shared) memory{need}. The card's "
        "memory is not the matter, and a smaller batch changes nothing."
    )
    return "kernel resources", why, (
        Remedy("kernel", "smaller block sizes, or num_stages=1", True, "both lower what one block keeps on the chip"),
        Remedy("command", "pip install -U torch", True, "newer versions choose blocks that fit more cards"),
        Remedy("arguments.per_device_train_batch_size", "smaller", False, "a block's size does not depend on it"),
    )  # fmt: skip


def _host_allocation(message: OomMessage) -> Answer:
    asked = f" {show(message.requested_bytes)} was asked for." if message.requested_bytes else ""
    why = f"The machine's RAM, or this container's share of it, ran out; the card did not.{asked}"
    return "host memory", why, (
        _WORKERS,
        Remedy("arguments.eval_accumulation_steps", "None, or prediction_loss_only=True", True,
                "if it came in an evaluation: its predictions are gathered in RAM"),
        _CONTAINER,
    )  # fmt: skip


def _pinned(message: OomMessage) -> Answer:
    why = (
        "CUDA could not have page-locked RAM. It is the machine's memory, though the text reads as the card's: RAM is "
        "full, or so much of it is locked already that the driver takes no more."
    )
    return "host memory", why, (
        Remedy("arguments.dataloader_pin_memory", "False", True, "batches are then copied from ordinary RAM, slower"),
        Remedy("DeepSpeed pin_memory", "false", True, "offloaded states then lie in ordinary RAM, slower to move"),
    )  # fmt: skip


def _mlock(message: OomMessage) -> Answer:
    asked = f"{show(message.requested_bytes)} " if message.requested_bytes else "its swap buffers "
    why = f"DeepSpeed could not lock {asked}in RAM: the limit of locked memory is lower. The card is not the matter."
    return "host memory", why, (
        Remedy("command", "ulimit -l unlimited", True, "in a container: docker run --ulimit memlock=-1"),
        Remedy("aio", "fewer or smaller buffers", True, "`memkit ds copy` computes them for this machine"),
    )  # fmt: skip


def _buffers(message: OomMessage) -> Answer:
    why = (
        "DeepSpeed's swap buffers are too few or too small for what it moves to NVMe. They are page-locked RAM of a "
        "fixed size that the JSON gives; the card is not the matter."
    )
    return "host memory", why, (
        Remedy("offload_param.buffer_count, buffer_size", "larger", True,
                "`memkit ds copy NAME --model MODEL` computes them from the largest parameter"),
    )  # fmt: skip


def _kernel_kill(message: OomMessage) -> Answer:
    who = f"process {message.pid}" if message.pid is not None else "the process"
    if message.process_name:
        who += f" ({message.process_name})"
    held = f", which held {show(message.resident_bytes)} of RAM" if message.resident_bytes else ""
    limit = "the container's or job's memory limit" if message.in_cgroup else "the machine's RAM"
    why = (
        f"Linux killed {who}{held}, because {limit} was used up. The card is not the matter, and no traceback exists."
    )
    settings = (_CONTAINER, _WORKERS) if message.in_cgroup else (_WORKERS,)
    return "host memory", why, (*settings, _OFFLOAD)


def _sigkill(message: OomMessage) -> Answer:
    who = f"Process {message.pid}" if message.pid is not None else "A process"
    why = (
        f"{who} was ended by SIGKILL, which leaves no message of its own. Mostly Linux does that where RAM (not the "
        "card's memory) runs out; a scheduler at its time limit, or a person, does the same."
    )
    check = Remedy(
        "command",
        "dmesg -T | grep -i 'killed process'",
        True,
        "says whether it was the memory; in a container, ask the host",
    )
    return "host memory", why, (check, _WORKERS, _OFFLOAD)


def _shared(message: OomMessage) -> Answer:
    asked = f" for {show(message.requested_bytes)}" if message.requested_bytes else ""
    why = (
        f"/dev/shm has no room{asked}: the folder in RAM through which data loader workers and NCCL hand data over. A "
        "container has 64 MB of it unless told otherwise. The card is not the matter."
    )
    return "shared memory", why, (
        Remedy("command", "docker run --shm-size 8g (or --ipc host)", True,
                "Kubernetes: an emptyDir of medium Memory at /dev/shm"),
        Remedy("arguments.dataloader_num_workers", "0", True,
                "batches are then made in the process that trains, and need none of it"),
    )  # fmt: skip


def _batch_search(message: OomMessage) -> Answer:
    why = (
        "auto_find_batch_size made the batch smaller until it reached zero: even one sample did not fit, or what "
        "failed was no matter of the training batch (an evaluation, a save, RAM). The first out-of-memory message "
        "above it in the log has the figures."
    )
    return "unknown", why, (
        Remedy("arguments.auto_find_batch_size", "False", True, "the job then stops at the first error and shows it"),
    )  # fmt: skip


_GROWTH: Final = Remedy(
    "environment.TF_FORCE_GPU_ALLOW_GROWTH", "true", True, "TensorFlow then takes what it needs as it goes"
)


def _tensorflow(message: OomMessage) -> Answer:
    asked = f" {show(message.requested_bytes)} was asked for." if message.requested_bytes else ""
    why = (
        f"TensorFlow ran out of memory, not PyTorch.{asked} It takes nearly all of a GPU when it starts, and leaves "
        "the rest to everybody else."
    )
    return "size", why, (
        _GROWTH,
        Remedy("environment.TF_GPU_ALLOCATOR", "cuda_malloc_async", True, "if its memory lies in pieces"),
    )  # fmt: skip


def _xla(message: OomMessage) -> Answer:
    asked = f" {show(message.requested_bytes)} was asked for." if message.requested_bytes else ""
    why = (
        f"JAX or TensorFlow ran out of memory, not PyTorch.{asked} Either takes most of a GPU when it starts (JAX 75 "
        "%), and leaves the rest to everybody else."
    )
    return "size", why, (
        Remedy("environment.XLA_PYTHON_CLIENT_PREALLOCATE", "false", True, "JAX then takes what it needs as it goes"),
        _GROWTH,
    )  # fmt: skip


_VLLM_SHARE: Final = "vLLM gpu_memory_utilization"


def _vllm_start(message: OomMessage) -> Answer:
    free, capacity, wanted = message.free_bytes, message.capacity_bytes, message.requested_bytes
    asked = f"{show(wanted)}, its share of the GPU," if wanted else "its share of the GPU"
    found = f" {show(free)} of {show(capacity)} are free." if free is not None and capacity else ""
    why = (
        f"vLLM wants {asked} when it starts, and not that much is free.{found} What is in use belongs to another "
        "process, or to the model that this job trains beside it."
    )
    share = f"at most {int(100 * free / capacity) / 100:.2f}" if free is not None and capacity else "smaller"
    return "cap", why, (
        Remedy(_VLLM_SHARE, share, True, "what is free now (trl: vllm_gpu_memory_utilization)"),
        Remedy("command", "nvidia-smi", True,
                "shows what else is on the GPU: an earlier run's engine that still stops needs a moment"),
    )  # fmt: skip


def _vllm_cache(message: OomMessage) -> Answer:
    need, left = message.requested_bytes, message.free_bytes
    sizes = (
        f" One request of the model's length needs {show(need)}, and {show(left)} is left." if need and left else ""
    )
    why = (
        "Of its share of the GPU (gpu_memory_utilization) vLLM has too little left for the cache of keys and values "
        f"after the weights, a trial run and CUDA graphs.{sizes}"
    )
    return "cap", why, (
        Remedy("vLLM max_model_len", "smaller", True,
                "the cache must hold one request of that length (trl: vllm_max_model_length)"),
        Remedy(_VLLM_SHARE, "larger", True,
                "if nothing else needs the GPU; beside a model in training it takes that model's room (trl: "
                "vllm_gpu_memory_utilization, with vllm_enable_sleep_mode=True)"),
        Remedy("vLLM enforce_eager", "True", True, "no CUDA graphs, which take memory of their own; slower"),
        Remedy("vLLM tensor_parallel_size", "more GPUs", True, "each then holds a part of weights and cache"),
    )  # fmt: skip


def _metal_buffer(message: OomMessage) -> Answer:
    asked = show(message.requested_bytes) if message.requested_bytes else "that size"
    return "size", f"Metal makes no single buffer of {asked}: one tensor is larger than this Mac allows.", ()


ANSWERS: Final[Mapping[str, Callable[[OomMessage], Answer]]] = {
    "torch-mps-buffer": _metal_buffer,
    "cuda-raw": _cuda,
    "cuda-driver": _driver,
    "level-zero": _library("Intel's runtime"),
    "hpu": _library("Habana's runtime"),
    "bitsandbytes": _library("bitsandbytes"),
    "bitsandbytes-launch": _launch,
    "cublas-alloc": _library("cuBLAS"),
    "cublas-handle": _cublas_handle,
    "cudnn-alloc": _library("cuDNN"),
    "cudnn-algorithm": _cudnn_algorithm,
    "nccl": _library("NCCL"),
    "nccl-shm": _shared,
    "triton": _triton,
    "deepspeed-buffers": _buffers,
    "deepspeed-buffer-size": _buffers,
    "deepspeed-mlock": _mlock,
    "pinned": _pinned,
    "torch-cpu": _host_allocation,
    "numpy": _host_allocation,
    "memory-error": _host_allocation,
    "mmap": _host_allocation,
    "torch-shm": _shared,
    "dataloader-shm": _shared,
    "dataloader-killed": _sigkill,
    "linux-memcg": _kernel_kill,
    "linux-oom": _kernel_kill,
    "slurm": _kernel_kill,
    "kubernetes": _kernel_kill,
    "sigkill": _sigkill,
    "accelerate-batch": _batch_search,
    "tensorflow": _tensorflow,
    "vllm-cache": _vllm_cache,
    "vllm-start": _vllm_start,
    "xla": _xla,
}
"""By form; the forms that are not here have figures to be reckoned with."""
