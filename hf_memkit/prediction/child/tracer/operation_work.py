"""Computes the cost of an operation on a GPU: FLOPs, bytes, dtype, shape, kernels.

Input: the operation, its arguments and its result, as a dispatch mode below autograd and autocast gets them. Output:
`work.Operation`s; none for a view, an allocation, or an operation on another device.

| operation | FLOPs | bytes |
|---|---|---|
| products, convolutions | `torch.utils.flop_counter`'s formulas | factors read, result written |
| fused attention | of queries × keys and scores × values; two products forward, five backward; half if causal | queries, keys, values, output; no scores |
| lookups (`index`, `gather`, `embedding`) | none | selected elements, read and written; not the whole source |
| all others | none | each tensor read or written once, tensors changed in place twice |

A broadcast or expanded tensor counts the bytes of its storage. An operation of an unknown library is `unknown`: its
bytes are counted, but it may compute anything.
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from hf_memkit.prediction.child.tracer.plain_tensors import device_type, plain_tensors_in
from hf_memkit.prediction.trace.work import Kind, Operation

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]

_ALLOCATES: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
    | {"_unsafe_view", "lift", "_nested_tensor_size", "is_same_size", "sym_size", "sym_stride", "sym_numel"}
)
"""Operations besides views that run no kernel."""

_ONLY_WRITES: Final = frozenset(
    {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "_foreach_zero_"}
    | {"_foreach_copy_", "geometric_", "log_normal_", "cauchy_", "eye", "arange", "linspace"}
)
"""Operations that do not read the tensor that they change in place."""

_ONLY_SHAPE: Final = frozenset(
    {f"{name}_like" for name in ("zeros", "ones", "full", "rand", "randn", "randint")}
    | {f"new_{name}" for name in ("zeros", "ones", "full")}
)
"""Operations that do not read their arguments."""

_PICKS: Final = frozenset(
    {"embedding", "index", "index_select", "gather", "take", "take_along_dim", "_unsafe_index", "masked_select"}
    | {"nll_loss_forward", "nll_loss2d_forward"}
)
"""Operations that read as much of their first tensor as their result has; a loss reads a number per row."""

_PUTS: Final = frozenset(
    {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "index_fill_"}
)
"""Operations that change as much of their first tensor as they write."""

_WAITS: Final = frozenset(
    {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
)
"""Operations whose result the host needs: a size or a value (pytorch: native/cuda/Nonzero.cu, Scalar.cu)."""

LIBRARIES: Final = frozenset(
    {"aten", "prims", "bitsandbytes", "torchao", "torchvision", "profiler", "_c10d_functional", "fsdp"}
)
"""Namespaces of operations whose costs follow from this table; others are `unknown`."""

_NO_FORMULA: Final = (
    "_linalg_", "linalg_qr", "linalg_inv", "linalg_lu", "linalg_ldl", "linalg_cholesky", "linalg_eig", "linalg_solve",
    "linalg_householder", "linalg_lstsq", "cholesky", "ormqr", "geqrf", "_cudnn_rnn", "_thnn_fused", "_ctc_loss",
)  # fmt: skip
"""Operations that compute more than they move, step by step: GaLore's decompositions, recurrent layers: `unknown`."""

_CHUNK: Final = 65536
_MAX_TENSORS: Final = (110, 64, 48, 36, 30)
_MAX_BLOCKS: Final = 320
"""Limits of one launch: elements of a chunk, tensors by the number of lists, chunks (torch 2.13:
ATen/native/cuda/MultiTensorApply.cuh, `kChunkSize`, `depth_to_max_tensors`, `depth_to_max_blocks`)."""


def operations_of(func: Any, args: Arguments, kwargs: Named, result: Any, device: str) -> tuple[Operation, ...]:
    """The operations of one call on a type of device, in the order in which their kernels run."""
    namespace, name, free = _named(func)
    if free:
        return ()
    tensors = list(plain_tensors_in((args, *kwargs.values(), result)))
    on_device = [tensor for tensor in tensors if device_type(tensor) == device]
    if not on_device and not (namespace == "bitsandbytes" and "optimizer" in name):
        return ()
    if len(on_device) < len(tensors) and (copied := _transfer(func, name, args, kwargs, result)) is not None:
        return (copied,)
    cost = _SPECIAL.get(name)
    if cost is not None and (operations := cost(func, args, kwargs, result)):
        return operations
    return (_memory(func, namespace, name, args, kwargs, result, device),)


def kernel_operation(name: str, arguments: Iterable[Any], device: str, **fields: Any) -> Operation:
    """A kernel that is called outside the dispatcher and reads or writes each of its tensors once. `fields`: fields of
    `Operation` that override the computed ones."""
    tensors = [tensor for tensor in plain_tensors_in(arguments) if device_type(tensor) == device]
    values: dict[str, Any] = {
        "kind": "memory",
        "dtype": _dtype(tensors[0]) if tensors else "",
        "flops": 0,
        "moved_bytes": sum(map(held_bytes, tensors)),
        **fields,
    }
    return Operation(name, **values)


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes in a tensor's storage: dimensions over which it is expanded do not count."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * int(tensor._nnz()) if tensor.is_sparse else 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            elements *= size
    return elements * tensor.element_size()


# ---- memory ----


def _memory(
    func: Any, namespace: str, name: str, args: Arguments, kwargs: Named, result: Any, device: str
) -> Operation:
    """An operation that moves each of its tensors once. For bitsandbytes' 8-bit optimizers `flops` are parameters."""
    moved = 0
    written: set[int] = set()
    picks, puts = name in _PICKS, name in _PUTS
    named = {argument.name: argument for argument in func._schema.arguments}
    given = [*zip(named.values(), args, strict=False), *((named[key], value) for key, value in kwargs.items())]
    for number, (argument, value) in enumerate(given):
        tensors = list(plain_tensors_in((value,)))
        changes = argument.alias_info is not None and argument.alias_info.is_write
        if changes:
            written.update(map(id, tensors))
        if (number == 0 and (picks or puts)) or name in _ONLY_SHAPE:
            continue
        twice = changes and name not in _ONLY_WRITES and not argument.is_out
        moved += (2 if twice else 1) * sum(map(held_bytes, tensors))
        if puts and not changes:
            moved += sum(held_bytes(tensor) for tensor in tensors if tensor.is_floating_point())
    made = sum(held_bytes(tensor) for tensor in plain_tensors_in((result,)) if id(tensor) not in written)
    moved += 2 * made if picks else made
    first = next(plain_tensors_in((result,)), None)
    if first is None:
        first = next(plain_tensors_in((args, *kwargs.values())))
    kind: Kind = "memory" if namespace in LIBRARIES and not name.startswith(_NO_FORMULA) else "unknown"
    updated = args[1].numel() if name == "optimizer_update_8bit_blockwise" else 0
    return Operation(
        str(func), kind, _dtype(first), updated, moved, launches=_launches(name, args), waits=name in _WAITS
    )


def _launches(name: str, args: Arguments) -> int:
    """Number of kernels: one, except for lists of tensors."""
    if (
        not name.startswith(("_foreach_", "_fused_", "_amp_foreach"))
        or not args
        or not isinstance(args[0], list | tuple)
    ):
        return 1
    lists = sum(isinstance(arg, list | tuple) and bool(arg) and isinstance(arg[0], torch.Tensor) for arg in args)
    lists += not name.endswith("_")  # and the results
    chunks: int = sum(-(-tensor.numel() // _CHUNK) for tensor in args[0])
    tensors = _MAX_TENSORS[min(max(lists, 1), len(_MAX_TENSORS)) - 1]
    return max(1, -(-chunks // _MAX_BLOCKS), -(-len(args[0]) // tensors))


def _transfer(func: Any, name: str, args: Arguments, kwargs: Named, result: Any) -> Operation | None:
    """A copy between host and GPU; None for other operations with a host tensor among their arguments."""
    if name == "_to_copy":
        source, target = args[0], result
    elif name == "copy_":
        target, source = args[0], args[1]
    elif name == "_local_scalar_dense":
        return Operation(str(func), "memory", _dtype(args[0]), 0, held_bytes(args[0]), waits=True)
    else:
        return None
    if device_type(source) == device_type(target):
        return None
    asynchronous = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
    return Operation(str(func), "transfer", _dtype(target), 0, held_bytes(target), waits=not asynchronous)


# ---- products ----


def _product_of(
    func: Any, a: torch.Tensor, shape: tuple[int, int, int, int], moved: Iterable[Any]
) -> tuple[Operation, ...]:
    """One product of `(batch, m, n, k)`; `a` has the factors' dtype."""
    tensors = list(plain_tensors_in(moved))
    total, aligned = sum(map(held_bytes, tensors)), min(map(_alignment, tensors))
    dtype = _dtype_of_products(a)
    return (Operation(str(func), "matmul", dtype, 2 * math.prod(shape), total, shape, alignment=aligned),)


def _alignment(tensor: torch.Tensor) -> int:
    """The largest of 8, 4, 2 and 1 that divides the distance between a matrix's rows, in elements."""
    if tensor.dim() < 2 or 1 in tensor.shape[-2:]:
        return 8
    return math.gcd(8, max(tensor.stride()[-2:]))


def _product(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """A product of two matrices or two batches of them; an added tensor precedes them in the arguments."""
    added = "add" in func._schema.name
    a, b = args[1:3] if added else args[:2]
    shape = (a.shape[0] if a.dim() > 2 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
    return _product_of(func, a, shape, (*args[: 2 + added], result))


def _mv(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    a, b = args[-2:] if len(args) == 2 else args[1:3]
    return _product_of(func, a, (1, a.shape[0], 1, a.shape[1]), (a, b, result))


def _linear(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    a, weight = args[0], args[1]
    rows = a.numel() // max(1, a.shape[-1])
    return _product_of(func, a, (1, rows, weight.shape[0], a.shape[-1]), (*args[:3], result))


def _grouped_mm(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """Groups of rows, each with a separate weight; for two matrices, groups of the summed dimension. The number of
    rows in a group depends on values; groups are assumed to be equal (torch 2.13: native/cuda/GroupedBlas.cpp)."""
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = offsets.shape[0] if offsets is not None else a.shape[0]
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == 2 and b.dim() == 2:
        flops, shape = 2 * rows * inner * columns, (groups, rows, columns, -(-inner // groups))
    elif a.dim() == 2:
        flops, shape = 2 * rows * inner * columns, (groups, -(-rows // groups), columns, inner)
    elif b.dim() == 2:
        flops, shape = 2 * rows * inner * columns, (groups, rows, -(-columns // groups), inner)
    else:
        flops, shape = 2 * groups * rows * inner * columns, (groups, rows, columns, inner)
    moved = sum(map(held_bytes, plain_tensors_in((a, b, result))))
    return (Operation(str(func), "matmul", _dtype_of_products(a), flops, moved, shape),)


def _convolution(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """A convolution as a product: output positions × output channels, over input channels × kernel."""
    inputs, weight = args[0], args[1]
    transposed = bool(args[6]) if len(args) > 6 else False
    groups = args[8] if len(args) > 8 else 1
    flops = flop_registry[torch.ops.aten.convolution](*args[:9], out_val=result)
    shape = _convolution_shape(inputs.shape, weight.shape, result.shape, groups, transposed=transposed)
    return (_convolution_operation(func, inputs, shape, (inputs, weight, result), flops),)


def _convolution_backward(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """A product for each requested gradient."""
    gradient, inputs, weight = args[:3]
    transposed, groups, requested = args[7], args[9], args[10]
    flops = flop_registry[torch.ops.aten.convolution_backward](*args, out_val=result)
    batch, m, n, k = _convolution_shape(inputs.shape, weight.shape, gradient.shape, groups, transposed=transposed)
    shape = (batch, m, k, n) if requested[0] else (batch, n, k, m)
    tensors = (gradient, inputs, weight, *result)
    return (
        _convolution_operation(func, gradient, shape, tensors, flops, launches=max(1, sum(map(bool, requested[:2])))),
    )


def _convolution_operation(
    func: Any, typed: torch.Tensor, shape: tuple[int, ...], tensors: Iterable[Any], flops: int, launches: int = 1
) -> Operation:
    moved = sum(map(held_bytes, plain_tensors_in(tensors)))
    dtype = _dtype_of_products(typed, convolution=True)
    return Operation(str(func), "matmul", dtype, int(flops), moved, shape, launches)


def _convolution_shape(
    inputs: Sequence[int], weight: Sequence[int], output: Sequence[int], groups: int, *, transposed: bool
) -> tuple[int, int, int, int]:
    places = math.prod((inputs if transposed else output)[2:])
    return groups, output[0] * places, weight[0] // groups, math.prod(weight[1:])


def _four_bit(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """The weight is dequantised, then multiplied (bitsandbytes 0.50.2: backends/cuda/ops.py,
    `_dequant_linear_fallback`); with few rows one kernel does both."""
    a, codes, (rows, columns) = args[0], args[1], args[2]
    m, dense = a.numel() // max(1, a.shape[-1]), rows * columns * a.element_size()
    packed = held_bytes(codes) + sum(map(held_bytes, plain_tensors_in((args[3], *kwargs.values()))))
    multiplied = held_bytes(a) + held_bytes(result)
    shape, dtype = (1, m, rows, columns), _dtype_of_products(a)
    flops = 2 * math.prod(shape)
    if m < _FUSED_ROWS:
        return (Operation(str(func), "matmul", dtype, flops, multiplied + packed, shape),)
    return (
        Operation(f"{func!s} (dequantised)", "memory", dtype, 0, packed + dense),
        Operation(str(func), "matmul", dtype, flops, multiplied + dense, shape),
    )


_FUSED_ROWS: Final = 512
"""Rows up to which one kernel does both: a third of 1536, as in `gpu_memory.py`; it depends on GPU and shapes."""


def _eight_bit(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """An integer product whose result is scaled in another kernel; the few outliers in 16 bits are not counted
    (bitsandbytes 0.50.2: backends/default/ops.py, `int8_scaled_mm`)."""
    codes, weight = (args[1], args[2]) if "mixed" in func._schema.name else (args[0], args[1])
    made = result[0] if isinstance(result, tuple | list) else result
    m, k, n = codes.numel() // max(1, codes.shape[-1]), codes.shape[-1], weight.shape[0]
    shape, whole = (1, m, n, k), 4 * m * n
    flops = 2 * math.prod(shape)
    return (
        Operation(str(func), "matmul", "int8", flops, held_bytes(codes) + held_bytes(weight) + whole, shape),
        Operation(f"{func!s} (scaled)", "memory", _dtype(made), 0, whole + held_bytes(made)),
    )


def _linear_cross_entropy(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """The output layer and its loss in chunks: logits; maximum, difference, exponentials, sum and share of each row,
    in place; and the requested gradients, already in the forward pass (torch 2.13: nn/modules/linear_cross_entropy.py,
    `_linear_cross_entropy_batch_chunked_accumulator`)."""
    hidden, weight, size, (of_hidden, of_weight) = args[0], args[1], args[8], args[12:14]
    (tokens, width), words, item = hidden.shape, weight.shape[0], hidden.element_size()
    dtype, held = _dtype_of_products(hidden), held_bytes(weight)
    rows: list[Operation] = []
    for begin in range(0, tokens, size):
        chunk = min(size, tokens - begin)
        logits, states = chunk * words * item, chunk * width * item
        flops, moved = 2 * chunk * words * width, logits + states + held
        shapes = (
            [(1, chunk, words, width)]
            + [(1, chunk, width, words)] * of_hidden
            + [(1, words, width, chunk)] * of_weight
        )
        rows += [Operation(f"{func!s} (product)", "matmul", dtype, flops, moved, shape) for shape in shapes]
        passes = 8 * logits + 3 * held * of_weight
        rows.append(Operation(f"{func!s} (passes)", "memory", _dtype(hidden), 0, passes, launches=5 + of_weight))
    return tuple(rows)


# ---- attention ----


def _attention(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """Attention on (batch, heads, length, head size)."""
    query, key, value = args[1:4] if "backward" in func._schema.name else args[:3]
    return _attended(func, query.shape, key.shape, value.shape, query, args, kwargs, result)


def _flash(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """`_flash_attention_forward` and `_backward` on (batch, length, heads, head size), or on (tokens, heads, head
    size) of concatenated sequences, assumed to have equal lengths."""
    query, key, value = args[1:4] if "backward" in func._schema.name else args[:3]
    sequences = _argument(func, "cum_seq_q", args, kwargs)
    count = max(1, sequences.shape[0] - 1) if isinstance(sequences, torch.Tensor) else 0

    def shape(tensor: torch.Tensor) -> tuple[int, ...]:
        if count:
            return count, tensor.shape[1], -(-tensor.shape[0] // count), tensor.shape[2]
        return tensor.shape[0], tensor.shape[2], tensor.shape[1], tensor.shape[3]

    return _attended(func, shape(query), shape(key), shape(value), query, args, kwargs, result)


def _attended(
    func: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int], typed: torch.Tensor, args: Arguments,
    kwargs: Named, result: Any,
) -> tuple[Operation, ...]:  # fmt: skip
    """Two products forward, five backward: the scores are recomputed (Dao 2023, arXiv 2307.08691, 2.3.1)."""
    backward, causal = "backward" in func._schema.name, _argument(func, "is_causal", args, kwargs)
    batch, heads, rows, size = query
    columns = key[-2]
    key_products, value_products = (3, 2) if backward else (1, 1)
    flops = 2 * batch * heads * rows * columns * (key_products * size + value_products * value[-1])
    moved = sum(map(held_bytes, plain_tensors_in((args, *kwargs.values(), result))))
    name = f"{func!s} (dropout)" if _argument(func, "dropout_p", args, kwargs) else str(func)
    return (
        Operation(
            name, "attention", _dtype_of_products(typed), flops // 2 if causal else flops, moved,
            (batch * heads, rows, columns, size), launches=3 if backward else 1,
        ),
    )  # fmt: skip


def _argument(func: Any, name: str, args: Arguments, kwargs: Named) -> Any:
    """The value of an argument by its name in the schema, or its default."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[number] if number < len(args) else kwargs.get(name, argument.default_value)
    return None


def _shards(func: Any, args: Arguments, kwargs: Named, result: Any) -> tuple[Operation, ...]:
    """FSDP2 copies its shards into this rank's part of a gathered tensor."""
    moved = 2 * sum(map(held_bytes, args[0]))
    launches = _launches("_foreach_copy_", (args[0], args[0]))
    return (Operation(str(func), "memory", _dtype(args[1]), 0, moved, launches=launches),)


_SPECIAL: Final[Mapping[str, Callable[[Any, Arguments, Named, Any], tuple[Operation, ...]]]] = {
    **dict.fromkeys(("mm", "addmm", "addmm_", "_addmm_activation", "_scaled_mm", "_int_mm"), _product),
    **dict.fromkeys(("bmm", "baddbmm", "baddbmm_"), _product),
    "mv": _mv,
    "addmv": _mv,
    "dot": lambda func, args, kwargs, result: _product_of(
        func, args[0], (1, 1, 1, args[0].shape[0]), (args[0], args[1], result)
    ),
    "linear": _linear,
    "_grouped_mm": _grouped_mm,
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    **{
        f"_scaled_dot_product_{name}_attention{end}": _attention
        for name in ("flash", "efficient", "cudnn")
        for end in ("", "_backward", "_for_cpu", "_for_cpu_backward")
    },
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash,
    "_linear_cross_entropy_batch_chunked": _linear_cross_entropy,
    "gemm_4bit": _four_bit,
    "int8_scaled_mm": _eight_bit,
    "int8_mixed_scaled_mm": _eight_bit,
    "all_gather_copy_in": _shards,
}


# ---- helpers ----


@functools.cache
def _named(func: Any) -> tuple[str, str, bool]:
    """(namespace, name, whether it runs no kernel)."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    return namespace, name, view or name in _ALLOCATES or namespace == "prim"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_of_products(tensor: torch.Tensor, *, convolution: bool = False) -> str:
    """`"tf32"` if torch may round the factors of fp32 products to it, else the tensor's dtype."""
    if tensor.dtype is torch.float32:
        backends: Any = torch.backends
        backend = getattr(backends.cudnn, "conv", None) if convolution else backends.cuda.matmul
        precision = getattr(backend, "fp32_precision", None)
        if precision is None:  # torch before 2.9
            older = backends.cudnn if convolution else backends.cuda.matmul
            precision = "tf32" if older.allow_tf32 else "ieee"
        if precision == "tf32":
            return "tf32"
    return _dtype(tensor)
