"""LoRA and QLoRA: low-rank adapters are trained, the model's weights are frozen."""

from __future__ import annotations

from typing import Any, Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import Bounds, InPlans, technique

RANK: Final = 16
"""Default rank of adapters; `lora_alpha` is twice that."""
TARGETS: Final = "all-linear"

_VALUES: Final = {"rank": int, "alpha": int, "dropout": float}
QUANTIZATION: Final = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""Fields of a `BitsAndBytesConfig`, without the compute dtype."""

_BOUNDS: Final[Bounds] = {"rank": (1, None), "alpha": (1, None), "dropout": (0, 1)}

_NOT_FULL = (
    "Only LoRA adapters are trained: the model's own weights stay as they are. What is saved is the adapter; "
    "merge_and_unload() makes one model of both."
)


@technique(
    "lora",
    saves="gradients and optimizer states of LoRA adapters are small, and the model's own weights have none",
    costs="a different training: base weights stay frozen (Hu et al. 2021, arXiv 2106.09685), which suits a new "
    "style or task and not new knowledge; the package peft",
    not_when="all weights must be trained",
    packages=("peft",),
    values=_VALUES,
    bounds=_BOUNDS,
    group="another method",
    settings={"adapter.LoraConfig": {"target_modules": TARGETS}},
    frees={"gradients": 1.0, "optimizer": 1.0},
    offered={"optimizer": 4, "host/optimizer": 2},
    unless=("adapters",),
    planned=InPlans("method", "LoRA"),
)
def lora(setup: Setup) -> Setup:
    """Low-rank adapters through PEFT (Hu et al. 2021, arXiv 2106.09685), which is not full training.

    Values: `rank` (default 16), `alpha` (default 2 × rank), `dropout` (default 0)."""
    return _adapters(setup)


@technique(
    "qlora",
    saves="weights take about 0.6 bytes a parameter instead of 2; LoRA adapters are trained on top (QLoRA)",
    costs="a different training: base weights stay frozen, rounded to 4 bit (Dettmers et al. 2023, arXiv "
    "2305.14314), and every layer is dequantised each time it is used; the packages bitsandbytes and peft",
    not_when="the 16-bit weights fit: lora is faster and exact; or most weights are experts in one tensor, which "
    "bitsandbytes leaves alone",
    packages=("peft", "bitsandbytes"),
    values=_VALUES,
    bounds=_BOUNDS,
    group="another method",
    settings={"model.quantization_config": "BitsAndBytesConfig(load_in_4bit=True, …)"},
    offered={"load": 2, "dispatched": 1},
    devices=("cuda", "rocm", "xpu", "hpu"),
    unless=("load_in_4bit",),
    planned=InPlans("method", "QLoRA"),
)
def qlora(setup: Setup) -> Setup:
    """LoRA over weights in doubly quantised 4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314): 16 bits of a
    linear layer's weight become 4 + 8/64 + 32/(64 × 256). Embeddings, the output layer, norms and biases keep 16 bits.

    Values: `rank` (default 16), `alpha` (default 2 × rank), `dropout` (default 0)."""
    job = setup.resolved_for
    dtype = "bfloat16" if job.bf16 else "float16"
    return _adapters(setup).put(
        "model.quantization",
        {**QUANTIZATION, "bnb_4bit_compute_dtype": dtype},
        f"NF4 because bitsandbytes' default fp4 rounds a third worse; doubly quantised: 0.37 bits a weight less; "
        f"products in {dtype}, which {job.gpu_name} computes in: the default is fp32, also under autocast",
    )


def peft_arguments(kind: str | None) -> dict[str, tuple[Any, str]]:
    """Arguments of PEFT's config for a model class (None: a causal language model), each with its reason.

    They are the task type (peft: mapping.py, MODEL_TYPE_TO_PEFT_MODEL_MAPPING) or the head that is trained whole.
    """
    if kind is None or kind.endswith(("ForCausalLM", "LMHeadModel")):
        return {"task_type": ("CAUSAL_LM", "a causal language model")}
    if kind.endswith("ForSequenceClassification"):  # PEFT then trains the head anyway
        return {"task_type": ("SEQ_CLS", "a classifier of sequences: its new head is trained whole")}
    if kind.endswith("ForTokenClassification"):
        return {"task_type": ("TOKEN_CLS", "a classifier of tokens: its new head is trained whole")}
    if kind.endswith("ForQuestionAnswering"):
        return {"task_type": ("QUESTION_ANS", "a model that marks answers: its new head is trained whole")}
    if kind.endswith(("ForImageClassification", "ForAudioClassification")):
        return {"modules_to_save": (["classifier"], "the head is new and must be trained whole")}
    if kind.endswith("ForConditionalGeneration") and not kind.startswith(_SPEECH):
        return {"task_type": ("SEQ_2_SEQ_LM", "an encoder and a decoder of text")}
    return {}


_SPEECH: Final = ("Whisper", "Speech2Text", "Moonshine")
"""Models of speech: PEFT's class for encoder and decoder supports text only; its base class takes any input."""


def _adapters(setup: Setup) -> Setup:
    job = setup.resolved_for
    rank = int(job.values.get("rank", RANK))
    alpha = int(job.values.get("alpha", 2 * rank))
    dropout = float(job.values.get("dropout", 0.0))

    def why(value: str, default: str) -> str:
        return "asked for" if value in job.values else default

    return setup.put_all(
        "adapter",
        peft_arguments(job.model.model_class if job.model is not None else None),
        r=(rank, why("rank", "enough for most tasks at a few MB")),
        lora_alpha=(alpha, why("alpha", "twice the rank: the update keeps its scale")),
        lora_dropout=(dropout, why("dropout", "none: the adapters are small already")),
        target_modules=(TARGETS, "every linear layer of the blocks, not attention alone"),
    ).with_notes(_NOT_FULL)
