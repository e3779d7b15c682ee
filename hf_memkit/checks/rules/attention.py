"""Attention and activation functions: implementations that do not run, or not as they seem."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Final

from hf_memkit.checks.rule import Match, Rules, any_job
from hf_memkit.checks.subject import Subject
from hf_memkit.common.units import format_size
from hf_memkit.setup.techniques.activation_functions import COMPOSED, activation_of
from hf_memkit.setup.techniques.registry import setting_of

_flash: Final = Rules(techniques=("flash-attention",))
_KEY: Final = "model.attn_implementation"
_FUSED: Final = "model_parts.fused_gelu"

WITHOUT_FLEX = frozenset({"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "xglm"})
"""Model types whose classes do not have `_supports_flex_attn` (transformers 5.23.0)."""

_SHARE_OF_GPU: Final = 8
"""Attention scores that take more than one part in this many of the GPU are worth a warning."""


@_flash.error(
    why="the flash-attn package computes only in fp16 and bf16: transformers loads the fp32 model with a warning, "
    "and the first forward pass fails",
    fix=f"set {setting_of('bf16-autocast')} (or {setting_of('fp16-autocast')}), or use the technique sdpa-attention",
    source="transformers 5.23.0: modeling_utils.py 1617-1625; flash-attn: flash_api.cpp, mha_fwd",
)
def flash_needs_16_bits(subject: Subject) -> Iterator[Match]:
    flash = str(subject.setting(_KEY)).startswith("flash_attention")
    if flash and not subject.mixed and subject.setting("model.dtype", "float32") == "float32":
        yield Match(_KEY)


@_flash.error(
    why="the flash-attn package is not installed here: transformers uses a kernel from the Hub if the package "
    "kernels is installed, and otherwise cannot load the model",
    fix="run: pip install flash-attn; or use the technique sdpa-attention",
    source="transformers 5.23.0: modeling_utils.py 1520-1577, 1788-1830",
)
def flash_not_installed(subject: Subject) -> Iterator[Match]:
    asked = subject.setting(_KEY) == "flash_attention_2"
    if asked and subject.here and importlib.util.find_spec("flash_attn") is None:
        yield Match(_KEY, "flash_attention_2")


@_flash.error(
    why="flash-attn runs only on a GPU: transformers cannot load the model",
    fix="use the technique sdpa-attention, which has a flash kernel for the CPU",
    source="transformers 5.23.0: modeling_utils.py 1551-1571",
)
def flash_on_cpu(subject: Subject) -> Iterator[Match]:
    if str(subject.setting(_KEY)).startswith("flash_attention") and subject.without_gpu:
        yield Match(_KEY)


@any_job.error(
    why="this model type does not support flex attention: transformers cannot load it",
    fix="use the technique sdpa-attention",
    source="transformers 5.23.0: modeling_utils.py, _flex_attn_can_dispatch",
    techniques=("sdpa-attention",),
)
def flex_not_supported(subject: Subject) -> Iterator[Match]:
    if subject.setting(_KEY) == "flex_attention" and subject.model_type in WITHOUT_FLEX:
        why = f"the model type {subject.model_type} does not support flex attention: transformers cannot load it"
        yield Match(_KEY, "flex_attention", why=why)


@any_job.warning(
    why="with output_attentions and no attn_implementation transformers silently loads eager attention: it keeps "
    "every layer's scores for backward and returns them too",
    fix="delete output_attentions for training",
    source="transformers 5.23.0: configuration_utils.py 582-592, 663-668",
    techniques=("sdpa-attention", "eager-attention"),
)
def attentions_force_eager(subject: Subject) -> Iterator[Match]:
    config = subject.setting("model.config") or {}
    asked = subject.setting(_KEY)
    if config.get("output_attentions") is True and asked != "eager":
        why = f"{asked} returns no attention weights: transformers rejects output_attentions with it" if asked else ""
        yield Match("model.config.output_attentions", True, why=why, severity="error" if asked else None)


@any_job.warning(
    why="eager attention keeps heads × length² scores of every layer for backward",
    fix="use the technique sdpa-attention, which keeps none, or checkpoint the layers",
    source="transformers 5.23.0: models/gpt2/modeling_gpt2.py, eager_attention_forward",
    techniques=("eager-attention",),
)
def eager_keeps_scores(subject: Subject) -> Iterator[Match]:
    model, gpu = subject.model, subject.gpu
    rows = subject.argument("per_device_train_batch_size", 8)
    length = subject.setting("data.sequence_length")
    if subject.setting(_KEY) != "eager" or model is None or gpu is None or not isinstance(length, int):
        return
    names = ("num_attention_heads", "n_head", "num_heads")
    heads = next((model.config[name] for name in names if model.config.get(name) is not None), None)
    if not isinstance(heads, int) or not isinstance(rows, int) or subject.on("activation_checkpointing"):
        return
    kept = 2 * rows * heads * length**2 * model.layers
    if kept * _SHARE_OF_GPU > gpu.usable_bytes:
        scores = f"{rows} × {heads} × {length}² scores in each of {model.layers} layers"
        why = f"eager attention keeps at least {scores} for backward: {format_size(kept)} in 16 bits"
        yield Match(_KEY, "eager", why=why)


@any_job.warning(
    why="the model's activation function is already one operation: fused-gelu has nothing to fuse",
    fix="leave out the technique fused-gelu",
    source="transformers 5.23.0: activations.py 324-350",
    techniques=("fused-gelu",),
)
def nothing_to_fuse(subject: Subject) -> Iterator[Match]:
    if subject.model is None or not subject.has_setting(_FUSED):
        return
    name = activation_of(dict(subject.model.config))
    if name is not None and name not in COMPOSED:
        why = f"the model's activation function, {name}, is already one operation: fused-gelu has nothing to fuse"
        yield Match(_FUSED, why=why)


@any_job.warning(
    why="torch.compile already fuses a composed GELU, and keeps no more for backward",
    fix="leave out the technique fused-gelu, or torch_compile",
    source="torch 2.13.0: _functorch/partitioners.py, min_cut_rematerialization_partition",
    techniques=("fused-gelu",),
)
def fused_by_the_compiler(subject: Subject) -> Iterator[Match]:
    without = subject.argument("torch_compile_backend") in ("eager", "aot_eager", "cudagraphs")
    if subject.has_setting(_FUSED) and subject.compiles and not without:
        yield Match(_FUSED)
