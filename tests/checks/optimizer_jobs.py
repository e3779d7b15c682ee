"""Small trainings with a chosen optimizer: what the proofs about optimizers share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import bitsandbytes
import torch
from torch import Tensor
from transformers import Trainer, set_seed

from tests.checks import real
from tests.checks.plain import alone
from tests.checks.real import arguments, rows
from tests.techniques.tiny_models import causal_model

TARGETS = {"optim_target_modules": "all-linear"}
LAYERWISE = {"optim": "galore_adamw_layerwise", **TARGETS}


def model() -> Any:
    set_seed(0)
    return real.model()


def llama() -> Any:
    return causal_model("llama", vocab_size=128, hidden_size=64, intermediate_size=128)


@contextmanager
def quiet() -> Any:
    """GaLore's own deprecation, and bitsandbytes' word about paging, are no news here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def forget_overrides() -> None:
    """bitsandbytes remembers for the whole process which places keep 32 bits (`GlobalOptimManager.index2config`)."""
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


def trainer(net: Any = None, own: Any = None, **more: Any) -> Trainer:
    values: dict[str, Any] = {"learning_rate": 1e-2, "max_grad_norm": 0.0, **more}
    forget_overrides()
    with alone():
        return Trainer(
            model=net or model(), args=arguments(None, **values), train_dataset=rows(),  # type: ignore[arg-type]
            optimizer_cls_and_kwargs=own,
        )  # fmt: skip


def optimizer(net: Any = None, **more: Any) -> Any:
    with quiet():
        return trainer(net, **more).create_optimizer()


def trained(net: Any = None, own: Any = None, **more: Any) -> Trainer:
    done = trainer(net, own, **more)
    with quiet(), torch.compiler.set_stance("force_eager"):
        done.train()
    return done


def weights(net: Any) -> Tensor:
    return torch.cat([one.detach().float().flatten() for one in net.parameters()])


def same_weights(make: Callable[[], Any], one: dict[str, Any], other: dict[str, Any], **more: Any) -> bool:
    """Training the same model with one or the other argument leaves the same weights; and it did train."""
    first, second = make(), make()
    torch.manual_seed(0)
    trained(first, **{**more, **one})
    torch.manual_seed(0)
    trained(second, **{**more, **other})
    assert not torch.equal(weights(first), weights(make()))
    return torch.equal(weights(first), weights(second))
