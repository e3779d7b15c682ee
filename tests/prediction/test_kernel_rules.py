"""The rules of `kernel_rules.py` give the kernels' results: dtypes, layouts, and reuse of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_memkit.common.errors import NoKernel
from hf_memkit.prediction.child.tracer.cuda_dtypes import REFUSED, TABLE, refuse_types
from hf_memkit.prediction.child.tracer.kernel_rules import KERNEL_RULES, learn_use_counts
from hf_memkit.prediction.child.tracer.tracer import StorageTracer

aten = torch.ops.aten
BF16 = torch.bfloat16


def turned(*shape: int) -> torch.Tensor:
    """Of this shape, with its last two dimensions in the other order in memory."""
    return torch.ones(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def layer_norm(dtype: torch.dtype) -> tuple[Any, ...]:
    return aten.native_layer_norm.default, torch.ones(4, 6, 8, dtype=dtype), [8], torch.ones(8), torch.ones(8), 1e-5


def layer_norm_backward() -> tuple[Any, ...]:
    inputs, statistics, weight = torch.ones(4, 6, 8), torch.ones(4, 6, 1), torch.ones(8)
    rest = inputs, [8], statistics, statistics, weight, weight, [True, True, True]
    return aten.native_layer_norm_backward.default, turned(4, 6, 8), *rest


def group_norm(dtype: torch.dtype) -> tuple[Any, ...]:
    return (
        aten.native_group_norm.default,
        torch.ones(2, 8, 5, dtype=dtype),
        torch.ones(8),
        torch.ones(8),
        2,
        8,
        5,
        4,
        1e-5,
    )


def group_norm_backward() -> tuple[Any, ...]:
    inputs, statistics = torch.ones(2, 8, 5, dtype=BF16), torch.ones(2, 4)
    rest = statistics, statistics, torch.ones(8), 2, 8, 5, 4, [True, True, True]
    return aten.native_group_norm_backward.default, inputs, inputs, *rest


def log_softmax_backward() -> tuple[Any, ...]:
    return aten._log_softmax_backward_data.default, turned(2, 6, 8), torch.ones(2, 6, 8), 2, torch.float32


def grouped_product(dtype: torch.dtype) -> tuple[Any, ...]:
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    return aten._grouped_mm.default, torch.ones(8, 16, dtype=dtype), torch.ones(2, 16, 24, dtype=dtype), offsets


@pytest.mark.parametrize(
    "case",
    [
        lambda: layer_norm(torch.float32),
        lambda: layer_norm(BF16),
        layer_norm_backward,
        lambda: group_norm(torch.float32),
        lambda: group_norm(BF16),
        group_norm_backward,
        log_softmax_backward,
        lambda: grouped_product(torch.float32),
        lambda: grouped_product(BF16),
    ],
)
def test_types_and_layouts_are_the_kernel_s(case: Callable[[], tuple[Any, ...]]) -> None:
    operation, *args = case()
    real = operation(*args)
    with FakeTensorMode():
        operation, *args = case()
        fake = KERNEL_RULES[operation](*args)
    assert described(fake) == described(real)


@pytest.mark.tracing
def test_a_product_added_in_fp32_takes_no_memory_but_its_result() -> None:
    """Liger and TRL sum a gradient in that way, chunk by chunk; torch 2.11 has no fake of it that runs."""
    tracer = StorageTracer("cpu")
    with FakeTensorMode(), tracer:
        a, b, total = torch.ones(4, 8, dtype=BF16), torch.ones(8, 16, dtype=BF16), torch.ones(4, 16)
        before = len(tracer.trace.sizes_bytes)
        for _ in range(2):  # the second one is known
            assert torch.addmm(total, a, b, out_dtype=torch.float32, out=total) is total
        assert len(tracer.trace.sizes_bytes) == before
        made = [torch.addmm(total, a, b, out_dtype=torch.float32, beta=0) for _ in range(2)]
        assert described(made) == 2 * described(total)
        assert list(tracer.trace.sizes_bytes[before:]) == [4 * 4 * 16] * 2


def described(result: Any) -> list[Any]:
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return [(each.dtype, tuple(each.shape), each.stride(), each.untyped_storage().nbytes()) for each in tensors]


def backward(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """How many tensors a backward pass makes."""
    learn_use_counts()
    tracer = StorageTracer("cpu")
    with FakeTensorMode(), tracer:
        loss = function(torch.ones(8, 8, requires_grad=True).exp()).sum()
        before = len(tracer.trace.sizes_bytes)
        loss.backward()  # type: ignore[no-untyped-call]
        return len(tracer.trace.sizes_bytes) - before


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.tracing)])
def test_a_second_gradient_is_added_to_the_first(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a compiled module, where dispatch modes are hidden from dynamo (`gpu/compiler.py`)."""
    if is_compiled:
        hidden = torch._disable_dynamo(StorageTracer.__torch_dispatch__)  # type: ignore[no-untyped-call]
        monkeypatch.setattr(StorageTracer, "__torch_dispatch__", hidden)
    one = backward(lambda x: x.sin())
    both = backward(lambda x: x.sin() + x.cos())
    gradients_of_cos = backward(lambda x: x.cos()) - backward(lambda x: x.clone())
    assert both - one == gradients_of_cos, "nothing more than what the second path makes by itself"


def test_a_gradient_that_goes_on_elsewhere_is_not_written_to() -> None:
    """The sum hands one gradient to both of its terms: nothing can be added to that one. (The sine makes it a tensor
    of its own; what comes from `sum` is an expanded number, to which nothing is added in any case.)"""
    assert backward(lambda x: (x + x.clone()).sin()) == backward(lambda x: x.sin()) + 1


def test_what_goes_in_a_row_goes_in_the_order_in_which_it_was_made() -> None:
    tracer = StorageTracer("cpu")
    with FakeTensorMode(), tracer:
        made = [torch.empty(4) for _ in range(3)]
        for place in (2, 0, 0):
            del made[place]
    assert tracer.finish("data").events == [1, 2, 3, -1, -2, -3]


def test_a_backward_function_in_python_adds_as_it_says() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * 2 + gradient * 3

    product_only = backward(lambda x: x.clone()) + 2
    assert backward(Twice.apply) == product_only + 1  # type: ignore[no-untyped-call]


def of_gpu(*shape: int, dtype: torch.dtype, device: str = "cuda:0") -> torch.Tensor:
    return FakeTensor(FakeTensorMode(), torch.empty(shape, dtype=dtype, device="meta"), torch.device(device))


def is_refused(operation: Any, *args: Any) -> bool:
    refusal = REFUSED.get(id(operation))
    if refusal is None:
        return False
    try:
        refuse_types(operation, args, {}, refusal, "model.layers.0")
    except NotImplementedError as error:  # as a library catches it
        assert isinstance(error, NoKernel) and "model.layers.0" in str(error)
        return True
    return False


def test_the_table_of_refused_types_is_of_the_installed_torch() -> None:
    """Would notice: a torch whose kernels are not in the table, so that nothing is refused. Run
    scripts/cuda_dtypes.py."""
    assert json.loads(TABLE.read_text())["torch"] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("operation", "dtype", "refused"),
    [
        (aten.mm.default, torch.int64, True),
        (aten.mm.default, BF16, False),
        (aten.mm.default, torch.float16, False),
        (aten._cdist_forward.default, BF16, True),
        (aten._cdist_forward.default, torch.float32, False),
        (aten._fft_r2c.default, BF16, True),
        (aten._fft_r2c.default, torch.float16, False),
        (aten._ctc_loss.default, torch.float16, True),
        (aten.bitwise_and_.Tensor, torch.float32, True),  # in place, too
        (aten.cumsum.default, torch.bool, False),  # OpInfos do not list it, but only `dtype=bool` fails
        (aten.relu.default, BF16, False),
    ],
)
def test_what_a_cuda_kernel_refuses(operation: Any, dtype: torch.dtype, refused: bool) -> None:
    two = of_gpu(4, 4, dtype=dtype), of_gpu(4, 4, dtype=dtype)
    assert is_refused(operation, *two) is refused
    on_host = (of_gpu(4, 4, dtype=dtype, device="cpu"),) * 2
    empty = (of_gpu(0, 4, dtype=dtype),) * 2  # nothing is launched
    assert not is_refused(operation, *on_host) and not is_refused(operation, *empty)
    assert not is_refused(operation, two[0], of_gpu(4, 4, dtype=torch.float64)) or operation in (
        aten._cdist_forward.default, aten._ctc_loss.default,
    ), "of two types the kernel's is another"  # fmt: skip
