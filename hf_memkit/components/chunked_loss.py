"""The loss of a causal language model, a few tokens at a time: the logits of a whole batch are never made.

The model's own forward runs as it is. Only while it is called with labels, its output embedding (`lm_head`) returns a
note of what it was given instead of logits, and the model's `loss_function` turns that note into the loss, chunk by
chunk (`chunked_loss_sum.py`). Scaling and soft-capping that a model applies to its logits in between are noted too and
repeated for each chunk (Gemma 2 and 3, Cohere, Granite, …); anything else that a model does with them is refused.

This file needs torch and transformers, and `chunked_loss_sum.py` and `chunked_loss_logits.py` beside it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_memkit.components.chunked_loss_logits import LogitsOnDemand, NotedLogits, Step, vocabulary_of, without_notes
from hf_memkit.components.chunked_loss_sum import ENGINES, ChunkedSum


def install(
    model: nn.Module,
    *,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    engine: str = "auto",
    self_check: bool = True,
) -> Callable[[], None]:
    """Makes `model` compute its loss in chunks; returns a function that undoes it.

    In training the output's `logits` are None. Without gradients they are computed when something reads them: an
    evaluation of the loss alone never computes them, and one with `compute_metrics` gets them as before.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        chunk_tokens: tokens in a chunk; None: `chunk_tokens_for`. Liger's kernel chooses its own.
        label_smoothing: replaces `TrainingArguments.label_smoothing_factor`, for which Trainer removes the labels from
            the model's inputs and needs all logits.
        engine: "auto" (the fastest available), "liger", "torch" or "loop".
        self_check: compare with the model's own loss on eight tokens.

    Raises:
        TypeError: `model` is not a causal language model with an output embedding and transformers' ForCausalLMLoss.
        ValueError: an option is out of range, or chunks cannot repeat what the model does with its logits.
        RuntimeError: installed already, or Liger fuses the loss.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and below 1")
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: unknown. Write one of {', '.join(ENGINES)}")
    language_model = _language_model(model)
    sums = ChunkedSum(language_model.get_output_embeddings(), chunk_tokens, label_smoothing, engine)
    chunked = _ChunkedLoss(language_model, sums)
    undo = chunked.put_in()
    if self_check:
        try:
            chunked.compare_with_own_loss()
        except BaseException:
            undo()
            raise
    return undo


def _language_model(model: nn.Module) -> Any:
    """The transformers model itself, out of PEFT's wrapper."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    name = type(inner).__name__
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "loss_function"):
        raise TypeError(f"{name} is not a causal language model of transformers. Omit chunked_loss")
    if inner.get_output_embeddings() is None:
        raise TypeError(f"{name} has no output embedding (lm_head). Omit chunked_loss")
    if isinstance(inner.loss_function, _LossFunction):
        raise RuntimeError(f"chunked_loss is already installed in {name}. Call install once")
    if inner.loss_function is not ForCausalLMLoss:
        own = getattr(inner.loss_function, "__name__", repr(inner.loss_function))
        raise TypeError(f"{name} computes {own}; chunked_loss replaces ForCausalLMLoss only. Omit chunked_loss")
    if "liger" in getattr(inner.forward, "__module__", ""):
        raise RuntimeError(f"Liger already fuses the loss of {name}. Omit chunked_loss")
    return inner


class _LossFunction:
    """What stands in for the model's `loss_function`; a class, so that it can be recognised."""

    def __init__(self, chunked: _ChunkedLoss) -> None:
        self.chunked = chunked

    def __call__(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(logits, NotedLogits):
            return self.chunked.loss(logits, labels, *args, **kwargs)
        if self.chunked.armed:
            raise ValueError(
                f"{self.chunked.name} computes its loss from logits that are not those of its output embedding. Omit "
                "chunked_loss"
            )
        loss: Tensor = ForCausalLMLoss(logits, labels, *args, **kwargs)
        return loss


class _ChunkedLoss:
    """The replaced methods of one model."""

    def __init__(self, model: Any, sums: ChunkedSum) -> None:
        self.model, self.head, self.sums = model, sums.head, sums
        self.name = type(model).__name__
        self.armed = False
        self.own_forward = model.forward
        self.signature = inspect.signature(model.forward)

    def put_in(self) -> Callable[[], None]:
        """Replace the methods on these instances; returns what takes them out again."""
        model, head = self.model, self.head
        new = {
            (model, _STATE): self,
            (model, "forward"): types.MethodType(_signed(self.signature), model),
            (model, "_loss_function"): _LossFunction(self),
            (model, "_replicate_for_data_parallel"): _no_replicas,
            (head, _STATE): self,
            (head, "forward"): types.MethodType(_EAGER_HEAD, head),
        }
        before = {(owner, name): owner.__dict__.get(name, _ABSENT) for owner, name in new}
        for (owner, name), value in new.items():
            setattr(owner, name, value)

        def undo() -> None:
            for (owner, name), value in before.items():
                if value is not _ABSENT:
                    setattr(owner, name, value)
                elif name in owner.__dict__:
                    delattr(owner, name)

        return undo

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own forward, with the output embedding and the loss replaced where there are labels."""
        training, gradients = self.model.training, torch.is_grad_enabled()
        if {**self.signature.bind_partial(*args, **kwargs).arguments, **kwargs}.get("labels") is None:
            if training and gradients:
                raise RuntimeError(
                    f"chunked_loss: {self.name} got no labels in training, so it would make all logits. Omit "
                    "label_smoothing_factor (write label_smoothing of chunked_loss instead) and compute_loss_func, "
                    "which remove the labels, or omit chunked_loss"
                )
            return self.own_forward(*args, **kwargs)
        if gradients and not training:
            return self.own_forward(*args, **kwargs)  # gradients through the logits may be what is wanted
        before, self.armed = self.armed, True
        try:
            output = self.own_forward(*args, **kwargs)
        finally:
            self.armed = before
        return without_notes(output, (lambda _: None) if gradients else LogitsOnDemand)

    def loss(
        self,
        noted: NotedLogits,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """As transformers' ForCausalLMLoss (transformers:loss/loss_utils.py) for the noted logits."""
        if shift_labels is None:
            if labels is None:
                raise ValueError(f"{self.name} passed neither labels nor shift_labels to its loss. Omit chunked_loss")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = noted.hidden.reshape(-1, noted.hidden.shape[-1])
        targets = shift_labels.reshape(-1).to(hidden.device)
        if len(targets) != len(hidden):
            raise ValueError(
                f"chunked_loss: {len(targets)} labels for {len(hidden)} logits. Give one label a token, and omit "
                "logits_to_keep"
            )
        total = self.sums(hidden, targets, noted.steps, ignore_index)
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def logits(self, hidden: Tensor, steps: tuple[Step, ...]) -> Tensor:
        """The model's logits for `hidden`, with what the model does to them."""
        before, self.armed = self.armed, False
        try:
            logits: Any = self.head(hidden)
        finally:
            self.armed = before
        for step in steps:
            logits = step(logits)
        result: Tensor = logits
        return result

    def compare_with_own_loss(self) -> None:
        """Compare with the model's own loss for eight tokens, out of training mode.

        Raises:
            ValueError: they differ, or the model does with its logits what cannot be repeated in chunks.
        """
        weights = list(self.model.parameters())
        if not weights or any(weight.is_meta or hasattr(weight, "ds_id") for weight in weights):
            return  # no values here: DeepSpeed's stage 3 holds a piece of each weight
        words = vocabulary_of(self.head)
        tokens = torch.arange(8, device=self.model.get_input_embeddings().weight.device)[None] * 7 % words
        labels = tokens.clone()
        labels[0, 1] = -100
        sums = self.sums
        options = sums.smoothing, sums.chunk
        sums.smoothing, sums.chunk = 0.0, 3
        try:
            with torch.no_grad(), _evaluating(self.model):
                try:
                    own = self.own_forward(input_ids=tokens, labels=labels).loss
                except Exception:
                    return  # it needs other inputs, or kernels that this device has not; it is watched in training
                chunked = self.model(input_ids=tokens, labels=labels).loss
        finally:
            sums.smoothing, sums.chunk = options
        if not torch.allclose(chunked, own, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"the loss of {self.name} is {float(own):.6f}, and chunked_loss computes {float(chunked):.6f}. Omit "
                "chunked_loss"
            )


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.__dict__[_STATE].forward(args, kwargs)


def _no_replicas() -> Any:
    """In place of the method by which nn.DataParallel copies a module (torch:torch/nn/parallel/replicate.py).

    A copy takes over what stands in the instance's `__dict__`: it would run the forward of the model that it is a copy
    of, on that model's GPU.
    """
    raise RuntimeError(
        "chunked_loss does not work under nn.DataParallel, which Trainer uses if one process sees several GPUs. Start "
        "one process per GPU (torchrun --nproc-per-node N), or set CUDA_VISIBLE_DEVICES to one GPU"
    )


def _head_forward(head: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    chunked = head.__dict__[_STATE]
    sums = chunked.sums
    if sums.work is not None:
        work, sums.work = sums.work, None
        return work(hidden)
    if chunked.armed and not args and not kwargs:
        return NotedLogits(chunked, hidden)
    return sums.head_forward(hidden, *args, **kwargs)


_disable: Any = torch.compiler.disable
_EAGER_FORWARD = _disable(_forward, recursive=False)  # torch.compile goes on inside the model's own forward
_EAGER_HEAD = _disable(_head_forward)


def _signed(own: inspect.Signature) -> Callable[..., Any]:
    """`_forward` as a function of its own with the model's signature: Trainer reads there what the model takes.

    It takes the model as its first argument, and has no `__wrapped__`: accelerate peels off what has one, and binds
    what is left to the model (accelerate:utils/other.py, extract_model_from_parallel).
    """

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        return _EAGER_FORWARD(model, *args, **kwargs)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = own.replace(parameters=[first, *own.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


_STATE = "_chunked_loss"
_ABSENT = object()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Out of training mode, each module put back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
