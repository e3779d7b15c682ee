"""Trainers that generate with vLLM (`use_vllm`): answers have their maximum length, and vLLM's own memory is a share
of the GPU, by formula (trl 1.16: generation/vllm_generation.py)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.gpu.fake_gpu import do_nothing
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.prediction.traced_training import Vllm

_BYTES_A_WEIGHT: Final = 2


def traced_vllm(trainer: Any) -> Vllm | None:
    """The share of this GPU that a Trainer's vLLM uses; None without vLLM. Raises Unmodelled if the Trainer uses vLLM
    in another way.

    vLLM's weights have 16 bits, as its dtype "auto" casts fp32; weights quantised by bitsandbytes stay as they are
    (trl 1.16: generation/vllm_generation.py; https://docs.vllm.ai/en/latest/configuration/engine_args/).
    """
    if not getattr(trainer.args, "use_vllm", False):
        return None
    generation: Any = getattr(trainer, "vllm_generation", None)
    if not isinstance(getattr(generation, "llm", None) or getattr(generation, "vllm_client", None), _Engine | _Server):
        raise Unmodelled(f"use_vllm: not supported for {type(trainer).__name__}; omit it, or measure with memkit run")
    if generation.mode != "colocate":
        return Vllm(generation.mode)
    model = base_model(trainer.model)
    adapters = trainer.model.prefix if model is not trainer.model else "-"
    weights = [weight for name, weight in model.named_parameters() if adapters not in name]
    size = sum(weight.numel() * min(weight.element_size(), _BYTES_A_WEIGHT) for weight in weights)
    return Vllm(
        generation.mode, float(generation.gpu_memory_utilization), bool(generation.enable_sleep_mode),
        size // generation.tensor_parallel_size,
    )  # fmt: skip


def patch_vllm() -> None:
    """Replaces vLLM in TRL's code by an engine without memory that only returns answers. Modules of TRL that do not
    use its `VLLMGeneration` still need vLLM."""
    if "trl" not in sys.modules:
        return
    module: Any = importlib.import_module("trl.generation.vllm_generation")
    for name, value in list(sys.modules.items()):
        if name.startswith("trl.") and "VLLMGeneration" in vars(value) and "is_vllm_available" in vars(value):
            value.is_vllm_available = lambda *args, **kwargs: True  # type: ignore[attr-defined]
    module.LLM, module.VLLMClient = _Engine, _Server
    module.SamplingParams = module.StructuredOutputsParams = SimpleNamespace


_WORD: Final = 0  # token of all answers


class _Engine:
    """The methods of `vllm.LLM` that TRL calls."""

    def __init__(self, model: str, max_model_len: int | None = None, **_: Any) -> None:
        driver = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=list)))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len or sys.maxsize),
            model_executor=SimpleNamespace(driver_worker=driver),
        )

    sleep = wake_up = reset_prefix_cache = do_nothing

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **_: Any) -> list[Any]:
        launched("vllm.generate", (), kind="unknown")
        answer = [_WORD] * sampling_params.max_tokens
        chances = [{token: SimpleNamespace(rank=1, logprob=0.0)} for token in answer]
        output = SimpleNamespace(token_ids=answer, logprobs=chances)
        return [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output] * sampling_params.n)
            for prompt in prompts
        ]


class _Server:
    """The methods that TRL calls of its client for a vLLM on other GPUs."""

    __init__ = init_communicator = reset_prefix_cache = do_nothing

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, parameters: Iterable[Any]) -> None:
        for _ in parameters:
            pass

    def image_features(self, images: Any) -> Any:
        raise NotImplementedError

    def generate(self, prompts: Sequence[Any], n: int = 1, max_tokens: int = 16, **_: Any) -> dict[str, Any]:
        launched("vllm.generate", (), kind="unknown")
        answer = [_WORD] * max_tokens
        answers = [answer for _ in prompts for _ in range(n)]
        chances = [[[0.0]] * max_tokens for _ in answers]
        return {"prompt_ids": list(prompts), "completion_ids": answers, "logprobs": chances}
