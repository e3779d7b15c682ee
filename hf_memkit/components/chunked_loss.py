"""Computes the loss of a causal language model in chunks of tokens, without the logits of a whole batch.

The model's own forward runs unchanged. While it is called with labels, its output embedding (`lm_head`) returns a
placeholder that records its input instead of logits, and the model's `loss_function` computes the loss from it, chunk
by chunk (`chunked_loss_sum.py`). Scaling and soft-capping of the logits (Gemma 2 and 3, Cohere, Granite, …) are
recorded too and repeated for each chunk; any other operation on them is refused.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_memkit.components.chunked_loss_logits import (
    LogitsOnDemand,
    RecordedLogits,
    Step,
    replace_recorded,
    vocabulary_of,
)
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
        ValueError: an option is out of range, or the model does something with its logits that chunks cannot repeat.
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
    undo = chunked.install()
    if self_check:
        try:
            chunked.compare_with_own_loss()
        except BaseException:
            undo()
            raise
    return undo


def _language_model(model: nn.Module) -> Any:
    """The transformers model, unwrapped from PEFT."""
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
    """Replaces the model's `loss_function`; a class, so that `install` can recognise it."""

    def __init__(self, chunked: _ChunkedLoss) -> None:
        self.chunked = chunked

    def __call__(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(logits, RecordedLogits):
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
        self.model = model
        self.head = sums.head
        self.sums = sums
        self.name = type(model).__name__
        self.armed = False
        self.own_forward = model.forward
        self.signature = inspect.signature(model.forward)

    def install(self) -> Callable[[], None]:
        """Replaces methods of this model and its output embedding; returns a function that undoes it."""
        model = self.model
        head = self.head
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
        """Runs the model's own forward; with labels, the output embedding and the loss are replaced."""
        training = self.model.training
        gradients = torch.is_grad_enabled()
        if {**self.signature.bind_partial(*args, **kwargs).arguments, **kwargs}.get("labels") is None:
            if training and gradients:
                raise RuntimeError(
                    f"chunked_loss: {self.name} got no labels in training, so it would make all logits. Omit "
                    "label_smoothing_factor (write label_smoothing of chunked_loss instead) and compute_loss_func, "
                    "which remove the labels, or omit chunked_loss"
                )
            return self.own_forward(*args, **kwargs)
        if gradients and not training:
            return self.own_forward(*args, **kwargs)  # the caller may want gradients through the logits
        before, self.armed = self.armed, True
        try:
            output = self.own_forward(*args, **kwargs)
        finally:
            self.armed = before
        return replace_recorded(output, (lambda _: None) if gradients else LogitsOnDemand)

    def loss(
        self,
        recorded: RecordedLogits,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Computes transformers' ForCausalLMLoss (transformers:loss/loss_utils.py) for recorded logits."""
        if shift_labels is None:
            if labels is None:
                raise ValueError(f"{self.name} passed neither labels nor shift_labels to its loss. Omit chunked_loss")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = recorded.hidden.reshape(-1, recorded.hidden.shape[-1])
        targets = shift_labels.reshape(-1).to(hidden.device)
        if len(targets) != len(hidden):
            raise ValueError(
                f"chunked_loss: {len(targets)} labels for {len(hidden)} logits. Give one label a token, and omit "
                "logits_to_keep"
            )
        total = self.sums(hidden, targets, recorded.steps, ignore_index)
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def logits(self, hidden: Tensor, steps: tuple[Step, ...]) -> Tensor:
        """The model's logits for `hidden`, after the operations in `steps`."""
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
        """Compares with the model's own loss for eight tokens, in evaluation mode.

        Raises:
            ValueError: they differ, or the model does something with its logits that chunks cannot repeat.
        """
        weights = list(self.model.parameters())
        if not weights or any(weight.is_meta or hasattr(weight, "ds_id") for weight in weights):
            return  # no values: DeepSpeed's stage 3 holds a part of each weight
        words = vocabulary_of(self.head)
        tokens = torch.arange(8, device=self.model.get_input_embeddings().weight.device)[None] * 7 % words
        labels = tokens.clone()
        labels[0, 1] = -100
        sums = self.sums
        options = sums.smoothing, sums.chunk
        sums.smoothing, sums.chunk = 0.0, 3
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                try:
                    own = self.own_forward(input_ids=tokens, labels=labels).loss
                except Exception:
                    return  # needs other inputs, or kernels that this device lacks; training checks it
                chunked = self.model(input_ids=tokens, labels=labels).loss
        finally:
            sums.smoothing, sums.chunk = options
            for module, training in modes:
                module.training = training
        if not torch.allclose(chunked, own, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"the loss of {self.name} is {float(own):.6f}, and chunked_loss computes {float(chunked):.6f}. Omit "
                "chunked_loss"
            )


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.__dict__[_STATE].forward(args, kwargs)


def _no_replicas() -> Any:
    """Replaces the method that nn.DataParallel copies a module with (torch:torch/nn/parallel/replicate.py). A copy
    shares the instance's `__dict__`, so it would run the original model's forward, on the original's GPU."""
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
        return RecordedLogits(chunked, hidden)
    return sums.head_forward(hidden, *args, **kwargs)


_disable: Any = torch.compiler.disable
_EAGER_FORWARD = _disable(_forward, recursive=False)  # torch.compile still compiles the model's own forward
_EAGER_HEAD = _disable(_head_forward)


def _signed(own: inspect.Signature) -> Callable[..., Any]:
    """A function that calls `_forward` and has the model's signature, from which Trainer reads the model's inputs. It
    has no `__wrapped__`, because accelerate unwraps such functions and binds the inner one to the model
    (accelerate:utils/other.py, extract_model_from_parallel)."""

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        return _EAGER_FORWARD(model, *args, **kwargs)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = own.replace(parameters=[first, *own.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


_STATE = "_chunked_loss"
_ABSENT = object()
