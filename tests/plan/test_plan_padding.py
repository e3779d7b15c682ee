"""Training without padding: TRL trains on the same tokens, and plans propose it only where that is so."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.catalog.library_versions import to_installed_arguments
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.choices import LeftOut, choices_for
from hf_memkit.plan.pasted import pasted
from hf_memkit.prediction.child.training.plan_facts import plan_facts, why_padding_needed
from hf_memkit.prediction.running_scripts import ScriptJob
from hf_memkit.prediction.traced_training import Padding, TracedTraining
from hf_memkit.prediction.waiting_script import WaitingScript
from hf_memkit.setup.script_overrides import Overrides
from tests.plan.made_trainings import changed

pytest.importorskip("trl")

LENGTHS = [4, 40, 7, 33, 12, 25, 60, 9] * 4
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

SCRIPT = """
import datasets, json, sys
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

fields, options = map(json.loads, sys.argv[1:3])
words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
rows = datasets.Dataset.from_dict({"input_ids": [[2] * (32 + 97 * n % 900) for n in range(64)]})
config = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=4000,
    max_position_embeddings=1024,
)
model = AutoModelForCausalLM.from_config(config, **options)
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
    """Would notice: rows that attend to one another, a truncated or lost row, a loss with another divisor than the
    plan names. On a CPU, with sdpa."""
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


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WaitingScript]:
    """The script, in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sft"))
        Path("train.py").write_text(SCRIPT)
        with WaitingScript(ScriptJob(UserScript.at("train.py", (json.dumps(OWN), "{}")), L4)) as script:
            yield script


@pytest.fixture(scope="module")
def own(script: WaitingScript) -> TracedTraining:
    training = script.trace(Overrides()).outcome().training
    assert training is not None
    return training


@pytest.mark.slow
def test_the_trace_is_that_of_the_script_with_these_settings(script: WaitingScript, own: TracedTraining) -> None:
    """Would notice: settings in the trace that the user's script would not have, or that cannot be pasted."""
    (choice,), _ = left_out(own)
    candidate = Candidate(8, 1, (choice,))
    free = script.trace(candidate.overrides).outcome().training
    paste = pasted(candidate)
    assert "--padding_free True" in paste.flags and paste.no_flag == ("max_length=None",)
    assert paste.before == ("pip install flash-attn  # or kernels",) and "max_length: null" in paste.yaml
    fields = json.dumps({**OWN, "padding_free": True, "max_length": None})
    options = json.dumps({"attn_implementation": "flash_attention_2"})
    with WaitingScript(ScriptJob(UserScript.at("train.py", (fields, options)), L4)) as traced:
        typed = traced.trace(Overrides()).outcome().training
    assert free is not None and typed is not None and free.facts.padding.is_left_out
    assert free.trace.peaks_by_phase() == typed.trace.peaks_by_phase()
    activations = [each.trace.peak().categories["activations"] for each in (own, free)]
    assert activations[1] < activations[0] and free.facts.model.attention == "flash_attention_2"


def left_out(own: TracedTraining, **others: Any) -> tuple[list[Any], LeftOut]:
    why: LeftOut = {}
    choices = choices_for(changed(own, **others), L4, {}, gpus=1, left_out=why)["padding"]
    return [each for each in choices if each is not None], why


@pytest.mark.slow
def test_the_reason_is_given_if_padding_is_kept(own: TracedTraining) -> None:
    """Would notice: rows that max_length truncates and padding_free does not; a missing reason; a reason although
    there is no padding."""
    assert 0.3 < own.facts.padding.share < 0.6 and len(left_out(own)[0]) == 1
    cut = changed(own, arguments__max_length=512)
    assert "max_length=512" in left_out(cut)[1]["padding-free"]
    assert len(left_out(cut, plan__padding__cuts_rows=False)[0]) == 1, "prepared rows are not truncated"
    assert left_out(own, plan__padding__needed="of old")[1]["padding-free"] == "of old"
    assert left_out(own, plan__padding__share=0.01)[1]["padding-free"] == "1.0 % of a batch is padding"
    for nothing in ({"share": None}, {"share": 0.0}, {"is_left_out": True}):
        choices, why = left_out(own, **{f"plan__padding__{name}": value for name, value in nothing.items()})
        assert not choices and "padding-free" not in why
    assert {"packing", "half weights with stochastic rounding"} <= set(why)


def test_models_and_gpus_without_flash_attention_keep_padding(tmp_path: Path) -> None:
    """Would notice: flash attention proposed for a model or a GPU without it."""
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    bert = BertForMaskedLM(BertConfig(**SHAPE, vocab_size=50))
    assert "BertForMaskedLM is not a causal language model" in why_padding_needed(Trainer(bert, arguments))
    assert "8.0 or later" in why_padding_needed(Trainer(llama(), arguments)), "no GPU here"
