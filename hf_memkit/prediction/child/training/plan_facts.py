"""What only plans have to know of the user's Trainer, before anything is changed for its trace: what could be done in
another way, how long the run is, and what decides whether another setup gives the same result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from dataclasses import replace
from typing import Any, Final

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig  # accelerate.utils has it only beside deepspeed
from torch import nn
from transformers import HfArgumentParser, PreTrainedModel, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import has_length

from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.libraries.pretrained import has_device_map, is_loaded, loaded_at
from hf_memkit.prediction.child.trainer_kinds.online import learns_from_answers
from hf_memkit.prediction.child.trainer_kinds.sft import refuses_padding_free
from hf_memkit.prediction.traced_training import BatchEffects, ModelTraits, Padding, PlanFacts, RunLength, Weights
from hf_memkit.setup.script_overrides import overrides_optimizer

_SCHEDULE: Final = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm",
)  # fmt: skip
"""Of TrainingArguments: what no candidate changes, though a script may compute it from what one does."""

_FREE: Final = ("sentence_transformers.",)
"""Trainers whose losses compare the rows of a batch with one another: a smaller micro-batch is another loss."""


def plan_facts(trainer: Any) -> PlanFacts:
    """All that is known before batches are chosen."""
    model, arguments = trainer.model, trainer.args
    base = base_model(model)
    config = getattr(base, "config", None)
    trained = [each for each in model.parameters() if each.requires_grad]
    frozen = [each for each in model.parameters() if not each.requires_grad]
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
            trained=tuple(each.numel() for each in trained),
            frozen=tuple(each.numel() for each in frozen),
            trained_bytes=sum(each.numel() * each.element_size() for each in trained),
            frozen_bytes=sum(each.numel() * each.element_size() for each in frozen),
            gradient_bytes=max((each.element_size() for each in trained), default=4),
        ),
        batch=BatchEffects(
            rows_compared=any(each.__module__.startswith(_FREE) for each in type(trainer).__mro__)
            or learns_from_answers(trainer),
            scaled_by_accumulation=_is_scaled(trainer, base),
            loss_func=trainer.compute_loss_func is not None,
            fixed_by_deepspeed=tuple(fixed_by_deepspeed(arguments.deepspeed)),
            late_batch=getattr(trainer, "_train_batch_size", None) not in (None, arguments.train_batch_size),
            batch_norm=any(isinstance(each, nn.modules.batchnorm._NormBase) for each in model.modules()),
            mean_of_micro_batches=_is_divided(trainer),
            dropout=any(_drops(each) for each in model.modules())
            or bool(getattr(arguments, "neftune_noise_alpha", None)),
        ),
        length=_length(trainer),
        padding=Padding(
            share=None,
            longest_row=None,
            is_left_out=bool(getattr(trainer, "padding_free", False)),
            needed=needs_padding(trainer) or refuses_padding_free(trainer),
            counts_first_labels=not getattr(trainer, "_loss_shifts_labels", True),
            cuts_rows=not getattr(trainer, "_skip_prepare_dataset", False),
        ),
        made_at=getattr(trainer, "memkit_made_at", None),
        parses_arguments=bool(_made_parsers),
        own_optimizer=trainer.optimizer is not None
        or trainer.optimizer_cls_and_kwargs is not None
        or overrides_optimizer(trainer),
        schedule=tuple(str(getattr(arguments, name, None)) for name in _SCHEDULE),
    )


def made_by_trainer(trainer: Any) -> bool:
    """Whether such a method has made the optimizer that Trainer makes of these arguments: those of front ends call
    Trainer's unless one asks for more (llamafactory 0.9.5, axolotl 0.19.0, ms-swift 4.6.0)."""
    made = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return type(made) is trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[0]


def needs_padding(trainer: Any) -> str:
    """Why rows cannot lie behind one another in this training, without padding; empty: they can. The model must
    continue a text, take positions and compute in 16 bits with flash attention, on a GPU that has it."""
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


_made_parsers: list[type] = []
"""Those that read TrainingArguments from the command line."""


def note_parsers() -> None:
    """Notes from here on whether the script reads its TrainingArguments from the command line with HfArgumentParser,
    TRL's copy of it (trl 1.16.0: scripts/_hf_argparser.py) or a subclass."""

    def watch(module: Any) -> None:
        kind = module.HfArgumentParser
        plain = kind.parse_args_into_dataclasses

        @functools.wraps(plain)
        def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, type) and issubclass(each, TrainingArguments) for each in self.dataclass_types):
                _made_parsers.append(type(self))
            return plain(self, *args, **kwargs)

        kind.parse_args_into_dataclasses = parse

    for name in (HfArgumentParser.__module__, "trl.scripts._hf_argparser"):
        when_imported(name, watch)


_COUNTS: Final = ("num_items_in_batch", "loss_function(", "loss_kwargs")
"""With one of these the code of a loss divides by the tokens of the whole step."""


def fixed_by_deepspeed(config: Any) -> list[str]:
    """Sizes of the batch that a DeepSpeed JSON sets itself: Trainer refuses others (transformers 5.23.0:
    integrations/deepspeed.py, `trainer_config_finalize`)."""
    if not config:
        return []
    read = HfDeepSpeedConfig(config).config  # a path, a dictionary, or JSON in base64
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return [name for name in names if read.get(name, "auto") != "auto"]


def _is_divided(trainer: Any) -> bool:
    """Whether Trainer divides the loss by the accumulation (transformers 5.23.0: trainer.py 2103-2111)."""
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is not None:
        return not is_scaled
    return not getattr(trainer, "model_accepts_loss_kwargs", False) and trainer.compute_loss_func is None


def _is_scaled(trainer: Any, model: Any) -> bool:
    """Whether another accumulation scales the gradients: Trainer does not divide by it where `forward` takes further
    keyword arguments (transformers 5.23.0: trainer.py 518 and 2159), also where the loss then ignores how many tokens
    the step has, as those of BERT, T5 and BART do, or a `compute_loss` of the user's."""
    if _is_divided(trainer) or getattr(trainer, "loss_is_scaled_for_ga", None):
        return False
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        return True  # that loss is a mean of each micro-batch (transformers 5.23.0: `load_balancing_loss_func`)
    own: Any = trainer.compute_loss_func
    if own is None and not type(trainer).compute_loss.__module__.startswith(("transformers.", "trl.")):
        own = type(trainer).compute_loss
        if "super().compute_loss" in _source(own):
            own = None
    code = _source(own) if own is not None else _source(type(model).forward)
    taken = code.partition(":\n")[2] if own is not None else code
    return not any(each in taken for each in _COUNTS)


def _is_chunkable(trainer: Any, model: Any) -> bool:
    """Whether the loss is transformers' of a causal language model, and nothing else reads the logits in training."""
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
    """Whether it draws in training: dropout, or a share of its own to drop, such as within an attention kernel, OPT's
    layers (`dropout`), stochastic depth (`drop_prob`, `layerdrop`)."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    shares = (each for name, each in vars(module).items() if "drop" in name or "jitter" in name)
    return any(isinstance(each, float) and each > 0 for each in shares)


def _rows_an_epoch(trainer: Any, loader: Any, rows: int) -> int:
    """Which all GPUs take together: without those of a last batch that is dropped; where it is not, several GPUs take
    some rows again until each has a whole one (accelerate 1.15: data_loader.py, `BatchSamplerShard`)."""
    arguments = trainer.args
    fills = arguments.world_size > 1 and getattr(trainer.accelerator, "even_batches", True)
    if arguments.dataloader_drop_last or fills:
        return int(len(loader) * arguments.train_batch_size * arguments.world_size)
    return rows


def _length(trainer: Any) -> RunLength:
    found = RunLength(generates=bool(getattr(trainer.args, "predict_with_generate", False)))
    with contextlib.suppress(Exception):  # a loader without a length, a Trainer of another kind
        loader = trainer.get_train_dataloader()
        values = trainer.set_initial_training_values(trainer.args, loader)
        steps = int(values[-1])
        if 0 < steps < sys.maxsize:
            found = replace(found, steps=steps, steps_an_epoch=int(values[1]))
            if has_length(loader):
                rows = int(values[2])
                found = replace(found, rows=rows)
                found = replace(found, rows_an_epoch=_rows_an_epoch(trainer, loader, rows))
    with contextlib.suppress(Exception):
        sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
        if None not in sets.values():
            batches = sum(len(trainer.get_eval_dataloader(each)) for each in sets.values())
            found = replace(found, evaluation_batches=batches)
    return found
