"""TRL's Trainers ask for values before they train: log-probabilities of a whole data set, answers of a vLLM.

| asked for | what there is |
|---|---|
| a hash of all weights (`precompute_ref_log_probs`) | one constant: it names a cache, which is not written |
| log-probabilities of each row, before `train()` | zeros; the pass over the largest batch is traced at `train()` |
| answers of a vLLM (`use_vllm`) | as long as they may be; vLLM itself is a share of the GPU, by formula |
| rewards | 0 |
| whether a step trains on the model's own answers (`lmbda`) | both, in different steps |

In TRL 1.16: trainer/dpo_trainer.py and kto_trainer.py, `_precompute_ref_logps`; generation/vllm_generation.py.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.gpu.cuda_questions import replace_everywhere
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.prediction.traced_training import Vllm


def answer_trl() -> None:
    """From now on a Trainer of TRL's that is made gets these answers."""
    original = Trainer.__init__

    @functools.wraps(original)  # libraries look at its parameters
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if "trl.trainer.utils" in sys.modules:
            _nothing_is_hashed()
            _rows_have_zeros(type(self))
        if getattr(self.args, "use_vllm", False):
            _vllm_is_installed()

    Trainer.__init__ = init


# ---- log-probabilities of a reference, computed before the training ----


def _nothing_is_hashed() -> None:
    found = sys.modules["trl.trainer.utils"]
    if hasattr(found, "hash_module"):
        replace_everywhere(found.hash_module, _no_hash, ("trl",))


def _no_hash(module: Any) -> str:
    return "predicted"


def _rows_have_zeros(kind: type) -> None:
    for each in kind.__mro__:
        original = vars(each).get("_precompute_ref_logps")
        if original is None or getattr(original, "memkits", False):
            continue

        def zeros(self: Any, dataset: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if not hasattr(dataset, "add_column") or not hasattr(dataset, "__len__"):
                return original(self, dataset, *args, **kwargs)  # which refuses a stream
            self._set_signature_columns_if_needed()
            for name in self._signature_columns:
                if name.startswith("ref_") and name not in dataset.column_names:
                    dataset = dataset.add_column(name, np.zeros(len(dataset), np.float32))
            return dataset

        zeros.memkits = True  # type: ignore[attr-defined]
        each._precompute_ref_logps = zeros  # type: ignore[attr-defined]


def reference_loaders(trainer: Any) -> Iterator[DataLoader[Any]]:
    """What a Trainer has gone through without gradients before it trains, if it has: the data for the training and for
    evaluations, in batches of `trainer.compute_ref_log_probs`."""
    if not getattr(trainer, "precompute_ref_logps", False):
        return
    arguments, evaluated = trainer.args, trainer.eval_dataset
    several = evaluated if isinstance(evaluated, Mapping) else {"eval": evaluated}
    sizes = [(trainer.train_dataset, arguments.per_device_train_batch_size)]
    sizes += [(each, arguments.per_device_eval_batch_size) for each in several.values() if each is not None]
    for dataset, size in sizes:
        batch_size = arguments.precompute_ref_batch_size or size
        yield DataLoader(dataset, batch_size=batch_size, collate_fn=trainer.data_collator)


def trace_reference(trainer: Any, batches: Iterable[Any], tracer: StorageTracer) -> None:
    """TRL computes log-probabilities of all rows before it trains (1.16: dpo_trainer.py, kto_trainer.py)."""
    tracer.ended("load")
    tracer.default, before = "activations", tracer.default
    for batch in batches:
        trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    tracer.default = before
    tracer.ended("log_probabilities")


def compared_models(trainer: Any) -> list[Any]:
    """Models whose log-probabilities a step computes: the one that trains, as it was or without its adapter, and a
    reference model. Of Trainers without a reference none."""
    if not hasattr(trainer, "ref_model"):
        return []
    return list({id(each): each for each in (trainer.model, trainer.ref_model) if each is not None}.values())


# ---- the model ----


def loads_the_model() -> bool:
    """Whether a Trainer of TRL's is loading the model itself: it chooses "auto" only outside distributed runs, and
    under DeepSpeed None, whatever `model_init_kwargs` say (trl 1.16.0: sft_trainer.py 691, utils.py 1350)."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        in_trl = str(frame.f_globals.get("__name__")).startswith("trl.")
        if in_trl and frame.f_code.co_name == "__init__" and hasattr(frame.f_locals.get("self"), "create_optimizer"):
            return True
        frame = frame.f_back
    return False


# ---- answers ----

GENERATES: Final = "_generate_single_turn"
"""The method by which a step generates answers, by the model or a vLLM (trl 1.16: grpo_trainer.py and others)."""


def learns_from_answers(trainer: Any) -> bool:
    """Whether each step trains on answers that the model generates to the loader's batch (GRPO, RLOO)."""
    return hasattr(trainer, "_buffered_inputs")


def before_step(trainer: Any, *, own_answers: bool | None) -> None:
    """Answers are generated in every step, also where they last for several. `own_answers`: whether this step trains
    on the model's, where chance decides (`draws_whose_answers`); None: it does not."""
    if own_answers is not None:
        trainer.lmbda = float(own_answers)
    if learns_from_answers(trainer):
        trainer._buffered_inputs = None


def answers_are_made_up(trainer: Any) -> Iterator[str]:
    """Notes on a Trainer that generates answers and learns from them: with rewards, or from a teacher. Reward
    functions are the user's: networks, judges, sandboxes. Reward models stay, and are counted."""
    trl_utils = sys.modules.get("trl.trainer.utils")
    if trl_utils is None:
        return

    def constant(completions: Sequence[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    # In an order by chance nobody knows which answers are where.
    if hasattr(trl_utils, "shuffle_sequence_dict"):  # since trl 0.19
        replace_everywhere(trl_utils.shuffle_sequence_dict, lambda found: found, ("trl",))
    rewards = getattr(trainer, "reward_funcs", None) or []
    own = [number for number, each in enumerate(rewards) if not isinstance(each, torch.nn.Module)]
    for number in own:
        rewards[number] = constant
    if own:
        yield "reward functions are not called: each answer counts as 0"
    length = getattr(getattr(trainer, "generation_config", None), "max_new_tokens", None)
    length = getattr(trainer, "max_completion_length", None) or length
    if length is not None and getattr(trainer, "lmbda", 1) > 0:
        yield f"every answer is counted at its maximum length: {length} tokens"


def draws_whose_answers(trainer: Any) -> bool:
    """Whether chance decides if a step trains on the model's own answers or on those of the data (trl 1.16: gkd, gold
    and iw_opd below experimental/, `random.random() <= self.lmbda`)."""
    own = any(each.__module__.startswith("trl.") for each in type(trainer).__mro__)
    return own and 0 < getattr(trainer, "lmbda", 0) < 1


_BYTES_A_WEIGHT: Final = 2


def traced_vllm(trainer: Any) -> Vllm | None:
    """What a Trainer's vLLM takes of this GPU; None: it has none. Its own weights are in 16 bits, as vLLM's dtype
    "auto" makes of fp32; where bitsandbytes has quantised them, as they are.

    From TRL 1.16: generation/vllm_generation.py, `gpu_memory_utilization`, `generate` (`sleep(level=2)`); the dtype
    from https://docs.vllm.ai/en/latest/configuration/engine_args/.

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


def _vllm_is_installed() -> None:
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


class _Engine:
    """`vllm.LLM`, as far as TRL asks it."""

    def __init__(self, model: str, max_model_len: int | None = None, **_: Any) -> None:
        driver = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=list)))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len or sys.maxsize),
            model_executor=SimpleNamespace(driver_worker=driver),
        )

    def sleep(self, level: int = 1) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def init_communicator(self, device: Any = None) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, parameters: Iterable[Any]) -> None:
        for _ in parameters:
            pass

    def reset_prefix_cache(self) -> None:
        pass

    def image_features(self, images: Any) -> Any:
        raise NotImplementedError

    def generate(self, prompts: Sequence[Any], n: int = 1, max_tokens: int = 16, **_: Any) -> dict[str, Any]:
        launched("vllm.generate", (), kind="unknown")
        answer = [_WORD] * max_tokens
        answers = [answer for _ in prompts for _ in range(n)]
        chances = [[[0.0]] * max_tokens for _ in answers]
        return {"prompt_ids": list(prompts), "completion_ids": answers, "logprobs": chances}
