"""What plans consider the same training, compared with real trainings on the CPU."""

from __future__ import annotations

import base64
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.models.udop.modeling_udop import UdopPreTrainedModel

from hf_memkit.catalog.fp16_overflow import overflow_in_fp16
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.plan.choices import choices_for, of_batch
from hf_memkit.plan.refused_settings import refused
from hf_memkit.prediction.child.training.describe_training import fp16_overflow
from hf_memkit.prediction.child.training.plan_facts import fixed_by_deepspeed, plan_facts
from tests.plan.made_trainings import MADE, changed

SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Own(Trainer):  # type: ignore[misc]
    """Its loss is not divided by the accumulation."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def own_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A mean, which Trainer does not divide by the accumulation either."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **SMALL)
    )


def gpt2() -> Any:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, **SMALL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def bert() -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**shape, **NO_DROPOUT, vocab_size=50))


def t5() -> Any:
    shape = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**shape, vocab_size=50, decoder_start_token_id=0))


def test_models_that_overflow_in_fp16_have_a_warning(tmp_path: Path) -> None:
    """Would notice: T5 in fp16, whose losses become NaN, without a warning; a warning for a model that fp16 suits, or
    for T5 in bf16."""
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    for make, overflows in ((t5, True), (llama, False)):
        trainer = Trainer(make(), arguments)
        arguments.fp16 = False
        assert fp16_overflow(trainer) == ""
        arguments.fp16 = True
        assert bool(fp16_overflow(trainer)) is overflows
        arguments.fp16 = False
        trainer.model.half()
        assert bool(fp16_overflow(trainer)) is overflows, "its weights are in fp16"
    assert overflow_in_fp16("udop", UdopPreTrainedModel._keep_in_fp32_modules), "by its class"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (llama, Trainer),
        (bert, Trainer),
        (t5, Trainer),
        (llama, Own),
        (llama, functools.partial(Trainer, compute_loss_func=own_mean)),
    ],
    ids=["llama", "bert", "t5", "own loss", "compute_loss_func"],
)
def test_another_micro_batch_is_the_same_training_or_another_method(
    make: Any, kind: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Would notice: "same result" where accumulation scales the loss, because Trainer leaves the division to a model
    that does not divide; a micro-batch that is fixed without need; advice that does not help."""

    def first_loss(size: int, accumulation: int, *, divided: bool = False) -> tuple[Any, float]:
        torch.manual_seed(0)
        model = make()
        if divided:
            model.accepts_loss_kwargs = False
        trainer = kind(
            model,
            TrainingArguments(
                str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=1,
                logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)],
        )  # fmt: skip
        facts = plan_facts(trainer)
        trainer.train()
        return facts, next(each["loss"] for each in trainer.state.log_history if "loss" in each)

    (facts, whole), (_, parts) = first_loss(8, 1), first_loss(2, 4)
    group, reason = of_batch(facts.batch)
    if whole == pytest.approx(parts, rel=1e-3):
        assert group == "same result" and not reason
    else:
        assert parts == pytest.approx(4 * whole, rel=0.05)
        assert group == "another method"
        if facts.batch.loss_func:
            assert "compute_loss_func" in reason and "accepts_loss_kwargs" not in reason, "which would change nothing"
            return
        assert "set model.accepts_loss_kwargs = False" in reason
        divided, same = first_loss(2, 4, divided=True)
        assert same == pytest.approx(whole, rel=1e-3) and of_batch(divided.batch)[0] != "another method"


@pytest.mark.slow
def test_parsers_of_training_arguments_are_recognised() -> None:
    """Would notice: flags for a script that reads TrainingArguments from a file, or parses only other arguments; no
    flags for a script that uses TRL's copy of HfArgumentParser."""
    pytest.importorskip("trl")
    code = (
        "from hf_memkit.prediction.child.training import plan_facts as facts; facts.note_argument_parsers()\n"
        "import dataclasses, json, pathlib, sys; from transformers import HfArgumentParser, TrainingArguments\n"
        "Other = dataclasses.make_dataclass('Other', [('name', str, 'x')])\n"
        "HfArgumentParser(Other).parse_args_into_dataclasses()\n"
        "HfArgumentParser(TrainingArguments).parse_dict({'output_dir': 'out'}); assert not facts._argument_parsers\n"
        "HfArgumentParser((Other, TrainingArguments)).parse_args_into_dataclasses()\n"
        "from trl import SFTConfig, TrlParser; sys.argv += ['--use_cpu', 'True', '--bf16', 'False']\n"
        "TrlParser((SFTConfig,)).parse_args_and_config()\n"
        "print([each.__name__ for each in facts._argument_parsers])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "['HfArgumentParser', 'TrlParser']\n", ran.stderr[-500:]


class OwnOptimizer(Trainer):  # type: ignore[misc]
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return torch.optim.SGD(self.model.parameters(), 0.1)


def experts(**options: Any) -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=2, **SMALL, **options))


def opt(dropout: float) -> Any:
    shape = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=16, dropout=dropout, attention_dropout=0.0, **SMALL))


def test_effects_outside_modules_are_recognised(tmp_path: Path) -> None:
    """Would notice: "same result" for an experts' loss that is a mean per micro-batch, for functional dropout or for
    noise on embeddings; a plan for an optimizer that the script does not use; evaluations without a time."""

    def facts(model: Any, kind: Any = Trainer, evaluated: Any = None, **arguments: Any) -> Any:
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        made = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_eval_batch_size=2, **arguments)
        return plan_facts(kind(model, made, train_dataset=rows, eval_dataset=evaluated and {"a": rows, "b": rows}))

    assert of_batch(facts(experts()).batch)[0] == of_batch(facts(opt(0.0)).batch)[0] == "same result"
    assert of_batch(facts(experts(output_router_logits=True)).batch)[0] == "another method"
    assert of_batch(facts(opt(0.1)).batch)[0] == "nearly the same"
    assert of_batch(facts(llama(), neftune_noise_alpha=5.0).batch)[0] == "nearly the same"
    plain, own = facts(llama()), facts(llama(), OwnOptimizer, True, learning_rate=1e-3)
    assert (plain.own_optimizer, own.own_optimizer) == (False, True)
    assert own.length.evaluation_batches == 8 and plain.length.evaluation_batches == 0
    assert own.schedule != plain.schedule == facts(llama(), per_device_train_batch_size=4).schedule


@pytest.mark.parametrize("drops", [False, True])
def test_the_rows_of_an_epoch_are_the_trained_ones(drops: bool, tmp_path: Path) -> None:
    """Would notice: a smaller micro-batch that drops fewer of the last rows in the same number of steps."""
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 125
    options = {"report_to": [], "use_cpu": True, "gradient_accumulation_steps": 2, "dataloader_drop_last": drops}
    trainer = Trainer(llama(), TrainingArguments(str(tmp_path), **options), train_dataset=rows)
    taken = sum(len(batch["input_ids"]) for batch in trainer.get_train_dataloader())
    assert plan_facts(trainer).length.rows_an_epoch == taken == (120 if drops else 125)


def test_a_batch_that_a_deepspeed_config_fixes_is_recognised(tmp_path: Path) -> None:
    """Would notice: setups with another micro-batch, which Trainer refuses."""
    fixed = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(fixed))
    encoded = base64.urlsafe_b64encode(json.dumps({**fixed, "padding": "x" * 400}).encode()).decode()
    for config in (fixed, str(tmp_path / "ds.json"), encoded):
        assert fixed_by_deepspeed(config) == ["train_micro_batch_size_per_gpu"]
    assert fixed_by_deepspeed(None) == [] == fixed_by_deepspeed({"train_micro_batch_size_per_gpu": "auto"})


def test_rules_check_choices_together() -> None:
    """Would notice: a setup with two choices that each work alone, and fail together."""
    own = MADE.arguments
    machine = described_machine("T4", None, "32GB", None)
    lomo, fp16 = {"arguments.optim": "lomo"}, {"arguments.fp16": True}
    assert not refused(lomo, own, machine, 1) and not refused(fp16, own, machine, 1)
    assert "lomo-with-fp16" in refused({**lomo, **fp16}, own, machine, 1)


@pytest.mark.parametrize(
    ("dtypes", "model_type", "proposed"),
    [(["float32"], "llama", True), (["bfloat16", "float32"], "llama", False), (["float32"], "t5", False)],
)
def test_no_fp16_is_proposed_if_it_cannot_train(dtypes: list[str], model_type: str, proposed: bool) -> None:
    """Would notice: fp16 proposed for gradients that no CUDA kernel unscales, or for a model whose losses become
    NaN."""
    own = changed(MADE, arguments__bf16=True, model__trained_dtypes=dtypes, plan__model__model_type=model_type)
    left_out: dict[str, str] = {}
    choices = choices_for(own, described_machine("T4", None, None, None), {}, gpus=1, left_out=left_out)
    assert (len(choices["precision"]) > 1) is proposed and ("fp16" in left_out) is (model_type == "t5")
