"""Mistakes that the rules of `checks/` know, in a script: as warnings of an answer, and where the script fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from hf_memkit.common.errors import ScriptFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.known_mistakes import explained, known_mistakes
from hf_memkit.prediction.launch_command import Launched
from hf_memkit.prediction.running_scripts import FIX_IT, training_of
from tests.predict_script.conftest import Predict

_SCRIPT: Final = """
import json, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

options = json.loads(sys.argv[1])
lora = options.pop("lora", False)
arguments = TrainingArguments("out", max_steps=3, report_to=[], bf16=True, **options)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
))
if lora:
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)}] * 32
Trainer(model, arguments, train_dataset=rows).train()
"""
_YAML: Final = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_activation_checkpointing: ON,
  fsdp_state_dict_type: FULL_STATE_DICT}
"""
_LAUNCHED: Final = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_ACTIVATION_CHECKPOINTING": "true",
}  # fmt: skip


def rules(sentences: tuple[str, ...]) -> list[str]:
    return [re.findall(r"\(rule ([\w-]+)\)", sentence)[-1] for sentence in sentences]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ('{"lora": true, "fsdp": "full_shard", "fsdp_config": "fsdp.json"}',
         ["fsdp-key-unread", "fsdp-saves-empty-adapter"]),
        pytest.param('{"lora": true, "fsdp": true, "activation_checkpointing": true}', [], marks=pytest.mark.slow),
        pytest.param('{"lora": true}', ["adapter-searches-graph"], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_traced_training_has_the_mistakes_of_its_script(
    predict: Predict, tmp_path: Path, options: str, expected: list[str]
) -> None:
    """Defect: no warning in a script, or one about values that transformers derives."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_activation_checkpointing": true, "reshard_after_forwrd": false}')
    outcome = predict(_SCRIPT, options, processes=2, per_node=2)
    assert outcome.training is not None, outcome.failed
    mistakes = known_mistakes(outcome.training, 2, 1)
    assert sorted(rules(mistakes)) == expected
    assert all(mistake.startswith("fsdp.json: ") for mistake in mistakes if "fsdp-" in mistake)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ("trainer.args.load_best_model_at_end = True", ["weights-not-restored"]),
        pytest.param(
            "trainer.args.load_best_model_at_end = True; restore_all_weights(trainer)", [], marks=pytest.mark.slow
        ),
        ("resume = 'out/checkpoint-6'", ["weights-not-restored"]),
        pytest.param("resume = 'out/checkpoint-6'; model.name_or_path = resume", [], marks=pytest.mark.slow),
    ],
)
def test_weights_that_a_resume_loses_are_a_warning(predict: Predict, trainer: str, expected: list[str]) -> None:
    script = f"""
import torch
from hf_memkit.components.resuming import restore_all_weights
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

arguments = TrainingArguments("out", max_steps=3, report_to=[], eval_strategy="steps")
model = ViTForImageClassification(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                                            intermediate_size=32, patch_size=4))
rows = [{{"pixel_values": torch.zeros(3, 8, 8), "labels": 1}}] * 32
trainer, resume = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows), None
{trainer}
trainer.train(resume_from_checkpoint=resume)
"""
    outcome = predict(script)
    assert outcome.training is not None, outcome.failed
    assert rules(known_mistakes(outcome.training, 1, 1)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("by_file", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_launchers_settings_count(predict: Predict, tmp_path: Path, by_file: bool) -> None:
    """Defect: FSDP of accelerate's YAML, or of its options, counts as DistributedDataParallel."""
    (tmp_path / "acc.yaml").write_text(_YAML)
    words: Any = ("--config_file", str(tmp_path / "acc.yaml")) if by_file else ("--use_fsdp", "--fsdp_version", "2")
    launched = Launched(UserScript("train.py"), environment=_LAUNCHED, before=("accelerate", "launch", *words))
    outcome = predict(_SCRIPT, '{"lora": true}', processes=2, per_node=2, environment=_LAUNCHED)
    assert outcome.training is not None, outcome.failed
    (mistake,) = known_mistakes(outcome.training, 2, 1, launched)
    assert rules((mistake,)) == ["fsdp-saves-empty-adapter"]
    assert mistake.startswith(str(tmp_path / "acc.yaml") if by_file else "accelerate launch")


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        ('{"fsdp": "true"}', 'line 9: fsdp = "true": ', " (rule fsdp-wrong-value)"),
        ('{"torch_compile_backend": "inductr"}', "line 16: ", '. torch_compile_backend = "inductr": '),
        (
            '{"fsdp": true, "fsdp_config": "fsdp.json"}',
            "line 9: fsdp_config: fsdp.json: line 1, column ",
            "JSON there",
        ),
    ],
)
def test_a_failure_names_the_wrong_argument(
    predict: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, begin: str, end: str
) -> None:
    """Defect: a library's error without the argument, its place or a fix."""
    (tmp_path / "fsdp.json").write_text('{"version": 2')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptFailed) as caught:
        training_of(UserScript("train.py"), predict(_SCRIPT, options, processes=2, per_node=2))
    message = str(explained(caught.value))
    print(message)
    assert message.startswith(f"train.py, {begin}") and end in message


@pytest.mark.parametrize(
    ("message", "arguments", "refused"),
    [
        ("ValueError: 'stepz' is not a valid IntervalStrategy", {"torch_compile_backend": "inductr"}, True),
        ("ImportError: this version of tokenizers is too old", {"fsdp": True, "fsdp_config": {"version": 3}}, False),
        ("RuntimeError: expected tensor of type float", {"deepspeed": {"optimizer": {"type": "AdamWW"}}}, False),
        ("ValueError: fp16 inference: 'enabled' missing", {"deepspeed": {"bf16": {"enabled": "yes"}}}, False),
        ("ImportError: foo", {"deepspeed": "a" * 5000}, False),
        ("ImportError: foo", {"deepspeed": "{"}, False),
    ],
)
def test_another_failure_keeps_its_message(message: str, arguments: dict[str, Any], refused: bool) -> None:
    """Defect: an error of the script is replaced by an argument's mistake, of which it is independent."""
    failure = ScriptFailed(
        f"train.py, line 3: {message}; {FIX_IT}", text="", place="train.py, line 3", arguments=arguments,
        refused_arguments=refused,
    )  # fmt: skip
    assert explained(failure) is failure


def test_a_name_in_another_failure_adds_the_mistake() -> None:
    """Defect: the library's message is lost where the mistake may not be its cause."""
    arguments = {"fsdp": True, "fsdp_config": {"version": 2}, "optim": "adafactor"}
    place = "train.py, line 3"
    failure = ScriptFailed(f"{place}: KeyError: 'adafactor'; {FIX_IT}", text="", place=place, arguments=arguments)
    assert str(explained(failure)).startswith(f"{place}: KeyError: 'adafactor'. optim = ")


def test_a_failure_that_no_rule_finds_gets_the_fix_of_explain(predict: Predict) -> None:
    """Defect: an error of FSDP with the advice to report it."""
    failing = _SCRIPT.replace(
        "if lora:", "raise ValueError('Could not find the transformer layer class B in the model')\nif lora:"
    )
    with pytest.raises(ScriptFailed) as caught:
        training_of(UserScript("train.py"), predict(failing, "{}"))
    message = str(explained(caught.value))
    assert "layer class B in the model. FSDP" in message and "transformer_layer_cls_to_wrap" in message
