"""The optimizer in host RAM: torchao's code and Trainer's, with stand-ins for the streams of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.optim import CPUOffloadOptimizer
from transformers import Trainer, TrainingArguments

from hf_memkit import Setup, preset
from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.errors import RunError
from hf_memkit.components.cpu_offload_optimizer import CPUOffloadAdamW
from hf_memkit.components.cpu_offload_optimizer import trainer_options as part_options
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe
from hf_memkit.setup.build import build_arguments, trainer_options
from hf_memkit.setup.request import Request
from hf_memkit.setup.techniques.setup_ledger import offloaded_parameters
from tests.recipes.resolving import resolve
from tests.techniques.proving import proves
from tests.techniques.standin_streams import standin_streams
from tests.tiny_trainer import samples, tiny_gpt2

SMALL = 100
"""Elements from which the tests step on the host: the tiny model has matrices above it, norms and biases below."""


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    with standin_streams():
        yield


def train(
    folder: Path, optimizer: tuple[type, dict[str, Any]] | None = None, *, resume: bool = False, **more: Any
) -> Any:
    """(losses, Trainer) of four steps with a schedule that warms up."""
    values: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 4,
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
        "warmup_steps": 1, "weight_decay": 0.1, "optim": "adamw_torch", "adam_epsilon": 1e-6,
    }  # fmt: skip
    trainer = Trainer(
        model=tiny_gpt2().train(), args=TrainingArguments(**{**values, **more}), train_dataset=samples(),
        optimizer_cls_and_kwargs=optimizer,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def ours(**options: Any) -> tuple[type, dict[str, Any]]:
    return CPUOffloadAdamW, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "minimal_size": SMALL, **options}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.slow
@proves("same-result", "cpu-offload-optimizer")
@pytest.mark.parametrize(
    ("offload_gradients", "accumulation", "norm"), [(True, 1, 0.05), (True, 1, 0.0), (False, 3, 0.05)]
)
def test_it_trains_as_adamw_on_the_gpu(
    tmp_path: Path, offload_gradients: bool, accumulation: int, norm: float
) -> None:
    """With a schedule, clipping and accumulation. The step is the same arithmetic; the norm is summed in another
    order, so that last bits may differ, and Adam makes steps of up to the learning rate of gradients that are rounding
    noise (the bias of the keys): hence 2e-5, a five-hundredth of the learning rate."""
    expected, plain = train(tmp_path, max_grad_norm=norm, gradient_accumulation_steps=accumulation)
    options = {"offload_gradients": offload_gradients, "max_grad_norm": norm}
    losses, trainer = train(tmp_path, ours(**options), max_grad_norm=0, gradient_accumulation_steps=accumulation)
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(trainer)[name], value, rtol=1e-4, atol=2e-5)
    optimizer = trainer.optimizer.optimizer
    held = [parameter for parameter in trainer.model.parameters() if parameter.grad is not None]
    assert not held, "gradients were left"
    assert {p.numel() >= SMALL for p in optimizer.param_d2h_map} == {True} and optimizer.d_opt is not None


def test_without_ours_small_tensors_never_follow_the_schedule(tmp_path: Path) -> None:
    """What ours closes: torchao's list of groups is stale once accelerate has loaded an empty state."""
    _, trainer = train(tmp_path, (CPUOffloadOptimizer, {"lr": 1e-2, "minimal_size": SMALL}), max_grad_norm=0)
    stuck = {group["lr"] for group in trainer.optimizer.optimizer.d_opt.param_groups}
    followed = {each.param_groups[0]["lr"] for each in trainer.optimizer.optimizer.optim_dict.values()}
    assert stuck == {1e-2} and followed == {0.0}, "torchao has closed the trap itself: param_groups can go"
    _, trainer = train(tmp_path, ours(), max_grad_norm=0)
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.0}
    assert {group["lr"] for group in trainer.optimizer.optimizer.d_opt.param_groups} == {0.0}


def test_a_resumed_run_goes_on_as_it_was(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "a", ours(), max_grad_norm=0, save_strategy="steps", save_steps=2)
    for folder in (tmp_path / "a").glob("checkpoint-4"):
        folder.rename(tmp_path / "done")
    resumed, trainer = train(tmp_path / "a", ours(), resume=True, max_grad_norm=0)
    assert trainer.state.global_step == 4
    assert resumed[-2:] == whole[-2:]


def test_step_hooks_and_states_are_where_tools_look_for_them() -> None:
    model, called = nn.Linear(16, 16), []
    optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-3, minimal_size=SMALL)
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert called == ["after"] and optimizer.defaults["lr"] == 1e-3
    assert set(optimizer.state) == {model.weight, model.bias}
    assert offloaded_parameters((256, 16)) == (0, 272) and offloaded_parameters((4096, 4095)) == (4096, 4095)
    with pytest.raises(AttributeError, match="_optimizer_step_post_hooks"):
        CPUOffloadOptimizer(model.parameters(), minimal_size=SMALL).register_step_post_hook(print)


def test_a_group_without_small_tensors_needs_no_optimizer_on_the_gpu() -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-3, minimal_size=SMALL, max_grad_norm=1.0)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups) == 1 and optimizer.d_opt is None
    assert not optimizer.step(lambda: None)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"max_grad_norm": 1.0}, {}, "max_grad_norm=1.0"),
        (
            {"gradient_accumulation_steps": 2},
            {"offload_gradients": True},
            "offload_gradients=True: .*gradient_accumulation_steps=2",
        ),
        ({"fp16": True}, {}, "fp16=True"),
        ({"world_size": 2}, {}, "2 GPUs"),
        ({"deepspeed": {"zero_optimization": {}}}, {}, "deepspeed"),
    ],
)
def test_the_part_refuses_what_would_go_wrong_in_silence(
    arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given = {
        "gradient_accumulation_steps": 1, "world_size": 1, "n_gpu": 1, "deepspeed": None, "fsdp": None, "fp16": False,
        "max_grad_norm": 0.0, "learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    }  # fmt: skip
    kept = part_options(model=None, processing_class=None, arguments=SimpleNamespace(**given))
    assert kept["optimizer_cls_and_kwargs"][1]["offload_gradients"] is True
    with pytest.raises(ValueError, match=message):
        part_options(model=None, processing_class=None, arguments=SimpleNamespace(**{**given, **arguments}), **options)


def setup_of(**values: Any) -> Setup:
    return preset("cpu-offload-optimizer", **values)


def test_a_setup_with_it_builds_what_trains(tmp_path: Path) -> None:
    setup = setup_of()
    arguments = build_arguments(setup, {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})
    optimizer, options = trainer_options(setup, model=None, arguments=arguments)["optimizer_cls_and_kwargs"]
    assert optimizer is CPUOffloadAdamW and options["max_grad_norm"] == 1.0 and options["offload_gradients"] is True


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cpu"])
    arguments = build_arguments(setup_of(), {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})
    with pytest.raises(RunError, match=r"needs a CUDA or XPU GPU\. Omit it"):
        trainer_options(setup_of(), model=None, arguments=arguments)


def test_a_rehearsal_without_a_gpu_steps_with_adamw_itself(recipe: Recipe, machine: Machine) -> None:
    techniques = ("cpu-offload-optimizer", "bf16-autocast")
    variant = recipe.variants["resident"].model_copy(update={"techniques": techniques})
    changed = recipe.model_copy(update={"variants": {**recipe.variants, "resident": variant}})
    resolved = resolve(changed, machine, Request(variant="resident"), use_hub=False)
    part = "trainer_parts.cpu_offload_optimizer"
    assert part in resolved and resolved["arguments.max_grad_norm"] == 0.0
    rehearsed = rehearse(changed, resolved)
    assert part not in rehearsed.setup and rehearsed.setup["arguments.max_grad_norm"] == 1.0
    assert part in [setting.key for setting in rehearsed.not_rehearsed]
