"""Every precision with the real Trainer: losses against fp32, and bytes a parameter of weights, gradients, states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.parameter_bytes import PARAMETER_BYTES
from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.conftest import ROOT
from tests.techniques.jobs import MACHINE, gpt2_job
from tests.techniques.proving import proves
from tests.techniques.tiny_models import VOCABULARY, causal_model

pytestmark = pytest.mark.bf16

TRAINED = ("fp32", "bf16-autocast", "fp16-autocast", "pure-bf16")
"""What a CPU runs with all weights trained, and without another engine."""

AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
"""Without it torch's fp16 kernels round oftener, by up to 0.7 % of a loss (torch 2.13: ATEN_CPU_CAPABILITY=avx2)."""

STOCHASTIC = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}


def applied(name: str, *, card: str | None = None) -> Setup:
    machine = MACHINE if card is None else MACHINE.with_gpu(named_gpu(card))
    return TECHNIQUES[name](Setup(preset="test", job=gpt2_job(None, machine=machine)))


class Sizes(TrainerCallback):  # type: ignore[misc]
    """Bytes of weights, gradients and matrix-shaped states, as the optimizer's step finds and leaves them."""

    def __init__(self) -> None:
        self.actual: dict[str, int] = {}

    def on_pre_optimizer_step(self, *args: Any, model: Any, **others: Any) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.actual["weights"] = sum(parameter.nbytes for parameter in model.parameters())
        self.actual["gradients"] = sum(parameter.grad.nbytes for parameter in parameters)

    def on_step_end(self, *args: Any, optimizer: Any, **others: Any) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.actual["states"] = sum(value.nbytes for value in states if torch.is_tensor(value) and value.dim())


def train(
    folder: Path, setup: Setup, *, steps: int = 12, model: Any = None, trainer_class: Any = Trainer, **more: Any
) -> Any:
    """A Trainer after `steps` steps, with its losses in `losses` and its bytes in `sizes`."""
    tokens = torch.randint(3, VOCABULARY, (64, 24), generator=torch.Generator().manual_seed(3))
    tokens[:, 1::2] = tokens[:, :1]  # something to learn
    if model is None:
        model = causal_model().to(getattr(torch, setup["model.dtype"]))
    values = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
              "save_strategy": "no", "logging_steps": 1, "max_steps": steps, "optim": "adamw_torch",
              "learning_rate": 1e-2, "lr_scheduler_type": "constant", **setup.arguments, **more}  # fmt: skip
    sizes = Sizes()
    trainer = trainer_class(
        model=model, args=TrainingArguments(**values), callbacks=[sizes],
        train_dataset=[{"input_ids": row, "labels": row.clone()} for row in tokens],
    )  # fmt: skip
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step: longer than these trainings
        trainer.train()
    trainer.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.sizes = sizes.actual
    return trainer


class Fp16Arithmetic(Trainer):  # type: ignore[misc]
    """accelerate silently ignores fp16 on a CPU (rule fp16-ignored-on-cpu): here it is on, without a scaler."""

    def compute_loss_context_manager(self) -> Any:
        return torch.autocast("cpu", torch.float16)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of fp32 with Trainer's own arguments and nothing of memkit."""
    empty = Setup(preset="none")
    losses: list[float] = train(tmp_path_factory.mktemp("plain"), empty, model=causal_model()).losses
    assert losses[-1] < losses[0] - 0.25  # it learns
    return losses


@pytest.mark.slow
@proves("same-result", "fp32", "bf16-autocast", "fp16-autocast", "pure-bf16")
@pytest.mark.parametrize(
    ("name", "tolerance", "more"),
    [
        ("fp32", 0.0, {}),  # exactly
        # fp16 has 11 bits of mantissa: products are off by up to 2**-11, and a loss of about 4 by less.
        ("fp16-autocast", 1e-3 if AVX512 else 1e-2, {"trainer_class": Fp16Arithmetic}),
        # bf16 has 8 bits: 2**-8 a product, mostly averaged out.
        ("bf16-autocast", 1e-2, {}),
        ("pure-bf16", 2e-2, STOCHASTIC),  # and the weights move in random roundings
    ],
)
def test_losses_are_those_of_fp32(
    tmp_path: Path, baseline: list[float], name: str, tolerance: float, more: dict[str, Any]
) -> None:
    losses = train(tmp_path, applied(name), **more).losses
    assert losses == (baseline if tolerance == 0 else pytest.approx(baseline, rel=tolerance))
    if tolerance:
        assert losses != baseline  # it does compute in other numbers


@proves("memory", "fp32", "bf16-autocast", "fp16-autocast", "pure-bf16")
@pytest.mark.parametrize("name", TRAINED)
def test_bytes_a_parameter_are_the_table_s(tmp_path: Path, name: str) -> None:
    sizes = train(tmp_path, applied(name), steps=1).sizes
    count = causal_model().num_parameters()
    expected = PARAMETER_BYTES[name]
    assert sizes == {
        "weights": expected.weights * count,
        "gradients": expected.gradients * count,
        "states": expected.states * count,
    }


def test_autocast_halves_what_is_kept_and_copies_the_weights() -> None:
    """Bytes that autograd keeps of a forward pass: under autocast the activations' halves, and 2 bytes for every
    weight of a matrix product, `ParameterBytes.copies`."""
    wide = {"n_embd": 64, "n_positions": 64}
    plain, cast = (saved(causal_model(**wide), dtype) for dtype in (None, torch.bfloat16))
    matrices = [p for name, p in causal_model(**wide).named_parameters() if p.dim() == 2 and "wpe" not in name]
    shapes = {tuple(p.shape) for p in matrices} | {tuple(p.shape[::-1]) for p in matrices}
    copies = [size for size, shape in cast if shape in shapes]
    assert sum(copies) == PARAMETER_BYTES["bf16-autocast"].copies * sum(p.numel() for p in matrices)
    assert not [shape for _, shape in plain if shape in shapes]
    activations = [sum(size for size, shape in kept if shape not in shapes) for kept in (plain, cast)]
    assert 0.5 <= activations[1] / activations[0] < 0.75  # norms and the loss stay in fp32


def saved(model: Any, dtype: torch.dtype | None) -> list[tuple[int, tuple[int, ...]]]:
    """(bytes, shape) of every storage that autograd keeps of a forward pass, the parameters themselves left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, tuple[int, ...]]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tuple(tensor.shape))
        return tensor

    # 160 tokens: no side of a weight.
    tokens = torch.randint(3, VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(0))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(input_ids=tokens, labels=tokens).loss
    assert loss.requires_grad
    return list(kept.values())


@proves("same-result", "half-weights-frozen")
@proves("memory", "half-weights-frozen")
def test_frozen_half_weights_train_the_same_adapters(tmp_path: Path) -> None:
    """bf16 under adapters against fp32 under adapters: 2 bytes a frozen parameter, and losses within bf16's 2**-8."""
    from peft import LoraConfig, get_peft_model

    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    runs = {}
    for name in ("fp32", "half-weights-frozen"):
        setup = applied(name)
        torch.manual_seed(0)
        adapted = get_peft_model(causal_model().to(getattr(torch, setup["model.dtype"])), LoraConfig(**lora))
        runs[name] = train(tmp_path, setup, model=adapted)
    whole, half = runs["fp32"], runs["half-weights-frozen"]
    assert half.losses == pytest.approx(whole.losses, rel=1e-2) and half.losses != whole.losses
    trained = sum(p.nbytes for p in half.model.parameters() if p.requires_grad)
    frozen = [p for p in half.model.parameters() if not p.requires_grad]
    assert sum(p.nbytes for p in frozen) == PARAMETER_BYTES["half-weights-frozen"].weights * sum(
        map(torch.numel, frozen)
    )
    assert half.sizes["gradients"] == whole.sizes["gradients"] == trained  # of the adapters alone, in fp32
    assert half.sizes["states"] == 2 * trained


@proves("same-result", "half-weights-deepspeed")
@proves("memory", "half-weights-deepspeed")
@pytest.mark.operators
def test_half_weights_under_deepspeed_train_as_fp32() -> None:
    """ZeRO-2 in a separate process: losses within bf16's rounding, 2 bytes a weight where the model is, and fp32
    master weights and moments in the engine."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.techniques.half_weights_driver"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    actual = json.loads(lines[0].removeprefix("FOUND "))
    whole, half = actual["fp32"], actual["half-weights-deepspeed"]
    assert half["losses"] == pytest.approx(whole["losses"], rel=1e-2) and half["losses"] != whole["losses"]
    each = PARAMETER_BYTES["half-weights-deepspeed"]
    assert half["weights"] == each.weights * half["parameters"]
    assert half["master"] + half["moments"] == pytest.approx(each.elsewhere * half["parameters"], rel=0.01)


def test_gpus_without_bf16_get_fp16_or_a_problem() -> None:
    for name in ("half-weights-deepspeed", "half-weights-frozen"):
        setup = applied(name, card="T4")
        assert setup["model.dtype"] == "float16" and setup.arguments == {"bf16": False, "fp16": True}
    for name in ("pure-bf16", "bf16-autocast", "tf32"):
        assert applied(name, card="T4").problems[0].startswith("needs a GPU that ")
        assert applied(name).problems == ()
    assert applied("fp16-autocast", card="V100 16GB").problems == applied("fp16-autocast", card="T4").notes == ()
    assert "bf16-autocast" in applied("fp16-autocast", card="A100 40GB").notes[0]


def test_trainer_s_tf32_switch_sticks(tmp_path: Path) -> None:
    """A trap that docs/techniques/precision.md names: the switch is cached, so that the third change in one process
    does nothing. Fails when transformers mends it: then drop the warning."""
    from transformers.utils.import_utils import enable_tf32

    before = torch.backends.fp32_precision
    try:
        enable_tf32.cache_clear()
        actual = []
        for on in (True, False, True):
            enable_tf32(on)
            actual.append(torch.backends.fp32_precision)
        assert actual == ["tf32", "ieee", "ieee"]
    finally:
        torch.backends.fp32_precision = before
        enable_tf32.cache_clear()
