# ruff: noqa: E501  # messages stand as they are printed
"""Messages as they are printed, with the numbers and the cause that must be read from them.

Written out from the formats in the libraries' sources (named in `hf_memkit/measuring/out_of_memory/patterns.py`), with
figures of the kind that users post; those of this machine's torch and numpy come from the live libraries in
`test_oom_messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_memkit.common.units import GIB, MIB

KIB = 1024


@dataclass(frozen=True)
class Example:
    """A text, its form, the cause, and the fields it must give (all other sizes must be None)."""

    name: str
    text: str
    form: str
    cause: str
    fields: dict[str, Any] = field(default_factory=dict)


def gib(number: float) -> int:
    return round(number * GIB)


def mib(number: float) -> int:
    return round(number * MIB)


def gpu(device_type: str = "cuda", device: int = 0, **more: Any) -> dict[str, Any]:
    """What a message of a GPU's allocator gives: sizes by their names without `_bytes`."""
    whole = ("variable", "processes")
    sizes = {name if name in whole else f"{name}_bytes": value for name, value in more.items()}
    return {"device_type": device_type, "device": device, **sizes}


_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_DOC = (
    " If reserved but unallocated memory is large try setting {}=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
_OLD_DOC = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)

THE_TEXT = (
    "Tried to allocate 1.24 GiB (GPU 0; 15.78 GiB total capacity; 10.34 GiB already allocated; 435.50 MiB free; 14.21 "
    "GiB reserved in total by PyTorch)"
)
"""The text of the field's surveys: 3.87 GiB cached, in pieces."""

EXAMPLES: tuple[Example, ...] = (
    # torch, CUDA
    Example(
        "torch 1.4-1.7: the surveys' text", f"RuntimeError: CUDA out of memory. {THE_TEXT}", "torch-device",
        "fragmentation",
        gpu(requested=gib(1.24), capacity=gib(15.78), allocated=gib(10.34), free=mib(435.5), reserved=gib(14.21)),
    ),
    Example(
        "torch 0.4: no figures", "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/"
        "THCGeneral.cpp:663", "cuda-raw", "context and libraries", {"device_type": "cuda"},
    ),
    Example(
        "torch 1.0-1.3: cached, size", "RuntimeError: CUDA out of memory. Tried to allocate 6.61 GiB (GPU 1; 10.76 GiB "
        "total capacity; 1.25 GiB already allocated; 2.39 GiB free; 1.62 GiB cached)", "torch-device", "another process",
        gpu(device=1, requested=gib(6.61), capacity=gib(10.76), allocated=gib(1.25), free=gib(2.39), reserved=gib(1.25)
            + gib(1.62)),
    ),
    Example(
        "torch 1.8: the cap", "RuntimeError: CUDA out of memory. Tried to allocate 5.59 GiB (GPU 0; 11.17 GiB total "
        "capacity; 0 bytes already allocated; 10.91 GiB free; 5.00 GiB allowed; 0 bytes reserved in total by PyTorch)",
        "torch-device", "size",
        gpu(requested=gib(5.59), capacity=gib(11.17), allocated=0, free=gib(10.91), reserved=0, allowed=gib(5.0)),
    ),
    Example(
        "torch 1.11-2.0: hint, full", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 144.00 MiB "
        "(GPU 0; 14.74 GiB total capacity; 13.38 GiB already allocated; 64.12 MiB free; 13.59 GiB reserved in total by "
        "PyTorch)" + _OLD_DOC, "torch-device", "size",
        gpu(requested=mib(144), capacity=gib(14.74), allocated=gib(13.38), free=mib(64.12), reserved=gib(13.59),
            variable=_CONF),
    ),
    Example(
        "torch 1.11-2.0: KiB and bytes", "RuntimeError: CUDA out of memory. Tried to allocate 512.00 KiB (GPU 0; 8.00 GiB "
        "total capacity; 5.67 GiB already allocated; 0 bytes free; 7.24 GiB reserved in total by PyTorch)" + _OLD_DOC,
        "torch-device", "fragmentation",
        gpu(requested=512 * KIB, capacity=gib(8.0), allocated=gib(5.67), free=0, reserved=gib(7.24), variable=_CONF),
    ),
    Example(
        "torch 2.1: capacty, max_split_size_mb, desktop beside", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried "
        "to allocate 2.09 GiB. GPU 0 has a total capacty of 23.69 GiB of which 541.00 MiB is free. Process 2006998 has "
        "256.00 MiB memory in use. Including non-PyTorch memory, this process has 22.89 GiB memory in use. Of the "
        "allocated memory 21.48 GiB is allocated by PyTorch, and 1.11 GiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See "
        "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF", "torch-device", "size",
        gpu(requested=gib(2.09), capacity=gib(23.69), free=mib(541), process=gib(22.89), allocated=gib(21.48),
            reserved=gib(21.48) + gib(1.11), variable=_CONF, processes=((2006998, mib(256)),)),
    ),
    Example(
        "torch 2.2-2.9: size", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.75 GiB. GPU 0 has a total "
        "capacity of 23.53 GiB of which 2.59 GiB is free. Including non-PyTorch memory, this process has 20.93 GiB "
        "memory in use. Of the allocated memory 20.43 GiB is allocated by PyTorch, and 47.16 MiB is reserved by PyTorch "
        "but unallocated." + _DOC.format("PYTORCH_CUDA_ALLOC_CONF"), "torch-device", "size",
        gpu(requested=gib(3.75), capacity=gib(23.53), free=gib(2.59), process=gib(20.93), allocated=gib(20.43),
            reserved=gib(20.43) + mib(47.16), variable=_CONF),
    ),
    Example(
        "torch 2.x: pieces", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
        "capacity of 39.39 GiB of which 1.03 GiB is free. Including non-PyTorch memory, this process has 38.35 GiB memory "
        "in use. Of the allocated memory 28.40 GiB is allocated by PyTorch, and 9.22 GiB is reserved by PyTorch but "
        "unallocated." + _DOC.format("PYTORCH_CUDA_ALLOC_CONF"), "torch-device", "fragmentation",
        gpu(device=3, requested=gib(2.0), capacity=gib(39.39), free=gib(1.03), process=gib(38.35), allocated=gib(28.4),
            reserved=gib(28.4) + gib(9.22), variable=_CONF),
    ),
    Example(
        "torch 2.x: two other jobs", "OutOfMemoryError: CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a "
        "total capacity of 94.96 GiB of which 59.69 MiB is free. Process 502587 has 1.78 GiB memory in use. Process "
        "745081 has 86.44 GiB memory in use. Including non-PyTorch memory, this process has 6.62 GiB memory in use. Of "
        "the allocated memory 5.97 GiB is allocated by PyTorch, and 116.33 MiB is reserved by PyTorch but unallocated."
        + _DOC.format("PYTORCH_CUDA_ALLOC_CONF"), "torch-device", "another process",
        gpu(requested=mib(130), capacity=gib(94.96), free=mib(59.69), process=gib(6.62), allocated=gib(5.97),
            reserved=gib(5.97) + mib(116.33), variable=_CONF, processes=((502587, gib(1.78)), (745081, gib(86.44)))),
    ),
    Example(
        "torch 2.x in a container: its own entry has the host's number", "torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 270.00 MiB. GPU 0 has a total capacity of 21.67 GiB of which 255.75 MiB is free. Process 2109 "
        "has 344.00 MiB memory in use. Process 1448259 has 21.07 GiB memory in use. Of the allocated memory 20.08 GiB is "
        "allocated by PyTorch, with 328.00 MiB allocated in private pools (e.g., CUDA Graphs), and 56.49 MiB is reserved "
        "by PyTorch but unallocated." + _DOC.format("PYTORCH_CUDA_ALLOC_CONF"), "torch-device", "size",
        gpu(requested=mib(270), capacity=gib(21.67), free=mib(255.75), allocated=gib(20.08), private_pools=mib(328),
            reserved=gib(20.08) + mib(56.49), variable=_CONF, processes=((2109, mib(344)), (1448259, gib(21.07)))),
    ),
    Example(
        "torch 2.x in a container: another container's job is not listed", "torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 39.49 GiB of which 47.00 MiB is free. Including "
        "non-PyTorch memory, this process has 5.16 GiB memory in use. Of the allocated memory 4.61 GiB is allocated by "
        "PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated.", "torch-device", "another process",
        gpu(requested=mib(64), capacity=gib(39.49), free=mib(47), process=gib(5.16), allocated=gib(4.61),
            reserved=gib(4.61) + mib(20)),
    ),
    Example(
        "torch 2.x in a container: NVML sees no process", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "130.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 12.81 MiB is free. Process 3427 has 0 bytes memory in "
        "use. Process 3428 has 0 bytes memory in use. Including non-PyTorch memory, this process has 0 bytes memory in use. "
        "Of the allocated memory 10.47 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated.",
        "torch-device", "another process",
        gpu(requested=mib(130), capacity=gib(79.1), free=mib(12.81), allocated=gib(10.47), reserved=gib(10.47) +
            mib(200), processes=((3427, None), (3428, None))),
    ),
    Example(
        "torch 2.x: private pools", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 304.00 MiB. GPU 0 has "
        "a total capacity of 94.97 GiB of which 218.81 MiB is free. Including non-PyTorch memory, this process has 93.84 "
        "GiB memory in use. Of the allocated memory 91.19 GiB is allocated by PyTorch, with 118.00 MiB allocated in "
        "private pools (e.g., CUDA Graphs), and 744.36 MiB is reserved by PyTorch but unallocated.", "torch-device",
        "size",
        gpu(requested=mib(304), capacity=gib(94.97), free=mib(218.81), process=gib(93.84), allocated=gib(91.19),
            private_pools=mib(118), reserved=gib(91.19) + mib(744.36)),
    ),
    Example(
        "torch 2.x: the cap", "OutOfMemoryError: CUDA out of memory. Tried to allocate 996.00 MiB. GPU 0 has a total "
        "capacity of 44.43 GiB of which 9.06 GiB is free. Process 2102129 has 17.54 GiB memory in use. Including "
        "non-PyTorch memory, this process has 17.81 GiB memory in use. 17.69 GiB allowed; Of the allocated memory 17.44 "
        "GiB is allocated by PyTorch, and 59.88 MiB is reserved by PyTorch but unallocated.", "torch-device", "cap",
        gpu(requested=mib(996), capacity=gib(44.43), free=gib(9.06), process=gib(17.81), allowed=gib(17.69),
            allocated=gib(17.44), reserved=gib(17.44) + mib(59.88), processes=((2102129, gib(17.54)),)),
    ),
    Example(
        "torch 2.x on Windows: NVML tells no process's memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "2.13 GiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Process 9132 has 17179869184.00 GiB "
        "memory in use. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated "
        "memory 6.95 GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated.", "torch-device",
        "size",
        gpu(requested=gib(2.13), capacity=gib(8.0), free=0, allocated=gib(6.95), reserved=gib(6.95) + mib(12),
            processes=((9132, None),)),
    ),
    Example(
        "torch, newer: PYTORCH_ALLOC_CONF, larger than the GPU", "torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 23.52 GiB of which 23.05 GiB is free. Including "
        "non-PyTorch memory, this process has 386.00 MiB memory in use. Of the allocated memory 0 bytes is allocated by "
        "PyTorch, and 0 bytes is reserved by PyTorch but unallocated." + _DOC.format("PYTORCH_ALLOC_CONF"),
        "torch-device", "size",
        gpu(requested=gib(32), capacity=gib(23.52), free=gib(23.05), process=mib(386), allocated=0, reserved=0,
            variable="PYTORCH_ALLOC_CONF"),
    ),
    Example("torch: cut off", "CUDA out of memory. Tried to allocate 2.00 GiB", "torch-device", "unknown",
            {"device_type": "cuda", "requested_bytes": gib(2)}),
    Example("torch: the words alone", "RuntimeError: CUDA out of memory.", "torch-device-bare", "unknown",
            {"device_type": "cuda"}),
    # ROCm, XPU, NPU, MPS
    Example(
        "ROCm", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 978.00 MiB. GPU 0 has a total capacity of "
        "15.98 GiB of which 630.00 MiB is free. Of the allocated memory 14.10 GiB is allocated by PyTorch, and 100.00 MiB "
        "is reserved by PyTorch but unallocated." + _DOC.format("PYTORCH_HIP_ALLOC_CONF"), "torch-device", "size",
        gpu(device_type="rocm", requested=mib(978), capacity=gib(15.98), free=mib(630), allocated=gib(14.1),
            reserved=gib(14.1) + mib(100), variable="PYTORCH_HIP_ALLOC_CONF"),
    ),
    Example("ROCm: driver", "RuntimeError: HIP error: out of memory", "cuda-raw", "context and libraries",
            {"device_type": "rocm"}),
    Example(
        "XPU", "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of "
        "28.55 GiB of which 12.01 GiB is free. Of the allocated memory 15.30 GiB is allocated by PyTorch, and 120.00 MiB "
        "is reserved by PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        "torch-device", "size",
        gpu(device_type="xpu", requested=gib(59.61), capacity=gib(28.55), free=gib(12.01), allocated=gib(15.3),
            reserved=gib(15.3) + mib(120)),
    ),
    Example(
        "XPU, without the free size", "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 15.11 GiB. Of the allocated memory 13.50 GiB is allocated by PyTorch, and 400.00 MiB is reserved "
        "by PyTorch but unallocated.", "torch-device", "size",
        gpu(device_type="xpu", requested=gib(2), capacity=gib(15.11), allocated=gib(13.5), reserved=gib(13.5) +
            mib(400)),
    ),
    Example("XPU: Level Zero", "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "level-zero", "context and libraries", {"device_type": "xpu"}),
    Example(
        "NPU", "[rank7]:[E615 22:00:29.320155898 compiler_depend.ts:444] NPU out of memory. NPUWorkspaceAllocator tried to "
        "allocate 1.89 GiB(NPU 7; 60.96 GiB total capacity; 1.82 GiB free). If you want to reduce memory usage, take a "
        "try to set the environment variable TASK_QUEUE_ENABLE=1.", "torch-device", "size",
        {"device": 7, "device_type": "npu", "requested_bytes": gib(1.89), "capacity_bytes": gib(60.96),
         "free_bytes": gib(1.82)},
    ),
    Example("Gaudi", "RuntimeError: FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB", "hpu",
            "context and libraries", {"device_type": "hpu", "requested_bytes": 268435456}),
    Example(
        "MPS, GB that are GiB", "RuntimeError: MPS backend out of memory (MPS allocated: 3.11 GB, other allocations: 5.42 "
        "GB, max allowed: 9.07 GB). Tried to allocate 720.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 "
        "to disable upper limit for memory allocations (may cause system failure).", "torch-mps", "cap",
        {"device_type": "mps", "allocated_bytes": gib(3.11), "other_bytes": gib(5.42), "allowed_bytes": gib(9.07),
         "requested_bytes": mib(720)},
    ),
    Example(
        "MPS without a limit", "RuntimeError: MPS backend out of memory (MPS allocated: 20.11 GiB, other allocations: "
        "384.00 KiB). Tried to allocate 8.00 GiB on private pool.", "torch-mps", "unknown",
        {"device_type": "mps", "allocated_bytes": gib(20.11), "other_bytes": 384 * KIB, "requested_bytes": gib(8)},
    ),
    Example("Metal", "RuntimeError: Invalid buffer size: 372.53 GiB", "torch-mps-buffer", "size",
            {"device_type": "mps", "requested_bytes": gib(372.53)}),
    # CUDA and its libraries
    Example("CUDA runtime", "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "cuda-raw", "context and libraries", {"device_type": "cuda"}),
    Example("CUDA driver", "RuntimeError: CUDA driver error: out of memory", "cuda-driver", "unknown",
            {"device_type": "cuda"}),
    Example("cuBLAS", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cublas-alloc", "context and libraries", {"device_type": "cuda"}),
    Example("cuBLAS handle", "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "cublas-handle", "context and libraries", {"device_type": "cuda"}),
    Example("cuDNN", "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cudnn-alloc", "context and libraries",
            {"device_type": "cuda"}),
    Example("cuDNN, no algorithm", "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
            "cudnn-algorithm", "unknown", {"device_type": "cuda"}),
    Example(
        "NCCL", "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:"
        "1970, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'", "nccl", "context and libraries",
        {"device_type": "cuda"},
    ),
    Example("NCCL, 2.18 and before", "Last error:\nFailed to CUDA calloc async 4294967296 bytes", "nccl",
            "context and libraries", {"device_type": "cuda", "requested_bytes": 4294967296}),
    Example(
        "NCCL, shared memory", "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
        "device error.\nLast error:\nError while creating shared memory segment /dev/shm/nccl-8NdDBF (size 9637888)",
        "nccl-shm", "shared memory", {"requested_bytes": 9637888},
    ),
    Example("bitsandbytes", "Error out of memory at line 118 in file /src/csrc/ops.cu", "bitsandbytes",
            "context and libraries", {"device_type": "cuda"}),
    Example("bitsandbytes, managed", "Error out of memory at line 380 in file /build/csrc/pythonInterface.c",
            "bitsandbytes-managed", "host memory"),
    Example("bitsandbytes, launch", "Error invalid configuration argument at line 54 in file /src/csrc/ops.cu",
            "bitsandbytes-launch", "kernel resources", {"device_type": "cuda"}),
    Example(
        "Triton", "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware "
        "limit: 101376. Reducing block sizes or `num_stages` may help.", "triton", "kernel resources",
        {"requested_bytes": 147456, "limit_bytes": 101376},
    ),
    # DeepSpeed
    Example("DeepSpeed, buffers", "AssertionError: Not enough buffers 0 for swapping 1", "deepspeed-buffers",
            "host memory"),
    Example("DeepSpeed, buffer's size", "AssertionError: More elements 163840000 than buffer size 100000000",
            "deepspeed-buffer-size", "host memory"),
    Example("DeepSpeed, locked memory", "mlock failed to allocate 400000000 bytes with error no 12 msg Cannot allocate "
            "memory", "deepspeed-mlock", "host memory", {"requested_bytes": 400000000}),
    Example(
        "DeepSpeed, pinned", '  File "/x/deepspeed/runtime/zero/stage_1_and_2.py", line 600, in __init__\n    '
        "self.temp_grad_buffer_for_cpu_offload = get_accelerator().pin_memory(torch.zeros(largest))\nRuntimeError: CUDA "
        "error: out of memory", "pinned", "host memory",
    ),
    # RAM
    Example(
        "torch, CPU", "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 281474976710656 bytes. Error code 12 (Cannot allocate memory)", "torch-cpu",
        "host memory", {"requested_bytes": 281474976710656},
    ),
    Example("torch, CPU, Windows", "RuntimeError: [enforce fail at ..\\c10\\core\\CPUAllocator.cpp:75] data. "
            "DefaultCPUAllocator: not enough memory: you tried to allocate 34359738368 bytes. Buy new RAM!", "torch-cpu",
            "host memory", {"requested_bytes": 34359738368}),
    Example("torch 0.4, CPU", "RuntimeError: $ Torch: not enough memory: you tried to allocate 16GB. Buy new RAM! at "
            "/pytorch/aten/src/TH/THGeneral.cpp:204", "torch-cpu", "host memory", {"requested_bytes": 16 * 10**9}),
    Example("numpy", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3.20 GiB for an array with shape "
            "(429496730,) and data type float64", "numpy", "host memory", {"requested_bytes": gib(3.2)}),
    Example("numpy 1.17", "MemoryError: Unable to allocate array with shape (90000, 90000) and data type float64",
            "numpy", "host memory"),
    Example("Python", "Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\nMemoryError",
            "memory-error", "host memory"),
    Example("C++", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
            "memory-error", "host memory"),
    Example("fork", "OSError: [Errno 12] Cannot allocate memory", "memory-error", "host memory"),
    # shared memory
    Example("data loader, bus error", "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient shared memory (shm).", "dataloader-shm", "shared memory"),
    Example("data loader, killed by it", "RuntimeError: DataLoader worker (pid 4217) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory.", "dataloader-shm", "shared memory"),
    Example("torch, shm", "RuntimeError: unable to allocate shared memory(shm) for file </torch_1140157_3143461634_13983>: "
            "Resource temporarily unavailable (11)", "torch-shm", "shared memory"),
    Example("torch, mmap", "RuntimeError: unable to mmap 1048576 bytes from file </torch_41>: Cannot allocate memory (12)",
            "mmap", "host memory", {"requested_bytes": 1048576}),
    # killed from outside
    Example("data loader, killed", "RuntimeError: DataLoader worker (pid 28841) is killed by signal: Killed. ",
            "dataloader-killed", "host memory", {"pid": 28841}),
    Example(
        "dmesg", "[ 1234.567890] Out of memory: Killed process 48211 (python) total-vm:94371840kB, anon-rss:62914560kB, "
        "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:124000kB oom_score_adj:0", "linux-oom", "host memory",
        {"pid": 48211, "process_name": "python", "resident_bytes": 62914560 * KIB, "in_cgroup": False},
    ),
    Example("dmesg, Linux 4", "[337533.314412] Out of memory: Kill process 1234 (python3) score 900 or sacrifice child",
            "linux-oom", "host memory", {"pid": 1234, "process_name": "python3", "in_cgroup": False}),
    Example(
        "dmesg, container", "[337533.314412] Memory cgroup out of memory: Killed process 23793 (python) "
        "total-vm:2623712kB, anon-rss:506500kB, file-rss:1268kB, shmem-rss:0kB", "linux-memcg", "host memory",
        {"pid": 23793, "process_name": "python", "resident_bytes": 506500 * KIB, "in_cgroup": True},
    ),
    Example(
        "journal, container", "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,"
        "oom_memcg=/job,task_memcg=/job,task=python,pid=23793,uid=0", "linux-memcg", "host memory",
        {"pid": 23793, "process_name": "python", "in_cgroup": True},
    ),
    Example("Slurm", "slurmstepd: error: Detected 1 oom_kill event in StepId=8538204.0. Some of the step tasks have been "
            "OOM Killed.", "slurm", "host memory", {"in_cgroup": True}),
    Example("Slurm, before 21.08", "slurmstepd: error: Detected 1 oom-kill event(s) in step 45791123.batch cgroup.",
            "slurm", "host memory", {"in_cgroup": True}),
    Example("Kubernetes", "    State: Terminated  Reason: OOMKilled  Exit Code: 137", "kubernetes", "host memory",
            {"in_cgroup": True}),
    Example("torchrun", "  exitcode  : -9 (pid: 8158)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by "
            "PID 8158", "sigkill", "host memory", {"pid": 8158}),
    Example("DeepSpeed's launcher", "[2026-01-05 12:00:00,123] [ERROR] [launch.py:325:sigkill_handler] ['python', "
            "'train.py'] exits with return code = -9", "sigkill", "host memory"),
    Example("a shell", "run.sh: line 3: 12345 Killed                  python train.py", "sigkill", "host memory"),
    Example("a shell, alone", "Killed", "sigkill", "host memory"),
    # others
    Example("accelerate", "RuntimeError: No executable batch size found, reached zero.", "accelerate-batch", "unknown"),
    Example("JAX", "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
            "33762398024 bytes.", "xla", "size", {"requested_bytes": 33762398024}),
    Example("JAX, now", "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 30.55GiB.",
            "xla", "size", {"requested_bytes": gib(30.55)}),
    Example("TensorFlow", "ResourceExhaustedError: OOM when allocating tensor with shape[32,128,56,56] and type float",
            "tensorflow", "size", {"device_type": "cuda"}),
    Example("TensorFlow, its allocator", "2020-09-24 21:35:23.363348: W tensorflow/core/common_runtime/bfc_allocator.cc:246] "
            "Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.20GiB (rounded to 2362232064)requested by op x",
            "tensorflow", "size", {"device_type": "cuda", "requested_bytes": gib(2.2)}),
    Example("TensorFlow, the driver", "2021-09-24 16:37:14.130269: I tensorflow/stream_executor/cuda/cuda_driver.cc:732] failed to "
            "allocate 7.81G (8387559424 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory", "tensorflow", "size",
            {"device_type": "cuda", "requested_bytes": 8387559424}),
    # vLLM: github.com/vllm-project/vllm/issues/10439, /2418, /27508
    Example("vLLM, no cache", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
            "when initializing the engine.", "vllm-cache", "cap"),
    Example("vLLM, too small a cache", "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 "
            "GiB KV cache is needed, which is larger than the available KV cache memory (5.24 GiB). Based on the available "
            "memory, the estimated maximum model length is 42928.", "vllm-cache", "cap",
            {"requested_bytes": gib(16), "free_bytes": gib(5.24)}),
    Example("vLLM, older", "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be "
            "stored in KV cache (3664). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`", "vllm-cache",
            "cap"),
    Example("vLLM, at its start", "ValueError: Free memory on device cuda:0 (10.2/23.6 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 21.24 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            "vllm-start", "cap",
            {"device_type": "cuda", "requested_bytes": gib(21.24), "free_bytes": gib(10.2),
             "capacity_bytes": gib(23.6)}),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line in other words: its form, which memory it is about, the fields it must give, and the phase it shows."""

    text: str
    form: str
    memory: str
    fields: dict[str, Any] = field(default_factory=dict)
    phase: str | None = None


_KILLED, _BUS, _GPU = ("sigkill", "host"), ("sigbus", "shared memory"), ("cuda-raw", "device")
_SHARED, _RAM = "shared memory", "host"
_CUDA = {"device_type": "cuda"}

LINES: tuple[Line, ...] = (
    # shells
    Line("zsh: killed     python train.py", *_KILLED),
    Line("[1]+  Killed                  python train.py", *_KILLED),
    Line("fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)", *_KILLED),
    Line("/bin/sh: line 1: 12345 Killed: 9               python train.py", *_KILLED),
    Line("./train.sh: 第 3 行： 12345 已杀死               python train.py", *_KILLED),
    Line("make: *** [Makefile:3: train] Killed", *_KILLED),
    Line("make: *** [Makefile:3: train] Error 137", *_KILLED),
    Line("Command terminated by signal 9", *_KILLED),
    Line("Bus error (core dumped)", *_BUS),
    Line("train.sh: line 7: 3344 Bus error               (core dumped) python train.py", *_BUS),
    Line("zsh: bus error  python train.py", *_BUS),
    Line("bash: fork: Cannot allocate memory", "host-other", _RAM),
    # launchers
    Line("['python', '-u', 'train.py'] exits with return code = -7", *_BUS),
    Line("exitcode  : -7 (pid: 3011)", *_BUS, {"pid": 3011}),
    Line("  traceback : Signal 7 (SIGBUS) received by PID 3011", *_BUS, {"pid": 3011}),
    Line("subprocess.CalledProcessError: Command '['python', 'x.py']' returned non-zero exit status 137.", *_KILLED),
    Line("APPLICATION TERMINATED WITH THE EXIT STRING: Bus error (signal 7)", *_BUS),
    Line("=   KILLED BY SIGNAL: 9 (Killed)", *_KILLED),
    Line("mpirun noticed that process rank 1 with PID 0 on node x exited on signal 9 (Killed).", *_KILLED),
    # schedulers, clusters, containers, the system
    Line("srun: error: node17: task 3: Out Of Memory", "slurm", _RAM, {"in_cgroup": True}),
    Line("srun: error: gpu01: tasks 0-3: Killed", *_KILLED),
    Line(" 123456.batch      batch            OUT_OF_ME+     0:125", "slurm", _RAM, {"in_cgroup": True}),
    Line("slurmstepd: error: Job 1 exceeded memory limit (16777216 > 8388608), being killed", "slurm", _RAM,
         {"in_cgroup": True, "used_bytes": gib(16), "total_bytes": gib(8)}),
    Line("=>> PBS: job killed: mem 68157440kb exceeded limit 67108864kb", "job-limit", _RAM,
         {"in_cgroup": True, "used_bytes": gib(65), "total_bytes": gib(64)}),
    Line("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "job-limit", _RAM, {"in_cgroup": True}),
    Line("Job has gone over memory limit of 4096 megabytes. Peak usage: 5000 megabytes.", "job-limit", _RAM,
         {"in_cgroup": True}),
    Line("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node (IP: "
         "10.0.0.1) where the task (task ID: x, pid=1, memory used=2.00GB) was running was 239.50GB / 252.00GB (0.950397), "
         "which exceeds the memory usage threshold of 0.95.", "ray", _RAM,
         {"used_bytes": gib(239.5), "total_bytes": gib(252)}),
    Line("distributed.nanny.memory - WARNING - Worker tcp://127.0.0.1:1 (pid=4821) exceeded 95% memory budget. Restarting",
         "dask", _RAM, {"pid": 4821}),
    Line("The node was low on resource: memory. Threshold quantity: 100Mi, available: 88Mi. Container trainer was using "
         "57671680Ki, request is 16Gi, has larger consumption of memory.", "kubernetes-node", _RAM,
         {"in_cgroup": False, "used_bytes": gib(55)}),
    Line("Pod The node had condition: [MemoryPressure].", "kubernetes-node", _RAM, {"in_cgroup": False}),
    Line("The node was low on resource: ephemeral-storage. Threshold quantity: 10120387530, available: 9421108Ki. Container "
         "trainer was using 92312416Ki, request is 0, has larger consumption of ephemeral-storage.", "kubernetes-disk",
         "disk"),
    Line("The node had condition: [DiskPressure].", "kubernetes-disk", "disk"),
    Line("Pod ephemeral local storage usage exceeds the total limit of containers 20Gi.", "kubernetes-disk", "disk"),
    Line('Usage of EmptyDir volume "cache" exceeds the limit "50Gi".', "kubernetes-disk", "disk"),
    Line("Workload evicted, storage limit exceeded (50G)", "kubernetes-disk", "disk"),
    Line("Memory limit exceeded (16Gi)", "job-limit", _RAM, {"in_cgroup": True, "total_bytes": gib(16)}),
    Line("c++: fatal error: Killed signal terminated program cc1plus", "compiler-killed", _RAM),
    Line("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "compiler-killed", _RAM),
    Line('"exitCode": 137, "startedAt": "x"', *_KILLED),
    Line("Exited (137) 5 minutes ago", *_KILLED),
    Line("x.service: Main process exited, code=killed, status=9/KILL", *_KILLED),
    Line("x.service: Failed with result 'oom-kill'.", "oom-daemon", _RAM, {"in_cgroup": False}),
    Line("Nov 02 10:11:12 host systemd-oomd[812]: Killed /user.slice/x.scope due to memory pressure for /user.slice",
         "oom-daemon", _RAM, {"in_cgroup": False}),
    Line('sending SIGKILL to process 4821 uid 1000 "python3": badness 790, VmRSS 30000 MiB', "oom-daemon", _RAM,
         {"in_cgroup": False, "pid": 4821}),
    Line("memorystatus: killing_specific_process pid 4821 [python3.11] (per-process-limit 10) 41943040KB", "oom-daemon",
         _RAM, {"in_cgroup": False, "pid": 4821}),
    Line("python3 invoked oom-killer: gfp_mask=0x1100cca, order=0, oom_score_adj=0", "oom-daemon", _RAM,
         {"in_cgroup": False}),
    Line("Killed process 4821 (python3) total-vm:94371840kB, anon-rss:62914560kB", "linux-oom", _RAM,
         {"in_cgroup": False, "pid": 4821, "process_name": "python3", "resident_bytes": gib(60)}),
    Line("System OOM encountered, victim process: python, pid: 4821", "kubernetes-node", _RAM,
         {"in_cgroup": False, "pid": 4821, "process_name": "python"}),
    Line("OOMKilled", "kubernetes", _RAM, {"in_cgroup": True}),
    Line("slurmstepd-gpu20: error: Detected 1 oom-kill event(s) in StepId=9.0. Some of your processes may have been killed "
         "by the cgroup out-of-memory handler.", "slurm", _RAM, {"in_cgroup": True}),
    Line("#033[2m#033[33m(raylet)#033[0m node_manager.cc:3007: 2 Workers (tasks /\n actors) killed due to memory pressure "
         "(OOM), 0 Workers crashed", "ray", _RAM),
    Line("The kernel for ft.ipynb appears to have died. It will restart automatically.", "notebook", _RAM,
         {"in_cgroup": True}),
    Line("The Kernel crashed while executing code in the current cell or a previous cell.", "notebook", _RAM,
         {"in_cgroup": True}),
    Line("nbclient.exceptions.DeadKernelError: Kernel died", "notebook", _RAM, {"in_cgroup": True}),
    Line("Execution failed. User process '/x/bin/python' exited with status code -9. Please check log file 'x'.", *_KILLED),
    Line("Your session crashed after using all available RAM.", "notebook", _RAM, {"in_cgroup": True}),
    Line("Your notebook tried to allocate more memory than is available. It has restarted.", "notebook", _RAM,
         {"in_cgroup": True}),
    # workers
    Line("RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable "
         "multiprocessing.", "pool-killed", _RAM, {}, "data"),
    Line("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the "
         "future was running or pending.", "pool-killed", _RAM, {}, "data"),
    Line("RuntimeError: DataLoader worker (pid(s) 4821, 4822) exited unexpectedly", "dataloader-exited", _RAM,
         {"pid": 4821}, "data"),
    # RAM
    Line("OSError: [WinError 1455] The paging file is too small for this operation to complete.", "windows-commit", _RAM),
    Line("OSError: The paging file is too small for this operation to complete. (os error 1455)", "windows-commit", _RAM),
    Line("pyarrow.lib.ArrowMemoryError: realloc of size 2172846080 failed", "allocator", _RAM,
         {"requested_bytes": 2172846080}),
    Line("memory allocation of 1073741824 bytes failed", "allocator", _RAM, {"requested_bytes": 1073741824}),
    # /dev/shm, disks
    Line("x:12:34 [0] misc/shmutils.cc:67 NCCL WARN Call to posix_fallocate failed : No space left on device", "nccl-shm",
         _SHARED),
    Line("x:1:2 [1] NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)",
         "nccl-shm", _SHARED, {"requested_bytes": 9637892}),
    Line("RuntimeError: unable to write to file </torch_18692_1>: No space left on device (28)", "torch-shm", _SHARED),
    Line("OSError: [Errno 28] No space left on device: '/dev/shm/tmpx'", "torch-shm", _SHARED),
    Line("OSError: [Errno 28] No space left on device: 'out/checkpoint-50/model.safetensors'", "disk", "disk"),
    Line("RuntimeError: [enforce fail at inline_container.cc:595] . PytorchStreamWriter failed writing file data/1: file "
         "write failed", "disk", "disk"),
    # GPUs
    Line("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "vllm-wake", "device", _CUDA),
    Line("RuntimeError: Triton Error [CUDA]: out of memory", *_GPU, _CUDA),
    Line("CUDA failure 2: out of memory ; GPU=0 ; hostname=x ; file=/onnxruntime", *_GPU, _CUDA),
    Line("torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com",
         *_GPU, _CUDA),
    Line("RuntimeError: CUDA error: hipErrorOutOfMemory", *_GPU, {"device_type": "rocm"}),
    Line('RuntimeError: NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "/x.cpp":1154',
         "torch-nvml", "device", _CUDA),
    Line("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated "
         "    : 19.00 GiB\nRequested               : 2.00 GiB\nDevice limit            : 23.53 GiB\nFree (according to "
         "CUDA): 1.03 GiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : "
         "17179869184.00 GiB", "torch-device", "device",
         {"device": 0, "device_type": "cuda", "allocated_bytes": gib(19), "requested_bytes": gib(2),
          "capacity_bytes": gib(23.53), "free_bytes": gib(1.03)}),
    Line("torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently "
         "allocated     : 9.50 GiB\nRequested               : 32.00 MiB\nDevice limit            : 12.00 GiB", "torch-device",
         "device", {"device": 0, "device_type": "cuda", "allocated_bytes": gib(9.5), "requested_bytes": mib(32),
                    "capacity_bytes": gib(12)}),
    Line(":0:rocdevice.cpp            :2881: 12345: Callback: Queue 0x7f0 aborting with error : "
         "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. Code: 0x1008 Available "
         "Free mem : 62 MB", "hsa", "device", {"device_type": "rocm", "free_bytes": mib(62)}),
    Line('RuntimeError: nrt_tensor_allocate status=4 message="Allocation Failure"', "neuron", "device",
         {"device_type": "neuron"}),
    Line("2026-Jul-30 14:22:31.305961 65191:69012 ERROR  TDRV:dmem_alloc_internal    Failed to alloc DEVICE memory: 4194304",
         "neuron", "device", {"device_type": "neuron", "requested_bytes": 4194304}),
    Line("RuntimeError: Unsloth: No or negligible GPU memory available for fused cross entropy.", "unsloth-loss", "device",
         {}, "forward"),
    Line("RuntimeError: MLU out of memory. Tried to allocate 1.00 GiB (MLU 1; 31.00 GiB total capacity; 29.00 GiB already "
         "allocated; 100.00 MiB free; 30.00 GiB reserved in total by PyTorch)", "torch-device", "device",
         {"device": 1, "device_type": "mlu", "requested_bytes": gib(1), "capacity_bytes": gib(31), "free_bytes": mib(100),
          "allocated_bytes": gib(29), "reserved_bytes": gib(30)}),
    Line("RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", "level-zero", "device",
         {"device_type": "xpu"}),
    Line("RuntimeError: Allocation is out of device memory on current platform.", "level-zero", "device",
         {"device_type": "xpu"}),
    Line("ERROR 04-09 21:56:46 [x.py:452]         Call rtMalloc fail, purpose: page caching, type = 2, size:3221291008, "
         "device_id:0", "cann", "device", {"device_type": "npu", "requested_bytes": 3221291008}),
    Line("[E compiler_depend.ts:280] call aclrtMalloc failed, error code is 207001", "cann", "device",
         {"device_type": "npu"}),
    Line("Error: (null) Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "metal", "device",
         {"device_type": "mps"}),
    Line("ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the "
         "quantized model.", "dispatched", "device", {}, "load"),
    Line("SomeError: the GPU ran out of memory", "device-other", "device"),
    # accelerators of XLA
    Line("RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: Attempting to allocate 2.00G. That was not possible. There "
         "are 1.25G free.; (0x0x0_HBM0)", "xla-tpu", "device",
         {"device_type": "tpu", "requested_bytes": gib(2), "free_bytes": gib(1.25)}),
    Line("Ran out of memory in memory space hbm. Used 20.50G of 15.50G hbm. Exceeded hbm capacity by 5.51G.", "xla-tpu",
         "device", {"device_type": "tpu", "requested_bytes": gib(20.5), "capacity_bytes": gib(15.5)}),
    # sizes that are none
    Line("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.", "no-size", "device", _CUDA),
    Line("RuntimeError: [enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: can't allocate memory: you tried to "
         "allocate -4611686018427387904 bytes. Error code 12", "no-size", _RAM),
    Line("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 6.94 EiB for an array with shape (1000000000, "
         "1000000000) and data type float64", "no-size", _RAM),
)  # fmt: skip
"""Each is one message of its form and no other."""

NOT_MESSAGES = (
    "",
    "Step 137 loss 2.137",
    "  except MemoryError:",
    "peak memory 3.20 GiB of 16 GiB",
    "Killed 3 stale workers",
    'if "out of memory" in str(error):',
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x4 and 5x5)",
    "RuntimeError: CUDA error: device-side assert triggered",
    "Setting memory limit to 90%",
    "exit code: 1",
    "saved 137 files in 1.9 s",
    "step 137 of 2000 returned 137 samples",
    "exitcode  : -15 (pid: 3011)",
    "If you run out of GPU memory, reduce the batch size",
    "except torch.cuda.OutOfMemoryError as e:",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "tasks: 3 Killed by user",
    "[1]+  Terminated              python train.py",
    "{'loss': 0.1, 'learning_rate': 1.3e-7, 'epoch': 9.0}",
    "Unable to shutdown process 123 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
    "1 select_algorithm.py:2100] No valid triton configs. OutOfResources: out of resource: shared memory, Required: 131072, "
    "Hardware limit: 101376.",
    "CUDA out of memory. Tried to allocate 2.00 GiB.\nIgnoring this choice.",
    # gRPC's code, of a quota and of a message
    "google.api_core.exceptions.ResourceExhausted: 429 Quota exceeded for x.googleapis.com/gpus. [code: RESOURCE_EXHAUSTED]",
    "429 RESOURCE_EXHAUSTED. Quota exceeded for allocated memory per project",
    'status = StatusCode.RESOURCE_EXHAUSTED\n\tdetails = "Received message larger than max (12582944 vs. 4194304)"',
    # lines of source around a frame of a notebook
    '     63         "CUDA out of memory.",  # CUDA OOM\n     64         "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",\n'
    "---> 65         \"DefaultCPUAllocator: can't allocate memory\",\nNameError: name 'x' is not defined",
    'KeyError      Traceback (most recent call last)\nCell In[3], line 4\n----> 4 x["labels"]\n      5     print(error)\n'
    "      6     # RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n      7     MemoryError\n\nKeyError: 'labels'",
    "│ /x/train.py:7 in <module>            │\n│   5 │   # CUDA out of memory           │\n│   6 │                                  │\n"
    "│ ❱ 7 │   x['labels']                    │\n╰──────────────────────────────────────╯\nKeyError: 'labels'",
    # what a model wrote
    "{'loss': 0.9, 'completion': 'Your program failed because the GPU is out of memory. Reduce the batch size.'}",
    "{'num_tokens': 1.2e4, 'epoch': 0.1, 'completion': 'Error: CUDA out of memory.'}",
    # other limits
    "hsa api call failure at: rocminfo.cc:1087\nCall returned HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to "
    "allocate the necessary resources.",
    "OSError: libgomp.so.1: cannot allocate memory in static TLS block",
    "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
    "*** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\nsrun: error: n1: task 0: Killed",
    "Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.02GiB with freed_by_count=0. The caller indicates that "
    "this is not a failure, but may mean that there could be performance gains if more memory were available.",
)
