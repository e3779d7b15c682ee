"""Proofs about Trainer's own batch, precision and loading, without DeepSpeed."""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from optimi import StableAdamW
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_memkit.checks.rules.batch import LOSS_NOT_SCALED, MEAN_OF_MEANS
from tests.checks.configs import ds
from tests.checks.real import arguments, model, refused, rows
from tests.checks.registry import proof

Rows = list[dict[str, torch.Tensor]]


class _Gradients(TrainerCallback):  # type: ignore[misc]
    """The gradients that the optimizer is about to use, one vector a step."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **others: Any) -> None:
        self.outputs.append(
            torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]).clone()
        )


class _InOrder(Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _pad(batch: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    padded = [("input_ids", 0), ("labels", -100), ("attention_mask", 0)]
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in batch], batch_first=True, padding_value=value)
        for key, value in padded
    }


def _unequal() -> Rows:
    cut = [{key: value[: 3 + 2 * (place % 7)] for key, value in row.items()} for place, row in enumerate(rows())]
    return [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in cut]


def _step(of: Any, micro: int, accumulation: int) -> tuple[torch.Tensor, float]:
    """(gradients, logged loss) of one step over the same eight sequences of unequal lengths."""
    seen = _Gradients()
    args = arguments(None, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation,
                     max_grad_norm=0, logging_strategy="steps", logging_steps=1)  # fmt: skip
    trainer = _InOrder(
        model=copy.deepcopy(of), args=args, train_dataset=_unequal(), data_collator=_pad, callbacks=[seen]
    )
    trainer.train()
    return seen.outputs[0], next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def _off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@proof("accumulation-multiplies-the-loss", fails="silent")
def accumulation_multiplies_the_loss() -> None:
    torch.manual_seed(0)
    bart = BartForCausalLM(BartConfig(
        d_model=16, decoder_layers=1, encoder_layers=1, decoder_attention_heads=2, encoder_attention_heads=2,
        decoder_ffn_dim=32, encoder_ffn_dim=32, vocab_size=128, max_position_embeddings=32, dropout=0.0,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, is_decoder=True, is_encoder_decoder=False,
    ))  # fmt: skip
    (big, big_loss), (split, split_loss) = _step(bart, 8, 1), _step(bart, 2, 4)
    assert 3.5 < float(split.norm() / big.norm()) < 4.5 and 3.9 < split_loss / big_loss < 4.1
    assert set(LOSS_NOT_SCALED) == {name for name, kind in _causal() if _takes_and_drops(kind)}


def _causal() -> list[tuple[str, type]]:
    return [
        (name, getattr(transformers, kinds if isinstance(kinds, str) else kinds[0]))
        for name, kinds in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if "assistant" not in name  # drafts of Gemma 4: they have no loss at all
    ]


def _takes_and_drops(kind: Any) -> bool:
    """Its forward has `**kwargs`, and computes its loss without them."""
    forward = inspect.unwrap(kind.forward)
    takes = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(kind.forward).parameters.values())
    source = inspect.getsource(forward)
    place = source.find("loss_function(")
    passes = place >= 0 and "kwargs" in source[place : place + 300]
    return takes and getattr(kind, "accepts_loss_kwargs", None) is not False and not passes


@proof("accumulation-averages-means", fails="silent")
def accumulation_averages_means() -> None:
    assert set(MEAN_OF_MEANS) == {n for n, kind in _causal() if getattr(kind, "accepts_loss_kwargs", None) is False}
    for flag, expected in ((False, True), (True, False)):
        gpt2 = model()
        gpt2.accepts_loss_kwargs = flag
        off = _off(_step(gpt2, 2, 4)[0], _step(gpt2, 8, 1)[0])
        assert (off > 0.1) == expected and (off < 1e-5) != expected, (flag, off)


class _WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(128, 16), nn.BatchNorm1d(16), nn.Linear(16, 128)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None, **others: Any) -> Any:
        logits = self.head(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / others["num_items_in_batch"]}


@proof("batch-norm-with-accumulation", fails="silent")
def batch_norm_with_accumulation() -> None:
    assert _off(_step(_WithBatchNorm(), 2, 4)[0], _step(_WithBatchNorm(), 8, 1)[0]) > 0.05


class _FullAbove(Trainer):  # type: ignore[misc]
    """A GPU that seven sequences fill."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if len(inputs["input_ids"]) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **options)


@proof("batch-search-shrinks-the-batch", fails="silent")
def batch_search_shrinks_the_batch() -> None:
    args = arguments(None, per_device_train_batch_size=8, gradient_accumulation_steps=4, auto_find_batch_size=True)
    trainer = _FullAbove(model=model(), args=args, train_dataset=rows(64))
    trainer.train()
    assert trainer.state.train_batch_size == 7 and trainer.args.gradient_accumulation_steps == 4


@proof("batch-split-among-processes", fails="silent")
def batch_split_among_processes() -> None:
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    def of_rank_0(split: bool) -> int:
        loader = prepare_data_loader(
            DataLoader(rows(16), batch_size=8), num_processes=4, process_index=0, split_batches=split,
            put_on_device=False,
        )  # fmt: skip
        return len(next(iter(loader))["input_ids"])

    assert (of_rank_0(False), of_rank_0(True)) == (8, 2)


@proof("accumulation-in-accelerator-config", fails="late")
def accumulation_in_accelerator_config() -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    trainer = Trainer(model=model(), args=arguments(None, accelerator_config=config), train_dataset=rows())
    assert trainer.args.gradient_accumulation_steps == 4
    args = arguments(None, accelerator_config=config, gradient_accumulation_steps=2)
    refused("`num_steps` is set but `gradient_accumulation_steps` is greater than 1", lambda: Trainer(model(), args))


def _moved(dtype: torch.dtype, **more: Any) -> tuple[float, float]:
    """(share of the matrices' elements that ten steps leave as they are, mean distance that they go)."""
    torch.manual_seed(0)
    trained = model().to(dtype)
    before = {name: weight.detach().clone() for name, weight in trained.named_parameters() if weight.dim() == 2}
    args = arguments(None, max_steps=10, learning_rate=1e-5, lr_scheduler_type="constant", **more)
    with torch.compiler.set_stance("force_eager"):
        Trainer(model=trained, args=args, train_dataset=rows(32)).train()
    after = dict(trained.named_parameters())
    count = sum(weight.numel() for weight in before.values())
    same = sum(int((after[name] == weight).sum()) for name, weight in before.items())
    far = sum(float((after[name].detach().float() - weight.float()).abs().sum()) for name, weight in before.items())
    return same / count, far / count


def _steps_down(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """How far 20 steps with a gradient of one take a bf16 weight of 0.01."""
    weight = nn.Parameter(torch.full((4,), 0.01, dtype=torch.bfloat16))
    started, made = weight.detach().clone(), optimizer([weight])
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        made.step()
    return float((started - weight.detach()).float()[0])


@proof("bf16-weights-lose-updates", fails="silent")
def bf16_weights_lose_updates() -> None:
    same, far = _moved(torch.float32, optim="adamw_torch")
    assert same < 0.05
    for optim in ("adamw_torch", "adamw_torch_8bit"):
        lost_same, lost_far = _moved(torch.bfloat16, optim=optim)
        assert lost_same > 0.6 and lost_far < 0.5 * far, (optim, lost_same, lost_far, far)
    _, kept_far = _moved(torch.bfloat16, optim="adamw_torch_8bit", optim_args="bf16_stochastic_round=True")
    assert kept_far > 0.8 * far
    # Kahan summation, without being told: 20 steps of 1e-5, each less than half of what bf16 can tell from 0.01.
    chosen, options = Trainer.get_optimizer_cls_and_kwargs(arguments(None, optim="stable_adamw", learning_rate=1e-5))
    assert chosen is StableAdamW and options["kahan_sum"] is None
    assert _steps_down(partial(StableAdamW, **options, triton=False)) > 1.6e-4
    assert _steps_down(partial(torch.optim.AdamW, lr=1e-5)) == 0
    # Mixed precision under FSDP makes trainable weights fp32, in both of its versions.
    one, two = inspect.getsource(Accelerator.prepare_model), inspect.getsource(fsdp2_prepare_model)
    assert one.index('if self.mixed_precision != "no"') < one.index("param.data = param.data.to(torch.float32)")
    assert two.index('accelerator.mixed_precision != "no"') < two.index("param.data = param.data.to(torch.float32)")


@proof("bf16-weights-fp16-scaler", fails="unshown")
def bf16_weights_fp16_scaler() -> None:
    """The kernel is CUDA's; that GradScaler gives it gradients in bf16, unlike fp16 ones, is seen here."""
    given: list[torch.dtype] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
                given.extend(each.dtype for each in args[0])
                return None
            return func(*args, **(kwargs or {}))

    layer = nn.Linear(4, 4).bfloat16()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(layer.parameters())
    scaler.scale(layer(torch.ones(2, 4).bfloat16()).float().sum()).backward()
    with Seen():
        scaler.unscale_(optimizer)
    assert given == [torch.bfloat16] * 2
    # A checkpoint that was saved in bf16 is loaded so, unless another dtype is asked for.
    with tempfile.TemporaryDirectory() as folder:
        model().bfloat16().save_pretrained(folder)
        assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.bfloat16


@proof("fp16-weights-trained", fails="silent")
def fp16_weights_trained() -> None:
    assert math.isnan(_moved(torch.float16, optim="adamw_torch")[1])
    layer = nn.Linear(4, 4).half()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(layer.parameters())
    scaler.scale(layer(torch.ones(2, 4).half()).float().sum()).backward()
    refused("Attempting to unscale FP16 gradients", lambda: scaler.unscale_(optimizer))
    # A checkpoint that was saved in fp16 is loaded so, unless another dtype is asked for.
    with tempfile.TemporaryDirectory() as folder:
        model().half().save_pretrained(folder)
        assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.float16
        assert AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).dtype is torch.float32


@proof("two-precisions", fails="loud")
def two_precisions() -> None:
    refused("At most one of fp16 and bf16 can be True, but not both", lambda: arguments(None, fp16=True, bf16=True))
    refused("but not both", lambda: arguments(None, fp16_full_eval=True, bf16_full_eval=True))


@proof("bf16-emulated", fails="unshown")
@proof("bf16-argument-emulated", fails="unshown")
def bf16_argument_emulated() -> None:
    from transformers.utils.import_utils import is_torch_bf16_gpu_available

    # What Trainer asks counts emulation as support.
    assert "torch.cuda.is_bf16_supported()" in inspect.getsource(is_torch_bf16_gpu_available)
    assert inspect.signature(torch.cuda.is_bf16_supported).parameters["including_emulation"].default is True


@proof("fp16-ignored-on-cpu", fails="silent")
def fp16_ignored_on_cpu() -> None:
    def logits(**more: Any) -> torch.Tensor:
        trainer = Trainer(model=model(), args=arguments(None, **more), eval_dataset=rows(2))
        return torch.tensor(trainer.predict(rows(2)).predictions[0])

    torch.manual_seed(0)
    plain = logits()
    torch.manual_seed(0)
    assert torch.equal(logits(fp16=True), plain)
    torch.manual_seed(0)
    assert not torch.equal(logits(bf16=True), plain)


@proof("tf32-not-there", fails="loud")
def tf32_not_there() -> None:
    refused("--tf32 requires Ampere or a newer GPU", lambda: arguments(None, tf32=True))
    assert arguments(None, tf32=False).tf32 is False


@proof("workers-missing", fails="late")
def workers_missing() -> None:
    trainer = Trainer(model=model(), args=arguments(None, dataloader_persistent_workers=True), train_dataset=rows())
    refused("persistent_workers option needs num_workers > 0", trainer.train)
    refused("can only be set when data is loaded in a different process",
            lambda: arguments(None, dataloader_prefetch_factor=2))  # fmt: skip


@proof("pinning-without-card", fails="silent")
def pinning_without_card() -> None:
    assert arguments(None, dataloader_pin_memory=True).dataloader_pin_memory is False


@proof("low-cpu-mem-usage-ignored", fails="silent")
def low_cpu_mem_usage_ignored() -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        model().save_pretrained(folder)
        for value in (True, False, "nonsense"):
            AutoModelForCausalLM.from_pretrained(folder, low_cpu_mem_usage=value)
    assert not [one for one in shown if "low_cpu_mem_usage" in str(one.message)]


@proof("device-map-with-stage-3", fails="late")
def device_map_with_stage_3() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model().save_pretrained(folder)
        kept = arguments(ds(3))  # transformers asks it, by a weak reference, whether stage 3 is on
        refused("DeepSpeed Zero-3 is not compatible with passing a `device_map`",
                lambda: AutoModelForCausalLM.from_pretrained(folder, device_map="cpu"))  # fmt: skip
        assert kept.deepspeed


@proof("allocator-options", fails="silent")
def allocator_options() -> None:
    # The CPU build has the same parser; only the names of CUDA's own options are checked elsewhere.
    take = torch._C._accelerator_setAllocatorSettings
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        take("expandable_segmentz:True")
        take("expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8")
    assert not message
    refused("Expected 'True' or 'False'", lambda: take("expandable_segments:true"))
    refused("max_split_size_mb too small, must be >= 20", lambda: take("max_split_size_mb:10"))
    refused("INTERNAL ASSERT FAILED", lambda: take("max_split_size_mb=128"))
