"""Computes values of fake tensors that follow from known ones: inputs of the model, positions, constants.

Models read such values: whether a mask is all ones, whether a label is below the vocabulary, how many inputs a mask
selects. The answer decides what is allocated next. So it is computed on the host next to the fake tensor, as long as
all sources of a tensor are known and it is small; not for weights and random numbers. Images and sound are large and
mostly only inspected (transformers 5.23.0: modeling_idefics3.py, `get_image_features`): their values stay known while
they are viewed, converted or compared.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_map_only

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.tracer.kernel_rules import KERNEL_RULES

_MAX_INTEGERS: Final = 2**20  # elements of integer tensors whose values are computed

_MAX_FLOATS: Final = 2**10  # elements of float tensors whose values are computed: no images and no optimizer states

_MAX_INSPECTED: Final = 2**29
"""Elements of a batch's tensors, and of views and comparisons of them: 680 images of 512 × 512 pixels."""

_MAX_BEFORE_TRAINING: Final = 2**24
"""Elements of tensors whose values are computed before the training: 64 images of 3 × 280 × 280."""

_aten: Final = torch.ops.aten

_COMPARISONS: Final = tuple(getattr(_aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_COPIES: Final = frozenset({_aten._to_copy.default, _aten.clone.default})
_INSPECTIONS: Final = frozenset({_aten._unsafe_view.default, _aten.index.Tensor, *(op.Scalar for op in _COMPARISONS)})
"""Operations besides views that only inspect a batch."""

_FILLED: Final[Mapping[Any, int | float]] = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}
_FILLED_BY_ARGUMENT: Final[Mapping[Any, int]] = {
    _aten.scalar_tensor.default: 0,
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.new_full.default: 2,
}
"""Operation → position of the value in its arguments."""

_FILLED_LIKE: Final = frozenset(
    {_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default}
    | {_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default}
)
"""Filling operations that use only the shape of a tensor argument."""


def _refuse_sparse(*args: Any, **kwargs: Any) -> NoReturn:
    """Kernels of sparse tensors sort and join indices, in memory that does not follow from shapes."""
    raise Unmodelled("torch.sparse_coo_tensor: what sparse tensors need is not modelled; measure with memkit run")


_CTC: Final = frozenset({_aten._ctc_loss.default, _aten._ctc_loss.Tensor})
_CTC_LIBRARIES: Final = ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
WITHOUT_FAKE: Final[Mapping[Any, Callable[..., Any]]] = {
    **KERNEL_RULES,
    **{
        getattr(getattr(_aten, name), overload): lambda *args, **kwargs: False
        for name in _CTC_LIBRARIES
        if hasattr(_aten, name)  # not every torch has both
        for overload in getattr(_aten, name).overloads()
    },
    **dict.fromkeys(
        (_aten._sparse_coo_tensor_with_dims_and_tensors.default, _aten._sparse_coo_tensor_unsafe.default),
        _refuse_sparse,
    ),
    _aten._ctc_loss_backward.default: lambda gradient, source, *args, **kwargs: torch.empty_like(source),
    _aten._ctc_loss_backward.Tensor: lambda gradient, source, *args, **kwargs: torch.empty_like(source),
}
"""Operations with a rule that replaces torch's: their kernel gives something else, or torch would run them on real
tensors, also on a GPU, to learn the shape of their result."""


_SERIES: Final = frozenset({_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default})


@dataclass(slots=True, eq=False)
class _Value:
    """Values of a tensor, on the host."""

    tensor: torch.Tensor
    known: list[bool]  # shared by views of one tensor, because writing to one changes all
    given: bool  # a batch's values, only inspected since


def remember(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a fake tensor the values of a real one on the host, unless it is too large."""
    if isinstance(tensor, FakeTensor) and values.numel() <= _MAX_INSPECTED:
        with no_dispatch():  # large tensors are never written to
            own = values.detach().clone() if _small(values) else values.detach()
            tensor.memkit_value = _Value(own, [True], given=True)  # type: ignore[attr-defined]


def known_values(tensor: FakeTensor) -> torch.Tensor | None:
    """The values of a fake tensor; None if unknown."""
    value: _Value | None = getattr(tensor, "memkit_value", None)
    return value.tensor if value is not None and value.known[0] else None


class KnownValues:
    """Computes values along the operations of one training; `follow` is called for each. While `of_data` is set, the
    script still handles its data and nothing is trained: larger tensors are followed, except parameters."""

    def __init__(self) -> None:
        self.of_data = False
        self._written: dict[int, tuple[int, ...]] = {}  # by id, because hashing an operation runs Python code

    def of(self, tensor: Any) -> torch.Tensor | None:
        """The values of `tensor`, if known; a real tensor itself."""
        if not isinstance(tensor, FakeTensor):
            return tensor if isinstance(tensor, torch.Tensor) and self._is_small(tensor) else None
        return known_values(tensor)

    def _is_small(self, tensor: torch.Tensor, given: bool = False) -> bool:
        large = self.of_data and not isinstance(tensor, torch.nn.Parameter)
        return math.prod(tensor.shape) <= _MAX_BEFORE_TRAINING if large and not given else _small(tensor, given)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Computes the values of `result`, returned by `func`, if those of its arguments are known."""
        written = self._written.get(id(func))
        if written is None:
            infos = [argument.alias_info for argument in func._schema.arguments]
            written = tuple(number for number, info in enumerate(infos) if info is not None and info.is_write)
            self._written[id(func)] = written
        first = args[0] if args else None
        if first.__class__ is FakeTensor and self.of(first) is None and func not in _FILLED_LIKE:
            self._forget(func, written, args, kwargs)
            return
        if func in _FILLED or func in _FILLED_BY_ARGUMENT:
            if isinstance(result, FakeTensor) and _small(result):
                value = _FILLED[func] if func in _FILLED else args[_FILLED_BY_ARGUMENT[func]]
                with no_dispatch():
                    self._put(result, torch.full(result.shape, value, dtype=result.dtype), ())
            return
        if isinstance(first, list | tuple) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) and not (func in _SERIES and _small(result)):
            return
        unknown = isinstance(first, FakeTensor) and self.of(first) is None
        if unknown or not self._compute_result(func, args, kwargs, result):
            self._forget(func, written, args, kwargs)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of `func` for known arguments. LookupError if a value is unknown, or the operation is random."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise LookupError(func)
        on_host = {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else dict(kwargs)
        known_args, known_kwargs = tree_map(self._value_or_error, (args, on_host))
        with no_dispatch():
            return func(*known_args, **known_kwargs)

    def shaped(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of `func` whose shape or answer depends on values, such as `mask.nonzero()` and `x[mask]`.
        Raises Unmodelled if the values are unknown, such as the experts that a router selects."""
        try:
            if func is _aten.index.Tensor:
                return func(args[0], self._positions(args[1]))
            if func is _aten.masked_select.default:
                mask: Any = self._value_or_error(args[1])
                with no_dispatch():
                    shape: Any = torch.broadcast_shapes(args[0].shape, mask.shape)  # type: ignore[no-untyped-call]
                    selected = int(mask.expand(shape).sum())
                return args[0].new_empty(selected)
            if func in _CTC:
                # A loss for each example and its paths, with 2 × the longest target + 1 states
                # (pytorch:aten/src/ATen/native/LossCTC.cpp, `ctc_loss_allocate_outputs`).
                log_probabilities, lengths = args[0], args[3]
                if isinstance(lengths, torch.Tensor):
                    values = self._value_or_error(lengths)
                    with no_dispatch():
                        lengths = values.tolist()
                time, batch = log_probabilities.shape[:2]
                paths = log_probabilities.new_empty(batch, time, 2 * max(lengths) + 1)
                return log_probabilities.new_empty(batch), paths
            result = self.compute(func, args, kwargs)
        except LookupError:
            raise Unmodelled(
                f"{func}: the size of its result depends on values that are computed or drawn by chance, and a trace "
                "has none; measure with memkit run"
            ) from None

        def on_device(leaf: torch.Tensor) -> torch.Tensor:
            return args[0].new_empty(leaf.shape, dtype=leaf.dtype)  # type: ignore[no-any-return]

        return tree_map_only(torch.Tensor, on_device, result)

    def _positions(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The indices of `tensor[…]` with masks as positions, which the kernel computes first."""
        positions: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            try:
                with no_dispatch():
                    selected = self._value_or_error(index).nonzero().shape[0]
            except LookupError:
                if not _is_metric_of_trl():
                    raise
                selected = index.numel()
            positions += [index.new_empty(selected, dtype=torch.int64) for _ in range(index.dim())]
        return positions

    def _compute_result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        value: _Value | None = getattr(args[0], "memkit_value", None) if args else None
        given = value is not None and value.given and (func in _INSPECTIONS or func in _COPIES or func.is_view)
        if func is _aten.index.Tensor and result.is_floating_point():  # copies images, and nothing inspects the copies
            given = False
        if given and func in _COPIES and not self._is_small(result):  # same values in another dtype or place
            self._put(result, self._value_or_error(args[0]), args[:1], given=True)
            return True
        if tree_any(lambda leaf: isinstance(leaf, torch.Tensor) and not self._is_small(leaf, given), result):
            return False
        try:
            values = self.compute(func, args, kwargs)
        except (LookupError, NotImplementedError, RuntimeError):
            return False
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        for leaf, computed in zip(tree_leaves(result), tree_leaves(values), strict=True):
            if isinstance(leaf, FakeTensor) and isinstance(computed, torch.Tensor):
                self._put(leaf, computed, sources, given=given)
        return True

    def _value_or_error(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        value = self.of(leaf)
        if value is None:
            raise LookupError("a tensor with unknown values")
        return value

    def _put(
        self, tensor: FakeTensor, value: torch.Tensor, sources: Iterable[FakeTensor], *, given: bool = False
    ) -> None:
        known = [True]
        storage = value.untyped_storage()._cdata
        for source in sources:
            held: _Value | None = getattr(source, "memkit_value", None)
            if held is not None and held.tensor.untyped_storage()._cdata == storage:
                known = held.known
        tensor.memkit_value = _Value(value, known, given=given)  # type: ignore[attr-defined]

    def _forget(self, func: Any, written: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Marks the values of tensors that the operation writes to as unknown."""
        for number in written:
            leaf = args[number] if number < len(args) else kwargs.get(func._schema.arguments[number].name)
            for tensor in tree_leaves(leaf):
                value = getattr(tensor, "memkit_value", None)
                if value is not None:
                    value.known[0] = False


def _small(tensor: torch.Tensor, given: bool = False) -> bool:
    if given:
        return math.prod(tensor.shape) <= _MAX_INSPECTED
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return math.prod(tensor.shape) <= (_MAX_FLOATS if is_float else _MAX_INTEGERS)


def _is_metric_of_trl() -> bool:
    """Whether TRL's own code is the caller: it indexes log-probabilities with a mask of an answer's tokens (1.16:
    grpo_trainer.py, `importance_sampling_ratio`); all are assumed to be selected."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(2)))
    own = (file for file in files if "/torch/" not in file and "/hf_memkit/" not in file)
    return "/trl/trainer/" in next(own, "")
