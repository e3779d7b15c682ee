"""Messages that need no arithmetic. In: the message. Out: cause, why, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from hf_memkit.measuring.out_of_memory.change import Remedy
from hf_memkit.measuring.out_of_memory.device_tools import tools_of
from hf_memkit.measuring.out_of_memory.message import OomMessage, show

Cause = Literal[
    "size",
    "fragmentation",
    "cap",
    "another process",
    "context and libraries",
    "host memory",
    "shared memory",
    "disk",
    "kernel resources",
    "corrupt size",
    "index out of range",
    "unknown",
]
"""The causes that a verdict can name. The error may name memory where an index was out of range."""


Answer = tuple[Cause, str, tuple[Remedy, ...]]

AFTER_AN_ASSERTION: Final = ("cublas-alloc", "cublas-handle", "cuda-raw", "cudnn-alloc", "cudnn-algorithm", "nccl")
"""Forms that also follow a failed assertion in a kernel: every later call on the device then fails, in any words."""


_LIMIT: Final = Remedy(
    "command", "a larger memory limit", True, "docker --memory, Slurm --mem, Kubernetes limits.memory"
)
_RAM_CHECK: Final = Remedy(
    "command", "dmesg -T | grep -i 'killed process'", True,
    "shows whether RAM ran out; in a container, run it on the host; on macOS, type log show --predicate 'eventMessage "
    "contains \"jetsam\"' --last 1h",
)  # fmt: skip
_INDEX_CHECK: Final = Remedy(
    "environment.CUDA_LAUNCH_BLOCKING", "1", True, "names the kernel if an index was out of range"
)


def _room(message: OomMessage) -> tuple[Remedy, ...]:
    """What makes PyTorch leave memory to others; a smaller job does too."""
    tools = tools_of(message.device_type)
    if not tools.fraction:
        return ()
    return (
        Remedy(
            f"{tools.module}.set_per_process_memory_fraction", "below 1", True,
            "caps PyTorch, which then raises its own error, with sizes, instead of this one",
        ),
    )  # fmt: skip


def _processes(message: OomMessage) -> tuple[Remedy, ...]:
    command = tools_of(message.device_type).processes
    return (Remedy("command", command, True, "lists the processes on the GPU"),) if command else ()


def _library(who: str) -> Callable[[OomMessage], Answer]:
    def answer(message: OomMessage) -> Answer:
        asked = f" It requested {show(message.requested_bytes)}." if message.requested_bytes else ""
        why = (
            f"The GPU was full when {who} allocated memory outside PyTorch's allocator.{asked} PyTorch does not "
            "release its cache for such requests, so they can fail long before PyTorch itself runs out."
        )
        return "context and libraries", why, _room(message)

    return answer


def _cuda(message: OomMessage) -> Answer:
    why = (
        f"The {_DRIVERS.get(message.device_type or '', 'CUDA')} driver had no memory for a context, a stream, a "
        "kernel's stack or page-locked RAM. The text has no sizes. At the start of a job, another process usually "
        "holds the GPU."
    )
    return "context and libraries", why, (*_processes(message), *_room(message))


_DRIVERS: Final = {"rocm": "ROCm", "xpu": "Intel", "npu": "Ascend", "mlu": "Cambricon", "musa": "MUSA"}


def _driver(message: OomMessage) -> Answer:
    why = (
        "The driver refused a virtual memory call, which PyTorch uses only for expandable segments. Either the GPU "
        "was full, or the platform does not support these calls (WSL2, Jetson). The text has no sizes."
    )
    off = Remedy(
        "environment.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", True,
        "if nvidia-smi shows free memory: the job then runs, or fails with PyTorch's own message, which has sizes",
    )  # fmt: skip
    return "unknown", why, (off,)


def _cublas(message: OomMessage) -> Answer:
    handle = message.form == "cublas-handle"
    what = "create its handle" if handle else "allocate memory outside PyTorch's allocator"
    why = (
        f"cuBLAS could not {what}. Usually the GPU was full: PyTorch does not release its cache for such requests. An "
        "index out of range in an earlier kernel (a token ID above the vocabulary, a label above the classes) gives "
        "the same error."
    )
    return "context and libraries", why, (*_room(message), _INDEX_CHECK)


def wrong_index(assertion: str) -> Answer:
    """The answer where a kernel in the same log met an index out of range."""
    classes = "n_classes" in assertion or "cur_target" in assertion
    what = "a label above the number of classes" if classes else "a token ID above the vocabulary"
    why = (
        f"A kernel found an index out of range: Assertion `{assertion}` failed, above in this log. GPU memory did not "
        f"run out; every later call fails, in whatever words. Most often it is {what}."
    )
    fix = "num_labels" if classes else "model.resize_token_embeddings"
    value = "at least the largest label + 1; -100 for labels to ignore" if classes else "len(tokenizer)"
    return "index out of range", why, (
        Remedy(fix, value, True, "or correct the data: print the largest index of a batch before the model sees it"),
        _INDEX_CHECK,
        Remedy("arguments.per_device_train_batch_size", "smaller", False, "memory is not the cause"),
    )  # fmt: skip


def _cudnn_algorithm(message: OomMessage) -> Answer:
    why = (
        "cuDNN found no algorithm for this convolution. Usually no workspace fits in the free GPU memory; sometimes "
        "the type, layout or size is unsupported."
    )
    return "unknown", why, _room(message)


def _launch(message: OomMessage) -> Answer:
    why = (
        "bitsandbytes launched a kernel with a grid that CUDA does not allow. No memory ran out: a tensor has 2**31 "
        "elements or more, a tensor is empty, or bitsandbytes was built for another GPU."
    )
    return "kernel resources", why, (
        Remedy("arguments.per_device_train_batch_size", "smaller", True, "if a tensor is that large"),
        Remedy("command", "pip install -U bitsandbytes", True, "newer versions support larger tensors and newer GPUs"),
    )  # fmt: skip


def _triton(message: OomMessage) -> Answer:
    need = ""
    if message.requested_bytes is not None and message.limit_bytes is not None:
        need = f": it needs {show(message.requested_bytes)} and the GPU has {show(message.limit_bytes)}"
    why = (
        f"A Triton kernel was compiled with blocks too large for the GPU's on-chip shared memory{need}. GPU memory "
        "did not run out, and a smaller batch does not help."
    )
    return "kernel resources", why, (
        Remedy("kernel", "smaller block sizes, or num_stages=1", True, "both reduce the shared memory of a block"),
        Remedy("command", "pip install -U torch", True, "newer versions choose blocks that fit more GPUs"),
        Remedy("arguments.per_device_train_batch_size", "smaller", False, "the block size does not depend on it"),
    )  # fmt: skip


_TINY: Final = 1 << 20
"""A request that hardly ever fails for want of RAM: Linux ends a process before it refuses so little."""


def _host_allocation(message: OomMessage) -> Answer:
    if message.requested_bytes is not None and message.requested_bytes < _TINY:
        return _tiny_allocation(message.requested_bytes)
    asked = f" The request was {show(message.requested_bytes)}." if message.requested_bytes else ""
    why = f"Host RAM ran out: the machine's, or this container's limit. This is not a GPU memory error.{asked}"
    return "host memory", why, ()


def _tiny_allocation(requested: int) -> Answer:
    why = (
        f"The system refused {show(requested)} of host RAM. For so small a request, a limit of the process is more "
        "likely than full RAM: its number of memory maps (each tensor that data loader workers share is one), or its "
        "address space. This is not a GPU memory error."
    )
    return "host memory", why, (
        Remedy("command", "sudo sysctl -w vm.max_map_count=1048576", True,
                "raises the number of memory maps of a process (65530 by default); in a container, on the host"),
        Remedy("command", "ulimit -v unlimited", True, "lifts a limit of the address space; `ulimit -v` prints it"),
    )  # fmt: skip


def _pinned(message: OomMessage) -> Answer:
    why = (
        "CUDA could not allocate page-locked host RAM. The text names CUDA, but this is not a GPU memory error: RAM "
        "is full, or too much of it is already locked. WSL2 allows little of it."
    )
    return "host memory", why, ()


def _managed(message: OomMessage) -> Answer:
    why = (
        "bitsandbytes could not allocate managed memory for the states of a paged optimizer (cudaMallocManaged). On "
        "WSL2 and Windows this fails even if the GPU is empty; on Linux, GPU and RAM are full."
    )
    return "host memory", why, ()


def _mlock(message: OomMessage) -> Answer:
    asked = f"{show(message.requested_bytes)} " if message.requested_bytes else "its swap buffers "
    why = f"DeepSpeed could not lock {asked}in RAM: the limit for locked memory is lower. The GPU is not the problem."
    return "host memory", why, (
        Remedy("command", "ulimit -l unlimited", True, "in a container, use docker run --ulimit memlock=-1"),
        Remedy("aio", "fewer or smaller buffers", True, "`memkit ds copy` computes them for this machine"),
    )  # fmt: skip


def _buffers(message: OomMessage) -> Answer:
    why = (
        "DeepSpeed's swap buffers are too few or too small for the tensors it moves to NVMe. They are page-locked "
        "RAM; the DeepSpeed JSON sets their size. The GPU is not the problem."
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
    limit = "the RAM limit of the container or job" if message.in_cgroup else "host RAM"
    why = f"The kernel killed {who}{held}: {limit} ran out. This is not a GPU memory error, so there is no traceback."
    return "host memory", why, (_LIMIT,) if message.in_cgroup else ()


def _sigkill(message: OomMessage) -> Answer:
    who = f"Process {message.pid}" if message.pid is not None else "A process"
    why = (
        f"{who} was ended by SIGKILL, most likely because host RAM, not GPU memory, ran out. SIGKILL leaves no error "
        "message; a scheduler at its time limit, or a person, can send it too."
    )
    return "host memory", why, (_RAM_CHECK,)


def _shared(message: OomMessage) -> Answer:
    asked = f" for {show(message.requested_bytes)}" if message.requested_bytes else ""
    why = (
        f"/dev/shm has no room{asked}. Data loader workers and NCCL pass data through this folder in RAM; a container "
        "has 64 MB of it by default. The GPU is not the problem."
    )
    return "shared memory", why, (
        Remedy("command", "docker run --shm-size 8g (or --ipc host)", True,
                "Kubernetes: an emptyDir of medium Memory at /dev/shm; without a container: mount -o "
                "remount,size=8g /dev/shm"),
    )  # fmt: skip


def _batch_search(message: OomMessage) -> Answer:
    why = (
        "auto_find_batch_size reduced the batch to zero: one sample does not fit, or the training batch is not the "
        "cause (an evaluation, a save, RAM). The first out-of-memory message above it in the log has the sizes."
    )
    return "unknown", why, (
        Remedy("arguments.auto_find_batch_size", "False", True, "the job then stops at the first error and prints it"),
    )  # fmt: skip


_GROWTH: Final = Remedy(
    "environment.TF_FORCE_GPU_ALLOW_GROWTH", "true", True, "TensorFlow then allocates memory as needed"
)


def _tensorflow(message: OomMessage) -> Answer:
    asked = f" The request was {show(message.requested_bytes)}." if message.requested_bytes else ""
    why = (
        f"TensorFlow, not PyTorch, ran out of GPU memory.{asked} TensorFlow reserves nearly the whole GPU at start, "
        "which leaves little for other libraries."
    )
    return "size", why, (
        _GROWTH,
        Remedy("environment.TF_GPU_ALLOCATOR", "cuda_malloc_async", True, "if its memory is fragmented"),
    )  # fmt: skip


def _xla(message: OomMessage) -> Answer:
    asked = f" The request was {show(message.requested_bytes)}." if message.requested_bytes else ""
    why = (
        f"JAX or TensorFlow, not PyTorch, ran out of GPU memory.{asked} Each reserves most of the GPU at start (JAX "
        "75 %), which leaves little for other libraries."
    )
    return "size", why, (
        Remedy("environment.XLA_PYTHON_CLIENT_PREALLOCATE", "false", True, "JAX then allocates memory as needed"),
        _GROWTH,
    )  # fmt: skip


_VLLM_SHARE: Final = "vLLM gpu_memory_utilization"


def _vllm_start(message: OomMessage) -> Answer:
    free, capacity, wanted = message.free_bytes, message.capacity_bytes, message.requested_bytes
    asked = f"{show(wanted)}, its share of the GPU," if wanted else "its share of the GPU"
    found = f" {show(free)} of {show(capacity)} are free." if free is not None and capacity else ""
    why = (
        f"vLLM could not reserve {asked} at start.{found} Another process, or the model that this job trains, uses "
        "the rest."
    )
    share = f"at most {int(100 * free / capacity) / 100:.2f}" if free is not None and capacity else "smaller"
    return "cap", why, (
        Remedy(_VLLM_SHARE, share, True, "the share that is free now (trl: vllm_gpu_memory_utilization)"),
        Remedy("command", tools_of(message.device_type).processes or "nvidia-smi", True,
                "lists the other processes on the GPU; if an earlier engine is still stopping, wait"),
    )  # fmt: skip


def _vllm_cache(message: OomMessage) -> Answer:
    need, left = message.requested_bytes, message.free_bytes
    sizes = (
        f" One request of the model's length needs {show(need)}, and {show(left)} is left." if need and left else ""
    )
    why = (
        "vLLM's share of the GPU (gpu_memory_utilization) is too small for the KV cache: weights, a profiling run and "
        f"CUDA graphs use most of it.{sizes}"
    )
    return "cap", why, (
        Remedy("vLLM max_model_len", "smaller", True,
                "the cache must hold one request of this length (trl: vllm_max_model_length)"),
        Remedy(_VLLM_SHARE, "larger", True,
                "if nothing else needs the GPU; a model in training gets less memory (trl: "
                "vllm_gpu_memory_utilization, with vllm_enable_sleep_mode=True)"),
        Remedy("vLLM enforce_eager", "True", True, "saves the memory of CUDA graphs; slower"),
        Remedy("vLLM tensor_parallel_size", "more GPUs", True, "splits weights and cache over the GPUs"),
    )  # fmt: skip


def _metal_buffer(message: OomMessage) -> Answer:
    asked = show(message.requested_bytes) if message.requested_bytes else "that size"
    return "size", f"One tensor is larger than this Mac allows: Metal cannot create a single buffer of {asked}.", ()


def _nvml(message: OomMessage) -> Answer:
    why = (
        "PyTorch ran out of GPU memory, and failed to write the sizes into its error because NVML does not work here "
        "(a virtual GPU, MIG, Jetson, gVisor). This is no bug of PyTorch."
    )
    return "size", why, ()


def _no_size(message: OomMessage) -> Answer:
    why = (
        "The requested size is negative or larger than any machine's memory. Memory did not run out: a shape or a "
        "length is wrong, as after a collective operation that failed (an NCCL timeout), or the library has a bug. A "
        "smaller batch does not help."
    )
    return "corrupt size", why, (
        Remedy("environment.CUDA_LAUNCH_BLOCKING", "1", True, "the traceback then ends at the wrong operation"),
        Remedy("arguments.per_device_train_batch_size", "smaller", False, "the size does not come from the batch"),
    )  # fmt: skip


def _vllm_wake(message: OomMessage) -> Answer:
    why = (
        "vLLM woke from sleep mode and could not take back its share of the GPU: training, or another process, holds "
        "too much of it."
    )
    share = Remedy(_VLLM_SHARE, "smaller", True, "leaves more to training (trl: vllm_gpu_memory_utilization)")
    return "cap", why, (share,)


def _dispatched(message: OomMessage) -> Answer:
    why = (
        "The weights do not fit the free GPU memory, so that part of the model was placed in RAM or on disk, which "
        "cannot be trained this way."
    )
    return "size", why, ()


def _tpu(message: OomMessage) -> Answer:
    why = (
        "The accelerator's memory (HBM) ran out in a program of XLA (PyTorch/XLA or JAX). XLA plans the whole step at "
        "once, so that settings of an allocator do not help."
    )
    return "size", why, (Remedy("FSDP (SPMD)", "on", True, "splits weights and optimizer states over the chips"),)


def _neuron(message: OomMessage) -> Answer:
    why = (
        "The memory of a NeuronCore ran out. The whole step is compiled, so that settings of an allocator do not help."
    )
    return "size", why, (
        Remedy("arguments.tensor_parallel_size", "larger", True, "splits weights and states over NeuronCores"),
    )  # fmt: skip


def _windows_commit(message: OomMessage) -> Answer:
    why = (
        "Windows' commit limit (RAM and paging file together) is reached. This is not a GPU memory error. A file of "
        "weights counts with its whole size, and each data loader worker loads the CUDA libraries again."
    )
    return "host memory", why, (
        Remedy("command", "a larger paging file", True, "System > Advanced > Performance > Virtual memory"),
    )  # fmt: skip


def _pool(message: OomMessage) -> Answer:
    why = "A worker process that prepares data ended without an error, most likely because host RAM ran out."
    return "host memory", why, ()


def _worker_exited(message: OomMessage) -> Answer:
    why = (
        "A data loader worker ended without an error, most likely because host RAM ran out, or /dev/shm in a "
        "container. With no workers, the job prints the worker's own error if it has one."
    )
    shared = Remedy(
        "command", "docker run --shm-size 8g (or --ipc host)", True, "in a container: more room in /dev/shm"
    )
    return "host memory", why, (shared,)


def _node(message: OomMessage) -> Answer:
    used, total = message.used_bytes, message.total_bytes
    sizes = f" {show(used)} of {show(total)} were in use." if used and total else ""
    why = f"{message.library} ended the process because host RAM ran out.{sizes} This is not a GPU memory error."
    return "host memory", why, (_LIMIT,) if message.in_cgroup else ()


def _evicted(message: OomMessage) -> Answer:
    used = f" It used {show(message.used_bytes)}." if message.used_bytes else ""
    why = (
        f"The node ran out of RAM, and the pod was ended for it.{used} Its own limit was not reached; pods that use "
        "more than they request are ended first. This is not a GPU memory error."
    )
    return "host memory", why, (
        Remedy("resources.requests.memory", "what the job uses, equal to limits.memory", True,
                "the pod then starts only where so much RAM is free, and is ended last"),
    )  # fmt: skip


def _evicted_for_disk(message: OomMessage) -> Answer:
    why = (
        "The node's disk is full, or the pod wrote more than it may: checkpoints, caches and logs that lie on no "
        "volume count. Neither the GPU nor RAM is the problem."
    )
    return "disk", why, (
        Remedy("command", "a volume for output_dir and HF_HOME", True,
                "or a larger resources.limits of ephemeral-storage, or sizeLimit of an emptyDir"),
    )  # fmt: skip


def _compiler(message: OomMessage) -> Answer:
    why = (
        "Host RAM ran out while a package compiled its CUDA code: one compiler runs per CPU core, and each needs "
        "several GB. The training had not started."
    )
    return (
        "host memory",
        why,
        (Remedy("environment.MAX_JOBS", "2", True, "compilers at a time, for pip install and DeepSpeed's operators"),),
    )


def _unsloth_loss(message: OomMessage) -> Answer:
    why = (
        "Unsloth's fused loss computes logits in chunks that fit half of the free GPU memory, and nothing was free. "
        "PyTorch's cache counts as used here, and so do other processes."
    )
    return "size", why, (
        *_processes(message),
        Remedy("environment.UNSLOTH_CE_LOSS_TARGET_GB", "1", True,
                "a fixed size of the chunks; PyTorch then uses its cache, or prints an error with sizes"),
    )  # fmt: skip


def _notebook(message: OomMessage) -> Answer:
    sure = "RAM" in message.quote or "memory" in message.quote
    why = (
        f"The notebook's kernel ended{'' if sure else ', most likely'} because host RAM ran out. This is not a GPU "
        "memory error."
    )
    more = Remedy("command", "a runtime with more RAM", True, "Colab: Runtime > Change runtime type > High-RAM")
    return "host memory", why, (more,)


def _disk(message: OomMessage) -> Answer:
    why = "A disk is full, or a quota is reached. Neither the GPU nor RAM is the problem."
    check = Remedy("command", "df -h", True, "shows which disk is full: the output folder's, HF_HOME's or /tmp")
    return "disk", why, (check,)


ANSWERS: Final[Mapping[str, Callable[[OomMessage], Answer]]] = {
    "torch-mps-buffer": _metal_buffer,
    "cuda-raw": _cuda,
    "cuda-driver": _driver,
    "level-zero": _library("Intel's runtime"),
    "hpu": _library("Habana's runtime"),
    "bitsandbytes": _library("bitsandbytes"),
    "bitsandbytes-managed": _managed,
    "bitsandbytes-launch": _launch,
    "cublas-alloc": _cublas,
    "cublas-handle": _cublas,
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
    "dataloader-exited": _worker_exited,
    "linux-memcg": _kernel_kill,
    "linux-oom": _kernel_kill,
    "slurm": _kernel_kill,
    "kubernetes": _kernel_kill,
    "kubernetes-node": _evicted,
    "kubernetes-disk": _evicted_for_disk,
    "compiler-killed": _compiler,
    "hsa": _library("ROCm's runtime"),
    "neuron": _neuron,
    "unsloth-loss": _unsloth_loss,
    "sigkill": _sigkill,
    "accelerate-batch": _batch_search,
    "tensorflow": _tensorflow,
    "vllm-cache": _vllm_cache,
    "vllm-start": _vllm_start,
    "xla": _xla,
    "xla-tpu": _tpu,
    "metal": _library("Metal"),
    "no-size": _no_size,
    "torch-nvml": _nvml,
    "vllm-wake": _vllm_wake,
    "dispatched": _dispatched,
    "cann": _library("Ascend's runtime"),
    "device-other": _library("a library"),
    "host-other": _host_allocation,
    "allocator": _host_allocation,
    "windows-commit": _windows_commit,
    "pool-killed": _pool,
    "sigbus": _shared,
    "ray": _node,
    "dask": _node,
    "oom-daemon": _kernel_kill,
    "job-limit": _node,
    "notebook": _notebook,
    "disk": _disk,
}
"""By form. The other forms have sizes, from which `verdict` computes the cause."""
