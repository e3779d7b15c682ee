"""Chat recipes: templates that mark the assistant, and defaults of SFTTrainer that decide nothing."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.errors import SettingError
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.export.scripts import train_chat
from hf_memkit.recipes.export.scripts.chat_templates import CHATML, training_template
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import read_recipe
from hf_memkit.recipes.tasks import find_task
from hf_memkit.recipes.tasks.chat_made_up import made_up_conversations
from hf_memkit.recipes.tasks.task import Framing
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup import build
from hf_memkit.setup.own_arguments import read_pairs
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.conftest import Quick, read_json_lines
from tests.loaded import Loaded
from tests.recipes.resolving import resolve
from tests.recipes.test_tokenizer import trained
from tests.techniques.tiny_models import causal_model

LENGTH = 64
RECIPE = """\
summary: chats on a small GPU
task: chat
model:
  hub_id: none/such-model
  architecture: {model_type: llama, hidden_size: 512, num_hidden_layers: 4, num_attention_heads: 8, vocab_size: 32000}
data: {hub_id: none/such-data, packing: true, held_out: 0.1, evaluated_blocks: 16}
card: 16GB
sequence_length: 512
sequences_per_step: 8
steps: 50
variants:
  resident: {micro_batch_size: 2, learning_rate: 1.0e-4, checkpointing: [none, activation-checkpointing]}
  lora: {micro_batch_size: 2, learning_rate: 1.0e-4}
rehearsal:
  model: {hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 400, max_position_embeddings: 128}
  sequence_length: 128
  sequences_per_step: 4
  micro_batch_size: 1
  steps: 10
  learning_rate: 5.0e-3
"""


@pytest.fixture(scope="module")
def conversations() -> Any:
    return datasets.Dataset.from_list([{"messages": messages} for messages in made_up_conversations()[:120]])


@pytest.fixture(scope="module")
def tokenizer(conversations: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    framing = find_task("chat").framing(Setup("x"))
    made = _trained(conversations, tmp_path_factory.mktemp("job"), framing)
    made.chat_template = CHATML
    return made


def _trained(conversations: Any, folder: Path, framing: Any) -> Any:
    texts = [message["content"] for messages in conversations["messages"] for message in messages]
    return trained(folder, texts, size=400, framing=framing)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.yaml"
    path.write_text(RECIPE)
    return path


def sft(model: Any, tokenizer: Any, rows: Any, folder: Path, **options: Any) -> SFTTrainer:
    arguments = SFTConfig(
        str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", max_length=LENGTH,
        per_device_train_batch_size=4, **options,
    )  # fmt: skip
    return SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("qwen3", "eager")])
def test_packed_conversations_see_only_themselves(
    conversations: Any, tokenizer: Any, tmp_path: Path, attention: str, kind: str
) -> None:
    """The loss of packed rows is that of the same conversations by themselves, without flash attention too."""
    shape: dict[str, Any] = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **shape, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    losses = []
    for packing in (False, True):
        few = conversations.select(range(12))
        trainer = sft(model, tokenizer, few, tmp_path, packing=packing, assistant_only_loss=True)
        batch = trainer.data_collator(list(trainer.train_dataset))
        assert ("attention_mask" in batch) is not packing
        with torch.no_grad():
            losses.append(float(trainer.compute_loss(trainer.model.eval(), batch)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _word_tokenizer(template: str | None) -> Any:
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import CharDelimiterSplit

    vocabulary = {"<unk>": 0, "<|eot_id|>": 1, "<|im_end|>": 2, "<|begin_of_text|>": 3}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = CharDelimiterSplit(" ")
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", unk_token="<unk>"
    )
    made.chat_template = template
    return made


def _shipped(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", ["llama3", "llama3_2", "qwen2_5", "qwen3"])
def test_templates_of_known_families_mark_the_assistant(name: str) -> None:
    own = _shipped(name)
    tokenizer = _word_tokenizer(own)
    marked = training_template(tokenizer)
    assert tokenizer.chat_template == own, "what is saved with the model is its own"
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."},
                {"role": "user", "content": "Three?"}, {"role": "assistant", "content": "Four."}]  # fmt: skip
    text = tokenizer.apply_chat_template(messages, chat_template=marked, tokenize=False)
    if name.startswith("llama"):
        assert text == tokenizer.apply_chat_template(messages, chat_template=own, tokenize=False)
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"bos_token": "<|begin_of_text|>", "add_generation_prompt": False}
    rendered, spans = render_jinja_template(
        conversations=[messages], chat_template=marked, return_assistant_tokens_mask=True, **options
    )
    answers = [rendered[0][start:end] for start, end in spans[0]]
    assert [("Two." in one, "Four." in one, "One?" in one or "Three?" in one) for one in answers] == [
        (True, False, False), (False, True, False),
    ]  # fmt: skip
    assert all(answer.rstrip("\n").endswith(("<|eot_id|>", "<|im_end|>")) for answer in answers), "it learns to stop"


def test_a_template_that_nobody_knows_is_refused_in_one_line() -> None:
    unknown = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    with pytest.raises(SystemExit, match="its chat template does not mark the assistant's turns") as caught:
        training_template(_word_tokenizer(unknown))
    assert "{% generation %}" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SystemExit, match="its tokenizer has no chat template"):
        training_template(_word_tokenizer(None))


def test_further_fields_of_sfttrainer_can_be_set(recipe_file: Path, machine: Machine, tmp_path: Path) -> None:
    recipe = read_recipe(recipe_file)
    chosen = read_pairs(["packing=false", "assistant_only_loss=no"], further=find_task(recipe.task).further_arguments)
    assert chosen == {"packing": False, "assistant_only_loss": False}
    request = Request(variant="lora", output=str(tmp_path / "run"), arguments=chosen)
    arguments = rehearse(recipe, resolve(recipe, machine, request, use_hub=False)).setup.arguments
    assert arguments["packing"] is False and arguments["assistant_only_loss"] is False
    with pytest.raises(SettingError, match="packing_strategy: no field of TrainingArguments"):
        read_pairs(["packing_strategy=wrapped"], further=find_task("chat").further_arguments)
    unmarked = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert training_template(_word_tokenizer(unmarked), marked=False) == unmarked


@pytest.mark.parametrize("variant", ["resident", "lora"])
def test_no_default_of_sftconfig_decides_memory(
    recipe_file: Path, machine: Machine, tmp_path: Path, variant: str
) -> None:
    request = Request(variant=variant, output=str(tmp_path / "run"))
    setup = resolve(read_recipe(recipe_file), machine, request, use_hub=False)
    plain = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    differ = {
        field.name for field in dataclasses.fields(SFTConfig)
        if field.name in plain and plain[field.name] != field.default and field.default is not dataclasses.MISSING
        and plain[field.name] is not dataclasses.MISSING
    }  # fmt: skip
    message = {"gradient_checkpointing": "activation_checkpointing"}
    assert differ and {message.get(name, name) for name in differ} <= setup.arguments.keys()
    setup = setup.put("arguments.use_cpu", True, "here").drop("arguments.tf32")
    made = build.build_arguments(setup, build.prepared_rows(setup))
    assert isinstance(made, SFTConfig)
    assert made.gradient_checkpointing is made.activation_checkpointing
    assert made.activation_checkpointing is bool(setup["arguments.activation_checkpointing"])
    assert made.bf16 is setup["arguments.bf16"] and made.max_length == setup["data.sequence_length"] == 512
    assert made.packing and not made.assistant_only_loss and made.dataset_kwargs == {"skip_prepare_dataset": True}
    assert setup["arguments.assistant_only_loss"] is True
    assert "model_parts.chunked_loss" not in setup and "chunked-loss" not in setup.techniques
    assert any(note.startswith("chunked-loss is left out: TRL's SFTTrainer") for note in setup.notes)


@pytest.mark.parametrize("fp16", [False, True])
def test_adapters_are_fp32_where_fp16_scales_the_loss(tmp_path: Path, tokenizer: Any, fp16: bool) -> None:
    from peft import LoraConfig, get_peft_model

    model = causal_model("llama", vocab_size=400).to(torch.float16)
    model.is_loaded_in_4bit = True  # what SFTTrainer asks; bitsandbytes' weights themselves are not looked at
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    adapted.is_loaded_in_4bit = True
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
    trainer = sft(adapted, tokenizer, rows, tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    assert {each.dtype for each in adapted.parameters() if each.requires_grad} == {torch.bfloat16}
    setup = Setup("tried").put("trainer.class", "trl:SFTTrainer", "tried").put("arguments.fp16", fp16, "tried")
    build.after_making(setup, trainer)
    expected = torch.float32 if fp16 else torch.bfloat16
    assert {each.dtype for each in adapted.parameters() if each.requires_grad} == {expected}
    assert {each.dtype for each in adapted.parameters() if not each.requires_grad} == {torch.float16}


@pytest.mark.parametrize(
    ("template", "length", "message"),
    [
        ("{{ raise_exception('only one turn') }}" + CHATML, 128, r"rejects a conversation \(only one turn\)"),
        (CHATML, 3, "no answer of the assistant begins within 3 tokens"),
    ],
)
def test_unusable_data_is_refused_in_one_line(
    recipe_file: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, length: int,
    message: str,
) -> None:  # fmt: skip
    """Would notice: a template's refusal as a traceback, a training on nothing."""
    request = Request(variant="lora", output=str(tmp_path / "run"), arguments={"packing": False})
    setup = rehearse(
        read_recipe(recipe_file), resolve(read_recipe(recipe_file), machine, request, use_hub=False)
    ).setup
    monkeypatch.setattr(train_chat, "CHATML", template)
    export_script(RecipeRun("chats", "lora", setup.put("arguments.max_length", length, "short")), tmp_path / "script")
    monkeypatch.syspath_prepend(tmp_path / "script")
    monkeypatch.setattr(train_chat, "__file__", str(tmp_path / "script" / "train_chat.py"))
    monkeypatch.setattr(train_chat.SFTTrainer, "train", lambda self, **_: pytest.fail("it trains"))
    before = set(sys.modules)
    with pytest.raises(SystemExit, match=message):
        train_chat.main()
    for name in set(sys.modules) - before:  # parts that lie beside the script
        sys.modules.pop(name) if "." not in name else None


@pytest.mark.slow
def test_the_tokenizer_and_template_of_a_model_of_ones_own(
    quick_memkit: Quick, process: Loaded, recipe_file: Path, conversations: Any, tmp_path: Path
) -> None:
    """Llama 3.1's template, which TRL does not mark: run and exported script mark it, and save it as it was."""
    framing = Framing(
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|start_header_id|>",
         "unk_token": "<|end_header_id|>"}
    )  # fmt: skip
    made = _trained(conversations, tmp_path / "job", framing)
    made.chat_template = _shipped("llama3_1")
    model = causal_model("llama", vocab_size=400, max_position_embeddings=512)
    recipe_file.write_text(RECIPE.replace("sequence_length: 128", "sequence_length: 256"))
    for each in (made, model):
        each.save_pretrained(tmp_path / "model")
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations["messages"]))
    asked = [str(recipe_file), "--variant", "lora", "--model", "model", "--data", str(data), "--max-steps", "2"]
    answer = quick_memkit("recipe", *asked, "--output", "run")
    assert answer.returncode == 0, answer.stderr[-3000:]
    answer = quick_memkit("recipe", *asked, "--export", "script")
    assert answer.returncode == 0, answer.stderr[-3000:]
    done = process.run(["script/train_chat.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = (tmp_path / "run" / "model" / "chat_template.jinja").read_text()
    assert kept == (tmp_path / "script" / "model" / "chat_template.jinja").read_text() == made.chat_template
    losses = [
        [each["metrics"]["eval_loss"] for each in read_json_lines(folder / "memory-rank0.jsonl") if
         each["kind"] == "evaluate"]
        for folder in (tmp_path / "run", tmp_path / "script")
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
