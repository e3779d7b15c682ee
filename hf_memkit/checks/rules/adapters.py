"""Adapters and quantised weights: wrong layers, uncounted copies, 4-bit weights that stay in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.catalog.adapter_layers import adapted_layers
from hf_memkit.checks.fsdp_settings import fsdp_of
from hf_memkit.checks.rule import Match, Rules, any_job
from hf_memkit.checks.subject import Subject
from hf_memkit.common.units import format_size
from hf_memkit.setup.techniques.setup_ledger import EMBEDDINGS, copied_parameters, quantised_bytes, quantised_layers

_LORA: Final = ("lora", "qlora")
_lora: Final = Rules(techniques=_LORA)
_qlora: Final = Rules(techniques=("qlora",))
_QUANTIZATION: Final = "model.quantization"


def _quantization(subject: Subject) -> Mapping[str, Any]:
    """The fields of the setup's BitsAndBytesConfig; empty without one."""
    value = subject.setting(_QUANTIZATION)
    return value if isinstance(value, Mapping) else {}


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list | tuple) else []


@_lora.warning(
    why="no layer of this model has that name: PEFT silently skips it if another name matches",
    fix='write "all-linear", or names of this model\'s layers',
    source="peft 0.21.2: tuners/tuners_utils.py, inject_adapter (refuses only where nothing matches)",
)
def adapter_target_missing(subject: Subject) -> Iterator[Match]:
    if subject.model is None or not subject.model.linears:
        return
    for name in _names(subject.adapter.get("target_modules")):
        if name not in EMBEDDINGS and not adapted_layers(subject.model, {"target_modules": [name]}):
            yield Match("adapter.target_modules", name)


@_lora.warning(
    why="modules_to_save trains a whole copy of the module, with gradients and AdamW states, and keeps the frozen "
    "original too",
    fix="leave it out: LoRA alone trains the blocks; for new tokens use trainable_token_indices",
    source="peft 0.21.2: utils/other.py, ModulesToSaveWrapper.update (a deep copy)",
)
def adapter_copies_module(subject: Subject) -> Iterator[Match]:
    key = "adapter.modules_to_save"
    names = _names(subject.adapter.get("modules_to_save"))
    if not names:
        return
    if subject.model is None:
        yield Match(key, names)
    elif copied := copied_parameters(subject.model, {"modules_to_save": names}):
        weight_bytes = 2 if subject.half_weights else 4
        size = format_size(4 * weight_bytes * copied)  # the copy and its moments have the weights' dtype
        tied = "; the copy is no longer tied to the word embedding" if subject.model.tied else ""
        why = f"PEFT keeps the frozen original and trains a copy of {copied / 1e6:.1f} M parameters: {size} of weights"
        yield Match(key, names, why=f"{why}, gradients and AdamW states by formula{tied}")


@_lora.warning(
    why="with a padded vocabulary PEFT saves the whole word embedding in every adapter checkpoint",
    fix="leave the vocabulary unpadded: adapters do not train it",
    source="peft 0.21.2: utils/save_and_load.py 295-332, save_embedding_layers",
)
def adapter_saves_embedding(subject: Subject) -> Iterator[Match]:
    multiple = subject.setting("model.pad_vocabulary_to_multiple_of")
    if multiple and subject.adapter and (subject.model is None or subject.model.vocabulary % multiple):
        yield Match("model.pad_vocabulary_to_multiple_of", multiple)


@any_job.warning(
    why="a PEFT model is not a class of transformers: Trainer lets DistributedDataParallel search the graph for "
    "unused parameters at every step, even with activation checkpointing",
    fix="set ddp_find_unused_parameters: false",
    source="transformers 5.23.0: trainer.py 749-756",
    techniques=(*_LORA, "data-parallel"),
)
def adapter_searches_graph(subject: Subject) -> Iterator[Match]:
    unset = subject.argument("ddp_find_unused_parameters") is None
    engine = subject.config is not None or fsdp_of(subject) is not None
    if unset and subject.adapter and subject.several and not engine:
        yield Match("ddp_find_unused_parameters", None, argument=True)


@_lora.warning(
    why="Liger's loss uses the output layer's own weight: the adapter on that layer is skipped and never trained",
    fix='remove the output layer from target_modules ("all-linear" excludes it), or set use_liger_kernel: false',
    source="liger-kernel 0.8.5: transformers/model/llama.py, lce_maybe_trainable_lm_head",
)
def adapter_on_head_unread(subject: Subject) -> Iterator[Match]:
    targets = _names(subject.adapter.get("target_modules"))
    heads = {"lm_head"} if subject.model is None else {one.name for one in subject.model.linears if one.head}
    if subject.on("use_liger_kernel") and any(head.endswith(one) for head in heads for one in targets):
        yield Match("adapter.target_modules", targets)


@_qlora.error(
    why="Trainer cannot train quantised weights without adapters; it fails, but only after loading them",
    fix="add adapters (technique lora), or load the weights unquantised",
    source="transformers 5.23.0: trainer_utils.py, validate_quantization_for_training",
)
def quantised_without_adapters(subject: Subject) -> Iterator[Match]:
    if _quantization(subject) and not subject.adapter:
        yield Match(_QUANTIZATION, dict(_quantization(subject)))


@_qlora.warning(
    why="BitsAndBytesConfig defaults to fp4, which rounds normally distributed weights a third worse than nf4, in "
    "the same bytes",
    fix="set bnb_4bit_quant_type: nf4",
    source="transformers 5.23.0: utils/quantization_config.py, BitsAndBytesConfig; Dettmers et al. 2023, "
    "arXiv 2305.14314, section 3",
)
def quantised_to_fp4(subject: Subject) -> Iterator[Match]:
    given = _quantization(subject)
    if given.get("load_in_4bit") is True and given.get("bnb_4bit_quant_type", "fp4") == "fp4":
        yield Match(f"{_QUANTIZATION}.bnb_4bit_quant_type", given.get("bnb_4bit_quant_type"))


@_qlora.warning(
    why="BitsAndBytesConfig defaults to fp32: every 4-bit product runs in fp32 with fp32 copies of its inputs, even "
    "under bf16 autocast",
    fix="set bnb_4bit_compute_dtype: bfloat16 (float16 on a GPU without bf16)",
    source="bitsandbytes 0.50.2: nn/modules.py, Linear4bit.forward; transformers 5.23.0: integrations/bitsandbytes.py",
)
def quantised_computes_in_fp32(subject: Subject) -> Iterator[Match]:
    given = _quantization(subject)
    sixteen = subject.half_weights or subject.argument("bf16") or subject.argument("fp16")
    compute = given.get("bnb_4bit_compute_dtype")
    if given.get("load_in_4bit") is True and sixteen and compute in (None, "float32"):
        yield Match(f"{_QUANTIZATION}.bnb_4bit_compute_dtype", compute)


@_qlora.hint(
    why="the scales stay in fp32; double quantisation saves 0.37 bits a weight, at no cost that its authors found",
    fix="set bnb_4bit_use_double_quant: true",
    source="bitsandbytes 0.50.2: functional.py, quantize_4bit; Dettmers et al. 2023, arXiv 2305.14314, section 3",
)
def quantised_once(subject: Subject) -> Iterator[Match]:
    given = _quantization(subject)
    if given.get("load_in_4bit") is True and given.get("bnb_4bit_use_double_quant") is not True:
        yield Match(f"{_QUANTIZATION}.bnb_4bit_use_double_quant", given.get("bnb_4bit_use_double_quant"))


@_qlora.error(
    why="the list replaces the default one: the output layer is quantised too, and if it is tied to the word "
    "embedding, the first forward pass fails",
    fix="add the output layer (lm_head) to llm_int8_skip_modules, or leave the list out",
    source="transformers 5.23.0: quantizers/base.py 258-281, get_modules_to_not_convert",
)
def quantised_head(subject: Subject) -> Iterator[Match]:
    given = _quantization(subject)
    skipped = given.get("llm_int8_skip_modules")
    if skipped is None:
        return
    if subject.model is None:
        hit = not any("lm_head".endswith(str(name)) for name in skipped)
    else:
        hit = any(layer.head for layer in quantised_layers(subject.model, given))
    if hit:
        yield Match(f"{_QUANTIZATION}.llm_int8_skip_modules", list(skipped))


@_qlora.warning(
    why="this model keeps its experts in one tensor, not in linear layers: bitsandbytes leaves them in 16 bits",
    fix="use a model without experts, or a checkpoint that is already quantised",
    source="transformers 5.23.0: integrations/bitsandbytes.py, replace_with_bnb_linear (nn.Linear and Conv1D only)",
)
def experts_not_quantised(subject: Subject) -> Iterator[Match]:
    model = subject.model
    given = _quantization(subject)
    if model is None or not model.stacked or not given:
        return
    share = model.stacked / model.parameters
    held = format_size(quantised_bytes(model, given).total)
    why = f"{share:.0%} of the weights are experts in one tensor a layer, which bitsandbytes leaves in 16 bits"
    yield Match(_QUANTIZATION, dict(given), why=f"{why}: the model takes {held} by formula")
