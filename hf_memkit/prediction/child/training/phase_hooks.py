"""Tells the tracer the current phase, module and category by Trainer's events and hooks on the model.

Phases are those of the memory report, from the same `PhaseTracker`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import GenerationMixin, TrainerCallback

from hf_memkit.common.terms import Category, Phase
from hf_memkit.measuring.memory.error_barrier import ErrorBarrier
from hf_memkit.measuring.memory.holdings import attached_tensors
from hf_memkit.measuring.memory.hooks import HookSet, output_embedding
from hf_memkit.measuring.memory.optimizer_state import innermost, states_of, tensors_in
from hf_memkit.measuring.memory.phases import PhaseTracker
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.gpu.compiler import refuse_modules
from hf_memkit.prediction.child.gpu.compiler_patches import compiled_modules, on_allocation
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.trainer_kinds.online import GENERATES
from hf_memkit.prediction.child.trainer_kinds.preference import compared_models

_WITHIN: Final[tuple[Phase, ...]] = ("generate", "log_probabilities")
"""Parts of a step without gradients, which interrupt another phase."""

_DEFAULT: Mapping[Phase, Category] = {
    "generate": "activations",
    "log_probabilities": "activations",
    "forward": "activations",
    "backward": "activations",
    "optimizer": "optimizer",
    "evaluate": "activations",
}
"""Default category of memory that is allocated in a phase; the optimizer's temporaries count with its states."""


def _boundary_event(boundary: str) -> Any:
    """A handler of a Trainer event that is a phase boundary."""
    return lambda watch, *args, **kwargs: getattr(watch._phases, boundary)()


class TrainingWatch(TrainerCallback):  # type: ignore[misc]
    """Watches one training, from `on_train_begin` to its end; `model` is the root module that Trainer calls."""

    def __init__(self, tracer: StorageTracer, wrapped: Callable[[], nn.Module]) -> None:
        self._tracer = tracer
        self._wrapped = wrapped
        self._phases = PhaseTracker(self._on_boundary)
        self._guard = ErrorBarrier()
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._region = ""  # the compiled module that backward has reached
        self._decoder = ""  # the name of the decoder in a model that is compiled as a whole
        self._outside_step: list[Category] = []
        self._passes: list[contextlib.ExitStack] = []
        self._generates = False
        self.optimizer_steps = 0
        self._hooks: HookSet | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for module in compiled_modules:  # by the script, before Trainer applied Liger
            refuse_modules(module)
        for parameter in model.parameters():
            self._tracer.label((parameter, *attached_tensors(parameter)), "weights")
        self._tracer.label(model.buffers(), "weights")
        self._names = {id(module): name for name, module in model.named_modules()}
        root = self._wrapped() if compiled_modules else model
        hooks = self._hooks = HookSet(root, self._guard)
        self._phases.attach(root, hooks)
        root.register_forward_pre_hook(self._root_begins, with_kwargs=True)
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ends)
        if compiled_modules:
            self._watch_compiled(root)
        else:
            self._watch_modules(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda weight: self._tracer.label([weight.grad], "gradients")
                )
        self._phases.train_begin()

    def _watch_compiled(self, root: nn.Module) -> None:
        """Hooks on compiled modules and on those around them: a hook inside would change what is compiled."""
        for name, module in _modules_around_compiled(root):
            self._names[id(module)] = name
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
        decoder = decoder_of(root)
        if decoder is not None and decoder is not root and not is_compiled(root):
            decoder.register_forward_hook(
                lambda _, args, output: self._loss_begins(getattr(output, "last_hidden_state", output))
            )
        inner = {id(module): name for name, module in root.named_modules()}
        self._decoder = inner.get(id(decoder), "").replace("_orig_mod.", "") if is_compiled(root) else ""
        on_allocation.append(self._allocates)

    def _allocates(self, module: str) -> None:
        """Compiled code allocates a tensor for `module`, named relative to the compiled one."""
        region = self._stack[-1] if self._stack else self._region
        self._tracer.module = ".".join(filter(None, (region, module)))
        if self._decoder and self._phases.phase in ("forward", "backward", "evaluate"):
            within = f"{module}.".startswith(f"{self._decoder}.")
            self._tracer.default = "activations" if within else "loss"

    def _watch_modules(self, model: nn.Module) -> None:
        # Global hooks: some functions behave differently if a module has hooks (chunked_loss).
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        decoder = decoder_of(model)
        if decoder is not None and decoder is not model:
            decoder.register_forward_hook(
                lambda _, args, output: self._loss_begins(getattr(output, "last_hidden_state", output))
            )
        elif (head := output_embedding(model)) is not None:
            head.register_forward_pre_hook(lambda _, args: self._loss_begins(args))

    on_step_begin, on_step_end = _boundary_event("step_begin"), _boundary_event("step_end")
    on_substep_end = _boundary_event("substep_end")
    on_evaluate, on_save = _boundary_event("evaluate_end"), _boundary_event("save_end")

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if compiled_modules:
            gc.enable()
            gc.collect()  # dynamo keeps the first output in a cycle until Python collects it, whenever that is
            gc.freeze()  # else the next step's collection visits what the compiler left, again
        self._phases.pre_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.optimizer_steps += 1
        for state in optimizer_states(innermost(optimizer)):
            self._tracer.label(tensors_in(state), "optimizer")

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._phases.prediction_step()
        self._tracer.default = _DEFAULT["evaluate"]  # the loss of this batch has been computed

    def watch_parts(self, trainer: Any) -> None:
        """Watches parts of a step without gradients: generating answers, computing log-probabilities."""
        for owner, name in ((trainer, GENERATES), (GenerationMixin, "generate")):
            if hasattr(owner, name):
                setattr(owner, name, self._generating(getattr(owner, name)))
        for model in compared_models(trainer):
            model.register_forward_pre_hook(self._pass_begins)
            model.register_forward_hook(lambda *_: self._passes.pop().close(), always_call=True)

    def _generating(self, function: Any) -> Any:
        @functools.wraps(function)
        def generates(*args: Any, **kwargs: Any) -> Any:
            with self._within("generate"):
                return function(*args, **kwargs)

        return generates

    @contextlib.contextmanager
    def _within(self, phase: Phase) -> Iterator[None]:
        """Assigns memory within it to `phase`, if in a step and not within another such part."""
        outer, default = self.phase, self._tracer.default
        if not self._phases.in_step or outer in _WITHIN:
            yield
            return
        self._phases.move_to(phase)
        try:
            yield
        finally:
            self._phases.move_to(outer)
            self._tracer.default = default

    def _pass_begins(self, *_: Any) -> None:
        self._passes.append(contextlib.ExitStack())
        if not torch.is_grad_enabled():
            self._passes[-1].enter_context(self._within("log_probabilities"))

    def end(self) -> None:
        """Stops watching phases."""
        if self._hooks is not None:
            self._hooks.remove()

    @property
    def phase(self) -> Phase:
        return self._phases.phase

    def _on_boundary(self, ended: Phase) -> None:
        self._tracer.end_phase(ended)
        phase = self._phases.phase
        if not (ended == "forward" and phase == "backward"):  # the loss ends when its gradient has been computed
            self._tracer.default = _DEFAULT.get(phase, "other")
        if phase not in ("forward", "backward", "evaluate", *_WITHIN):
            self._tracer.module = ""

    def _root_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._tracer.default = "activations"
        self._generates = kwargs.get("past_key_values") is not None and not torch.is_grad_enabled()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._stack.append(self._names.get(id(module), self._tracer.module))
        self._tracer.module = self._stack[-1]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = self._stack.pop() if self._stack else ""
        self._tracer.module = self._stack[-1] if self._stack else ""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, name=name: self._backward_enters(name))  # type: ignore[no-untyped-call]

    def _backward_enters(self, name: str) -> None:
        if not self._stack:  # within a recomputation, forward sets the module
            self._tracer.module = self._region = name

    def _loss_begins(self, output: Any) -> None:
        """The loss is computed from the first tensor of `output` from now on, and backward reaches it at its end."""
        if self._generates:  # the next token is chosen instead
            return
        self._tracer.default = "loss"
        hidden = next(tensors_in(output), None)
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(self._loss_ends)  # type: ignore[no-untyped-call]

    def _loss_ends(self, gradient: torch.Tensor) -> None:
        self._tracer.default = "activations"

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called for each optimizer step, which may be in the middle of backward, parameter by parameter."""
        self._outside_step.append(self._tracer.default)
        self._tracer.default = "optimizer"

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._tracer.default = self._outside_step.pop()


def optimizer_states(optimizer: Any) -> list[Any]:
    """The states of an optimizer, of those in Trainer's layer-wise dummy, and AdaLomo's in separate dictionaries."""
    parts = getattr(optimizer, "optimizer_dict", None) or {}
    own = [value for name, value in vars(optimizer).items() if name.startswith("exp_avg") and isinstance(value, dict)]
    return [*states_of(optimizer), *(state for part in parts.values() for state in states_of(part)), *own]


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has wrapped the module, or compiled its `forward`."""
    return "_orig_mod" in module._modules or module in compiled_modules


def _modules_around_compiled(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The dotted name and the module of `module` and all below it, except those inside of a compiled one."""
    yield name, module
    if not is_compiled(module):
        for child, below in module.named_children():
            yield from _modules_around_compiled(below, f"{name}.{child}" if name else child)


def decoder_of(model: Any) -> nn.Module | None:
    """The model without its head, unwrapped from PEFT; None if transformers keeps it in several parts."""
    unwrapped = base_model(model)
    decoder = getattr(unwrapped, getattr(unwrapped, "base_model_prefix", "") or "-", None)
    return decoder if isinstance(decoder, nn.Module) else None
