"""Proofs about the choice of an optimizer: what Trainer and the libraries do with it, on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import torch
from accelerate import Accelerator
from lomo_optim import AdaLomo, Lomo
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.checks import real
from tests.checks.optimizer_jobs import (
    LAYERWISE,
    TARGETS,
    alone,
    llama,
    model,
    optimizer,
    quiet,
    same_weights,
    trained,
    trainer,
    weights,
)
from tests.checks.real import refusals, refused
from tests.checks.registry import proof

refusals(
    "late", lambda make, options: trained(make(), **options),
    ("optimizer-options-unreadable", "not enough values to unpack", model,
     {"optim": "sgd", "optim_args": "momentum:0.9"}),
    ("torchao-block-size", "'int' and 'str'", model, {"optim": "adamw_torch_4bit", "optim_args": "block_size=128"}),
    ("low-rank-without-targets", "optim_target_modules", llama, {"optim": "galore_adamw"}),
    ("low-rank-without-targets", "optim_target_modules", llama, {"optim": "apollo_adamw"}),
    ("galore-adafactor-layerwise", "Cannot combine manual `lr` and `relative_step=True`", llama,
     {"optim": "galore_adafactor_layerwise", **TARGETS}),
    ("layerwise-accumulation", "does not support gradient accumulation", llama,
     {"gradient_accumulation_steps": 2, **LAYERWISE}),
)  # fmt: skip


@proof("optimizer-options-ignored", fails="silent")
def options_ignored() -> None:
    assert optimizer(optim="adamw_torch", optim_args="foreach=False").defaults["foreach"] is None
    assert optimizer(optim="adamw_bnb_8bit", optim_args="min_8bit_size=1").args.min_8bit_size == 4096
    assert optimizer(optim="adafactor", optim_args="beta1=0.9").defaults["beta1"] is None
    assert optimizer(optim="sgd", optim_args="momemtum=0.9").defaults["momentum"] == 0


@proof("optimizer-option-always-true", fails="silent")
def option_always_true() -> None:
    made = optimizer(optim="stable_adamw", optim_args="kahan_sum=False,decouple_lr=False")
    assert made.defaults["kahan_sum"] is True and made.defaults["decouple_lr"] is True
    assert optimizer(optim="stable_adamw").defaults["decouple_lr"] is False


@proof("optimizer-decay-overridden", fails="silent")
def decay_overridden() -> None:
    groups = optimizer(optim="sgd", optim_args="weight_decay=0.5").param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]


@proof("adam-settings-ignored", fails="silent")
def adam_settings_ignored() -> None:
    given = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-2}
    assert same_weights(model, given, {}, optim="adafactor")
    assert same_weights(model, given, {}, optim="lomo")
    group = optimizer(llama(), optim="galore_adamw", **TARGETS, **given).param_groups[0]
    assert group["betas"] == (0.9, 0.999) and group["eps"] == 1e-6
    rest, projected = optimizer(llama(), optim="apollo_adamw", **TARGETS, **given).param_groups
    assert rest["betas"] == (0.9, 0.999) and projected["betas"] == (0.5, 0.6)


@proof("weight-decay-ignored", fails="silent")
def weight_decay_ignored() -> None:
    assert optimizer(optim="lomo", weight_decay=0.5).weight_decay == 0.0
    for name in ("galore_adamw", "apollo_adamw"):
        groups = optimizer(llama(), optim=name, weight_decay=0.5, **TARGETS).param_groups
        assert [group["weight_decay"] for group in groups] == [0.0, 0.0]
    assert optimizer(optim="adafactor", weight_decay=0.5).param_groups[0]["weight_decay"] == 0.5


@proof("sgd-without-momentum", fails="silent")
def sgd_without_momentum() -> None:
    assert optimizer(optim="sgd").defaults["momentum"] == 0


@proof("lion-betas", fails="silent")
def lion_betas() -> None:
    assert optimizer(optim="lion_8bit").defaults["betas"] == (0.9, 0.999)
    assert bitsandbytes.optim.Lion([nn.Parameter(torch.ones(2))]).defaults["betas"] == (0.9, 0.99)


@proof("optimizer-ignored", fails="silent")
def optimizer_ignored() -> None:
    made = trainer(own=(torch.optim.SGD, {"lr": 1.0}), optim="adafactor", optim_args="momentum=0.9")
    assert type(made.create_optimizer()) is torch.optim.SGD and made.optimizer.defaults["momentum"] == 0


@proof("targets-ignored", fails="silent")
def targets_ignored() -> None:
    made = optimizer(optim="adamw_torch", **TARGETS)
    assert type(made) is torch.optim.AdamW and not any("rank" in group for group in made.param_groups)


@proof("low-rank-on-conv1d", fails="silent")
def low_rank_on_conv1d() -> None:
    rest, projected = optimizer(optim="galore_adamw", **TARGETS).param_groups
    assert projected["params"] == [] and len(rest["params"]) == len(list(model().parameters()))
    named = {"optim_target_modules": ["attn", "mlp"]}
    refused("No target modules found", lambda: optimizer(optim="galore_adamw", **named))


@proof("galore-8bit-arguments", fails="silent")
def galore_8bit_arguments() -> None:
    made = optimizer(llama(), optim="galore_adamw_8bit", **TARGETS)
    assert made.args.max_unorm == 100 and made.args.skip_zeros is True


@proof("layerwise-several-cards", fails="late")
def layerwise_several_cards() -> None:
    from transformers.training_args import ParallelMode

    with mock.patch.object(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED):
        refused("does not support DDP", lambda: optimizer(llama(), **LAYERWISE))


@proof("clipping-without-gradients", fails="silent")
def clipping_without_gradients() -> None:
    tight, off = {"max_grad_norm": 1e-6}, {"max_grad_norm": 0.0}
    assert same_weights(model, tight, off, optim="lomo")
    assert same_weights(llama, tight, off, **LAYERWISE)
    assert not same_weights(model, tight, off, optim="sgd")


class _Moved(TrainerCallback):
    """Whether the weights have moved before the step is complete."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.before, self.moved = net, weights(net), False

    def on_substep_end(self, *args: Any, **more: Any) -> None:
        self.moved = not torch.equal(weights(self.net), self.before)


@proof("lomo-accumulation", fails="silent")
def lomo_accumulation() -> None:
    moved = {}
    for name in ("lomo", "sgd"):
        net = model()
        watching = _Moved(net)
        made = trainer(net, optim=name, gradient_accumulation_steps=2)
        made.add_callback(watching)
        made.train()
        moved[name] = watching.moved
    assert moved == {"lomo": True, "sgd": False}


@proof("lomo-several-cards", fails="silent")
def lomo_several_cards() -> None:
    # What the GPUs would agree on is replaced by nothing at all, and the weights move all the same.
    def nothing(state, bucket):  # type: ignore[no-untyped-def]  # torch checks what is annotated
        agreed: torch.futures.Future[Tensor] = torch.futures.Future()
        agreed.set_result(torch.zeros_like(bucket.buffer()))
        return agreed

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    before = weights(net)
    spread = nn.parallel.DistributedDataParallel(net)
    spread.register_comm_hook(None, nothing)
    lomo = Lomo(net, lr=0.1)
    lomo.fused_backward(spread(torch.ones(2, 4)).sum(), 0.1)
    assert not torch.equal(weights(net), before)


@proof("lomo-with-deepspeed", fails="late")
def lomo_with_deepspeed() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    refused("learning_rate", lambda: real.train(config, optim="lomo", max_grad_norm=0.0))


@proof("lomo-with-fp16", fails="late")
def lomo_with_fp16() -> None:
    with alone():
        made = Accelerator(cpu=True)
    made.scaler = torch.amp.GradScaler("cpu")
    loss = nn.Linear(2, 1)(torch.ones(1, 2)).sum()
    refused("learning_rate", lambda: made.backward(loss, learning_rate=0.1))


@proof("adalomo-without-cuda", fails="late")
def adalomo_without_cuda() -> None:
    refused("", lambda: optimizer(optim="adalomo"))
    assert real.reads(AdaLomo.__init__, ".cuda()") == 6


def _resumed(make: Callable[[], Any], **more: Any) -> tuple[Trainer, int]:
    """A Trainer that went on from a checkpoint, and the bytes of the optimizer's file in it."""
    folder = tempfile.mkdtemp()
    kept = {"output_dir": folder, "save_strategy": "steps", "save_steps": 1}
    trained(make(), **kept, **more)
    done = trainer(make(), **{**kept, "max_steps": 2, **more})
    with quiet():
        done.train(resume_from_checkpoint=True)
    return done, Path(folder, "checkpoint-1", "optimizer.pt").stat().st_size


@proof("checkpoint-cannot-be-loaded", fails="late")
def checkpoint_cannot_be_loaded() -> None:
    for name in ("galore_adamw", "apollo_adamw"):
        refused("Weights only load failed", lambda name=name: _resumed(llama, optim=name, **TARGETS))  # type: ignore[misc]


@proof("states-not-saved", fails="silent")
def states_not_saved() -> None:
    done, size = _resumed(llama, **LAYERWISE)
    held = sum(len(one.state) for one in done.optimizer.optimizer.optimizer_dict.values())
    assert held == len(list(done.model.parameters())) and size < 4096
    with mock.patch.object(Tensor, "cuda", lambda self: self):
        made = trained(optim="adalomo").optimizer.optimizer
    assert made.exp_avg_sq_row and made.state_dict()["state"] == {}
