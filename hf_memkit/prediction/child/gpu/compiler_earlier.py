"""What torch 2.9 and 2.10 do otherwise than 2.11, of what the trace of compiled code needs; and where they fail."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu.compiler_patches import private, replace_private

IS_EARLIER: Final = torch.__version__ < "2.11"


def patch_earlier_compiler() -> None:
    """Makes torch 2.9 and 2.10 compile for fake tensors, and gives them the private names of torch 2.11 that
    `patch_compiler` replaces. Call it before."""
    _pass_inputs_in_own_mode()
    _separate_padding()
    _accept_device_of_patterns()
    vars(torch._C).setdefault("_ensureCUDADeviceGuardSet", None)  # torch 2.9 does not call it


def _pass_inputs_in_own_mode() -> None:
    """Passes a backend the inputs of a graph in the compilation's own fake mode.

    Torch 2.9 and 2.10 pass the fake tensors that the compiled code is called with, and their backends refuse tensors
    of another fake mode (torch 2.11: _guards.py, `detect_fake_mode`; _functorch/_aot_autograd/frontend_utils.py,
    `process_inputs`).
    """

    def example_inputs(self: Any) -> list[Any]:
        context = self.tracing_context
        mode = context.fake_mode
        inputs: list[Any] = original(self)
        for place, value in enumerate(inputs):
            if isinstance(value, FakeTensor) and value.fake_mode is not mode:
                sizes = context.tensor_to_context[value]  # which of them are dynamic
                inputs[place] = mode.from_tensor(value, symbolic_context=sizes, source=sizes.tensor_source)
        return inputs

    original = replace_private("torch._dynamo.output_graph.OutputGraph.example_inputs", example_inputs)


def _separate_padding() -> None:
    """Lets inductor ask `_should_pad` only where there is something to pad; `_should_pad_bench` decides both."""

    def should_pad(match: Any, left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        alignment = padding.get_alignment_size(left)
        sides = (*left.shape[-2:], right.shape[-1])
        unaligned = any(padding.get_padded_length(side, alignment) for side in sides)
        return unaligned and bool(padding._should_pad(match, left, right, *args, **kwargs))

    padding = private("torch._inductor.fx_passes.pad_mm")
    padding._should_pad = replace_private("torch._inductor.fx_passes.pad_mm._should_pad_bench", should_pad)


def _accept_device_of_patterns() -> None:
    """Lets inductor's patterns of attention be made for the CPU; without an argument they are for a GPU if one is
    available."""

    def patterns_on_host(device: torch.device) -> list[Any]:
        is_available = replace_private("torch.cuda.is_available", lambda: False)
        patterns = list(original())
        replace_private("torch.cuda.is_available", is_available)
        return patterns

    path = "torch._inductor.fx_passes.fuse_attention._get_sfdp_patterns"
    original = replace_private(path, patterns_on_host)


def refuse_tf32() -> None:
    """Raises Unmodelled if inductor fails, here and in a real run, because it reads the setting of TF32 by its former
    name. Transformers 5 turns TF32 on by the new name, for `torch_compile` on a GPU that has it (`enable_tf32`)."""
    try:
        torch.backends.cuda.matmul.allow_tf32  # noqa: B018
    except RuntimeError as error:
        raise Unmodelled(
            f"torch_compile: inductor of torch {torch.__version__} fails where TF32 is on as transformers 5 turns it "
            "on, in a real run too (pytorch#166387). Install torch 2.11 or later, set tf32=False, or use "
            "torch_compile_backend=aot_eager"
        ) from error
