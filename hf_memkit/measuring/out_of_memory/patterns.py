"""The known forms of out-of-memory messages: the words, the memory that ran out, and the reader of the sizes.

A comment names the library's source file. All patterns are bounded, so any text takes linear time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.common.terms import Phase
from hf_memkit.measuring.out_of_memory.figures import (
    Reader,
    cuda_figures,
    device_figures,
    evicted_figures,
    host_figures,
    hsa_figures,
    kill_figures,
    mps_figures,
    numbers,
    request,
    vllm_figures,
    xla_figures,
)
from hf_memkit.measuring.out_of_memory.message import Memory


@dataclass(frozen=True, slots=True)
class Form:
    """One form of message.

    Attributes:
        head: regular expression of its first words.
        words: plain text, of which a line must contain one before `head` is tried, for speed.
        rank: 0 says most about the cause, 3 and 4 only follow from it; of several messages, the lowest is explained.
        read: reads the sizes.
        fixed: fields with the same value in all messages of this form.
        phase: phase of the job, if no traceback shows it.
        ends: whether it reports the end of a process. A traceback above it belongs to another one.
        general: whether it only applies if no other form matches in the same line.
    """

    name: str
    library: str
    memory: Memory
    head: str
    words: tuple[str, ...]
    rank: int
    read: Reader | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    phase: Phase | None = None
    ends: bool = False
    general: bool = False


_CUDA: Final = {"device_type": "cuda"}
_MPS: Final = {"device_type": "mps"}


def _pattern_of_end(signal: int) -> str:
    """An end by a signal: `exit code: 137`, `exits with return code = -9`, `(exitcode: -9)`, `Exited (137)`."""
    words = (
        r"(?i:\b(?:exit[ _-]?(?:code|status)|return(?:ed)?[ _-](?:code|value)|exited(?= \()"
        r"|(?:exited |terminated )?with(?: exit)?(?: code| status){0,2}(?: of)?)(?!\w))"
    )
    return rf"{words}[\s=:(<\"']{{0,12}}(?:-{signal}|{128 + signal})\b(?![.%/]?\d|[%/:])"


FORMS: Final[tuple[Form, ...]] = (
    # torch: aten/src/ATen/mps/MPSAllocator.mm
    Form(
        "torch-mps", "PyTorch (MPS)", "device", r"MPS backend out of memory", ("MPS backend",), 0,
        mps_figures, _MPS,
    ),
    Form(
        "torch-mps-buffer", "Metal", "device",
        r"Invalid buffer size: (?=\d)|total bytes of NDArray > 2\*\*32|greater than the maximum allowed buffer size",
        ("Invalid buffer", "of NDArray >", "allowed buffer size"), 1, request, _MPS,
    ),
    Form("metal", "Metal", "device",
         r"(?:Insufficient Memory \(\w{1,10}:)?kIOGPUCommandBufferCallbackErrorOutOfMemory", ("kIOGPU",), 1, None,
         _MPS),
    # torch: c10/cuda/CUDACachingAllocator.cpp, c10/core/alloc_cpu.cpp; NumPy refuses such sizes with another error
    Form(
        "no-size", "PyTorch", "device",
        r"(?:\b[A-Z]\w{1,9} out of memory\. )?[Tt]ried to allocate (?:more than 1 ?EB|-\d)"
        r"|alloc_cpu\(\) seems to have been called with negative number",
        ("more than 1EB", "more than 1 EB", "to allocate -", "negative number"), 0,
    ),
    # torch: c10/cuda/CUDACachingAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp, c10/core/CachingDeviceAllocator.h
    Form(
        "torch-device", "PyTorch", "device",
        r"(?:\b[A-Z]\w{1,9} )?[Oo]ut of memory\. (?:\w{1,40} )?[Tt]ried to allocate(?= \d)"
        r"|Allocation on device (?:\d{1,4} )?would exceed allowed memory",  # c10/cuda/CUDAMallocAsyncAllocator.cpp
        ("ried to allocate", "exceed allowed memory"), 0, device_figures,
    ),
    # torch: c10/cuda/CUDACachingAllocator.cpp asks NVML for the sizes that the error would print
    Form("torch-nvml", "PyTorch", "device", r"NVML_SUCCESS == [^\n]{0,80}?INTERNAL ASSERT FAILED",
         ("NVML_SUCCESS",), 1, None, _CUDA),
    Form("torch-device-bare", "PyTorch", "device",
         r"\b(?:CUDA|HIP|XPU|NPU|MLU|MUSA|MTIA|HPU|GCU|SDAA) out of memory\b"
         r"|: Allocation on device(?: \d{1,4})?\s{0,4}$",
         ("out of memory", "Allocation on device"), 2),
    # tensorflow: core/framework/op_kernel.cc, core/common_runtime/bfc_allocator.cc,
    # stream_executor/cuda/cuda_driver.cc (github.com/tensorflow/tensorflow/issues/43546, /52123)
    Form(
        "tensorflow", "TensorFlow", "device",
        r"OOM when allocating tensor"
        r"|failed to allocate \S{1,20} \(\d{1,18} bytes\) from device: (?:CUDA_ERROR_OUT|HIP_ERROR_Out|hipErrorOut)"
        r"|Allocator \(\w{1,20}_bfc\) ran out of memory trying to allocate(?= ?\d)(?![^\n]{0,200}not a failure)",
        ("OOM when alloc", "from device: CUDA_ERR", "from device: hip", "_bfc) ran out"), 1, request, _CUDA,
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
    # vllm: csrc/cumem_allocator.cpp: memory that a sleeping engine gave back is not free when it wakes
    Form("vllm-wake", "vLLM", "device", r"CUDA Error: out of memory at [^\n]{0,200}cumem_allocator", ("cumem",), 1,
         None, _CUDA),
    # transformers and accelerate: a device_map moved what the free GPU memory did not hold to RAM or disk
    Form(
        "dispatched", "transformers", "device",
        r"Some modules are dispatched on the CPU or the disk|weights offloaded to the disk\. Please provide"
        r"|need an `offload_dir` to dispatch|loaded in 8-bit or 4-bit precision with CPU or disk offload",
        ("modules are dispatched", "offloaded to the disk", "offload_dir", "or disk offload"), 1, None, {}, "load",
    ),
    # NCCL: src/include/alloc.h and checks.h
    Form(
        "nccl", "NCCL", "device",
        r"Cuda failure (?:\d{1,4} )?'out of memory'|Failed to CUDA [cm]alloc (?:async )?(?=\d)",
        ("Cuda failure", "CUDA calloc", "CUDA malloc"), 1,
        numbers(r"[cm]alloc (?:async )?(\d{1,18}) bytes", "requested_bytes"), _CUDA,
    ),
    # torch: c10/cuda/CUDAException.h, C10_CUDA_DRIVER_CHECK: only expandable segments go through the driver's API
    Form(
        "cuda-driver", "CUDA driver", "device", r"CUDA driver error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        ("CUDA driver error", "CUDA_ERROR_OUT"), 1, None, _CUDA,
    ),
    # bitsandbytes: csrc/pythonInterface.cpp, cget_managed_ptr: the states of a paged optimizer
    Form("bitsandbytes-managed", "bitsandbytes", "host",
         r"\bout of memory at line \d{1,6} in file \S{0,300}pythonInterface\.c", ("at line",), 1),
    Form(
        "bitsandbytes", "bitsandbytes", "device", r"\bout of memory at line \d{1,6} in file", ("at line",), 1, None,
        _CUDA,
    ),
    Form(
        "bitsandbytes-launch", "bitsandbytes", "kernel", r"invalid configuration argument at line \d{1,6} in file",
        ("at line",), 1, None, _CUDA,
    ),
    # Device, failure, "out of memory": CUDA, its runtime, Triton, flash-attn, ggml, ONNX Runtime, RMM, CuPy, MXNet.
    Form(
        "cuda-raw", "CUDA", "device",
        r"(?i:\b(?:cuda|hip|gpu|triton|onnxruntime)\w{0,30}[^\n]{0,60}?(?:error|fail(?:ed|ure))\b"
        r"(?:(?!Allocation on device)[^\n;]){0,160}?\bout of memory\b)(?!\. (?:\w{1,40} )?[Tt]ried)"
        r"|(?<!Search for .)\b(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b|CUDA_OUT_OF_MEMORY\b"
        r"|Out of memory allocating [\d,]{1,20} bytes \(allocated so far",
        ("out of memory", "ErrorMemoryAlloc", "hipErrorOut", "CUDA_OUT_OF"), 1, cuda_figures,
    ),
    # Unified Runtime, its predecessor, OpenCL, Intel Extension for PyTorch
    Form(
        "level-zero", "Level Zero", "device",
        r"\b(?:UR_RESULT|ZE_RESULT|PI|CL)_(?:ERROR_)?(?:OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"
        r"|MEM_OBJECT_ALLOCATION_FAILURE)|Allocation is out of device memory on current platform",
        ("_OUT_OF_", "MEM_OBJECT_ALL", "out of device memory"), 1, None, {"device_type": "xpu"},
    ),
    # ROCm's runtime (rocclr: device/rocm/rocdevice.cpp, callbackQueue); rocminfo prints the same code without a queue
    Form(
        "hsa", "ROCm", "device", r"(?i:aborting with error) ?: ?HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        ("HSA_STATUS_ERROR_OUT",), 1, hsa_figures, {"device_type": "rocm"},
    ),
    # unsloth_zoo: fused_losses/cross_entropy_loss.py, _get_chunk_multiplier
    Form(
        "unsloth-loss", "Unsloth", "device", r"No or negligible GPU memory available for fused cross entropy",
        ("negligible GPU",), 1, None, {}, "forward",
    ),
    # Ascend CANN: error codes of aclrtMalloc and of the driver
    Form("cann", "CANN", "device", r"EL0004: [^\n]{0,80}?[Ff]ailed to allocate memory|\[driver error:out of memory\]"
         r"|Call rtMalloc fail|(?:result|code)\S{0,4} {0,2}(?:is|=)? {0,2}207001\b",
         ("EL0004", "driver error:out", "207001", "rtMalloc fail"), 1,
         numbers(r"\bsize:(\d{1,18})", "requested_bytes"),
         {"device_type": "npu"}),
    # accelerate 1.15: utils/memory.py, should_reduce_batch_size
    Form(
        "hpu", "Habana", "device", r"MODULE:PT_DEVMEM Allocation failed|No space in device memory",
        ("PT_DEVMEM", "in device memory"), 1, numbers(r"size::(\d{1,18})", "requested_bytes"), {"device_type": "hpu"},
    ),
    Form(
        "cublas-alloc", "cuBLAS", "device", r"\b(?:CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
        r"|\bCUFFT_ALLOC_FAILED|rocblas_status_memory_error", ("_STATUS_ALLOC", "CUFFT_ALLOC", "status_memory"), 1,
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
    # AWS Neuron: its runtime, and what torch-neuronx makes of it
    Form(
        "neuron", "Neuron", "device",
        r"\bnrt_\w{1,40} status=4\b|Failure: NRT_RESOURCE\b|Failed to alloc DEVICE memory",
        ("nrt_", "NRT_RESOURCE", "alloc DEVICE"), 1, numbers(r"DEVICE memory: (\d{1,18})", "requested_bytes"),
        {"device_type": "neuron"},
    ),
    # NCCL: src/misc/shmutils.cc
    Form(
        "nccl-shm", "NCCL", "shared memory",
        r"Error while creating shared memory segment|Call to posix_fallocate failed|failed to extend /dev/shm/nccl"
        r"|Error: failed to extend /dev/shm",
        ("shared memory segment", "posix_fallocate", "extend /dev/shm"), 1,
        numbers(r"(?:\(size|to) (\d{1,18})\b", "requested_bytes"),
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
    Form("pinned", "CUDA", "pinned", r"\bcudaHostAlloc\b[^\n]{0,80}(?:fail|out of memory)|cudaErrorHostMemory"
         r"|Failed to CUDA host alloc(?= \d)", ("cudaHostAlloc", "cudaErrorHost", "CUDA host alloc"), 0,
         numbers(r"host alloc (\d{1,18})", "requested_bytes")),
    # torch: c10/core/impl/alloc_cpu.cpp; before 1.0 TH/THGeneral.c
    Form(
        "torch-cpu", "PyTorch (CPU)", "host",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory(?:: you tried to allocate -\d{1,20})?"
        r"|Torch: (?:not enough memory|unable to mmap memory)",
        ("CPUAllocator", "Torch: "), 0, request,
    ),
    Form("numpy", "NumPy", "host", r"Unable to allocate (?:array with shape|(?=[\d.]{1,12} \w{2,5} for an array))",
         ("Unable to allocate",), 0, request),
    # Arrow: memory_pool.cc, io/file.cc. Rust (tokenizers, safetensors, polars): alloc::handle_alloc_error
    Form(
        "allocator", "a library", "host",
        r"(?:\bArrowMemoryError: )?\b(?:re|m)alloc of size (?=\d{1,18} failed)|\bArrowMemoryError\b"
        r"|memory allocation of (?=\d{1,18} bytes failed)|OpenBLAS error: Memory allocation still failed",
        ("alloc of size", "ArrowMemoryError", "memory allocation"), 1, request,
    ),
    # Windows: the commit limit, RAM and paging file together
    Form(
        "windows-commit", "Windows", "host",
        r"\[WinError (?:1455|8|1450)\]|os error 1455\b"
        r"|(?:paging file is too small|页面文件太小|Auslagerungsdatei ist zu klein)(?:[^\n]{0,60}os error 1455)?"
        r"|Not enough memory resources are available"
        r"|\b(?:exit|exited|returned)\b[^\n]{0,40}(?:3221225495|-1073741801|0xC0000017)",
        ("WinError", "paging file", "页面文件太小", "Auslagerungsdatei", "os error 1455", "memory resources",
         "3221225495", "1073741801", "0xC0000017"), 1,
    ),
    # torch: c10/core/MapAllocator.cpp
    Form("mmap", "PyTorch (CPU)", "host", r"unable to mmap \d{1,18} bytes from file", ("unable to mmap",), 1,
         numbers(r"mmap (\d{1,18}) bytes", "requested_bytes")),
    Form(
        "torch-shm", "PyTorch", "shared memory",
        r"unable to (?:allocate shared memory ?\(shm\)|write to file </torch_|stretch file </torch_)"
        r"|No space left on device[^\n]{0,20}(?:/dev/shm|/psm_)|(?:/dev/shm|/psm_)[^\n]{0,80}No space left on device",
        ("memory(shm)", "memory (shm)", "file </torch_", "No space left"), 1,
    ),
    # torch: torch/csrc/DataLoader.cpp
    Form("dataloader-shm", "PyTorch", "shared memory", r"insufficient shared memory|is killed by signal: Bus error",
         ("insufficient shared", "signal: Bus"), 1, phase="data"),
    # torch: torch/csrc/DataLoader.cpp, utils/data/dataloader.py
    Form(
        "dataloader-killed", "PyTorch", "host",
        r"DataLoader worker \(pid (\d{1,10})\) is killed by signal: Killed", ("signal: Killed",), 2,
        numbers(r"\(pid (\d{1,10})", "pid"), phase="data",
    ),
    Form(
        "dataloader-exited", "PyTorch", "host", r"DataLoader worker \(pid\(s\) [\d, ]{1,200}\) exited unexpectedly",
        ("exited unexpectedly",), 2, numbers(r"\(pid\(s\) (\d{1,10})", "pid"), phase="data",
    ),
    # datasets: utils/py_utils.py; concurrent.futures, joblib: a worker that was killed
    Form(
        "pool-killed", "a worker pool", "host",
        r"One of the subprocesses has abruptly died during map|A process in the process pool was terminated abruptly"
        r"|A worker process managed by the executor was unexpectedly terminated",
        ("abruptly", "unexpectedly terminated"), 2, None, {}, "data",
    ),
    # Ray: _private/memory_monitor.py, raylet/node_manager.cc
    Form(
        "ray", "Ray", "host",
        r"\(?[Tt]asks?(?: / actors)?\)? (?:was |were )?killed due to (?:memory pressure|the node running low on mem)",
        ("memory pressure (OOM)", "running low on memory"), 1, host_figures, ends=True,
    ),
    # Linux: mm/oom_kill.c. Before 4.x and after "invoked oom-killer", the words "Out of memory:" are missing.
    Form("linux-memcg", "Linux", "host",
         r"Memory cgroup out of memory: Kill(?:ed)? process|oom-kill:constraint=CONSTRAINT_MEMCG",
         ("Memory cgroup", "CONSTRAINT_MEMCG"), 0, kill_figures, {"in_cgroup": True}, ends=True),
    Form("linux-oom", "Linux", "host",
         r"Out of memory(?: \(\w{1,40}\))?: Kill(?:ed)? process|oom-kill:constraint=CONSTRAINT_"
         r"|(?<!memory: )\bKilled process (?=\d{1,10},? [^\n]{0,120}total-vm:)",
         ("Out of memory", "oom-kill:constraint", "Killed process"), 0, kill_figures, {"in_cgroup": False}, ends=True),
    # systemd-oomd, earlyoom, macOS (jetsam)
    Form(
        "oom-daemon", "the system", "host",
        r"\bKilled /\S{1,200} due to memory|sending SIG(?:KILL|TERM) to process (?=\d{1,10} uid)"
        r"|Failed with result 'oom-kill'|killed by the OOM killer|memorystatus: killing\w{0,40}(?: process)?(?: pid)?"
        r"|low swap: killing"
        r"|\binvoked oom-killer\b",
        ("due to memory", "to process", "oom-kill", "OOM killer", "memorystatus:", "low swap:"), 1,
        numbers(r"(?:process|pid) (\d{1,10})\b", "pid"), {"in_cgroup": False}, ends=True,
    ),
    # Slurm, PBS, LSF, Grid Engine, HTCondor, YARN, Hugging Face Spaces: the limit of a job
    Form(
        "slurm", "Slurm", "host",
        r"oom[_-]kill event(?:\(s\)|s)? in (?i:step)(?:[^\n]{0,120}out-of-memory handler)?"
        r"|[Ee]xceeded (?:job |step |virtual )?memory limit(?! of)"
        r"|\btasks? [\d,-]{1,40}: Out Of Memory\b|hit memory limit at least once|cgroup out-of-memory handler"
        r"|\bOUT_OF_MEMORY\b(?! *=)|\bOUT_OF_ME\+",
        ("kill event", "memory limit", ": Out Of Memory", "out-of-memory handler", "OUT_OF_ME"), 1, host_figures,
        {"in_cgroup": True}, ends=True,
    ),
    Form(
        "job-limit", "the scheduler", "host",
        r"job killed: (?:p?v?mem|memory)\b|TERM_MEMLIMIT\b|job killed after reaching \S{0,20} ?memory usage limit"
        r"|gone over memory limit of|killed by YARN for exceeding|memory usage exceeded request_memory"
        r"|[Mm]emory limit of \S{1,20} \w{1,3} exceeded|\bMemory limit exceeded \((?=\d{1,6}[MGT]i\))",
        ("job killed", "MEMLIMIT", "memory limit", "by YARN", "request_memory"), 1, host_figures,
        {"in_cgroup": True}, ends=True,
    ),
    # Kubernetes, Docker, cloud services
    Form(
        "kubernetes", "Kubernetes", "host",
        r"\bOOM-?[Kk]illed\b|ran out-of-memory and exited|use an instance type with more memory",
        ("OOMKilled", "OOM-Killed", "ran out-of-memory", "with more memory"), 1, None, {"in_cgroup": True}, ends=True,
    ),
    # Kubernetes: pkg/kubelet/eviction/helpers.go, pkg/kubelet/oom: the node's memory, not the pod's limit
    Form(
        "kubernetes-node", "Kubernetes", "host",
        r"low on resource: memory|node had condition: \[MemoryPressure\]|System OOM encountered",
        ("resource: memory", "[MemoryPressure]", "System OOM"), 1, evicted_figures, {"in_cgroup": False}, ends=True,
    ),
    # The node's disk, or a pod's share of it; Hugging Face Spaces
    Form(
        "kubernetes-disk", "Kubernetes", "disk",
        r"low on resource: (?:ephemeral-storage|nodefs|imagefs|inodes)|node had condition: \[DiskPressure\]"
        r"|ephemeral[- ](?:local )?storage usage exceeds|Usage of EmptyDir volume [^\n]{1,80} exceeds the limit"
        r"|storage limit exceeded \((?=\d)",
        ("low on resource", "[DiskPressure]", "storage usage exceeds", "EmptyDir volume", "storage limit"), 1,
        ends=True,
    ),
    # gcc, nvcc and clang, as pip and DeepSpeed run them
    Form(
        "compiler-killed", "the compiler", "host",
        r"Killed signal terminated program \w{1,20}|\bdied due to signal 9\b|cc1plus: out of memory allocating",
        ("signal terminated program", "due to signal 9", "cc1plus: out"), 1, ends=True,
    ),
    # Colab, Kaggle, Jupyter, VS Code, nbclient
    Form(
        "notebook", "the notebook", "host",
        r"crashed after using all available RAM|tried to allocate more memory than is available"
        r"|[Kk]ernel (?:for [^\n]{1,120}? )?appears to have died|KernelRestarter: restarting kernel"
        r"|Kernel crashed while executing code|\bDeadKernelError: ",
        ("all available RAM", "more memory than is", "appears to have died", "KernelRestarter", "Kernel crashed",
         "DeadKernel"), 3, None,
        {"in_cgroup": True}, ends=True,
    ),
    # Dask: distributed/worker_memory.py
    Form("dask", "Dask", "host", r"(?:\(pid=\d{1,10}\) )?exceeded \d{1,3}% memory budget|KilledWorker\b",
         ("memory budget", "KilledWorker"), 2, numbers(r"pid=(\d{1,10})", "pid"), ends=True),
    # A write beyond what /dev/shm holds: shells, torchrun, DeepSpeed's launcher, Python's faulthandler
    Form(
        "sigbus", "the system", "shared memory",
        rf"{_pattern_of_end(7)}|\bSIGBUS\b|\b[Ss]ignal 7\b|Fatal Python error: Bus error"
        r"|(?:^|[:\]]|\b\d{1,10}) {0,4}[Bb]us error(?= {0,30}\(core dumped\)| {2,}|: 7\b| {0,4}$)",
        ("135", " -7", "=-7", "SIGBUS", "Signal 7", "us error"), 3, kill_figures, ends=True,
    ),
    Form(
        "sigkill", "the system", "host",
        rf"{_pattern_of_end(9)}|(?<!via )(?<!via Signals\.)\bSIGKILL\b|\bSignal 9\b|(?:\(|\b(?:by|on|with) )signal 9\b"
        r"|KILLED BY SIGNAL: 9|status=9/KILL"
        r"|\bEXIT CODE: 9\b|\bError 137\b|non-zero status of 9\b"
        # a shell: alone, sh -c, a script's line
        r"|(?:^ {0,4}|^[^\n:]{1,80}: \d{1,6}: |\d ?\w{0,3}[:：] {0,8}\d{1,10} {1,4})"
        r"(?:Killed|已杀死|已殺死|Getötet|強制終了|Убито)(?=\s|$)|(?<=[\]%]) {0,4}Killed(?=\s|$)"
        r"|\bKilled: 9\b|\btasks? [\d,-]{1,40}: Killed\b|\bzsh: killed\b"
        r"|^ {0,4}\[\d{1,4}\] {0,4}[+-]? {0,8}(?:\d{1,10} )?[Kk]illed\s",
        ("137", " -9", "=-9", "SIGKILL", "ignal 9", "SIGNAL: 9", "9/KILL", "EXIT CODE: 9",
         "Error 137", "status of 9", "killed", "已杀死", "已殺死", "getötet", "強制終了", "убито"), 3, kill_figures,
        ends=True,
    ),
    # accelerate 1.15: utils/memory.py
    Form("accelerate-batch", "accelerate", "device", r"No executable batch size found", ("executable batch",), 3),
    # The code is gRPC's: a quota, a rate or a message that is too long gives it too.
    Form("xla", "XLA", "device", r"\bRESOURCE_EXHAUSTED(?=[^\n]{0,300}?(?i:memor|alloc|reserve|hbm))"
         r"(?![^\n]{0,200}(?i:quota|rate limit))|Ran out of memory in memory space"
         r"|Attempting to (?:allocate|reserve) [\d.]{1,12}[KMGT][^\n]{0,30}\. That was not possible",
         ("RESOURCE_EXH", "in memory space", "was not possible"), 1, xla_figures),
    Form("xla-tpu", "XLA", "device", r"RESOURCE_EXHAUSTED: [^\n]{0,40}TPU|Ran out of memory in memory space hbm",
         ("RESOURCE_EXH", "in memory space"), 1, xla_figures, {"device_type": "tpu"}),
    Form("memory-error", "Python", "host",
         r"(?:^|[\s\]|:>)]) {0,2}(?<!except )(?<!raise )(?:[\w.]{1,80}\.)?MemoryError(?=: (?!std::bad_alloc: )\S)"
         r"|^MemoryError\b(?!: std::bad_alloc: )"
         r"|std::bad_alloc(?!: (?:out_of_memory: )?CUDA)|\[Errno 12\] Cannot allocate memory",
         ("MemoryError", "bad_alloc", "Errno 12"), 1),
    Form(
        "disk", "the system", "disk",
        r"No space left on device|PytorchStreamWriter failed writing file|Disk quota exceeded|not enough space on the"
        r"|inline_container\.cc[^\n]{0,20} unexpected pos \d|Not enough disk space\. Needed",
        ("No space left", "StreamWriter failed", "quota exceeded", "space on the", "unexpected pos", "disk space"), 2,
        general=True,
    ),
    # All other errors of memory, with or without a device.
    Form(
        "device-other", "a library", "device",
        r"(?i:(?:error|exception|fail(?:ed|ure))\b[^\n]{0,100}?\b(?:cuda|gpu|hip|device|vram)\b[^\n]{0,100}?"
        r"\bout of (?:\w{1,12} )?memory\b)|(?i:(?:\bran |^|: )out of (?:gpu|device|cuda|video) memory\b)"
        r"|(?i:\bout of memory (?:error )?on (?:gpu|device|cuda))|(?<!lang\.)\bOutOfMemoryError: ",
        ("of memory", "gpu memory", "device memory", "cuda memory", "video memory", "OutOfMemoryError: "), 2,
        request, general=True,
    ),
    Form(
        "host-other", "a library", "host",
        r"(?:Error|Exception|error|failed|fork|mmap)\b[^\n]{0,120}?(?:Cannot allocate memory|Not enough memory\b"
        r"|\bos error 12\b)|(?i:\bout of (?:host|system|cpu) memory\b)|(?i:\bby (?:the )?oom[- ]killer\b)"
        r"|[Jj]ava heap space",
        ("Cannot allocate memory", "Not enough memory", "os error 12", "host memory", "system memory", "cpu memory",
         "oom-killer", "oom killer", "java heap"), 2, request, general=True,
    ),
)  # fmt: skip
