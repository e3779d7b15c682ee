"""Collects facts about the user's Trainer for plans, before it is changed for the trace: possible settings, length of
the run, and properties that decide whether another setup gives the same result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from dataclasses import replace
from typing import Any, Final

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig  # accelerate.utils exports it only if deepspeed is installed
from torch import nn
from transformers import HfArgumentParser, PreTrainedModel, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import has_length

from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.gpu.fsdp import parallel_sizes
from hf_memkit.prediction.child.libraries.pretrained import has_device_map, is_loaded, loaded_at
from hf_memkit.prediction.child.trainer_kinds.online import learns_from_answers
from hf_memkit.prediction.child.trainer_kinds.sft import why_not_padding_free
from hf_memkit.prediction.traced_training import BatchEffects, ModelTraits, Padding, PlanFacts, RunLength, Weights
from hf_memkit.setup.script_overrides import overrides_optimizer

_SCHEDULE: Final = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm",
)  # fmt: skip
"""Fields of TrainingArguments that no candidate changes, but a script may derive from ones that candidates change."""

_COMPARING_TRAINERS: Final = ("sentence_transformers.",)
"""Modules of Trainers whose losses compare the rows of a batch: a smaller micro-batch changes the loss."""


def plan_facts(trainer: Any) -> PlanFacts:
    """All facts that are known before batches are chosen."""
    model, arguments = trainer.model, trainer.args
    base = base_model(model)
    config = getattr(base, "config", None)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    return PlanFacts(
        model=ModelTraits(
            model_type=getattr(config, "model_type", None),
            attention=getattr(config, "_attn_implementation", None),
            supports_checkpointing=bool(getattr(base, "supports_gradient_checkpointing", False)),
            supports_sdpa=bool(getattr(base, "_supports_sdpa", False)),
            of_transformers=hasattr(base, "from_pretrained"),
            from_pretrained=is_loaded(base),
            loaded_at=loaded_at(base),
            device_map=has_device_map(base),
            adapters=hasattr(model, "peft_config"),
            quantised=bool(getattr(base, "is_quantized", False)),
            chunkable_loss=_is_chunkable(trainer, base),
        ),
        weights=Weights(
            trained=tuple(weight.numel() for weight in trained),
            frozen=tuple(weight.numel() for weight in frozen),
            trained_bytes=sum(weight.numel() * weight.element_size() for weight in trained),
            frozen_bytes=sum(weight.numel() * weight.element_size() for weight in frozen),
            gradient_bytes=max((weight.element_size() for weight in trained), default=4),
        ),
        batch=BatchEffects(
            rows_compared=any(base_.__module__.startswith(_COMPARING_TRAINERS) for base_ in type(trainer).__mro__)
            or learns_from_answers(trainer),
            scaled_by_accumulation=_scales_gradients(trainer, base),
            loss_func=trainer.compute_loss_func is not None,
            fixed_by_deepspeed=tuple(fixed_by_deepspeed(arguments.deepspeed)),
            late_batch=getattr(trainer, "_train_batch_size", None) not in (None, arguments.train_batch_size),
            batch_norm=any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules()),
            mean_of_micro_batches=_divides_loss(trainer),
            dropout=any(_drops(module) for module in model.modules())
            or bool(getattr(arguments, "neftune_noise_alpha", None)),
        ),
        length=_length(trainer),
        padding=Padding(
            share=None,
            longest_row=None,
            is_left_out=bool(getattr(trainer, "padding_free", False)),
            needed=why_padding_needed(trainer) or why_not_padding_free(trainer),
            counts_first_labels=not getattr(trainer, "_loss_shifts_labels", True),
            cuts_rows=not getattr(trainer, "_skip_prepare_dataset", False),
        ),
        made_at=getattr(trainer, "memkit_made_at", None),
        parses_arguments=bool(_argument_parsers),
        own_optimizer=makes_optimizer(trainer),
        schedule=tuple(str(getattr(arguments, name, None)) for name in _SCHEDULE),
    )


def makes_optimizer(trainer: Any) -> bool:
    """Whether the script makes the optimizer, instead of `optim`; a method that overrides its creation may call
    Trainer's."""
    is_given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    return is_given or overrides_optimizer(trainer)


def made_by_trainer(trainer: Any) -> bool:
    """Whether Trainer makes the optimizer from these arguments, although a method overrides its creation: front ends
    call Trainer's unless more is requested (llamafactory 0.9.5, axolotl 0.19.0, ms-swift 4.6.0)."""
    made = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return type(made) is trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[0]


def why_padding_needed(trainer: Any) -> str:
    """Why rows cannot be concatenated without padding in this training; empty if they can. The model must be a causal
    language model that accepts positions and computes in 16 bits with flash attention, on a GPU that supports it."""
    arguments, model = trainer.args, trainer.model
    base = base_model(model)
    name = type(base).__name__
    if not isinstance(base, PreTrainedModel) or not name.endswith(("ForCausalLM", "LMHeadModel")):
        return f"{name} is not a causal language model of transformers"
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return f"{name} takes no position_ids"
    if not base._supports_flash_attn:
        return f"{name} has no flash attention, without which rows would see one another"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return "flash attention needs compute capability 8.0 or later"
    if not (arguments.bf16 or arguments.fp16 or base.dtype in (torch.bfloat16, torch.float16)):
        return "flash attention computes in 16 bits, and the script trains in fp32"
    return ""


_argument_parsers: list[type] = []  # parsers that read TrainingArguments from the command line


def note_argument_parsers() -> None:
    """Records from here on whether the script reads its TrainingArguments from the command line with HfArgumentParser,
    TRL's copy of it (trl 1.16.0: scripts/_hf_argparser.py) or a subclass."""

    def watch(module: Any) -> None:
        kind = module.HfArgumentParser
        plain = kind.parse_args_into_dataclasses

        @functools.wraps(plain)
        def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(kind, type) and issubclass(kind, TrainingArguments) for kind in self.dataclass_types):
                _argument_parsers.append(type(self))
            return plain(self, *args, **kwargs)

        kind.parse_args_into_dataclasses = parse

    for name in (HfArgumentParser.__module__, "trl.scripts._hf_argparser"):
        when_imported(name, watch)


_TOKEN_COUNTS: Final = ("num_items_in_batch", "loss_function(", "loss_kwargs")
"""Code of a loss that contains one of these divides by the tokens of the whole step."""


def fixed_by_deepspeed(config: Any) -> list[str]:
    """Batch sizes that a DeepSpeed JSON sets; Trainer refuses others (transformers 5.23.0: integrations/deepspeed.py,
    `trainer_config_finalize`)."""
    if not config:
        return []
    content = HfDeepSpeedConfig(config).config  # from a path, a dictionary, or JSON in base64
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return [name for name in names if content.get(name, "auto") != "auto"]


def _divides_loss(trainer: Any) -> bool:
    """Whether Trainer divides the loss by the accumulation steps (transformers 5.23.0: trainer.py 2103-2111)."""
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is not None:
        return not is_scaled
    return not getattr(trainer, "model_accepts_loss_kwargs", False) and trainer.compute_loss_func is None


def _scales_gradients(trainer: Any, model: Any) -> bool:
    """Whether other accumulation steps scale the gradients. Trainer does not divide by them if `forward` accepts
    further keyword arguments (transformers 5.23.0: trainer.py 518 and 2159), even if the loss ignores the tokens of
    the step, as in BERT, T5 and BART, or in a user's `compute_loss`."""
    if _divides_loss(trainer) or getattr(trainer, "loss_is_scaled_for_ga", None):
        return False
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        return True  # the auxiliary loss is a mean per micro-batch (transformers 5.23.0: `load_balancing_loss_func`)
    own: Any = trainer.compute_loss_func
    if own is None and not type(trainer).compute_loss.__module__.startswith(("transformers.", "trl.")):
        own = type(trainer).compute_loss
        if "super().compute_loss" in _source(own):
            own = None
    code = _source(own) if own is not None else _source(type(model).forward)
    body = code.partition(":\n")[2] if own is not None else code
    return not any(name in body for name in _TOKEN_COUNTS)


def _is_chunkable(trainer: Any, model: Any) -> bool:
    """Whether the loss is transformers' causal one, and nothing else reads the logits in training."""
    if not isinstance(model, PreTrainedModel) or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    if trainer.args.label_smoothing_factor or trainer.compute_loss_func is not None:
        return False
    own = not type(trainer).compute_loss.__module__.startswith("transformers.")
    return not own and model.get_output_embeddings() is not None and model.loss_function is ForCausalLMLoss


def _source(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def _drops(module: nn.Module) -> bool:
    """Whether it is random in training: dropout, or an attribute with a rate, such as dropout in an attention kernel,
    OPT's layers (`dropout`), stochastic depth (`drop_prob`, `layerdrop`)."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _length(trainer: Any) -> RunLength:
    length = RunLength(generates=bool(getattr(trainer.args, "predict_with_generate", False)))
    with contextlib.suppress(Exception):  # a loader without a length, a custom Trainer
        loader = trainer.get_train_dataloader()
        values = trainer.set_initial_training_values(trainer.args, loader)
        steps = int(values[-1])
        if 0 < steps < sys.maxsize:
            length = replace(length, steps=steps, steps_an_epoch=int(values[1]))
            if has_length(loader):
                arguments, rows = trainer.args, int(values[2])
                length = replace(length, rows=rows)
                # A last batch is dropped, or several GPUs repeat rows until each has a whole batch (accelerate 1.15:
                # data_loader.py, `BatchSamplerShard`).
                fills = arguments.world_size > 1 and getattr(trainer.accelerator, "even_batches", True)
                if arguments.dataloader_drop_last or fills:
                    sizes = parallel_sizes(trainer)
                    batches = arguments.world_size // sizes.get("cp_size", 1) // sizes.get("tp_size", 1)
                    rows = int(len(loader) * arguments.train_batch_size * batches)
                length = replace(length, rows_an_epoch=rows)
    with contextlib.suppress(Exception):
        sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
        if None not in sets.values():
            batches = sum(len(trainer.get_eval_dataloader(data)) for data in sets.values())
            length = replace(length, evaluation_batches=batches)
    return length
