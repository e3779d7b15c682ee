"""Adapters that are not where they were asked for, copies that nobody counted, and 4-bit weights that are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.adapter_layers import adapted
from hf_memkit.checks.rule import Found, any_job
from hf_memkit.checks.subject import Subject
from hf_memkit.techniques.ledger import (
    EMBEDDINGS,
    copied_parameters,
    quantised_bytes,
    quantised_layers,
)
from hf_memkit.units import format_size

_LORA: Final = ("lora", "qlora")
_QUANTIZATION: Final = "model.quantization"


def _quantization(subject: Subject) -> Mapping[str, Any]:
    value = subject.setting(_QUANTIZATION)
    return value if isinstance(value, Mapping) else {}


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list | tuple) else []


@any_job.warning(
    why="no layer of this model has that name: PEFT adds adapters to the others, and says nothing as long as there is "
    "one of them",
    fix='write "all-linear", or names of this model\'s layers',
    source="peft 0.21.2: tuners/tuners_utils.py, inject_adapter (refuses only where nothing matches)",
    techniques=_LORA,
)
def adapter_target_missing(subject: Subject) -> Iterator[Found]:
    if subject.model is None or not subject.model.linears:
        return
    for name in _names(subject.adapter.get("target_modules")):
        if name not in EMBEDDINGS and not adapted(subject.model, {"target_modules": [name]}):
            yield Found("adapter.target_modules", name)


@any_job.warning(
    why="modules_to_save trains a copy and keeps the frozen original beside it, with gradients and AdamW states for "
    "the whole copy",
    fix="leave it out: LoRA alone trains the blocks; to teach new tokens, use trainable_token_indices",
    source="peft 0.21.2: utils/other.py, ModulesToSaveWrapper.update (a deep copy)",
    techniques=_LORA,
)
def adapter_copies_module(subject: Subject) -> Iterator[Found]:
    key = "adapter.modules_to_save"
    names = _names(subject.adapter.get("modules_to_save"))
    if not names:
        return
    if subject.model is None:
        yield Found(key, names)
    elif copied := copied_parameters(subject.model, {"modules_to_save": names}):
        each = 2 if subject.half_weights else 4
        size = format_size(4 * each * copied)  # the copy has the weights' own dtype, and so have both its moments
        tied = "; and it is tied to the word embedding: from now on they are two" if subject.model.tied else ""
        why = f"PEFT trains a copy of {copied / 1e6:.1f} M parameters beside the frozen original: {size} of weights"
        yield Found(key, names, why=f"{why}, gradients and AdamW states by formula{tied}")


@any_job.warning(
    why="the padded vocabulary makes PEFT save the whole word embedding in every adapter checkpoint",
    fix="leave the vocabulary as it is: adapters do not train it",
    source="peft 0.21.2: utils/save_and_load.py 295-332, save_embedding_layers",
    techniques=_LORA,
)
def adapter_saves_embedding(subject: Subject) -> Iterator[Found]:
    multiple = subject.setting("model.pad_vocabulary_to_multiple_of")
    if multiple and subject.adapter and (subject.model is None or subject.model.vocabulary % multiple):
        yield Found("model.pad_vocabulary_to_multiple_of", multiple)


@any_job.warning(
    why="a PEFT model is none of transformers' own classes: Trainer lets DistributedDataParallel search the graph for "
    "unused parameters at every step, also with activation checkpointing",
    fix="set ddp_find_unused_parameters: false",
    source="transformers 5.23.0: trainer.py 749-756",
    techniques=(*_LORA, "data-parallel"),
)
def adapter_searches_graph(subject: Subject) -> Iterator[Found]:
    unset = subject.argument("ddp_find_unused_parameters") is None
    if unset and subject.adapter and subject.several and subject.config is None:
        yield Found("ddp_find_unused_parameters", None, argument=True)


@any_job.warning(
    why="Liger's loss multiplies with the output layer's own weight: the adapter on it is skipped, and never trained",
    fix='take the output layer out of target_modules ("all-linear" leaves it out), or use_liger_kernel: false',
    source="liger-kernel 0.8.5: transformers/model/llama.py, lce_maybe_trainable_lm_head",
    techniques=_LORA,
)
def adapter_on_head_unread(subject: Subject) -> Iterator[Found]:
    targets = _names(subject.adapter.get("target_modules"))
    heads = {"lm_head"} if subject.model is None else {one.name for one in subject.model.linears if one.head}
    if subject.on("use_liger_kernel") and any(head.endswith(one) for head in heads for one in targets):
        yield Found("adapter.target_modules", targets)


@any_job.error(
    why="Trainer refuses to train quantised weights without adapters, after they were loaded",
    fix="add adapters (technique lora), or load the weights as they are",
    source="transformers 5.23.0: trainer_utils.py, validate_quantization_for_training",
    techniques=("qlora",),
)
def quantised_without_adapters(subject: Subject) -> Iterator[Found]:
    if _quantization(subject) and not subject.adapter:
        yield Found(_QUANTIZATION, dict(_quantization(subject)))


@any_job.warning(
    why="fp4 is what BitsAndBytesConfig takes if nothing is said: it rounds normally distributed weights a third "
    "worse than nf4, in the same bytes",
    fix="set bnb_4bit_quant_type: nf4",
    source="transformers 5.23.0: utils/quantization_config.py, BitsAndBytesConfig; Dettmers et al. 2023, "
    "arXiv 2305.14314, section 3",
    techniques=("qlora",),
)
def quantised_to_fp4(subject: Subject) -> Iterator[Found]:
    given = _quantization(subject)
    if given.get("load_in_4bit") is True and given.get("bnb_4bit_quant_type", "fp4") == "fp4":
        yield Found(f"{_QUANTIZATION}.bnb_4bit_quant_type", given.get("bnb_4bit_quant_type"))


@any_job.warning(
    why="fp32 is what BitsAndBytesConfig takes if nothing is said: every 4-bit product then runs in fp32, also under "
    "bf16 autocast, with fp32 copies of its inputs",
    fix="set bnb_4bit_compute_dtype: bfloat16 (float16 on a card without bf16)",
    source="bitsandbytes 0.50.2: nn/modules.py, Linear4bit.forward; transformers 5.23.0: integrations/bitsandbytes.py",
    techniques=("qlora",),
)
def quantised_computes_in_fp32(subject: Subject) -> Iterator[Found]:
    given = _quantization(subject)
    sixteen = subject.half_weights or subject.argument("bf16") or subject.argument("fp16")
    compute = given.get("bnb_4bit_compute_dtype")
    if given.get("load_in_4bit") is True and sixteen and compute in (None, "float32"):
        yield Found(f"{_QUANTIZATION}.bnb_4bit_compute_dtype", compute)


@any_job.hint(
    why="the scales stay in fp32: 0.37 bits a weight that double quantisation saves, at no cost that "
    "its authors found",
    fix="set bnb_4bit_use_double_quant: true",
    source="bitsandbytes 0.50.2: functional.py, quantize_4bit; Dettmers et al. 2023, arXiv 2305.14314, section 3",
    techniques=("qlora",),
)
def quantised_once(subject: Subject) -> Iterator[Found]:
    given = _quantization(subject)
    if given.get("load_in_4bit") is True and given.get("bnb_4bit_use_double_quant") is not True:
        yield Found(f"{_QUANTIZATION}.bnb_4bit_use_double_quant", given.get("bnb_4bit_use_double_quant"))


@any_job.error(
    why="the list replaces the default one: the output layer is quantised too, and where it is tied to the word "
    "embedding the first forward pass fails",
    fix="add the output layer (lm_head) to llm_int8_skip_modules, or leave the list out",
    source="transformers 5.23.0: quantizers/base.py 258-281, get_modules_to_not_convert",
    techniques=("qlora",),
)
def quantised_head(subject: Subject) -> Iterator[Found]:
    given = _quantization(subject)
    skipped = given.get("llm_int8_skip_modules")
    if skipped is None:
        return
    if subject.model is None:
        hit = not any("lm_head".endswith(str(name)) for name in skipped)
    else:
        hit = any(layer.head for layer in quantised_layers(subject.model, given))
    if hit:
        yield Found(f"{_QUANTIZATION}.llm_int8_skip_modules", list(skipped))


@any_job.warning(
    why="this model keeps its experts in one tensor, which is no linear layer: bitsandbytes leaves it in 16 bits",
    fix="use a model without experts, or one whose checkpoint is quantised already",
    source="transformers 5.23.0: integrations/bitsandbytes.py, replace_with_bnb_linear (nn.Linear and Conv1D only)",
    techniques=("qlora",),
)
def experts_not_quantised(subject: Subject) -> Iterator[Found]:
    model, given = subject.model, _quantization(subject)
    if model is None or not model.stacked or not given:
        return
    share = model.stacked / model.parameters
    held = format_size(quantised_bytes(model, given).total)
    why = f"{share:.0%} of the weights are experts kept in one tensor a layer, which bitsandbytes leaves in 16 bits"
    yield Found(_QUANTIZATION, dict(given), why=f"{why}: the model takes {held} by formula")
