"""Rows without padding, as a plan proposes them: what TRL makes of it, and what a plan says of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_memkit import predict_script
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.library_versions import to_installed_arguments
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.choices import LeftOut, choices_for
from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.make_plan import Asked, plan_gpus
from hf_memkit.plan.pasted import pasted
from hf_memkit.plan.plan import Plan
from hf_memkit.prediction.child.training.plan_facts import needs_padding, plan_facts
from hf_memkit.prediction.traced_training import Padding, TracedTraining
from tests.plan.made_trainings import changed

pytest.importorskip("trl")

LENGTHS = [4, 40, 7, 33, 12, 25, 60, 9] * 4
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

SCRIPT = """
import datasets, json, sys
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

fields, options = map(json.loads, sys.argv[1:3])
words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
rows = datasets.Dataset.from_dict({"input_ids": [[2] * (32 + 97 * n % 900) for n in range(64)]})
config = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=4000,
    max_position_embeddings=1024,
)
model = LlamaForCausalLM(config) if options == "by hand" else AutoModelForCausalLM.from_config(config, **options)
arguments = SFTConfig("out", **{"report_to": "none", "bf16": True, "optim": "sgd", "save_strategy": "no", **fields})
SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
"""
OWN = {"per_device_train_batch_size": 8, "use_liger_kernel": True, "activation_checkpointing": False}
L4 = described_machine("L4", None, "64GB", None)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=50))


def gpt2() -> Any:
    drawn = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, **drawn))


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2])
def test_trl_trains_on_the_same_tokens(make: Any, tmp_path: Path) -> None:
    """Would notice: rows that see one another, a row that is cut or lost, a loss that is divided by another number of
    tokens than is said. On a CPU, with sdpa."""
    import datasets
    import torch
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    rows = datasets.Dataset.from_dict({"input_ids": [[2 + (n * at) % 40 for at in range(n)] for n in LENGTHS]})

    def losses(**fields: Any) -> tuple[list[float], Padding]:
        set_seed(0)
        trainer = SFTTrainer(
            make(),
            args=SFTConfig(
                str(tmp_path), per_device_train_batch_size=8, max_steps=3, logging_steps=1, report_to="none",
                use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
                **to_installed_arguments({"activation_checkpointing": False}), **fields,
            ),
            train_dataset=rows, processing_class=tokenizer(),
        )  # fmt: skip
        facts = plan_facts(trainer).padding
        torch.manual_seed(0)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each], facts

    (padded, facts), (free, of_free) = losses(), losses(padding_free=True, max_length=None)
    assert of_free.is_left_out and not facts.is_left_out
    if facts.counts_first_labels:
        share = (sum(LENGTHS[:8]) - 8) / sum(LENGTHS[:8])
        assert padded[0] == pytest.approx(share * free[0], rel=0.02) and padded[0] < 0.99 * free[0]
    else:
        assert free == pytest.approx(padded, rel=1e-5)
    assert facts.counts_first_labels == (make is gpt2)


@dataclass
class Found:
    plan: Plan
    own: Judged
    free: Judged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def planned(folder: Path, options: Any = None, **fields: Any) -> Plan:
    arguments = (json.dumps({**OWN, **fields}), json.dumps(options or {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return plan_gpus(UserScript.found("train.py", arguments), [L4], Asked(limit_s=60))[0]


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    plan = planned(folder)
    names = {each.candidate.name: each for each in plan.traced}
    return Found(plan, plan.own, names["8 × 1, padding-free"])


@pytest.mark.exhaustive
@pytest.mark.tracing
def test_the_same_tokens_in_less_memory_and_time(found: Found) -> None:
    """Would notice: a candidate whose rows are padded all the same, tokens that are counted with padding or twice, a
    setup that says nothing of its result, settings that cannot be pasted."""
    own, free = found.own, found.free
    assert 0.3 < own.facts.padding.share < 0.6
    assert free.facts.model.attention == "flash_attention_2" and free.facts.padding.is_left_out
    mean = sum(32 + 97 * n % 900 for n in range(64)) / 64
    for each in (own, free):
        assert each.step_time is not None
        assert sum(each.step_time.by_phase.values()) == pytest.approx(each.seconds, rel=1e-3), "of average batches"
    assert own.tokens == pytest.approx(8 * mean, rel=0.05) and free.tokens == pytest.approx(8 * mean, rel=0.05)
    assert own.prediction is not None and free.prediction is not None and free.fits
    held = own.prediction.categories["activations"], free.prediction.categories["activations"]
    assert held[1] < held[0]
    assert free.seconds is not None and own.seconds is not None and free.seconds < own.seconds
    assert free.candidate.group == "nearly the same" and "of a batch now" in free.candidate.result
    said = pasted(free.candidate)
    assert "--padding_free True" in said.flags and said.no_flag == ("max_length=None",)
    assert said.before == ("pip install flash-attn  # or kernels",)
    assert "max_length" not in " ".join(said.flags) and "max_length: null" in said.yaml
    assert found.plan.best("same result") is not None, "its neighbours are looked at too"


@pytest.mark.slow
@pytest.mark.tracing
def test_it_is_what_the_script_gives_with_these_settings(
    found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: settings that a trace has and a user's script would not have."""
    monkeypatch.chdir(folder)
    fields = {**OWN, "padding_free": True, "max_length": None}
    by_hand = predict_script(
        "train.py", [json.dumps(fields), json.dumps({"attn_implementation": "flash_attention_2"})], gpu="L4"
    )
    free = found.free.prediction
    assert free is not None and by_hand.total_bytes == free.total_bytes
    assert by_hand.peak_allocated_bytes == free.peak_allocated_bytes and by_hand.categories == free.categories


@pytest.mark.tracing
@pytest.mark.exhaustive
def test_a_model_that_takes_no_option_is_no_setup(folder: Path) -> None:
    """Would notice: rows behind one another judged with an attention that the user's model would not have."""
    plan = planned(folder, "by hand", max_steps=3)
    assert "which stays sdpa" in plan.left_out["padding-free"]
    assert not any("padding-free" in each.candidate.name for each in plan.traced)


def left_out(own: TracedTraining, **others: Any) -> tuple[list[Any], LeftOut]:
    why: LeftOut = {}
    found = choices_for(changed(own, **others), L4, {}, gpus=1, left_out=why)["padding"]
    return [each for each in found if each is not None], why


@pytest.mark.slow
@pytest.mark.tracing
def test_where_it_is_not_proposed_a_line_says_why(found: Found) -> None:
    """Would notice: rows that max_length cuts and padding_free does not; a reason that is lost; a line where there is
    no padding to leave out."""
    own = found.own.training
    assert own is not None
    assert len(left_out(own)[0]) == 1
    cut = changed(own, arguments__max_length=512)
    assert "max_length=512" in left_out(cut)[1]["padding-free"]
    assert len(left_out(cut, plan__padding__cuts_rows=False)[0]) == 1, "what is prepared already is not cut"
    assert left_out(own, plan__padding__needed="of old")[1]["padding-free"] == "of old"
    assert left_out(own, plan__padding__share=0.01)[1]["padding-free"] == "1.0 % of a batch is padding"
    for nothing in ({"share": None}, {"share": 0.0}, {"is_left_out": True}):
        choices, why = left_out(own, **{f"plan__padding__{name}": value for name, value in nothing.items()})
        assert not choices and "padding-free" not in why
    assert {"packing", "torch_compile", "half weights with stochastic rounding"} <= set(why)


def test_what_keeps_padding_in_a_training(tmp_path: Path) -> None:
    """Would notice: flash attention offered to a model without it, or where no GPU has it."""
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    bert = BertForMaskedLM(BertConfig(**SHAPE, vocab_size=50))
    assert "BertForMaskedLM is not a causal language model" in needs_padding(Trainer(bert, arguments))
    assert "8.0 or later" in needs_padding(Trainer(llama(), arguments)), "no GPU here"
