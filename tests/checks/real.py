"""What the proofs share: a small model, and the real DeepSpeed, accelerate and Trainer around it.

Runs in a separate process (`proofs.py`), which has the environment of one DeepSpeed process.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.checks.registry import REFUSALS, Fails, proof

PARAMETERS_MADE = [0]
"""How many parameters modules were given since whoever runs the proofs set this to zero."""


def _count(*_: Any) -> None:
    PARAMETERS_MADE[0] += 1


register_module_parameter_registration_hook(_count)


def parse(config: Mapping[str, Any]) -> Any:
    """DeepSpeed's own config object, of the values that Trainer would fill in."""
    from deepspeed.runtime.config import DeepSpeedConfig

    filled = copy.deepcopy(dict(config))
    for key, value in (("train_batch_size", 1), ("train_micro_batch_size_per_gpu", 1), ("gradient_clipping", 1.0),
                       ("gradient_accumulation_steps", 1)):  # fmt: skip
        if filled.get(key) == "auto":
            filled[key] = value
    return DeepSpeedConfig(filled)


def checkpointed_by_fsdp(network: Any) -> Any:
    """The network with its layers wrapped by accelerate, as for FSDP2's activation checkpointing."""
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=True, auto_wrap_policy="transformer_based_wrap"
    )
    plugin.set_auto_wrap_policy(network)
    return fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), network)


def arguments(config: Any, **more: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 2, "max_steps": 1, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**{**values, "deepspeed": config, **more})


def model(wide: bool = False) -> Any:
    """110 thousand parameters; 2.1 million if `wide`: DeepSpeed swaps nothing below a megabyte."""
    width, words = (256, 2048) if wide else (64, 128)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = GPT2Config(
        vocab_size=words, n_positions=32, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **dropouts
    )
    return AutoModelForCausalLM.from_config(shape)  # under zero.Init at stage 3


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 128, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def trainer(config: Any, *, wide: bool = False, **more: Any) -> Trainer:
    set_seed(0)
    unset_hf_deepspeed_config()
    args = arguments(config, **more)  # before the model: stage 3 splits it while it is made
    return Trainer(model=model(wide), args=args, train_dataset=rows(), eval_dataset=rows(2))


def train(config: Any, *, wide: bool = False, **more: Any) -> Trainer:
    """A Trainer after `max_steps` steps; its engine is `model_wrapped`."""
    done = trainer(config, wide=wide, **more)
    done.train()
    return done


def optimizers(done: Trainer) -> tuple[str, str]:
    """Class names of DeepSpeed's wrapper and of the optimizer that steps."""
    engine = done.model_wrapped
    return type(engine.optimizer).__name__, type(engine.basic_optimizer).__name__


def refused(text: str, action: Callable[[], Any]) -> None:
    """The library raises, and says `text`."""
    try:
        action()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        assert text in message, f"expected {text!r} in {message!r}"
        REFUSALS.append(PARAMETERS_MADE[0] > 0)
        return
    raise AssertionError(f"nothing was refused; expected {text!r}")


def refusals(fails: Fails, act: Callable[..., Any], *rows: tuple[Any, ...], by: Callable[..., Any] = proof) -> None:
    """Proofs of rules whose library only refuses: rows of a rule, what is said, and what `act` is given then."""
    for rule in dict.fromkeys(row[0] for row in rows):

        def refuse(own: tuple[Any, ...] = tuple(row[1:] for row in rows if row[0] == rule)) -> None:
            for message, *given in own:
                refused(message, functools.partial(act, *given))

        by(rule, fails=fails)(refuse)


def reads(where: Any, name: str) -> int:
    """How often the source of a class or module names something."""
    return inspect.getsource(where).count(name)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
