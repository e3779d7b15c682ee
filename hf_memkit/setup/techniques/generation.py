"""Generation, and vLLM during training: only advice."""

from __future__ import annotations

from hf_memkit.setup.techniques.registry import advice

advice(
    "smaller-vllm-share", "generation", {"arguments.vllm_gpu_memory_utilization": "smaller"},
    saves="vLLM in this process reserves this share of the GPU (trl: 0.3 by default); vllm_enable_sleep_mode=True "
    "frees it while the model trains",
    costs="vLLM generates fewer sequences at a time",
    offered={"generation": 1, "vLLM": 1}, only_with=("vLLM",),
)  # fmt: skip
advice(
    "vllm-server", "generation", {"arguments.vllm_mode": "server"},
    saves="`trl vllm-serve` then generates on other GPUs, and training has these alone",
    costs="at least one more GPU",
    offered={"vLLM": 2},
)  # fmt: skip
advice(
    "vllm-over-gpus", "generation", {"arguments.vllm_tensor_parallel_size": 2},
    saves="each GPU then holds a share of vLLM's weights and KV cache",
    costs="several GPUs, which communicate for every token; the number of processes must be a multiple",
    offered={"vLLM": 3},
)  # fmt: skip
advice(
    "shorter-answers", "generation", {"arguments.generation_max_length": "smaller"},
    saves="the KV cache grows with every generated token, and with generation_num_beams",
    costs="longer answers are truncated",
    group="another method", offered={"generation": 3},
)  # fmt: skip
