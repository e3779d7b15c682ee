"""Proofs about the loss, attention and activation functions.

Liger cannot be imported without Triton, so that its patching is run from its own source, function by function.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from trl import SFTConfig, SFTTrainer

from hf_memkit.catalog.liger_support import LIGER_OPTIONS, LIGER_WITH_LOGITS
from hf_memkit.checks.rules.attention import WITHOUT_FLEX
from hf_memkit.components import chunked_loss, fused_gelu
from tests.checks.real import arguments, refused, rows
from tests.checks.registry import proof
from tests.techniques.cpu_allocations import saved_bytes
from tests.techniques.tiny_models import batch, causal_model


class _Patching:
    """Liger's own functions, each made from its source, and what they were called with."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("liger_kernel")
        assert spec is not None and spec.origin is not None
        path = Path(spec.origin).parent / "transformers" / "monkey_patch.py"
        tree = ast.parse(path.read_text())
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        table = next(
            node.value for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN"
        )  # fmt: skip
        assert isinstance(table, ast.Dict)
        self.by_type = {
            ast.literal_eval(key): ast.unparse(value)
            for key, value in zip(table.keys, table.values, strict=True)
            if key
        }
        self.calls: list[dict[str, Any]] = []
        self.logged: list[str] = []

    def options(self, model_type: str) -> set[str]:
        return {argument.arg for argument in self.functions[self.by_type[model_type]].args.args} - {"model"}

    def default(self, model_type: str, option: str) -> Any:
        given = self.functions[self.by_type[model_type]].args
        defaults = dict(zip([a.arg for a in given.args][-len(given.defaults) :], given.defaults, strict=True))
        return ast.literal_eval(defaults[option])

    def made(self, name: str, **names: Any) -> Callable[..., Any]:
        space: dict[str, Any] = {
            "PreTrainedModel": object,
            "inspect": inspect,
            "MethodType": types.MethodType,
            **names,
        }
        node = self.functions[name]
        exec(compile(ast.Module([node], []), name, "exec"), space)
        function: Callable[..., Any] = space[name]
        return function

    def apply(self, model: Any, **config: Any) -> None:
        """`_apply_liger_kernel_to_instance`, with functions that only say what they are called with."""

        def recording(name: str) -> Any:
            def called(**given: Any) -> None:
                self.calls.append(given)

            called.__signature__ = inspect.signature(self.made(name))  # type: ignore[attr-defined]
            return called

        log = types.SimpleNamespace(info=self.logged.append)
        table = {kind: recording(name) for kind, name in self.by_type.items()}
        self.made("_apply_liger_kernel_to_instance", MODEL_TYPE_TO_APPLY_LIGER_FN=table, logger=log)(model, **config)


@proof("liger-model-unknown", fails="silent")
def liger_model_unknown() -> None:
    patching = _Patching()
    assert {kind: patching.options(kind) for kind in patching.by_type} == LIGER_OPTIONS
    model = causal_model("gpt2")
    before = {name: type(module) for name, module in model.named_modules()}
    patching.apply(model)
    assert patching.calls == [] and {name: type(module) for name, module in model.named_modules()} == before
    assert "forward" not in model.__dict__ and patching.logged[0].startswith("There are currently no Liger kernels")
    patching.apply(causal_model("llama"))
    assert len(patching.calls) == 1


@proof("liger-key-unknown", fails="silent")
def liger_key_unknown() -> None:
    patching = _Patching()
    model = causal_model("llama")
    patching.apply(model, geglu=True, fused_cross_entropy=True, rms_norm=False)
    assert patching.calls == [{"model": model, "rms_norm": False}]
    assert not any("ignored" in line or "unknown" in line for line in patching.logged)


@proof("liger-config-unused", fails="silent")
def liger_config_unused() -> None:
    model = causal_model("llama", vocab_size=128)
    trainer = Trainer(
        model=model, args=arguments(None, liger_kernel_config={"rope": True, "nonsense": 1}), train_dataset=rows()
    )
    trainer.train()  # without Liger, which cannot be imported here, silently
    assert "forward" not in model.__dict__ or "liger" not in model.forward.__module__
    assert trainer.args.liger_kernel_config == {"rope": True, "nonsense": 1}


@proof("liger-two-losses", fails="late")
def liger_two_losses() -> None:
    patching = _Patching()
    for kind in ("llama", "qwen3", "mistral", "gemma2"):
        assert patching.default(kind, "fused_linear_cross_entropy") is True
        refused("cannot both be True", lambda kind=kind: patching.made(patching.by_type[kind])(cross_entropy=True))


@proof("liger-keeps-logits", fails="unshown")
def liger_keeps_logits() -> None:
    patching = _Patching()
    loss = "fused_linear_cross_entropy"
    off = {kind for kind in patching.by_type if loss not in patching.options(kind) or not patching.default(kind, loss)}
    assert off == LIGER_WITH_LOGITS


@proof("liger-without-gpu", fails="late")
def liger_without_gpu() -> None:
    def fused_loss() -> None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        weight, hidden = torch.randn(97, 32), torch.randn(8, 32, requires_grad=True)
        LigerFusedLinearCrossEntropyLoss()(weight, hidden, torch.arange(8))

    if importlib.util.find_spec("triton") is None:
        refused("No module named 'triton'", fused_loss)
    else:
        refused("active driver", fused_loss)


@proof("liger-and-chunked-loss", fails="silent")
def liger_and_chunked_loss() -> None:
    model = causal_model("llama")
    chunked_loss.install(model, chunk_tokens=7)
    assert model(**batch()).logits is None

    def llama_lce_forward(self: Any, **inputs: Any) -> str:
        return "Liger's forward"

    patching = _Patching()
    only_the_loss = {"rope": False, "rms_norm": False, "swiglu": False, "model": model}
    patching.made("apply_liger_kernel_to_llama", llama_lce_forward=llama_lce_forward)(**only_the_loss)
    assert model(**batch()) == "Liger's forward"  # and nothing was said


@proof("label-smoothing-makes-logits", fails="silent")
def label_smoothing_makes_logits() -> None:
    given: list[set[str]] = []
    sizes: list[tuple[int, ...]] = []
    model = causal_model("llama", vocab_size=128)
    own = model.forward

    @functools.wraps(own)  # Trainer reads the signature
    def watching(**inputs: Any) -> Any:
        output = own(**inputs)
        given.append({name for name, value in inputs.items() if value is not None})
        sizes.append(tuple(output.logits.shape))
        return output

    model.forward = watching
    Trainer(model=model, args=arguments(None, label_smoothing_factor=0.1), train_dataset=rows()).train()
    assert "labels" not in given[0] and sizes[0] == (2, 16, 128)
    with_part = causal_model("llama", vocab_size=128)
    chunked_loss.install(with_part)
    smoothed = Trainer(model=with_part, args=arguments(None, label_smoothing_factor=0.1), train_dataset=rows())
    refused("label_smoothing_factor", smoothed.train)


@proof("sft-has-its-own-loss", fails="silent")
def sft_has_its_own_loss() -> None:
    def loss(sft: bool, smoothing: float) -> float:
        model = causal_model("llama", vocab_size=128)
        chunked_loss.install(model, chunk_tokens=4, label_smoothing=smoothing)
        values = {key: value for key, value in vars(arguments(None)).items() if key in ("output_dir", "max_steps")}
        plain = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 1}
        examples = Dataset.from_list([{name: ids.tolist() for name, ids in row.items()} for row in rows()])
        if not sft:
            args = TrainingArguments(**values, **plain)
            return float(Trainer(model=model, args=args, train_dataset=examples).train().training_loss)
        vocabulary = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<end>")
        own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False}
        made = SFTTrainer(
            model=model, args=SFTConfig(**values, **plain, **own), train_dataset=examples, processing_class=tokenizer
        )
        return float(made.train().training_loss)

    assert loss(False, 0.0) != loss(False, 0.5), "the part does its work in a Trainer"
    assert loss(True, 0.0) == loss(True, 0.5), "and SFTTrainer never asks it"


@proof("chunked-loss-needs-causal-model", fails="late")
def chunked_loss_needs_causal_model() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **sizes))
    refused("BertForSequenceClassification", lambda: chunked_loss.install(bert))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))
    ids = torch.arange(5, 15).reshape(2, 5)

    def first_step() -> None:
        chunked_loss.install(t5)
        t5(input_ids=ids, labels=ids)

    refused("T5ForConditionalGeneration", first_step)


@proof("one-chunk-only", fails="silent")
def one_chunk_only() -> None:
    made: list[int] = []
    model = causal_model("llama")
    chunked_loss.install(model, chunk_tokens=64, engine="loop", self_check=False)
    cross_entropy = torch.nn.functional.cross_entropy

    def watching(logits: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        made.append(logits.shape[0])
        return cross_entropy(logits, *rest, **more)

    torch.nn.functional.cross_entropy = watching  # type: ignore[assignment]
    try:
        with torch.no_grad():
            model(**batch(2, 32))
            assert made == [64]
            made.clear()
            model(**batch(3, 32))
            assert made == [64, 32]
    finally:
        torch.nn.functional.cross_entropy = cross_entropy  # type: ignore[assignment]


@proof("flash-needs-16-bits", fails="unshown")
def flash_needs_16_bits() -> None:
    messages: list[str] = []
    model = causal_model("llama", dtype="float32")
    log = logging.Handler()
    log.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(log)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        # As if the package were there: what is left is a warning, and the model is loaded.
        model._flash_attn_import_error = lambda **_: None
        assert model._flash_attn_can_dispatch(2, is_init_check=True)
    finally:
        logger.removeHandler(log)
        transformers.logging.set_verbosity(verbosity)
    assert any("only supports torch.float16 and torch.bfloat16" in line for line in messages), messages


@proof("flash-not-installed", fails="late")
def flash_not_installed() -> None:
    if importlib.util.find_spec("flash_attn") is None and importlib.util.find_spec("kernels") is None:
        refused("doesn't seem to be installed", lambda: causal_model("llama", attn_implementation="flash_attention_2"))


@proof("flash-on-cpu", fails="late")
def flash_on_cpu() -> None:
    if not torch.cuda.is_available():
        refused("FlashAttention2 has been toggled on, but it cannot be used",
                lambda: causal_model("gpt2", attn_implementation="flash_attention_2"))  # fmt: skip


@proof("flex-not-supported", fails="late")
def flex_not_supported() -> None:
    refused("does not support", lambda: causal_model("gpt2", attn_implementation="flex_attention"))
    for kind in WITHOUT_FLEX:
        assert not MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(kind))]._supports_flex_attn, kind


@proof("attentions-force-eager", fails="silent")
def attentions_force_eager() -> None:
    def config(**values: Any) -> Any:
        return type(causal_model("llama").config)(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, **values
        )

    asked = config()
    asked.output_attentions = True
    model = AutoModelForCausalLM.from_config(asked)
    assert model.config._attn_implementation == "eager" and len(model(**batch()).attentions) == 2
    assert AutoModelForCausalLM.from_config(config()).config._attn_implementation == "sdpa"
    with_sdpa = config(attn_implementation="sdpa")
    refused("not supported when using the `attn_implementation`",
            lambda: setattr(with_sdpa, "output_attentions", True))  # fmt: skip


@proof("eager-keeps-scores", fails="unshown")
def eager_keeps_scores() -> None:
    def kept(implementation: str, length: int) -> int:
        model = causal_model("gpt2", attn_implementation=implementation)
        return saved_bytes(lambda: model(**batch(1, length)).loss)

    short, long = (kept("eager", length) - kept("sdpa", length) for length in (32, 64))
    assert 3.9 < long / short < 4.2
    assert 0.95 < long / (4 * 4 * 64 * 64 * 2) <= 1  # fp32 × heads × length² × layers; sdpa keeps a sum a row


@proof("nothing-to-fuse", fails="unshown")
def nothing_to_fuse() -> None:
    value = torch.randn(32, 32, requires_grad=True)
    single = value.numel() * value.element_size()
    assert saved_bytes(lambda: ACT2FN["silu"](value)) == single
    assert saved_bytes(lambda: ACT2FN["gelu_pytorch_tanh"](value)) == single
    assert saved_bytes(lambda: ACT2FN["gelu_new"](value)) > 3 * single
    refused("fused-gelu", lambda: fused_gelu.install(causal_model("llama")))


@proof("fused-by-the-compiler", fails="unshown")
def fused_by_the_compiler() -> None:
    value = torch.randn(32, 32, requires_grad=True)
    single = value.numel() * value.element_size()
    # inductor's decompositions and partitioner, without its C++ compiler
    compiled = torch.compile(ACT2FN["gelu_new"], backend="aot_eager_decomp_partition")
    compiled(value)
    assert saved_bytes(lambda: compiled(value)) == single
    assert saved_bytes(lambda: ACT2FN["gelu_new"](value)) > 3 * single
