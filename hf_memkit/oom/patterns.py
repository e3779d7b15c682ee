"""Every form of message that is known: how it is recognised, which memory it is about, how its numbers are read.

Where a wording is not this project's own knowledge of the library's source, the comment names the file. Sizes are read
as libraries print them: torch prints KiB, MiB and GiB; the kernel's kB are 1024 bytes; MPS prints "GB" and means 2**30
bytes (torch: aten/src/ATen/mps/MPSAllocator.mm, `format_size`), so that each form says which it is. Every pattern is
bounded: no text, however long or strange, takes more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.oom.message import Memory, Process

__all__ = ["FORMS", "FORM_OF", "Form", "heads", "might_be"]

SIZE: Final = r"(\d{1,20}(?:[,_']\d{3}){0,6}(?:\.\d{1,9})?) ?(bytes|byte|[KMGTPkmgtp]i?B|B)\b"
"""A number and a unit: two groups."""

_POWER: Final = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

# NVML answers -1 for a process's memory where it cannot tell (Windows, WSL2), and torch prints that as a size:
# 17179869184.00 GiB. No machine has 2**60 bytes.
_ABSURD: Final = 2**60


def to_bytes(number: str, unit: str, *, binary: bool = False) -> int | None:
    """Bytes of a size; None where the number stands for "not known". `binary`: GB means 2**30 here."""
    value = float(re.sub(r"[,_']", "", number))
    letter = unit[0].lower()
    factor = 1 if letter == "b" else (1024 if binary or "i" in unit else 1000) ** _POWER[letter]
    size = round(value * factor)
    return size if size < _ABSURD else None


Figures = tuple[dict[str, Any], int]
Reader = Callable[[str], Figures]
"""From the text that begins at the head: the fields, and the end of the message in that text."""

# torch: c10/cuda/CUDACachingAllocator.cpp, where OutOfMemoryError is raised. 0.4 to 1.3 say "cached", 1.4 to 2.0
# "reserved in total by PyTorch", 2.1 and later "is reserved by PyTorch but unallocated". 1.8 and later know "allowed".
_DEVICE: Final = {
    "requested_bytes": re.compile(rf"[Tt]ried to allocate {SIZE}"),
    "capacity_bytes": re.compile(rf"{SIZE} total capacity|has a total capac(?:i?)ty of {SIZE}"),
    "free_bytes": re.compile(rf"of which {SIZE} is free|; {SIZE} free"),
    "allocated_bytes": re.compile(rf"{SIZE} already allocated|Of the allocated memory {SIZE} is allocated by"),
    "reserved_bytes": re.compile(rf"{SIZE} (?:reserved in total by PyTorch|cached\))"),
    "_unallocated": re.compile(rf"{SIZE} is reserved by PyTorch but unallocated"),
    "allowed_bytes": re.compile(rf"{SIZE} allowed;"),
    "private_pools_bytes": re.compile(rf"{SIZE} allocated in private pools"),
    "process_bytes": re.compile(rf"this process has {SIZE} memory in use"),
}
_INDEX: Final = re.compile(r"\b(?:GPU|NPU|XPU) ?(\d{1,4})\b")
_PROCESS: Final = re.compile(rf"\bProcess (\d{{1,10}}) has {SIZE} memory in use")
_VARIABLE: Final = re.compile(r"\bPYTORCH_(?:CUDA_|HIP_|NPU_)?ALLOC_CONF\b")
_LAST_WORDS: Final = re.compile(r"See documentation for Memory Management[^\n]{0,120}?(?:\)|ALLOC_CONF)")

_MPS: Final = {
    "allocated_bytes": re.compile(rf"MPS allocated: {SIZE}"),
    "other_bytes": re.compile(rf"other allocations: {SIZE}"),
    "allowed_bytes": re.compile(rf"max allowed: {SIZE}"),
    "requested_bytes": re.compile(rf"[Tt]ried to allocate {SIZE}"),
}
_REQUEST: Final = re.compile(
    rf"(?:allocate|allocating|size:) {SIZE}|allocate (?:[\d.]{{1,12}}\w{{1,3}} \()?(\d{{1,20}})\b(?!\.)"
)
_RESIDENT: Final = re.compile(r"anon-rss:(\d{1,15})kB")
_KILLED: Final = re.compile(
    r"process (\d{1,10}),? \(([^)\n]{1,60})\)|\btask=([^,\n]{1,60}),pid=(\d{1,10})|(?:PID|\(pid:) (\d{1,10})"
)


def device_figures(text: str) -> Figures:
    """The figures of torch's own allocators (CUDA, HIP, XPU; NPU writes them alike)."""
    values, end = _sizes(_DEVICE, text)
    unallocated = values.pop("_unallocated", None)
    if unallocated is not None and values.get("allocated_bytes") is not None:
        values["reserved_bytes"] = values["allocated_bytes"] + unallocated
    if index := _INDEX.search(text):
        values["device"] = int(index[1])
    found = list(_PROCESS.finditer(text))
    values["processes"] = tuple(Process(int(one[1]), to_bytes(one[2], one[3])) for one in found)
    if variable := _VARIABLE.search(text):
        values["variable"] = variable[0]
    last = _LAST_WORDS.search(text)
    return values, max([end, *(one.end() for one in found), last.end() if last is not None else 0])


_VLLM: Final = (
    (re.compile(r"\(([\d.]{1,12})/([\d.]{1,12}) (GiB)\)"), ("free_bytes", "capacity_bytes")),
    (re.compile(r"desired GPU memory utilization \([\d.]{1,8}, ([\d.]{1,12}) (GiB)\)"), ("requested_bytes",)),
    (re.compile(r"([\d.]{1,12}) (GiB) KV cache is needed"), ("requested_bytes",)),
    (re.compile(r"available KV cache memory \(([\d.]{1,12}) (GiB)\)"), ("free_bytes",)),
)


def vllm_figures(text: str) -> Figures:
    """What vLLM wants and what it finds."""
    values: dict[str, Any] = {}
    end = 0
    for pattern, names in _VLLM:
        if found := pattern.search(text):
            *sizes, unit = found.groups()
            values |= {name: to_bytes(size, unit) for name, size in zip(names, sizes, strict=True)}
            end = max(end, found.end())
    return values, end


def request(text: str) -> Figures:
    """What was asked for, where that is the only number."""
    found = _REQUEST.search(text)
    if found is None:
        return {}, 0
    size = int(found[3]) if found[3] else to_bytes(found[1], found[2])
    return {"requested_bytes": size}, found.end()


def numbers(pattern: str, *names: str) -> Reader:
    """A reader that takes whole numbers (bytes) from the groups of `pattern`."""
    compiled = re.compile(pattern)

    def read(text: str) -> Figures:
        found = compiled.search(text)
        if found is None:
            return {}, 0
        values = {name: int(value) for name, value in zip(names, found.groups(), strict=True) if value is not None}
        return values, found.end()

    return read


def killed(text: str) -> Figures:
    """The kernel's line: who was killed, and how much RAM it held."""
    values: dict[str, Any] = {}
    who, resident = _KILLED.search(text), _RESIDENT.search(text)
    if who is not None:
        values |= {"pid": int(who[1] or who[4] or who[5]), "process_name": who[2] or who[3]}
    if resident is not None:
        values["resident_bytes"] = int(resident[1]) * 1024
    return values, max((found.end() for found in (who, resident) if found is not None), default=0)


def _sizes(patterns: dict[str, re.Pattern[str]], text: str, *, binary: bool = False) -> Figures:
    values: dict[str, Any] = {}
    end = 0
    for name, pattern in patterns.items():
        if found := pattern.search(text):
            number, unit = (group for group in found.groups() if group is not None)
            values[name] = to_bytes(number, unit, binary=binary)
            end = max(end, found.end())
    return values, end


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    Attributes:
        name: its key.
        library: who writes it.
        memory: which memory ran out.
        head: regular expression of its first words.
        words: one of them must stand in a line before `head` is tried; plain text, for speed.
        rank: 0 says most about the cause, 3 is only a consequence; of several messages the lowest is explained.
        read: takes the numbers.
        fixed: fields that the form itself decides.
    """

    name: str
    library: str
    memory: Memory
    head: str
    words: tuple[str, ...]
    rank: int
    read: Reader | None = None
    fixed: dict[str, Any] = field(default_factory=dict)


_CUDA: Final = {"device_type": "cuda"}

FORMS: Final[tuple[Form, ...]] = (
    # torch: aten/src/ATen/mps/MPSAllocator.mm
    Form(
        "torch-mps", "PyTorch (MPS)", "device", r"MPS backend out of memory", ("MPS backend",), 0,
        lambda text: _sizes(_MPS, text, binary=True), {"device_type": "mps"},
    ),
    Form(
        "torch-mps-buffer", "Metal", "device", r"Invalid buffer size: (?=\d)", ("Invalid buffer",), 1,
        request, {"device_type": "mps"},
    ),
    # torch: c10/cuda/CUDACachingAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp, c10/core/CachingDeviceAllocator.h
    Form(
        "torch-device", "PyTorch", "device",
        r"(?:\b(?:CUDA|HIP|XPU|NPU|MTIA|MUSA) )?[Oo]ut of memory\. (?:\w{1,40} )?[Tt]ried to allocate(?= \d)",
        ("ried to allocate",), 0, device_figures,
    ),
    Form("torch-device-bare", "PyTorch", "device", r"\b(?:CUDA|HIP|XPU|NPU) out of memory\b", ("out of memory",), 2),
    # tensorflow: core/framework/op_kernel.cc, core/common_runtime/bfc_allocator.cc,
    # stream_executor/cuda/cuda_driver.cc (github.com/tensorflow/tensorflow/issues/43546, /52123)
    Form(
        "tensorflow", "TensorFlow", "device",
        r"OOM when allocating tensor"
        r"|failed to allocate \S{1,20} \(\d{1,18} bytes\) from device: CUDA_ERROR_OUT_OF_MEMORY"
        r"|Allocator \(\w{1,20}_bfc\) ran out of memory trying to allocate(?= ?\d)(?![^\n]{0,200}not a failure)",
        ("OOM when alloc", "from device: CUDA_ERR", "_bfc) ran out"), 1, request, _CUDA,
    ),
    # vllm 0.2 to 0.11: worker/worker.py, v1/core/kv_cache_utils.py, v1/worker/utils.py
    # (github.com/vllm-project/vllm/issues/10439, /2418, /27508)
    Form(
        "vllm-cache", "vLLM", "device",
        r"No available memory for the cache blocks|To serve at least one request with the model'?s'?s? max seq len"
        r"|The model's max seq len \(\d{1,12}\) is larger than the maximum number of tokens",
        ("the cache blocks", "max seq len"), 1, vllm_figures,
    ),
    Form(
        "vllm-start", "vLLM", "device", r"Free memory on device(?: [\w:]{1,20})? ?\((?=[\d.])",
        ("Free memory on dev",), 1, vllm_figures,
    ),
    # torch: c10/cuda/CUDAException.h, C10_CUDA_DRIVER_CHECK: only expandable segments go through the driver's API
    Form(
        "cuda-driver", "CUDA driver", "device", r"CUDA driver error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        ("CUDA driver error", "CUDA_ERROR_OUT"), 1, None, _CUDA,
    ),
    Form(
        "bitsandbytes", "bitsandbytes", "device", r"\bout of memory at line \d{1,6} in file", ("at line",), 1, None,
        _CUDA,
    ),
    Form(
        "bitsandbytes-launch", "bitsandbytes", "kernel", r"invalid configuration argument at line \d{1,6} in file",
        ("at line",), 1, None, _CUDA,
    ),
    Form(
        "cuda-raw", "CUDA", "device",
        r"(?:CUDA|HIP) error: out of memory|cuda runtime error \(2\) ?: out of memory"
        r"|CUDA failed with error out of memory|\bcudaErrorMemoryAllocation\b|\bhipErrorOutOfMemory\b",
        ("error: out of memory", "runtime error (2)", "error out of memory", "ErrorMemoryAlloc", "hipErrorOut"), 1,
    ),
    Form(
        "level-zero", "Level Zero", "device", r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)", ("UR_RESULT",), 1,
        None, {"device_type": "xpu"},
    ),
    # accelerate 1.15: utils/memory.py, should_reduce_batch_size
    Form(
        "hpu", "Habana", "device", r"MODULE:PT_DEVMEM Allocation failed", ("PT_DEVMEM",), 1, None,
        {"device_type": "hpu"},
    ),
    Form(
        "cublas-alloc", "cuBLAS", "device", r"\b(?:CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
        ("_STATUS_ALLOC",), 1,
    ),
    Form(
        "cublas-handle", "cuBLAS", "device", r"\b(?:CUBLAS|HIPBLAS|CUSOLVER)_STATUS_NOT_INITIALIZED",
        ("_STATUS_NOT_INIT",), 2,
    ),
    Form(
        "cudnn-alloc", "cuDNN", "device",
        r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ("CUDNN_STATUS",), 1, None, _CUDA,
    ),
    Form(
        "cudnn-algorithm", "cuDNN", "device",
        r"[Uu]nable to find a valid cuDNN algorithm|unable to find an engine to execute this computation"
        r"|CUDNN_STATUS_NOT_SUPPORTED",
        ("cuDNN algorithm", "find an engine", "CUDNN_STATUS_NOT"), 2, None, _CUDA,
    ),
    # NCCL: src/include/alloc.h and checks.h
    Form(
        "nccl", "NCCL", "device", r"Cuda failure (?:\d{1,4} )?'out of memory'|Failed to CUDA calloc async (?=\d)",
        ("Cuda failure", "CUDA calloc"), 1,
        numbers(r"calloc async (\d{1,18}) bytes", "requested_bytes"), _CUDA,
    ),
    # NCCL: src/misc/shmutils.cc
    Form(
        "nccl-shm", "NCCL", "shared memory", r"Error while creating shared memory segment", ("shared memory segment",),
        1, numbers(r"\(size (\d{1,18})", "requested_bytes"),
    ),
    Form("triton", "Triton", "kernel", r"out of resource: shared memory", ("out of resource",), 1,
         numbers(r"Required: (\d{1,12}),? Hardware limit: (\d{1,12})", "requested_bytes", "limit_bytes")),
    # deepspeed 0.19.8: runtime/swap_tensor/partitioned_param_swapper.py 312 and 357
    Form("deepspeed-buffers", "DeepSpeed", "pinned", r"Not enough buffers \d{1,9} for swapping",
         ("Not enough buffers",), 1),
    Form("deepspeed-buffer-size", "DeepSpeed", "pinned", r"More elements \d{1,15} than buffer size",
         ("More elements",), 1),
    # deepspeed 0.19.8: ops/csrc/pin_memory/page_alloc.cpp
    Form("deepspeed-mlock", "DeepSpeed", "pinned", r"mlock failed to allocate (?=\d)", ("mlock failed",), 1,
         request),
    Form("pinned", "CUDA", "pinned", r"\bcudaHostAlloc\b[^\n]{0,80}(?:fail|out of memory)|cudaErrorHostMemory",
         ("cudaHostAlloc", "cudaErrorHost"), 1),
    # torch: c10/core/impl/alloc_cpu.cpp; before 1.0 TH/THGeneral.c
    Form(
        "torch-cpu", "PyTorch (CPU)", "host",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
        r"|Torch: (?:not enough memory|unable to mmap memory)",
        ("CPUAllocator", "Torch: "), 0, request,
    ),
    Form("numpy", "NumPy", "host", r"Unable to allocate (?:array with shape|(?=[\d.]{1,12} \w{2,5} for an array))",
         ("Unable to allocate",), 0, request),
    # torch: c10/core/MapAllocator.cpp
    Form("mmap", "PyTorch (CPU)", "host", r"unable to mmap \d{1,18} bytes from file", ("unable to mmap",), 1,
         numbers(r"mmap (\d{1,18}) bytes", "requested_bytes")),
    Form("torch-shm", "PyTorch", "shared memory", r"unable to allocate shared memory ?\(shm\)",
         ("memory(shm)", "memory (shm)"), 1),
    # torch: torch/csrc/DataLoader.cpp
    Form("dataloader-shm", "PyTorch", "shared memory", r"insufficient shared memory|is killed by signal: Bus error",
         ("insufficient shared", "signal: Bus"), 1),
    Form("dataloader-killed", "PyTorch", "host", r"DataLoader worker \(pid (\d{1,10})\) is killed by signal: Killed",
         ("signal: Killed",), 2, numbers(r"\(pid (\d{1,10})\)", "pid")),
    # Linux: mm/oom_kill.c
    Form("linux-memcg", "Linux", "host",
         r"Memory cgroup out of memory: Kill(?:ed)? process|oom-kill:constraint=CONSTRAINT_MEMCG",
         ("Memory cgroup", "CONSTRAINT_MEMCG"), 0, killed, {"in_cgroup": True}),
    Form("linux-oom", "Linux", "host", r"Out of memory: Kill(?:ed)? process|oom-kill:constraint=CONSTRAINT_",
         ("Out of memory: Kill", "oom-kill:constraint"), 0, killed, {"in_cgroup": False}),
    Form("slurm", "Slurm", "host", r"oom[_-]kill event(?:\(s\)|s)? in (?i:step)|Exceeded (?:job|step) memory limit",
         ("kill event", "memory limit"), 1, None, {"in_cgroup": True}),
    Form("kubernetes", "Kubernetes", "host", r"\bOOMKilled\b", ("OOMKilled",), 1, None, {"in_cgroup": True}),
    Form(
        "sigkill", "the system", "host",
        r"exitcode {0,4}: {0,4}-9\b|Signal 9 \(SIGKILL\)|(?:exit|return) ?code:? (?:= )?(?:137|-9)\b|Signals\.SIGKILL"
        r"|exited with code 137\b|^ {0,4}(?:[^\n:]{1,80}: line \d{1,6}: +\d{1,10} )?Killed(?=\s|$)",
        ("exitcode", "SIGKILL", "code 137", "code: 137", "code -9", "code: -9", "= -9", "Killed"), 3, killed,
    ),
    # accelerate 1.15: utils/memory.py
    Form("accelerate-batch", "accelerate", "device", r"No executable batch size found", ("executable batch",), 3),
    Form("xla", "XLA", "device", r"RESOURCE_EXHAUSTED", ("RESOURCE_EXH",), 1, request),
    Form("memory-error", "Python", "host", r"^MemoryError\b|std::bad_alloc|\[Errno 12\] Cannot allocate memory",
         ("MemoryError", "bad_alloc", "Errno 12"), 1),
)  # fmt: skip

FORM_OF: Final = {form.name: form for form in FORMS}

_PATTERNS: Final = tuple((form, re.compile(form.head)) for form in FORMS)
_WORDS: Final = tuple(dict.fromkeys(word for form in FORMS for word in form.words))


def might_be(text: str) -> bool:
    """Whether it is worth looking for heads: a quick test that most lines fail."""
    # Runs for every line of a log; a plain loop takes half the time of any() or of one regular expression.
    for word in _WORDS:  # noqa: SIM110
        if word in text:
            return True
    return False


def heads(text: str, start: int = 0) -> list[tuple[re.Match[str], Form]]:
    """Where messages begin in `text` from `start` on, in order: their first words, and the form; of two at one place
    the form that stands first in `FORMS`."""
    found = [
        (match, form)
        for form, pattern in _PATTERNS
        if any(word in text for word in form.words)
        for match in pattern.finditer(text, start)
    ]
    return sorted(found, key=lambda head: head[0].start())
