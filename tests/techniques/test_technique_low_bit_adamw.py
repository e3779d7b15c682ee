"""The 8- and 4-bit AdamW: the trap is real, it is closed, and a resume does not open it again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchao.optim import AdamW4bit as TorchaoAdamW4bit
from torchao.optim import AdamW8bit as TorchaoAdamW8bit

from hf_memkit.components.low_bit_adamw import AdamW4bit, AdamW8bit

pytestmark = pytest.mark.bf16

BOTH = pytest.mark.parametrize("cls", [AdamW8bit, AdamW4bit])


def model() -> nn.ParameterDict:
    """A matrix that torchao quantises; an embedding with a remainder, as GPT-2's; a bias that is too small."""
    torch.manual_seed(0)
    sizes = {"matrix": (64, 128), "embedding": (257, 100), "bias": (48,)}
    return nn.ParameterDict({name: torch.randn(size).bfloat16() for name, size in sizes.items()})


def step(parameters: nn.ParameterDict, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    for number, parameter in enumerate(parameters.values()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    optimizer.step()


def ours(parameters: nn.ParameterDict, cls: type = AdamW8bit, **options: object) -> AdamW8bit:
    made: AdamW8bit = cls(parameters.values(), lr=1e-3, compiled=False, **options)
    return made


@BOTH
def test_states_are_quantised_or_fp32_and_never_16_bit(cls: type) -> None:
    parameters = model()
    optimizer = ours(parameters, cls)
    step(parameters, optimizer)
    kinds = {name: type(optimizer.state[p]["exp_avg_sq"]).__name__ for name, p in parameters.items()}
    assert kinds == {"matrix": f"OptimState{cls.__name__[5:]}", "embedding": "Tensor", "bias": "Tensor"}
    for name in ("embedding", "bias"):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameters[name]][moment].dtype is torch.float32


def second_moment_after_quiet_steps(optimizer: torch.optim.Optimizer, parameters: nn.ParameterDict) -> Tensor:
    """The second moment's mean ratio to its first value, after 300 steps with next to no gradient."""
    step(parameters, optimizer)
    first = optimizer.state[parameters["bias"]]["exp_avg_sq"].float().clone()
    for _ in range(300):
        step(parameters, optimizer, scale=1e-6)
    return (optimizer.state[parameters["bias"]]["exp_avg_sq"].float() / first).mean()


@pytest.mark.slow
def test_torchao_s_second_moment_stands_still_and_ours_decays() -> None:
    """beta2 = 0.999: after 300 quiet steps a second moment must have fallen to 0.999**300 = 0.74."""
    with torch.compiler.set_stance("force_eager"):
        parameters = model()
        frozen = second_moment_after_quiet_steps(TorchaoAdamW8bit(parameters.values(), lr=1e-3), parameters)
    assert frozen == pytest.approx(1.0, abs=0.01), "torchao has closed the trap itself: AdamW8bit can go"
    parameters = model()
    decayed = second_moment_after_quiet_steps(ours(parameters), parameters)
    assert decayed == pytest.approx(0.999**300, rel=0.01)


@BOTH
def test_a_resume_brings_back_the_same_states_bit_for_bit(cls: type) -> None:
    parameters = model()
    optimizer = ours(parameters, cls)
    for _ in range(3):
        step(parameters, optimizer)
    saved = optimizer.state_dict()
    copy = model()
    resumed = ours(copy, cls)
    resumed.load_state_dict(saved)
    for name, parameter in parameters.items():
        old, new = optimizer.state[parameter], resumed.state[copy[name]]
        assert old["step"] == new["step"]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert type(old[moment]) is type(new[moment])
            if type(old[moment]) is Tensor:
                assert new[moment].dtype is torch.float32
                torch.testing.assert_close(new[moment], old[moment], rtol=0, atol=0)
            else:
                torch.testing.assert_close(new[moment].dequantize(), old[moment].dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize(("cls", "original"), [(AdamW8bit, TorchaoAdamW8bit), (AdamW4bit, TorchaoAdamW4bit)])
def test_the_update_is_torchao_s_own(cls: type, original: type) -> None:
    """Same result: one step of ours equals one step of torchao's, for quantised and other parameters alike."""
    mine, theirs = model(), model()
    step(mine, ours(mine, cls))
    with torch.compiler.set_stance("force_eager"):
        step(theirs, original(theirs.values(), lr=1e-3))
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0)


def test_stochastic_rounding_moves_weights_that_rounding_would_keep() -> None:
    def moved(stochastic: bool) -> float:
        torch.manual_seed(0)
        parameters = nn.ParameterDict({"matrix": torch.ones(64, 128).bfloat16()})
        optimizer = AdamW8bit(
            parameters.values(), lr=1e-4, weight_decay=0.0, compiled=False, bf16_stochastic_round=stochastic
        )
        for _ in range(20):
            parameters["matrix"].grad = torch.ones(64, 128).bfloat16()
            optimizer.step()
        return float((1 - parameters["matrix"].detach().float()).mean())

    assert moved(False) == 0.0
    assert moved(True) == pytest.approx(20 * 1e-4, rel=0.2)
