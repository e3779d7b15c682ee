"""The models of the published rows, made as their trainings made them, on tensors without memory.

`"benchmarks.published_models:fms_2025_02_008"` names the model of the row `fms-2025-02-008`: a function without
arguments, as `predict_trainer` takes it. `__getattr__` finds it among the rows of the files that the environment
variable `MEMKIT_PUBLISHED_ROWS` names. `published_then.py` calls the same functions under the libraries of that day.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent / "published_rows"
ROWS: Final = "MEMKIT_PUBLISHED_ROWS"

Row = Mapping[str, Any]

_NOT_TOLD: Final[Mapping[str, Mapping[str, Any]]] = {
    "ADALORA": {"total_step": 5000},  # the loop's number of steps
    "OFT": {"oft_block_size": 0},  # the default contradicts `r`, which is told
    # These follow from the trainable parameters, which are told: 28 x (100 x 3072 + 1), 28 x 32 x (3072 + 1024).
    "ADAPTION_PROMPT": {"adapter_len": 100, "adapter_layers": 28},
    "DEFT": {"para": True},
}
"""Fields that PEFT needs and the rows leave out (huggingface/peft: method_comparison/MetaMathQA/run.py, utils.py)."""

_LORA: Final = re.compile(r"r=(?P<r>\d+) alpha=(?P<alpha>\d+) dropout=(?P<dropout>[\d.]+) targets (?P<targets>\S+)")


_TASKS: Final = {
    "text-classification": "AutoModelForSequenceClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
"""Rows without `task` train causal language models."""


def read_rows(*paths: str | Path) -> dict[str, Row]:
    """The rows of files in JSON lines, by `id`."""
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row for row in map(json.loads, lines)}


def attribute(row: Row) -> str:
    """The name of the row's model in this module."""
    return re.sub(r"\W", "_", row["id"])


def __getattr__(name: str) -> Callable[[], Any]:
    if ROWS in os.environ:
        for row in read_rows(*os.environ[ROWS].split(os.pathsep)).values():
            if attribute(row) == name:
                return functools.partial(_model, row)
    raise AttributeError(name)


def config_of(row: Row) -> dict[str, Any] | None:
    """The values of the model's config.json, as it was trained; None: they are not kept here.

    They are kept because the hub may not be reachable; `models.json` says where each comes from.
    """
    known = json.loads((FOLDER / "models.json").read_text(encoding="utf-8")).get(row["model"])
    if known is None:
        return None
    resized = known["as_trained"] if "resizes the embeddings" in row["note"] else {}
    return {**known["config"], **resized}


def family_of(row: Row) -> str:
    """The model's `model_type`; empty where its config is not kept here."""
    return str((config_of(row) or {}).get("model_type", ""))


def kind_of(row: Row) -> str:
    """What is trained, in the words of `comparable.json`."""
    method = row["method"]
    if method.startswith("{") or row["source"].startswith("huggingface/peft"):
        return "PEFT"
    if "deepspeed" in row:
        return f"DeepSpeed ZeRO-{row['deepspeed']['zero_optimization']['stage']}"
    if method.startswith("QLoRA"):
        # FSDP shards weights that wait in RAM, and TRL upcasts none of those (trl 0.11 to 1.16: `is_sharded_qlora`).
        upcast = row["gpus"] == 1 and "prepare_model_for_kbit_training" in row["note"]
        return "QLoRA, upcast" if upcast else "QLoRA"
    return "LoRA" if method.startswith("LoRA") else "full"


def precision_of(row: Row) -> dict[str, bool]:
    """`bf16` and `fp16` of TrainingArguments."""
    said = row["mixed_precision"]
    return {"bf16": said.startswith("bf16"), "fp16": said.startswith("fp16")}


def example_of(row: Row, tokens: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """One row of its data: (shape, dtype) by name."""
    sequence, number = ((tokens,), "int64"), ((), "int64")
    if row.get("task") == "text-classification":
        return {"input_ids": sequence, "labels": number}
    if row.get("task") == "question-answering":  # padded to one length
        return dict.fromkeys(("input_ids", "attention_mask"), sequence) | dict.fromkeys(
            ("start_positions", "end_positions"), number
        )
    return dict.fromkeys(("input_ids", "labels"), sequence)


def optimizer_of(row: Row) -> str | tuple[type, dict[str, Any]] | None:
    """`optim` of TrainingArguments, or a class and its arguments; None: DeepSpeed's JSON names it."""
    optimizer = row["optimizer"]
    if "deepspeed" in row:
        return None
    if optimizer.startswith("bitsandbytes.optim.Adam8bit"):
        from bitsandbytes.optim import Adam8bit

        return Adam8bit, {"lr": 5e-5}
    if optimizer.startswith("adafactor, with a full first moment"):
        from transformers.optimization import Adafactor

        return Adafactor, {"lr": 1e-3, "relative_step": False, "beta1": 0.9}
    exact = ("adamw_hf", "adafactor", "adamw_torch_fused")
    return str(re.split(r"\W", optimizer)[0]) if optimizer.startswith(exact) else "adamw_torch"


def adapter_of(row: Row) -> dict[str, Any] | None:
    """The row's adapter as fields of PEFT's config, with `peft_type`; None: full fine-tuning.

    Raises:
        ValueError: its method is described in another way.
    """
    method = row["method"]
    if method.startswith("full"):
        return None
    if method.startswith("{"):
        found: dict[str, Any] = json.loads(method)
        return {**_NOT_TOLD.get(found["peft_type"], {}), **found}
    said = _LORA.search(method)
    if said is None:
        raise ValueError(f"the method is described as {method!r}")
    return {
        "peft_type": "LORA", "r": int(said["r"]), "lora_alpha": int(said["alpha"]),
        "lora_dropout": float(said["dropout"]), "target_modules": said["targets"].split(","),
    }  # fmt: skip


def _model(row: Row) -> Any:
    model = _without_adapters(row)
    in_4_bits, upcast = row["weights_dtype"].startswith("4-bit"), kind_of(row) == "QLoRA, upcast"
    if in_4_bits:
        # What from_pretrained does with a quantization_config: there are no weights to load here.
        from hf_memkit.prediction.child.libraries.setup_model import quantise_linears

        quantise_linears(
            model,
            {
                "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_use_double_quant": "(double quant)" in row["method"],
            },
        )  # fmt: skip
        if upcast:
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=row["checkpointing"])
    adapter = adapter_of(row)
    if adapter is None:
        return model
    if row["checkpointing"]:
        model.enable_input_require_grads()  # as TRL does where all weights are frozen
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = adapter.pop("peft_type")
    own_type = {"autocast_adapter_dtype": False} if "bf16 LoRA" in row["weights_dtype"] else {}
    model = get_peft_model(model, PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **adapter), **own_type)
    if in_4_bits and upcast:
        _norms_alone_keep_fp32(model)
    return model


def transformers_config(row: Row) -> Any:
    """The config as transformers reads it, from the hub where its values are not kept here."""
    import transformers

    values = config_of(row)
    if values is None:
        return transformers.AutoConfig.from_pretrained(row["model"])
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def _without_adapters(row: Row) -> Any:
    import torch
    import transformers

    config = transformers_config(row)
    window = getattr(config, "sliding_window", None)
    if row["attention"].startswith("flash_attention") and window:
        if row["seq_len"] > window:
            raise ValueError(f"{row['seq_len']} tokens are more than the window of {window}: another kernel")
        config.sliding_window = None  # the package takes the window as a number; SDPA would be given a mask
    made_by = getattr(transformers, _TASKS.get(row.get("task", ""), "AutoModelForCausalLM"))
    major, minor = map(int, transformers.__version__.split(".")[:2])
    if (major, minor) < (4, 36):  # one kind of attention and, where no file is read, one type
        assert row["attention"] == "eager" and row["weights_dtype"] == "float32"
        return made_by.from_config(config)
    module = "transformers.modeling_utils" if major == 4 else "transformers.initialization"
    dtype = torch.float32 if row["weights_dtype"] == "float32" else torch.bfloat16
    # SDPA chooses the kernel that the flash-attn package has; the package itself has none for fake tensors.
    attention = row["attention"] if row["attention"] in ("eager", "flex_attention") else "sdpa"
    chunked = row.get("fused_loss", "").startswith("torchtune")
    if chunked:
        from benchmarks.published_trainer import ChunkedLogits
    with __import__(module, fromlist=["no_init_weights"]).no_init_weights():
        options = {"attn_implementation": attention, "torch_dtype" if major == 4 else "dtype": dtype}
        model = (ChunkedLogits._from_config if chunked else made_by.from_config)(config, **options)
    model.tie_weights()
    if row.get("compile") == "each layer":  # and a chunked loss (pytorch/torchtune @ 1814feb17: training/_compile.py)
        model.model.layers = torch.nn.ModuleList(map(torch.compile, model.model.layers))
        if chunked:
            model.sum_of_losses = torch.compile(model.sum_of_losses)
    return model


def _norms_alone_keep_fp32(model: Any) -> None:
    """What TRL did of a 4-bit model under bf16 autocast: embeddings and output layer are bf16 again
    (trl 0.11.4: trainer/utils.py, `peft_module_casting_to_bf16`; still in trl 1.16.0: experimental/utils.py)."""
    import torch

    for name, module in model.named_modules():
        if "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype is torch.float32:
                module.to(torch.bfloat16)
