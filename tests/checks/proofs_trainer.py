"""Proofs that need Trainer and accelerate: what is filled in, compared, or silently left."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from hf_memkit.checks.rules.trainer import _NEEDED, _OPTIMIZER_DEFAULTS, DEFAULTS
from tests.checks.case import CPU, ZERO
from tests.checks.configs import ADAMW, GONE, ds
from tests.checks.real import arguments, optimizers, refusals, refused, train, trainer
from tests.checks.registry import proof

_WARM_UP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}
_DECAY = {"type": "WarmupDecayLR", "params": {**_WARM_UP, "warmup_num_steps": 7, "total_num_steps": 100}}

refusals(
    "late", lambda changes: train(ds(2, changes)),
    ("schedule-mismatch", "ds scheduler.params.total_num_steps=100 vs hf num_training_steps", {"scheduler": _DECAY}),
    ("schedule-mismatch", "ds scheduler.params.warmup_num_steps=7 vs hf warmup_steps=1", {"scheduler": _DECAY}),
    ("hard-coded", "ds fp16.enabled=True vs hf fp16|fp16_full_eval=False", {"fp16.enabled": True}),
    ("hard-coded", "ds train_batch_size=64 vs hf", {"train_batch_size": 64}),
    ("unknown-optimizer", "AdamWW is not a supported DeepSpeed Optimizer",
     {"optimizer": {"type": "AdamWW", "params": {"lr": "auto"}}}),
    ("unknown-scheduler", "does not recognize LR scheduler WarmUpLR",
     {"optimizer": ADAMW, "scheduler": {"type": "WarmUpLR", "params": {}}}),
    ("clipping-in-optimizer", "'max_grad_norm' is not supported",
     {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "max_grad_norm": 1.0}}}),
)  # fmt: skip
refusals(
    "late", lambda stage, arguments: trainer(ds(stage), **arguments),
    ("batch-search-at-stage-3", "isn't supported yet with DeepSpeed Zero-3", 3, {"auto_find_batch_size": True}),
    ("fsdp-and-deepspeed", "Using --fsdp xxx together with --deepspeed", 2, {"fsdp": "full_shard"}),
    ("best-model-without-states", "can't be used with `save_only_model`", 2,
     {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}),
)  # fmt: skip


@proof("accumulation-missing", fails="late")
def accumulation_missing() -> None:
    without = ds(2, {"gradient_accumulation_steps": GONE})
    refused("train_batch_size is not equal", lambda: train(without, gradient_accumulation_steps=2))


@proof("auto-not-filled", fails="late")
def auto_not_filled() -> None:
    message = "`zero_optimization.allgather_bucket_size` not found in kwargs"
    refused(message, lambda: train(ds(2, {f"{ZERO}.allgather_bucket_size": "auto"})))
    gather = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    plugin = arguments(ds(3, {gather: "auto"})).deepspeed_plugin
    assert plugin.hf_ds_config.get_value(gather) is False


@proof("trainer-mismatch", fails="late")
def trainer_mismatch() -> None:
    refused("ds gradient_accumulation_steps=1 vs hf gradient_accumulation_steps=2",
            lambda: train(ds(2, {"gradient_accumulation_steps": 1}), gradient_accumulation_steps=2))  # fmt: skip
    refused("ds gradient_clipping=0.5 vs hf max_grad_norm=1.0", lambda: train(ds(2, {"gradient_clipping": 0.5})))
    real = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none")
    for name, value in DEFAULTS.items():
        actual = getattr(real, name)
        assert getattr(actual, "value", actual) == value, name


@proof("learning-rate-missing", fails="silent")
def learning_rate_missing() -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    done = train(ds(2, section), learning_rate=2e-5, lr_scheduler_type="constant")
    assert done.model_wrapped.get_lr()[0] == 1e-3
    assert (
        train(ds(2, {"optimizer": ADAMW}), learning_rate=2e-5, lr_scheduler_type="constant").model_wrapped.get_lr()[0]
        == 2e-5
    )


@proof("optimizer-params-missing", fails="silent")
def optimizer_params_missing() -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
    done = train(ds(2, section), adam_beta2=0.95)
    assert done.model_wrapped.basic_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    import deepspeed

    for optimizer in (deepspeed.ops.adam.FusedAdam, deepspeed.ops.adam.DeepSpeedCPUAdam):
        parameters = inspect.signature(optimizer).parameters
        for name, value in _OPTIMIZER_DEFAULTS.items():
            default = parameters[name].default
            assert (list(default) if name == "betas" else default) == value


@proof("scheduler-params-missing", fails="late")
def scheduler_params_missing() -> None:
    from deepspeed.runtime import lr_schedules

    from hf_memkit.checks.deepspeed_keys import SCHEDULERS

    for name in SCHEDULERS:
        parameters = list(inspect.signature(getattr(lr_schedules, name)).parameters.values())[1:]
        needed = tuple(each.name for each in parameters if each.default is inspect.Parameter.empty)
        assert needed == _NEEDED.get(name, ()), name
    section = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}}
    refused("total_num_steps", lambda: train(ds(2, section)))


@proof("deepspeed-config-in-yaml", fails="loud")
def deepspeed_config_in_yaml() -> None:
    path = Path(tempfile.mkdtemp()) / "ds.yaml"
    path.write_text("zero_optimization: {stage: 2}\n")
    refused("JSONDecodeError", lambda: arguments(str(path)))


@proof("clipping-missing", fails="silent")
def clipping_missing() -> None:
    done = train(ds(2, {"gradient_clipping": GONE}), max_grad_norm=0.25)
    assert done.model_wrapped.gradient_clipping() == 1.0
    assert train(ds(2), max_grad_norm=0.25).model_wrapped.gradient_clipping() == 0.25


@proof("scheduler-twice", fails="silent")
def scheduler_twice() -> None:
    section = {"scheduler": {"type": "WarmupLR", "params": {**_WARM_UP, "warmup_num_steps": "auto"}}}
    done = train(ds(2, section), lr_scheduler_type="cosine")
    assert type(done.model_wrapped.lr_scheduler).__name__ == "WarmupLR"


@proof("zero-section-missing", fails="loud")
def zero_section_missing() -> None:
    refused("Please specify the ZeRO optimization config", lambda: arguments(ds(0, {ZERO: GONE})))


@proof("optimizer-replaced", fails="silent")
def optimizer_replaced() -> None:
    done = train(ds(2, CPU), optim="sgd")
    assert optimizers(done)[1] == "DeepSpeedCPUAdam" and done.model_wrapped.basic_optimizer.adam_w_mode is False
    kept = train(ds(2, {**CPU, "zero_force_ds_cpu_optimizer": False}), optim="sgd")
    assert optimizers(kept)[1] == "SGD"
    refused("unexpected keyword argument 'adamw_mode'", lambda: train(ds(2, CPU), optim="adagrad"))
    refused("incompatible function arguments", lambda: train(ds(2, CPU), optim="adafactor"))
    assert train(ds(2, CPU), optim="adamw_torch").model_wrapped.basic_optimizer.adam_w_mode is True


@proof("optimizer-twice", fails="silent")
def optimizer_twice() -> None:
    assert optimizers(train(ds(2, {"optimizer": ADAMW}), optim="sgd"))[1] == "AdamW"


@proof("evaluation-only", fails="late")
def evaluation_only() -> None:
    refused("ZeRO inference only makes sense with ZeRO Stage 3", lambda: trainer(ds(2)).evaluate())


@proof("no-weights-saved", fails="silent")
def no_weights_saved() -> None:
    gather = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    for changes, expected in (({gather: GONE}, 0), ({}, 1)):
        done = train(ds(3, changes))
        done.save_model()
        assert len(list(Path(done.args.output_dir).glob("*.safetensors"))) == expected, changes


@proof("text-for-truth", fails="silent")
def text_for_truth() -> None:
    """The text is kept, and a real Trainer computes in bf16 because of it."""
    assert arguments(None, bf16="false").bf16 == "false"
    made = Trainer(model=torch.nn.Linear(1, 1), args=arguments(None, bf16="false"))
    assert made.accelerator.mixed_precision == "bf16"
    assert Trainer(model=torch.nn.Linear(1, 1), args=arguments(None)).accelerator.mixed_precision == "no"


@proof("text-for-number", fails="late")
def text_for_number() -> None:
    import yaml

    assert yaml.safe_load("learning_rate: 1e-4") == {"learning_rate": "1e-4"}
    refused("'<=' not supported between instances of 'float' and 'str'", lambda: train(ds(2), learning_rate="1e-4"))
    from tests.checks.proofs_arguments import parse_with_trl

    assert parse_with_trl(learning_rate="1e-4").learning_rate == 1e-4  # TRL's parser converts
