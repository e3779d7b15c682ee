"""Trainers that have a vLLM answer (`use_vllm`). Its answers are as long as they may be; vLLM itself is a share of the
GPU, by formula (trl 1.16: generation/vllm_generation.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.prediction.traced_training import Vllm

_BYTES_A_WEIGHT: Final = 2


def traced_vllm(trainer: Any) -> Vllm | None:
    """What a Trainer's vLLM takes of this GPU; None: it has none. Its own weights are in 16 bits, as vLLM's dtype
    "auto" makes of fp32; where bitsandbytes has quantised them, as they are (trl 1.16: generation/vllm_generation.py;
    https://docs.vllm.ai/en/latest/configuration/engine_args/).

    Raises:
        Unmodelled: another Trainer has a vLLM of its own.
    """
    if not getattr(trainer.args, "use_vllm", False):
        return None
    found: Any = getattr(trainer, "vllm_generation", None)
    if not isinstance(getattr(found, "llm", None) or getattr(found, "vllm_client", None), _Engine | _Server):
        raise Unmodelled(f"use_vllm: not supported for {type(trainer).__name__}; omit it, or measure with memkit run")
    if found.mode != "colocate":
        return Vllm(found.mode)
    model = base_model(trainer.model)
    adapters = trainer.model.prefix if model is not trainer.model else "-"
    weights = [each for name, each in model.named_parameters() if adapters not in name]
    size = sum(each.numel() * min(each.element_size(), _BYTES_A_WEIGHT) for each in weights)
    return Vllm(
        found.mode, float(found.gpu_memory_utilization), bool(found.enable_sleep_mode),
        size // found.tensor_parallel_size,
    )  # fmt: skip


def vllm_is_installed() -> None:
    """TRL's own code goes on, with an engine that holds nothing and is asked for answers alone. Modules that do not
    use its `VLLMGeneration` would ask for vLLM itself."""
    if "trl" not in sys.modules:
        return
    module: Any = importlib.import_module("trl.generation.vllm_generation")
    for name, each in list(sys.modules.items()):
        if name.startswith("trl.") and "VLLMGeneration" in vars(each) and "is_vllm_available" in vars(each):
            each.is_vllm_available = lambda *args, **kwargs: True  # type: ignore[attr-defined]
    module.LLM, module.VLLMClient = _Engine, _Server
    module.SamplingParams = module.StructuredOutputsParams = SimpleNamespace


_WORD: Final = 0
"""The token that all answers are made of."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Of no effect here."""


class _Engine:
    """`vllm.LLM`, as far as TRL asks it."""

    def __init__(self, model: str, max_model_len: int | None = None, **_: Any) -> None:
        driver = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=list)))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len or sys.maxsize),
            model_executor=SimpleNamespace(driver_worker=driver),
        )

    sleep = wake_up = reset_prefix_cache = _nothing

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **_: Any) -> list[Any]:
        launched("vllm.generate", (), kind="unknown")
        answer = [_WORD] * sampling_params.max_tokens
        chances = [{each: SimpleNamespace(rank=1, logprob=0.0)} for each in answer]
        output = SimpleNamespace(token_ids=answer, logprobs=chances)
        return [
            SimpleNamespace(prompt_token_ids=each["prompt_token_ids"], outputs=[output] * sampling_params.n)
            for each in prompts
        ]


class _Server:
    """TRL's client of a vLLM on other GPUs: what it sends and gets."""

    __init__ = init_communicator = reset_prefix_cache = _nothing

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
