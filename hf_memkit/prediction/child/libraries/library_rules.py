"""Rules for what libraries do beside torch's dispatcher, or cannot do with tensors that hold nothing.

`script/replacements.py` says when each is installed. Besides: quantised weights (`quantised.py`, for setups
`setup_model.py`), and torchao's low-bit AdamW, whose compiled step is bounded (`fake_gpu.py`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.prediction.gpu_memory import OUTLIER_COLUMNS
from hf_memkit.setup.setup import Setup


def traceable(setup: Setup) -> Setup:
    """The setup as it is traced: without what looks at the data, and with torch's own flash attention in the place of
    the flash-attn package, whose kernels keep the same tensors.

    Raises:
        Unmodelled: its attention is compiled.
    """
    if setup.get("model.attn_implementation") == "flex_attention":
        raise Unmodelled("attn_implementation=flex_attention: compiled kernels cannot be traced; use sdpa")
    setup = setup.drop("trainer_parts.check_length_grouping")
    if with_flash_package(setup):
        setup = setup.put("model.attn_implementation", "sdpa", "traced as torch's own flash attention")
    return setup


def refuse_missing_kernels(setup: Setup) -> None:
    """Raises Unmodelled if a library of the setup's is not installed, so that it cannot be traced."""
    if setup.get("arguments.use_liger_kernel") and not is_installed("triton", "liger_kernel"):
        raise Unmodelled("use_liger_kernel: the trace needs liger-kernel and triton; run: pip install liger-kernel")


def views_raise_what_real_ones_raise() -> None:
    """A view that strides do not allow is a RuntimeError, for which code waits (axolotl 0.19.0:
    monkeypatch/trainer/utils.py, `selective_log_softmax`); of a fake tensor torch makes it a ValueError (2.13:
    _refs/__init__.py, `_reshape_view_helper_core_alg`)."""
    import torch._refs as refs

    original = refs._reshape_view_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    refs._reshape_view_helper = helper


def calls_by_pointer_do_nothing(functional: Any) -> None:
    """axolotl and Unsloth call bitsandbytes' CUDA functions by pointer, past torch, into tensors that they have made
    (axolotl 0.19.0: kernels/quantize.py, `_ctypes_nf4_dequant`)."""
    own = functional.lib

    class Lib:
        def __getattr__(self, name: str) -> Any:
            if name.startswith(("cdequantize", "cgemm")) and "cpu" not in name:
                return lambda *args: launched(f"bitsandbytes.{name}", (), kind="unknown")
            return getattr(own, name)

    functional.lib = Lib()


def no_weight_is_looked_at(tokenizer_utils: Any) -> None:
    """Unsloth looks for rows of the embedding that are zero, and fills them (unsloth_zoo 2026.10.9)."""
    tokenizer_utils.fix_untrained_tokens = lambda *args, **kwargs: None


@contextlib.contextmanager
def shapes_from_values_are_unmodelled() -> Iterator[None]:
    """Turns torch's errors about shapes that depend on values, and about kernels that it has no shapes for, into
    `Unmodelled`."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    try:
        yield
    except UnsupportedOperatorException as error:
        raise Unmodelled(
            f"{error.func}: torch has no shapes for this kernel, so no trace; measure with memkit run"
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        operation = getattr(error, "func", error)
        raise Unmodelled(
            f"{operation}: the size of its result depends on values, and a trace has none (a router picks experts one "
            f"by one, a mask picks rows); measure with memkit run"
        ) from error


def constants_can_be_copied() -> None:
    """A fake tensor made from a number remembers it in a real tensor, which cannot be copied among fake ones: the copy
    that accelerate makes of an optimizer's groups holds torchao's learning rate."""
    original: Any = FakeTensor.__deepcopy__

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if isinstance(self, torch.nn.Parameter) or self.requires_grad:
            return original(self, memo)
        return memo.setdefault(id(self), self.detach().clone())

    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign]


def tensors_become_numbers() -> None:
    """`torch.tensor([a, b])` of tensors reads their numbers past all modes (torch 2.13: csrc/utils/tensor_new.cpp,
    `recursive_store`), such as the positions of Qwen2.5-VL (transformers 5.23.0: modeling_qwen2_5_vl.py,
    `get_rope_index`). Here `item()` does, which knows those that follow from the batch.

    In autograd's own thread no mode makes a tensor on the GPU at once: it is made on the CPU, and moved. Liger's
    backward does so (liger_kernel 0.8.5: ops/fused_linear_cross_entropy.py), and layers that are checkpointed run
    again there.
    """
    make = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        try:
            return make(data, **options)
        except RuntimeError:
            fakes = [leaf for leaf in tree_leaves(data) if isinstance(leaf, FakeTensor)]
            if not fakes and options.get("device") and threading.current_thread() is not threading.main_thread():
                device = options.pop("device")
                return make(data, **options).to(device)
            if not fakes or isinstance(data, FakeTensor):
                raise
        dtype = functools.reduce(torch.promote_types, (each.dtype for each in fakes))
        numbers = tree_map(lambda leaf: leaf.item() if isinstance(leaf, FakeTensor) else leaf, data)
        return make(numbers, **{"dtype": dtype, **options})

    devices: Any = torch.utils._device
    devices._device_constructors().add(make)  # which get the script's default device, and are looked up by now
    jit: Any = torch.jit._builtins
    jit._register_builtin(tensor, jit._find_builtin(make))  # functions that call it are scripted
    torch.tensor = tensor  # type: ignore[assignment]


def with_flash_package(setup: Setup) -> bool:
    return "flash" in str(setup.get("model.attn_implementation") or "")


def is_installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def tf32_is_available() -> None:
    """The fake GPU was made for it; transformers asks torch for its CUDA version besides."""
    from transformers import training_args

    training_args.is_torch_tf32_available = lambda: torch.cuda.get_device_capability() >= (8, 0)


def kernels_are_not_launched() -> None:
    """A launch of a Triton kernel does nothing: its outputs are allocated around it, and hold nothing anyway
    (triton 3.7.1: runtime/jit.py, `KernelInterface.__getitem__` calls `run`)."""
    from triton.runtime import autotuner, jit

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = _kernel(self)
        kind = "unknown" if _multiplies(kernel) else "memory"
        launched(f"triton.{getattr(kernel, '__name__', 'kernel')}", (*args, *kwargs.values()), kind=kind)

    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        kind.run = run


def _kernel(kernel: Any) -> Any:
    """The Python function of a Triton kernel, below autotuning and heuristics."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


@functools.cache
def _multiplies(function: Any) -> bool:
    """Whether a kernel, or a Triton function that it may call, has products of tiles (`tl.dot`): its bytes alone do
    not say how long it takes."""
    from triton.runtime.jit import JITFunction

    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    known = getattr(function, "__globals__", {})
    called = []
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            of = node.func
            name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
            if name in ("dot", "dot_scaled"):
                return True
            owner = (
                known.get(of.value.id) if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) else None
            )
            called.append(getattr(owner, name, None) if owner is not None else known.get(name))
    return any(_multiplies(_kernel(each)) for each in called if isinstance(each, JITFunction))


def bitsandbytes_optimizers() -> None:
    """States in managed memory are not the allocator's (bitsandbytes 0.50.2: functional.py, `get_paged`): they are
    taken for the host's. LARS and LAMB hand the parameter's norm on as a number (`optimizer_update_32bit`)."""
    import bitsandbytes.functional as functional

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        state: Any = torch.empty(shape, dtype=dtype, device="cpu")
        state.is_paged = True
        state.page_deviceid = 0
        return state  # type: ignore[no-any-return]

    original = functional.optimizer_update_32bit

    def update(name: str, gradient: Any, parameter: Any, *rest: Any, max_unorm: float = 0.0, **options: Any) -> None:
        if max_unorm > 0:
            torch.norm(parameter.data.float())
        original(name, gradient, parameter, *rest, max_unorm=0.0, **options)

    functional.get_paged = get_paged
    functional.fill = lambda *args, **kwargs: None
    functional.prefetch_tensor = lambda *args, **kwargs: None
    functional.optimizer_update_32bit = update


def outliers_are_few() -> None:
    """How many columns of an input exceed the threshold of 8 bits depends on values: `OUTLIER_COLUMNS` are assumed
    (bitsandbytes 0.50.2: _ops.py; backends/default/ops.py, `int8_vectorwise_quant`, `int8_mixed_scaled_mm`)."""

    def vectorwise(inputs: torch.Tensor, threshold: float = 0.0) -> Any:
        rows = inputs.new_empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32)
        few = min(OUTLIER_COLUMNS, inputs.shape[-1])
        outliers = inputs.new_empty(few, dtype=torch.int64) if threshold > 0 else None
        return torch.empty_like(inputs, dtype=torch.int8), rows, outliers

    def mixed(
        inputs: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, rows: Any, columns: Any,
        outliers: torch.Tensor | None = None, bias: Any = None,
    ) -> Any:  # fmt: skip
        kept = (inputs.shape[0], outliers.shape[0]) if outliers is not None and outliers.numel() else (0,)
        return inputs.new_empty((*codes.shape[:-1], weight.shape[0])), inputs.new_empty(kept)

    torch.library.register_fake("bitsandbytes::int8_vectorwise_quant", vectorwise, allow_override=True)
    torch.library.register_fake("bitsandbytes::int8_mixed_scaled_mm", mixed, allow_override=True)


def apollo_draws_on_the_host() -> None:
    """A generator on a GPU that is not there waits for ever (apollo_torch 1.0.3: random_projector.py)."""
    from apollo_torch import random_projector

    def stable_randn(shape: Any, seed: int, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    random_projector.stable_randn = stable_randn


def wide_states() -> None:
    """The part makes 16-bit states fp32, and knows them by their exact type, which a fake tensor is not."""
    from hf_memkit.components.low_bit_adamw import _WideRest

    original = _WideRest._new_buffer

    def new_buffer(self: Any, p: torch.Tensor, signed: bool) -> torch.Tensor:
        buffer = original(self, p, signed)
        narrow = isinstance(buffer, FakeTensor) and buffer.dtype in (torch.bfloat16, torch.float16)
        return buffer.float() if narrow else buffer

    _WideRest._new_buffer = new_buffer  # type: ignore[method-assign]


def rows_are_packed(*, with_masks: bool) -> None:
    """transformers looks at position ids to see whether sequences share a row; made-up values would say no
    (transformers 5.23.0: masking_utils.py, `find_packed_sequence_indices`)."""
    from transformers import masking_utils

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        before = position_ids[:, :1] - 1
        return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1) if with_masks else None

    masking_utils.find_packed_sequence_indices = find
