"""Patches for library code that bypasses torch's dispatcher, or cannot handle tensors without values.

`script/replacements.py` says when each is installed. See also quantised weights (`quantised.py`, for setups
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
from hf_memkit.prediction.child.quick_imports import without_lines
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.prediction.gpu_memory import OUTLIER_COLUMNS
from hf_memkit.setup.setup import Setup


def traceable(setup: Setup) -> Setup:
    """The setup as it is traced: without checks of the data, and with torch's flash attention instead of the
    flash-attn package, whose kernels keep the same tensors."""
    setup = setup.drop("trainer_parts.check_length_grouping")
    if uses_flash_attention(setup):
        setup = setup.put("model.attn_implementation", "sdpa", "traced as torch's own flash attention")
    return setup


def refuse_missing_kernels(setup: Setup) -> None:
    """Raises Unmodelled if a library that the setup needs for its trace is not installed."""
    if setup.get("arguments.use_liger_kernel") and not is_installed("triton", "liger_kernel"):
        raise Unmodelled("use_liger_kernel: the trace needs liger-kernel and triton; run: pip install liger-kernel")


def patch_view_errors() -> None:
    """Raises RuntimeError for a view that strides do not allow, as for real tensors. Code catches that error (axolotl
    0.19.0: monkeypatch/trainer/utils.py, `selective_log_softmax`); for a fake tensor torch raises ValueError (2.13:
    _refs/__init__.py, `_reshape_view_helper_core_alg`)."""
    import torch._refs as refs

    original = refs._reshape_view_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    refs._reshape_view_helper = helper


def disable_pointer_calls(functional: Any) -> None:
    """Skips bitsandbytes' CUDA functions that axolotl and Unsloth call by pointer, outside torch, to fill tensors that
    they have allocated (axolotl 0.19.0: kernels/quantize.py, `_ctypes_nf4_dequant`)."""
    own = functional.lib

    class Lib:
        def __getattr__(self, name: str) -> Any:
            if name.startswith(("cdequantize", "cgemm")) and "cpu" not in name:
                return lambda *args: launched(f"bitsandbytes.{name}", (), kind="unknown")
            return getattr(own, name)

    functional.lib = Lib()


def disable_weight_check(tokenizer_utils: Any) -> None:
    """Skips Unsloth's search for embedding rows that are zero (unsloth_zoo 2026.10.9)."""
    tokenizer_utils.fix_untrained_tokens = lambda *args, **kwargs: None


@contextlib.contextmanager
def unmodelled_shapes() -> Iterator[None]:
    """Raises `Unmodelled` for torch's errors about value-dependent shapes and kernels without shape rules."""
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


def patch_deepcopy() -> None:
    """Lets fake tensors made from a number be copied. They keep the number in a real tensor, which cannot be copied
    within a fake mode; accelerate's copy of an optimizer's groups contains torchao's learning rate."""
    original: Any = FakeTensor.__deepcopy__

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if isinstance(self, torch.nn.Parameter) or self.requires_grad:
            return original(self, memo)
        return memo.setdefault(id(self), self.detach().clone())

    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign]


def patch_tensor_constructor() -> None:
    """Lets `torch.tensor([a, b])` convert fake tensors with known values, by `item()`.

    torch reads the numbers outside all modes (torch 2.13: csrc/utils/tensor_new.cpp, `recursive_store`), for example
    the positions of Qwen2.5-VL (transformers 5.23.0: modeling_qwen2_5_vl.py, `get_rope_index`).

    In autograd's thread no mode can create a tensor on the GPU directly, so it is created on the CPU and moved.
    Liger's backward does that (liger_kernel 0.8.5: ops/fused_linear_cross_entropy.py), and checkpointed layers run
    there.
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
        dtype = functools.reduce(torch.promote_types, (fake.dtype for fake in fakes))
        numbers = tree_map(lambda leaf: leaf.item() if isinstance(leaf, FakeTensor) else leaf, data)
        return make(numbers, **{"dtype": dtype, **options})

    devices: Any = torch.utils._device
    devices._device_constructors().add(make)  # functions that get the script's default device
    jit: Any = torch.jit._builtins
    jit._register_builtin(tensor, jit._find_builtin(make))  # functions that call it are scripted
    torch.tensor = tensor  # type: ignore[assignment]


def uses_flash_attention(setup: Setup) -> bool:
    return "flash" in str(setup.get("model.attn_implementation") or "")


def is_installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def patch_tf32_check() -> None:
    """Makes transformers' TF32 check, which also asks torch for its CUDA version, depend on the fake GPU only."""
    from transformers import training_args

    training_args.is_torch_tf32_available = lambda: torch.cuda.get_device_capability() >= (8, 0)


def skip_triton_kernels() -> None:
    """Skips launches of Triton kernels: their outputs are allocated by the caller, and fake tensors have no values
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
    """Whether a kernel, or a Triton function it calls, multiplies tiles (`tl.dot`): its bytes do not give its time."""
    from triton.runtime.jit import JITFunction

    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    known = getattr(function, "__globals__", {})
    called = []
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            function_node = node.func
            name = function_node.attr if isinstance(function_node, ast.Attribute) else getattr(function_node, "id", "")
            if name in ("dot", "dot_scaled"):
                return True
            owner = None
            if isinstance(function_node, ast.Attribute) and isinstance(function_node.value, ast.Name):
                owner = known.get(function_node.value.id)
            called.append(getattr(owner, name, None) if owner is not None else known.get(name))
    return any(_multiplies(_kernel(callee)) for callee in called if isinstance(callee, JITFunction))


def patch_bitsandbytes_optimizers() -> None:
    """Counts paged states as host memory: the allocator has no managed memory (bitsandbytes 0.50.2: functional.py,
    `get_paged`). Reads no value of a norm, which LARS and LAMB pass on as a number (`optimizer_update_32bit`)."""
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


def assume_few_outliers() -> None:
    """Assumes that `OUTLIER_COLUMNS` columns of an 8-bit layer's input exceed the threshold, which depends on values
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

    with without_lines():
        torch.library.register_fake("bitsandbytes::int8_vectorwise_quant", vectorwise, allow_override=True)
        torch.library.register_fake("bitsandbytes::int8_mixed_scaled_mm", mixed, allow_override=True)


def patch_apollo_random() -> None:
    """Draws APOLLO's numbers without a GPU generator: a fake GPU's hangs (apollo_torch 1.0.3: random_projector.py)."""
    from apollo_torch import random_projector

    def stable_randn(shape: Any, seed: int, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    random_projector.stable_randn = stable_randn


def patch_low_bit_states() -> None:
    """Makes 16-bit states of memkit's low-bit AdamW fp32 for fake tensors, too: it compares the exact tensor type."""
    from hf_memkit.components.low_bit_adamw import _Fp32States

    original = _Fp32States._new_buffer

    def new_buffer(self: Any, p: torch.Tensor, signed: bool) -> torch.Tensor:
        buffer = original(self, p, signed)
        narrow = isinstance(buffer, FakeTensor) and buffer.dtype in (torch.bfloat16, torch.float16)
        return buffer.float() if narrow else buffer

    _Fp32States._new_buffer = new_buffer  # type: ignore[method-assign]


def patch_packed_sequences(*, with_masks: bool) -> None:
    """Makes transformers see several sequences in a row, which it detects from the values of position ids
    (transformers 5.23.0: masking_utils.py, `find_packed_sequence_indices`)."""
    from transformers import masking_utils

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        before = position_ids[:, :1] - 1
        return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1) if with_masks else None

    masking_utils.find_packed_sequence_indices = find
