"""Cases of the rules about the loss, attention and activation functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.checks import Subject
from tests.checks.case import LARGE, MACHINE, ON_CPU, SMALL, Case, Cases

_LIGER = {"use_liger_kernel": True}
_CHUNKED = {"model_parts.chunked_loss": {"chunk_tokens": 1024}, "data.sequence_length": 512}
_GRANITE = replace(LARGE, config={"model_type": "granite"})
_WIDE = replace(LARGE, config={"model_type": "llama", "num_attention_heads": 32})
_GELU = replace(SMALL, config={"model_type": "gpt2", "activation_function": "gelu_new"})
_SILU = replace(LARGE, config={"model_type": "llama", "hidden_act": "silu"})
_FLASH = "model.attn_implementation"


def _of(
    arguments: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, model: ModelFacts | None = None,
    **more: Any,
) -> Subject:  # fmt: skip
    return Subject(None, arguments or {}, model, settings=settings or {}, **more)


def _config(**values: Any) -> dict[str, Any]:
    return {**_LIGER, "liger_kernel_config": values}


CASES: Cases = {
    "liger-model-unknown": Case("use_liger_kernel", _of(_LIGER, model=SMALL), _of(_LIGER, model=LARGE)),
    "liger-key-unknown": [
        Case("liger_kernel_config.fused_cross_entropy", _of(_config(fused_cross_entropy=True)),
             _of(_config(rope=True))),
        Case("liger_kernel_config.geglu", _of(_config(geglu=True), model=LARGE), _of(_config(geglu=True))),
    ],
    "liger-config-unused": Case("liger_kernel_config", _of({"liger_kernel_config": {"rope": True}}),
                                _of(_config(rope=True))),
    "liger-two-losses": [
        Case("liger_kernel_config.cross_entropy", _of(_config(cross_entropy=True)),
             _of(_config(cross_entropy=True, fused_linear_cross_entropy=False))),
        Case("liger_kernel_config.cross_entropy", _of(_config(cross_entropy=True), model=LARGE),
             _of(_config(cross_entropy=True), model=_GRANITE)),
    ],
    "liger-keeps-logits": Case("use_liger_kernel", _of(_LIGER, model=_GRANITE), _of(_LIGER, model=LARGE)),
    "liger-without-gpu": [
        Case("use_liger_kernel", _of({**_LIGER, "use_cpu": True}), _of(_LIGER)),
        Case("use_liger_kernel", _of(_LIGER, machine=ON_CPU), _of(_LIGER, machine=MACHINE)),
    ],
    "liger-and-chunked-loss": Case("model_parts.chunked_loss", _of(_LIGER, _CHUNKED, LARGE),
                                   _of(_LIGER, _CHUNKED, SMALL)),
    "label-smoothing-makes-logits": [
        Case("label_smoothing_factor", _of({"label_smoothing_factor": 0.1}, _CHUNKED),
             _of({"label_smoothing_factor": 0.0}, _CHUNKED)),
        Case("label_smoothing_factor", _of({**_LIGER, "label_smoothing_factor": 0.1}),
             _of({"label_smoothing_factor": 0.1})),
    ],
    "one-chunk-only": Case("model_parts.chunked_loss.chunk_tokens", _of({"per_device_train_batch_size": 2}, _CHUNKED),
                           _of({"per_device_train_batch_size": 3}, _CHUNKED)),
    "sft-has-its-own-loss": Case("model_parts.chunked_loss", _of({}, {**_CHUNKED, "trainer.class": "trl:SFTTrainer"}),
                                 _of({}, _CHUNKED)),
    "chunked-loss-needs-causal-model": Case("model_parts.chunked_loss",
                                            _of({}, _CHUNKED, replace(SMALL, model_class="BertForMaskedLM")),
                                            _of({}, _CHUNKED, SMALL)),
    "flash-needs-16-bits": [
        Case(_FLASH, _of({}, {_FLASH: "flash_attention_2"}), _of({"bf16": True}, {_FLASH: "flash_attention_2"})),
        Case(_FLASH, _of({}, {_FLASH: "flash_attention_2", "model.dtype": "float32"}),
             _of({}, {_FLASH: "flash_attention_2", "model.dtype": "bfloat16"})),
    ],
    "flash-not-installed": Case(_FLASH, _of({"bf16": True}, {_FLASH: "flash_attention_2"}, here=True),
                                _of({"bf16": True}, {_FLASH: "flash_attention_2"})),
    "flash-on-cpu": Case(_FLASH, _of({"use_cpu": True}, {_FLASH: "flash_attention_2"}),
                         _of({"use_cpu": True}, {_FLASH: "sdpa"})),
    "flex-not-supported": Case(_FLASH, _of({}, {_FLASH: "flex_attention"}, SMALL),
                               _of({}, {_FLASH: "flex_attention"}, LARGE)),
    "attentions-force-eager": [
        Case("model.config.output_attentions", _of({}, {"model.config": {"output_attentions": True}}),
             _of({}, {"model.config": {"output_attentions": True}, _FLASH: "eager"})),
        Case("model.config.output_attentions", _of({}, {"model.config": {"output_attentions": True}, _FLASH: "sdpa"}),
             _of({}, {"model.config": {"output_attentions": False}})),
    ],
    "eager-keeps-scores": [
        Case(_FLASH, _of({"per_device_train_batch_size": 1}, {_FLASH: "eager", "data.sequence_length": 2048}, _WIDE,
                         machine=MACHINE),
             _of({"per_device_train_batch_size": 1}, {_FLASH: "eager", "data.sequence_length": 256}, _WIDE,
                 machine=MACHINE.with_gpu(named_gpu("T4")))),
    ],
    "nothing-to-fuse": Case("model_parts.fused_gelu", _of({}, {"model_parts.fused_gelu": {}}, _SILU),
                            _of({}, {"model_parts.fused_gelu": {}}, _GELU)),
    "fused-by-the-compiler": Case("model_parts.fused_gelu",
                                  _of({"torch_compile": True}, {"model_parts.fused_gelu": {}}),
                                  _of({"torch_compile_backend": "aot_eager"}, {"model_parts.fused_gelu": {}})),
}  # fmt: skip
