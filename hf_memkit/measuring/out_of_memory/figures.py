"""Reads the sizes in a message, in bytes, and where the message ends.

torch prints KiB, MiB and GiB; the kernel's kB are 1024 bytes; "GB" of MPS (torch: aten/src/ATen/mps/MPSAllocator.mm,
`format_size`) and of Ray, and "G" of XLA, are 2**30 bytes. All patterns are bounded, so any text takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from hf_memkit.measuring.out_of_memory.message import Process

SIZE: Final = r"(\d{1,20}(?:[,_']\d{3}){0,6}(?:\.\d{1,9})?) ?(bytes|byte|[KMGTPEkmgtpe]i?[Bb]|B)\b"
"""A number and a unit: two groups."""

_POWER: Final = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}

# On Windows and WSL2, NVML gives -1 for a process's memory, and torch prints it as 17179869184.00 GiB.
_ABSURD: Final = 2**60


def to_bytes(number: str, unit: str, *, binary: bool = False) -> int | None:
    """The size in bytes; None if it is absurd and so means "unknown". `binary`: GB means 2**30 bytes."""
    value = float(re.sub(r"[,_']", "", number))
    base = 1024 if binary or "i" in unit else 1000
    size = round(value * base ** _POWER[unit[0].lower()])
    return size if size < _ABSURD else None


_WORDS: Final = (
    "CUDA HIP XPU NPU MLU MUSA MPS backend out of memory Tried tried to allocate GPU has a total capacity capacty "
    "which is free Process in use Including PyTorch this process Of the allocated by with private pools and "
    "reserved but unallocated already cached allowed other allocations max DefaultCPUAllocator can't not enough "
    "you Unable for an array shape type bytes KiB MiB GiB TiB KB MB GB "
    "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NPU_ALLOC_CONF PYTORCH_ALLOC_CONF"
)
"""Words of messages with sizes, which are long: terminals, collectors and forums break them inside a word."""
_WHOLE: Final = frozenset(_WORDS.split())
_IN_WORD: Final = re.compile(r"([A-Za-z_']+)\n([A-Za-z_']+)")
_IN_SIZE: Final = re.compile(r"\d\.?\n\.?\d[\d.]{0,20} ?(?:bytes|[KMGT]i?B|has\b)|[A-Za-z]\n[.:;)]")


def join_lines(text: str, following: str) -> str:
    """`text` and the next line, with a space between them unless the break is inside a word or a number."""
    at = f"{text[-30:]}\n{following[:30]}"
    word = _IN_WORD.search(at)
    inside = word[1] + word[2] in _WHOLE if word is not None else _IN_SIZE.search(at) is not None
    return f"{text}{'' if inside else ' '}{following}"


Figures = tuple[dict[str, Any], int]
Reader = Callable[[str], Figures]
"""From the text of a message to its fields, and where the message ends in it."""

# torch: c10/cuda/CUDACachingAllocator.cpp, where OutOfMemoryError is raised. 0.4 to 1.3 print "cached" for reserved
# - allocated, 1.4 to 2.0 "reserved in total by PyTorch", 2.1 and later "is reserved by PyTorch but unallocated". 1.8
# and later have "allowed". The words before a colon are of c10/cuda/CUDAMallocAsyncAllocator.cpp.
_DEVICE: Final = {
    "requested_bytes": re.compile(rf"[Tt]ried to allocate {SIZE}|\bRequested {{0,20}}: {SIZE}"),
    "capacity_bytes": re.compile(
        rf"{SIZE} total capacity|has a total capac(?:i?)ty of {SIZE}|\bDevice limit {{0,20}}: {SIZE}"
    ),
    "free_bytes": re.compile(rf"of which {SIZE} is free|; {SIZE} free|\bFree \(according to CUDA\): {SIZE}"),
    "allocated_bytes": re.compile(
        rf"{SIZE} already allocated|Of the allocated memory {SIZE} is allocated by"
        rf"|\bCurrently allocated {{0,20}}: {SIZE}"
    ),
    "reserved_bytes": re.compile(rf"{SIZE} reserved in total by PyTorch"),
    "_unallocated": re.compile(rf"{SIZE} (?:is reserved by PyTorch but unallocated|cached\))"),
    "allowed_bytes": re.compile(rf"{SIZE} allowed;|user-supplied memory fraction\) {{0,40}}: {SIZE}"),
    "private_pools_bytes": re.compile(rf"{SIZE} allocated in private pools"),
    "process_bytes": re.compile(rf"this process has {SIZE} memory in use"),
}
_INDEX: Final = re.compile(r"\b(?:GPU|NPU|XPU|MLU|Allocation on device) ?(\d{1,4})\b")
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
    rf"(?:allocate|allocating|allocation of|realloc of size|malloc of size|size:) {SIZE}"
    r"|(?:allocate|(?:re|m)alloc of size) (?:[\d.]{1,12}\w{1,3} \()?(\d{1,20})\b(?!\.)"
)
_RESIDENT: Final = re.compile(r"anon-rss:(\d{1,15})kB")
_KILLED: Final = re.compile(
    r"process (\d{1,10}),? (?:\(([^)\n]{1,60})\))?|\btask=([^,\n]{1,60}),pid=(\d{1,10})|(?:PID|\(pid:) (\d{1,10})"
)


def device_figures(text: str) -> Figures:
    """The sizes of torch's allocators (CUDA, HIP, XPU, NPU)."""
    values, end = _sizes(_DEVICE, text)
    # A process on a GPU holds at least its context. NVML gives 0 in a container, where it sees no processes.
    values["process_bytes"] = values.get("process_bytes") or None
    unallocated = values.pop("_unallocated", None)
    if values.get("allowed_bytes", 0) is None:
        del values["allowed_bytes"]  # no cap: torch prints the largest number
    if unallocated is not None and values.get("allocated_bytes") is not None:
        values["reserved_bytes"] = values["allocated_bytes"] + unallocated
    if index := _INDEX.search(text):
        values["device"] = int(index[1])
    processes = list(_PROCESS.finditer(text))
    values["processes"] = tuple(Process(int(one[1]), to_bytes(one[2], one[3]) or None) for one in processes)
    if variable := _VARIABLE.search(text):
        values["variable"] = variable[0]
    last = _LAST_WORDS.search(text)
    return values, max([end, *(one.end() for one in processes), last.end() if last is not None else 0])


_VLLM: Final = {
    "requested_bytes": re.compile(
        r"desired GPU memory utilization \([\d.]{1,8}, ([\d.]{1,12}) (GiB)\)|([\d.]{1,12}) (GiB) KV cache is needed"
    ),
    "free_bytes": re.compile(r"\(([\d.]{1,12})/[\d.]{1,12} (GiB)\)|available KV cache memory \(([\d.]{1,12}) (GiB)\)"),
    "capacity_bytes": re.compile(r"\([\d.]{1,12}/([\d.]{1,12}) (GiB)\)"),
}


def request(text: str) -> Figures:
    """The requested size, if it is the only number."""
    match = _REQUEST.search(text)
    if match is None:
        return {}, 0
    size = int(match[3]) if match[3] else to_bytes(match[1], match[2])
    return {"requested_bytes": size}, match.end()


def numbers(pattern: str, *names: str) -> Reader:
    """A reader of whole numbers (bytes): the groups of `pattern`, by name."""
    compiled = re.compile(pattern)

    def read(text: str) -> Figures:
        match = compiled.search(text)
        if match is None:
            return {}, 0
        values = {name: int(value) for name, value in zip(names, match.groups(), strict=True) if value is not None}
        return values, match.end()

    return read


def kill_figures(text: str) -> Figures:
    """The killed process and its RAM, from the kernel's line."""
    values: dict[str, Any] = {}
    process = _KILLED.search(text)
    resident = _RESIDENT.search(text)
    if process is not None:
        values |= {"pid": int(process[1] or process[4] or process[5]), "process_name": process[2] or process[3]}
    if resident is not None:
        values["resident_bytes"] = int(resident[1]) * 1024
    return values, max((match.end() for match in (process, resident) if match is not None), default=0)


def _sizes(patterns: dict[str, re.Pattern[str]], text: str, *, binary: bool = False) -> Figures:
    values: dict[str, Any] = {}
    end = 0
    for name, pattern in patterns.items():
        if match := pattern.search(text):
            number, unit = (group for group in match.groups() if group is not None)
            values[name] = to_bytes(number, unit, binary=binary)
            end = max(end, match.end())
    return values, end


mps_figures: Final = partial(_sizes, _MPS, binary=True)
"""The sizes of torch's allocator for MPS."""

vllm_figures: Final = partial(_sizes, _VLLM)
"""The memory that vLLM needs, and the free memory."""

# Schedulers and clusters: RAM in use, and the limit. Ray: _private/memory_monitor.py; its GB are 2**30 bytes.
_HOST: Final = (
    re.compile(rf"was {SIZE} / {SIZE} \([\d.]{{1,12}}\)"),
    re.compile(rf"\b{SIZE} exceeded limit {SIZE}"),  # PBS
    re.compile(rf"\b{SIZE} of {SIZE} physical memory used"),  # YARN
)
_SLURM: Final = re.compile(r"memory limit \((\d{1,15}) > (\d{1,15})\)")
"""In KiB (Slurm: plugins/jobacct_gather)."""
_ALLOWED: Final = re.compile(r"limit exceeded \((\d{1,6})([MGT]i)\)")
_EVICTED: Final = re.compile(r"\bwas using (\d{1,15})([KMGT]i)?\b")
_VICTIM: Final = re.compile(r"victim process: ([^,\n]{1,60}), pid: (\d{1,10})")

hsa_figures: Final = partial(_sizes, {"free_bytes": re.compile(r"Available Free mem ?: ?(\d{1,9}) (MB)")}, binary=True)
"""The free memory that ROCm's runtime prints; its MB are 2**20 bytes."""


def host_figures(text: str) -> Figures:
    """RAM in use and the limit, from a scheduler or a cluster."""
    if match := _SLURM.search(text):
        return {"used_bytes": int(match[1]) * 1024, "total_bytes": int(match[2]) * 1024}, match.end()
    if match := _ALLOWED.search(text):
        return {"total_bytes": to_bytes(match[1], match[2])}, match.end()
    for pattern in _HOST:
        if match := pattern.search(text):
            used = to_bytes(match[1], match[2], binary=True)
            total = to_bytes(match[3], match[4], binary=True)
            return {"used_bytes": used, "total_bytes": total}, match.end()
    return {}, 0


def evicted_figures(text: str) -> Figures:
    """The RAM of an evicted container (Kubernetes), or the process that a node's kernel killed."""
    if match := _EVICTED.search(text):
        return {"used_bytes": to_bytes(match[1], match[2] or "B")}, match.end()
    if match := _VICTIM.search(text):
        return {"process_name": match[1], "pid": int(match[2])}, match.end()
    return {}, 0


# tensorflow: tsl/framework/bfc_allocator.cc; xla: service/hlo_rematerialization.cc and the TPU's own compiler.
_XLA_SIZE: Final = r"(\d{1,18}(?:\.\d{1,4})?) ?((?:[KMGT]i?)?B|bytes|[KMGT])\b"
_XLA: Final = {
    "requested_bytes": re.compile(rf"(?:allocate|allocating|reserve|Used) {_XLA_SIZE}"),
    "free_bytes": re.compile(rf"There are {_XLA_SIZE} free"),
    "capacity_bytes": re.compile(rf"Used [\d.]{{1,12}}[KMGT] of {_XLA_SIZE} hbm"),
}
xla_figures: Final = partial(_sizes, _XLA, binary=True)
"""XLA's request, the free memory, and the size of the accelerator's memory."""


def cuda_figures(text: str) -> Figures:
    """The device type: torch for ROCm writes CUDA in the error, and HIP's error code after it."""
    hip = re.search(r"Search for .?hipError\w{1,40}", text[:600])
    return ({"device_type": "rocm"}, hip.end()) if hip is not None else ({}, 0)
