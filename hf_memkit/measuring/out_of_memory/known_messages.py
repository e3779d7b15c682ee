"""The cause, reason and remedies of messages that need no arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

from hf_memkit.measuring.out_of_memory.change import Remedy
from hf_memkit.measuring.out_of_memory.device_tools import tools_of
from hf_memkit.measuring.out_of_memory.message import OomMessage, show
from hf_memkit.setup.techniques.machine import LIMITS
from hf_memkit.setup.techniques.registry import CATALOGUE

Cause = Literal[
    "size", "fragmentation", "cap", "another process", "context and libraries", "host memory", "shared memory", "disk",
    "kernel resources", "corrupt size", "index out of range", "unknown", "FSDP", "several processes",
]  # fmt: skip
"""The causes of a verdict. An index out of range can raise an error about memory; the last two are of other errors
(`engine_failures`)."""


class KnownCause(NamedTuple):
    """The cause of a message, the reason in sentences, and what helps."""

    cause: Cause
    why: str
    settings: tuple[Remedy, ...] = ()


_Explain = Callable[[OomMessage], KnownCause]

AFTER_AN_ASSERTION: Final = ("cublas-alloc", "cublas-handle", "cuda-raw", "cudnn-alloc", "cudnn-algorithm", "nccl")
"""Forms that also follow a failed assertion in a kernel: every later call on the device then fails."""

NOT_OF_THE_JOB: Final = (
    "xla", "tensorflow", "vllm-cache", "vllm-start", "deepspeed-mlock", "deepspeed-buffers", "deepspeed-buffer-size",
    "compiler-killed",
)  # fmt: skip
"""Forms for which only the remedies of the cause help."""

_LIMIT: Final = Remedy("command", "a larger memory limit", LIMITS)
_RAM_CHECK: Final = Remedy(
    "command", "dmesg -T | grep -i 'killed process'",
    "shows whether RAM ran out; in a container, run it on the host; on macOS, type log show --predicate 'eventMessage "
    "contains \"jetsam\"' --last 1h",
)  # fmt: skip
_INDEX_CHECK: Final = Remedy("environment.CUDA_LAUNCH_BLOCKING", "1", "names the kernel if an index was out of range")
_GROWTH: Final = Remedy("environment.TF_FORCE_GPU_ALLOW_GROWTH", "true", "TensorFlow then allocates memory as needed")
_BATCH: Final = CATALOGUE["global-batch"].key
VLLM_SHARE: Final = "vLLM gpu_memory_utilization"
_MORE_SHM: Final = "docker run --shm-size 8g (or --ipc host)"


def _room(message: OomMessage) -> tuple[Remedy, ...]:
    """A setting with which PyTorch leaves memory to other libraries."""
    module = tools_of(message.device_type).module
    why = "caps PyTorch, which then raises its own error, with sizes, instead of this one"
    return (Remedy(f"{module}.set_per_process_memory_fraction", "below 1", why),) if module else ()


def _processes(message: OomMessage) -> tuple[Remedy, ...]:
    command = tools_of(message.device_type).processes
    return (Remedy("command", command, "lists the processes on the GPU"),) if command else ()


def _always(cause: Cause, why: str, *settings: Remedy) -> _Explain:
    return lambda message: KnownCause(cause, why, settings)


def _with_size(cause: Cause, why: str, asked: str, *settings: Remedy, unknown: str = "") -> _Explain:
    """A cause with `asked` and the requested size at `{}`, or with `unknown` if there is no size."""

    def explain(message: OomMessage) -> KnownCause:
        size = message.requested_bytes
        shown = asked.format(show(size)) if size else unknown
        return KnownCause(cause, why.format(shown), settings)

    return explain


def _library(who: str) -> _Explain:
    why = _with_size(
        "context and libraries",
        f"The GPU was full when {who} allocated memory outside PyTorch's allocator.{{}} PyTorch does not release its "
        "cache for such requests, so they can fail long before PyTorch itself runs out.",
        " It requested {}.",
    )
    return lambda message: why(message)._replace(settings=_room(message))


def _cuda(message: OomMessage) -> KnownCause:
    why = (
        f"The {_DRIVERS.get(message.device_type or '', 'CUDA')} driver had no memory for a context, a stream, a "
        "kernel's stack or page-locked RAM. The text has no sizes. At the start of a job, another process usually "
        "holds the GPU."
    )
    return KnownCause("context and libraries", why, (*_processes(message), *_room(message)))


_DRIVERS: Final = {"rocm": "ROCm", "xpu": "Intel", "npu": "Ascend", "mlu": "Cambricon", "musa": "MUSA"}


def _cublas(message: OomMessage) -> KnownCause:
    handle = message.form == "cublas-handle"
    what = "create its handle" if handle else "allocate memory outside PyTorch's allocator"
    why = (
        f"cuBLAS could not {what}. Usually the GPU was full: PyTorch does not release its cache for such requests. An "
        "index out of range in an earlier kernel (a token ID above the vocabulary, a label above the classes) gives "
        "the same error."
    )
    return KnownCause("context and libraries", why, (*_room(message), _INDEX_CHECK))


def wrong_index(assertion: str) -> KnownCause:
    """The cause if the log has a kernel's failed assertion about an index."""
    classes = "n_classes" in assertion or "cur_target" in assertion
    what = "a label above the number of classes" if classes else "a token ID above the vocabulary"
    why = (
        f"A kernel found an index out of range: Assertion `{assertion}` failed, above in this log. GPU memory did not "
        f"run out; every later call fails with another error. Most often it is {what}."
    )
    fix = "num_labels" if classes else "model.resize_token_embeddings"
    value = "at least the largest label + 1; -100 for labels to ignore" if classes else "len(tokenizer)"
    return KnownCause("index out of range", why, (
        Remedy(fix, value, "or correct the data: print the largest index of a batch before the model sees it"),
        _INDEX_CHECK,
        Remedy(_BATCH, "smaller", "memory is not the cause", helps=False),
    ))  # fmt: skip


def _cudnn_algorithm(message: OomMessage) -> KnownCause:
    why = (
        "cuDNN found no algorithm for this convolution. Usually no workspace fits in the free GPU memory; sometimes "
        "the type, layout or size is unsupported."
    )
    return KnownCause("unknown", why, _room(message))


def _triton(message: OomMessage) -> KnownCause:
    need = ""
    if message.requested_bytes is not None and message.limit_bytes is not None:
        need = f": it needs {show(message.requested_bytes)} and the GPU has {show(message.limit_bytes)}"
    why = (
        f"A Triton kernel was compiled with blocks too large for the GPU's on-chip shared memory{need}. GPU memory "
        "did not run out, and a smaller batch does not help."
    )
    return KnownCause("kernel resources", why, (
        Remedy("kernel", "smaller block sizes, or num_stages=1", "both reduce the shared memory of a block"),
        Remedy("command", "pip install -U torch", "newer versions choose blocks that fit more GPUs"),
        Remedy(_BATCH, "smaller", "the block size does not depend on it", helps=False),
    ))  # fmt: skip


_TINY: Final = 1 << 20
"""A smaller request rarely fails for lack of RAM: Linux kills a process before it refuses so little."""


def _host_allocation(message: OomMessage) -> KnownCause:
    tiny = message.requested_bytes is not None and message.requested_bytes < _TINY
    return (_REFUSED if tiny else _RAM_IS_FULL)(message)


_RAM_IS_FULL: Final = _with_size(
    "host memory",
    "Host RAM ran out: the machine's, or this container's limit. This is not a GPU memory error.{}",
    " The request was {}.",
)
_REFUSED: Final = _with_size(
    "host memory",
    "The system refused {} of host RAM. For so small a request, a limit of the process is more likely than full RAM: "
    "its number of memory maps (each tensor that data loader workers share is one), or its address space. This is not "
    "a GPU memory error.",
    "{}",
    Remedy("command", "sudo sysctl -w vm.max_map_count=1048576",
           "raises the number of memory maps of a process (65530 by default); in a container, on the host"),
    Remedy("command", "ulimit -v unlimited", "lifts a limit of the address space; `ulimit -v` prints it"),
    unknown="0 bytes",
)  # fmt: skip


def _kernel_kill(message: OomMessage) -> KnownCause:
    who = f"process {message.pid}" if message.pid is not None else "the process"
    if message.process_name:
        who += f" ({message.process_name})"
    held = f", which held {show(message.resident_bytes)} of RAM" if message.resident_bytes else ""
    limit = "the RAM limit of the container or job" if message.in_cgroup else "host RAM"
    why = f"The kernel killed {who}{held}: {limit} ran out. This is not a GPU memory error, so there is no traceback."
    return KnownCause("host memory", why, (_LIMIT,) if message.in_cgroup else ())


def _sigkill(message: OomMessage) -> KnownCause:
    who = f"Process {message.pid}" if message.pid is not None else "A process"
    why = (
        f"{who} was ended by SIGKILL, most likely because host RAM, not GPU memory, ran out. SIGKILL leaves no error "
        "message; a scheduler at its time limit, or a person, can send it too."
    )
    return KnownCause("host memory", why, (_RAM_CHECK,))


def _vllm_start(message: OomMessage) -> KnownCause:
    free, capacity, wanted = message.free_bytes, message.capacity_bytes, message.requested_bytes
    asked = f"{show(wanted)}, its share of the GPU," if wanted else "its share of the GPU"
    sizes = f" {show(free)} of {show(capacity)} are free." if free is not None and capacity else ""
    why = (
        f"vLLM could not reserve {asked} at start.{sizes} Another process, or the model that this job trains, uses "
        "the rest."
    )
    share = f"at most {int(100 * free / capacity) / 100:.2f}" if free is not None and capacity else "smaller"
    return KnownCause("cap", why, (
        Remedy(VLLM_SHARE, share, "the share that is free now (trl: vllm_gpu_memory_utilization)"),
        Remedy("command", tools_of(message.device_type).processes or "nvidia-smi",
               "lists the other processes on the GPU; if an earlier engine is still stopping, wait"),
    ))  # fmt: skip


def _vllm_cache(message: OomMessage) -> KnownCause:
    need, left = message.requested_bytes, message.free_bytes
    sizes = (
        f" One request of the model's length needs {show(need)}, and {show(left)} is left." if need and left else ""
    )
    why = (
        "vLLM's share of the GPU (gpu_memory_utilization) is too small for the KV cache: weights, a profiling run and "
        f"CUDA graphs use most of it.{sizes}"
    )
    return KnownCause("cap", why, (
        Remedy("vLLM max_model_len", "smaller",
               "the cache must hold one request of this length (trl: vllm_max_model_length)"),
        Remedy(VLLM_SHARE, "larger",
               "if nothing else needs the GPU; a model in training gets less memory (trl: "
               "vllm_gpu_memory_utilization, with vllm_enable_sleep_mode=True)"),
        Remedy("vLLM enforce_eager", "True", "saves the memory of CUDA graphs; slower"),
        Remedy("vLLM tensor_parallel_size", "more GPUs", "splits weights and cache over the GPUs"),
    ))  # fmt: skip


def _node(message: OomMessage) -> KnownCause:
    used, total = message.used_bytes, message.total_bytes
    sizes = f" {show(used)} of {show(total)} were in use." if used and total else ""
    why = f"{message.library} ended the process because host RAM ran out.{sizes} This is not a GPU memory error."
    return KnownCause("host memory", why, (_LIMIT,) if message.in_cgroup else ())


def _eviction(message: OomMessage) -> KnownCause:
    used = f" It used {show(message.used_bytes)}." if message.used_bytes else ""
    why = (
        f"The node ran out of RAM, and the pod was ended for it.{used} Its own limit was not reached; pods that use "
        "more than they request are ended first. This is not a GPU memory error."
    )
    return KnownCause("host memory", why, (
        Remedy("resources.requests.memory", "what the job uses, equal to limits.memory",
               "the pod then starts only where so much RAM is free, and is ended last"),
    ))  # fmt: skip


def _unsloth_loss(message: OomMessage) -> KnownCause:
    why = (
        "Unsloth's fused loss computes logits in chunks that fit half of the free GPU memory, and nothing was free. "
        "PyTorch's cache counts as used here, and so do other processes."
    )
    return KnownCause("size", why, (
        *_processes(message),
        Remedy("environment.UNSLOTH_CE_LOSS_TARGET_GB", "1",
               "a fixed size of the chunks; PyTorch then uses its cache, or prints an error with sizes"),
    ))  # fmt: skip


_SHARED: Final = _with_size(
    "shared memory",
    "/dev/shm has no room{}. Data loader workers and NCCL pass data through this folder in RAM; a container has 64 MB "
    "of it by default. The GPU is not the problem.",
    " for {}",
    Remedy("command", _MORE_SHM,
           "Kubernetes: an emptyDir of medium Memory at /dev/shm; without a container: mount -o remount,size=8g "
           "/dev/shm"),
)  # fmt: skip
_BUFFERS: Final = _always(
    "host memory",
    "DeepSpeed's swap buffers are too few or too small for the tensors it moves to NVMe. They are page-locked RAM; "
    "the DeepSpeed JSON sets their size. The GPU is not the problem.",
    Remedy("offload_param.buffer_count, buffer_size", "larger",
           "`memkit ds copy NAME --model MODEL` computes them from the largest parameter"),
)  # fmt: skip

KNOWN_CAUSES: Final[Mapping[str, _Explain]] = {
    "torch-mps-buffer": _with_size(
        "size", "One tensor is larger than this Mac allows: Metal cannot create a single buffer of {}.", "{}",
        unknown="that size",
    ),
    "cuda-raw": _cuda,
    "cuda-driver": _always(
        "unknown",
        "The driver refused a virtual memory call, which PyTorch uses only for expandable segments. Either the GPU "
        "was full, or the platform does not support these calls (WSL2, Jetson). The text has no sizes.",
        Remedy("environment.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False",
               "if nvidia-smi shows free memory: the job then runs, or fails with PyTorch's own message, which has "
               "sizes"),
    ),
    "level-zero": _library("Intel's runtime"),
    "hpu": _library("Habana's runtime"),
    "bitsandbytes": _library("bitsandbytes"),
    "bitsandbytes-managed": _always(
        "host memory",
        "bitsandbytes could not allocate managed memory for the states of a paged optimizer (cudaMallocManaged). On "
        "WSL2 and Windows this fails even if the GPU is empty; on Linux, GPU and RAM are full.",
    ),
    "bitsandbytes-launch": _always(
        "kernel resources",
        "bitsandbytes launched a kernel with a grid that CUDA does not allow. No memory ran out: a tensor has 2**31 "
        "elements or more, a tensor is empty, or bitsandbytes was built for another GPU.",
        Remedy(_BATCH, "smaller", "if a tensor is that large"),
        Remedy("command", "pip install -U bitsandbytes", "newer versions support larger tensors and newer GPUs"),
    ),
    "cublas-alloc": _cublas,
    "cublas-handle": _cublas,
    "cudnn-alloc": _library("cuDNN"),
    "cudnn-algorithm": _cudnn_algorithm,
    "nccl": _library("NCCL"),
    "nccl-shm": _SHARED,
    "triton": _triton,
    "deepspeed-buffers": _BUFFERS,
    "deepspeed-buffer-size": _BUFFERS,
    "deepspeed-mlock": _with_size(
        "host memory",
        "DeepSpeed could not lock {} in RAM: the limit for locked memory is lower. The GPU is not the problem.", "{}",
        Remedy("command", "ulimit -l unlimited", "in a container, use docker run --ulimit memlock=-1"),
        Remedy("aio", "fewer or smaller buffers", "`memkit ds copy` computes them for this machine"),
        unknown="its swap buffers",
    ),
    "pinned": _always(
        "host memory",
        "CUDA could not allocate page-locked host RAM. The text names CUDA, but this is not a GPU memory error: RAM "
        "is full, or too much of it is already locked. WSL2 allows little of it.",
    ),
    "torch-cpu": _host_allocation,
    "numpy": _host_allocation,
    "memory-error": _host_allocation,
    "mmap": _host_allocation,
    "torch-shm": _SHARED,
    "dataloader-shm": _SHARED,
    "dataloader-killed": _sigkill,
    "dataloader-exited": _always(
        "host memory",
        "A data loader worker ended without an error, most likely because host RAM ran out, or /dev/shm in a "
        "container. With no workers, the job prints the worker's own error if it has one.",
        Remedy("command", _MORE_SHM, "in a container: more room in /dev/shm"),
    ),
    "linux-memcg": _kernel_kill,
    "linux-oom": _kernel_kill,
    "slurm": _kernel_kill,
    "kubernetes": _kernel_kill,
    "kubernetes-node": _eviction,
    "kubernetes-disk": _always(
        "disk",
        "The node's disk is full, or the pod wrote more than it may: checkpoints, caches and logs that lie on no "
        "volume count. Neither the GPU nor RAM is the problem.",
        Remedy("command", "a volume for output_dir and HF_HOME",
               "or a larger resources.limits of ephemeral-storage, or sizeLimit of an emptyDir"),
    ),
    "compiler-killed": _always(
        "host memory",
        "Host RAM ran out while a package compiled its CUDA code: one compiler runs per CPU core, and each needs "
        "several GB. The training had not started.",
        Remedy("environment.MAX_JOBS", "2", "compilers at a time, for pip install and DeepSpeed's operators"),
    ),
    "hsa": _library("ROCm's runtime"),
    "neuron": _always(
        "size",
        "The memory of a NeuronCore ran out. The whole step is compiled, so that settings of an allocator do not "
        "help.",
        Remedy("arguments.tensor_parallel_size", "larger", "splits weights and states over NeuronCores"),
    ),
    "unsloth-loss": _unsloth_loss,
    "sigkill": _sigkill,
    "accelerate-batch": _always(
        "unknown",
        "auto_find_batch_size reduced the batch to zero: one sample does not fit, or the training batch is not the "
        "cause (an evaluation, a save, RAM). The first out-of-memory message above it in the log has the sizes.",
        Remedy("arguments.auto_find_batch_size", "False", "the job then stops at the first error and prints it"),
    ),
    "tensorflow": _with_size(
        "size",
        "TensorFlow, not PyTorch, ran out of GPU memory.{} TensorFlow reserves nearly the whole GPU at start, which "
        "leaves little for other libraries.",
        " The request was {}.",
        _GROWTH,
        Remedy("environment.TF_GPU_ALLOCATOR", "cuda_malloc_async", "if its memory is fragmented"),
    ),
    "vllm-cache": _vllm_cache,
    "vllm-start": _vllm_start,
    "xla": _with_size(
        "size",
        "JAX or TensorFlow, not PyTorch, ran out of GPU memory.{} Each reserves most of the GPU at start (JAX 75 %), "
        "which leaves little for other libraries.",
        " The request was {}.",
        Remedy("environment.XLA_PYTHON_CLIENT_PREALLOCATE", "false", "JAX then allocates memory as needed"),
        _GROWTH,
    ),
    "xla-tpu": _always(
        "size",
        "The accelerator's memory (HBM) ran out in a program of XLA (PyTorch/XLA or JAX). XLA plans the whole step at "
        "once, so that settings of an allocator do not help.",
        Remedy("FSDP (SPMD)", "on", "splits weights and optimizer states over the chips"),
    ),
    "metal": _library("Metal"),
    "no-size": _always(
        "corrupt size",
        "The requested size is negative or larger than any machine's memory. Memory did not run out: a shape or a "
        "length is wrong, as after a collective operation that failed (an NCCL timeout), or the library has a bug. A "
        "smaller batch does not help.",
        Remedy("environment.CUDA_LAUNCH_BLOCKING", "1", "the traceback then ends at the wrong operation"),
        Remedy(_BATCH, "smaller", "the size does not come from the batch", helps=False),
    ),
    "torch-nvml": _always(
        "size",
        "PyTorch ran out of GPU memory, and failed to write the sizes into its error because NVML does not work here "
        "(a virtual GPU, MIG, Jetson, gVisor). This is no bug of PyTorch.",
    ),
    "vllm-wake": _always(
        "cap",
        "vLLM woke from sleep mode and could not take back its share of the GPU: training, or another process, holds "
        "too much of it.",
        Remedy(VLLM_SHARE, "smaller", "leaves more to training (trl: vllm_gpu_memory_utilization)"),
    ),
    "dispatched": _always(
        "size",
        "The weights do not fit the free GPU memory, so that part of the model was placed in RAM or on disk, which "
        "cannot be trained this way.",
    ),
    "cann": _library("Ascend's runtime"),
    "device-other": _library("a library"),
    "host-other": _host_allocation,
    "allocator": _host_allocation,
    "windows-commit": _always(
        "host memory",
        "Windows' commit limit (RAM and paging file together) is reached. This is not a GPU memory error. A file of "
        "weights counts with its whole size, and each data loader worker loads the CUDA libraries again.",
        Remedy("command", "a larger paging file", "System > Advanced > Performance > Virtual memory"),
    ),
    "pool-killed": _always(
        "host memory",
        "A worker process that prepares data ended without an error, most likely because host RAM ran out.",
    ),
    "sigbus": _SHARED,
    "ray": _node,
    "dask": _node,
    "oom-daemon": _kernel_kill,
    "job-limit": _node,
    "notebook": _always(
        "host memory",
        "The notebook's kernel ended, most likely because host RAM ran out. This is not a GPU memory error.",
        Remedy("command", "a runtime with more RAM", "Colab: Runtime > Change runtime type > High-RAM"),
    ),
    "disk": _always(
        "disk",
        "A disk is full, or a quota is reached. Neither the GPU nor RAM is the problem.",
        Remedy("command", "df -h", "shows which disk is full: the output folder's, HF_HOME's or /tmp"),
    ),
}  # fmt: skip
"""By form. Other forms have sizes, from which `cause` computes the cause."""
