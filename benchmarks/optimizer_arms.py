"""Optimizers whose learning curves are compared: each as a preset would set it, and the learning rates tried."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.catalog.optimizers import find_optimizer

BASELINE: Final = "adamw-fused"
"""The arm, in fp32, that every other is compared with."""

LOW_RANK: Final = {"optim_target_modules": "all-linear", "optim_args": "rank=16,update_proj_gap=200,scale=0.25"}
"""A quarter of the width, as in GaLore's table 2 (Zhao et al. 2024, arXiv 2403.03507)."""
APOLLO: Final = {"optim_target_modules": "all-linear", "optim_args": "rank=16,update_proj_gap=200,scale=1.0"}
"""Zhu et al. 2024, arXiv 2412.05270, section 4: rank of a quarter of the width, scale 1."""
SAME_RATE: Final = ()
"""No grid of its own: the baseline's learning rate, because the algorithm is the same."""


@dataclass(frozen=True)
class Arm:
    """One optimizer.

    Attributes:
        technique: its name in hf_memkit; empty for what is only a control.
        arguments: of TrainingArguments.
        optimizer: class (`module:name`) and its options, where no argument does.
        takes: which of lr, betas and eps that class is given from the arguments.
        dtype: of the weights.
        rates: learning rates tried, in a quarter of the steps; the best runs to the end. Empty: the baseline's.
        rates_of: the arm whose choice it shares, if `rates` is empty.
        architecture: gpt2, or llama where the library cannot work on GPT-2's Conv1D.
        baseline: the arm that it is compared with; empty: AdamW on the same architecture.
        bar: how far its held-out loss may end above the baseline's, as a share; None where only the curve is kept.
        cpu: what was done so that it runs on a CPU at all.
    """

    technique: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ("lr", "betas", "eps")
    dtype: str = "float32"
    rates: tuple[float, ...] = SAME_RATE
    rates_of: str = BASELINE
    architecture: str = "gpt2"
    baseline: str = ""
    bar: float | None = None
    cpu: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """Import names of what it needs beyond torch and transformers."""
        return find_optimizer(str(self.optimizer.get("class") or self.arguments.get("optim", ""))).packages

    def class_and_options(self, rate: float) -> tuple[type, dict[str, Any]] | None:
        """What Trainer's `optimizer_cls_and_kwargs` takes, or None where `optim` does."""
        if not self.optimizer:
            return None
        options = dict(self.optimizer)
        module, _, name = str(options.pop("class")).partition(":")
        known = {"lr": rate, "betas": (0.9, 0.999), "eps": 1e-8}
        options.update({key: known[key] for key in self.takes})
        return getattr(importlib.import_module(module), name), options


_LOW_BIT = "hf_memkit.components.low_bit_adamw"
_LARGE_BATCH = "hf_memkit.components.large_batch_optimizers"
_EIGHT: Final = {"class": f"{_LOW_BIT}:AdamW8bit", "bf16_stochastic_round": True, "block_size": 256, "compiled": False}
_FOUR: Final = {"class": f"{_LOW_BIT}:AdamW4bit", "bf16_stochastic_round": True, "block_size": 128, "compiled": False}
_UNCOMPILED = "compiled=False: the same arithmetic without torch.compile"
_ADAMW_RATES = (1e-3, 3e-3, 1e-2)
_LION: Final = {"adam_beta1": 0.9, "adam_beta2": 0.99}
"""As in Lion's paper (Chen et al. 2023, arXiv 2302.06675)."""
_LION_RATES = (3e-4, 1e-3, 3e-3)

ARMS: Final[Mapping[str, Arm]] = {
    BASELINE: Arm(BASELINE, {"optim": "adamw_torch_fused"}, rates=_ADAMW_RATES),
    "adamw-fused, data in another order": Arm("", {"optim": "adamw_torch_fused", "data_seed": 1}),
    "adamw-fused, pure bf16": Arm("", {"optim": "adamw_torch_fused"}, dtype="bfloat16"),
    "adamw-8bit": Arm("adamw-8bit", {"optim": "adamw_bnb_8bit"}, bar=0.01),
    "adamw-8bit-stochastic": Arm(
        "adamw-8bit-stochastic", optimizer=_EIGHT, dtype="bfloat16", bar=0.01, cpu=_UNCOMPILED
    ),
    "adamw-4bit-stochastic": Arm(
        "adamw-4bit-stochastic", optimizer=_FOUR, dtype="bfloat16", bar=0.01, cpu=_UNCOMPILED
    ),
    "sgd-momentum": Arm(
        "sgd-momentum", {"optim": "sgd", "optim_args": "momentum=0.9"}, rates=(0.03, 0.1, 0.3)
    ),
    "adafactor": Arm("adafactor", {"optim": "adafactor"}, rates=_ADAMW_RATES),
    "lion, 32 bit": Arm("", {"optim": "lion_32bit", **_LION}, rates=_LION_RATES),
    "lion-8bit": Arm(
        "lion-8bit", {"optim": "lion_8bit", **_LION}, rates=_LION_RATES, baseline="lion, 32 bit", bar=0.01
    ),
    "lomo": Arm("lomo", {"optim": "lomo", "max_grad_norm": 0.0}, rates=(0.1, 0.3, 1.0)),
    "adalomo": Arm(
        "adalomo", {"optim": "adalomo", "max_grad_norm": 0.0}, rates=(3e-3, 1e-2, 3e-2),
        cpu="Tensor.cuda made to do nothing: the library puts its states on CUDA without asking",
    ),
    "lars": Arm(
        "lars", {"weight_decay": 0.0}, {"class": f"{_LARGE_BATCH}:LARS", "momentum": 0.9}, takes=("lr",),
        rates=(0.3, 1.0, 3.0),
    ),
    "lamb": Arm("lamb", optimizer={"class": f"{_LARGE_BATCH}:LAMB"}, rates=(3e-3, 1e-2, 3e-2)),
    "adamw-fused, llama": Arm("", {"optim": "adamw_torch_fused"}, rates=_ADAMW_RATES, architecture="llama"),
    "galore": Arm(
        "galore", {"optim": "galore_adamw", **LOW_RANK}, rates=(3e-3, 1e-2, 3e-2), architecture="llama"
    ),
    "apollo": Arm("apollo", {"optim": "apollo_adamw", **APOLLO}, rates=(3e-3, 1e-2, 3e-2), architecture="llama"),
}  # fmt: skip
"""By name, in the order in which they run: the baseline first. What computes the same as another arm (the forms of
AdamW, paging, layer by layer) has a test that shows it, and no curve of its own."""
