"""LoRA and QLoRA in a script that trains whole models: after the proposed change the script has the trace that was
predicted, and the change is correct Python in every form of script."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan import other_code
from hf_memkit.plan.candidate import Candidate, Choice
from hf_memkit.plan.choices import choices_for
from hf_memkit.plan.pasted import pasted
from hf_memkit.prediction.running_scripts import ScriptJob, run_in_worker, script_request
from hf_memkit.prediction.traced_training import CallPlace, TracedArguments, TracedTraining, TrainerCall
from hf_memkit.prediction.waiting_script import TraceFile, WaitingScript
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.script_overrides import Overrides
from tests.conftest import ROOT
from tests.plan.made_trainings import MADE, changed

MACHINE = described_machine("L4", None, None, None)
OWN = ("--output_dir", "out", "--per_device_train_batch_size", "4", "--report_to", "none")

PLAIN = """#!/usr/bin/env python
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained("llama")
    rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)}] * 32
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows
    )
    trainer.train()
    trainer.save_model()


main()
"""
SUBCLASS = """
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


class Weighted(Trainer):
    def __init__(self, net, args, weight=1.0, **kwargs):
        super().__init__(net, args, **kwargs)


class Job:
    def __init__(self):
        (self.args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
        self.model = AutoModelForCausalLM.from_pretrained("llama")

    def run(self):
        rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)}] * 32
        Weighted(self.model, self.args, 2.0, train_dataset=rows).train()


Job().run()
"""
SCRIPTS = {"plain": PLAIN, "subclass": SUBCLASS}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "llama"
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)} | {"<pad>": 100, "</s>": 101}, "</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").symlink_to(llama)
    return tmp_path


def waiting(*arguments: str) -> WaitingScript:
    return WaitingScript(ScriptJob(UserScript.at("train.py", arguments), MACHINE))


def training(traced: TraceFile) -> TracedTraining:
    training = traced.outcome().training
    assert training is not None, traced
    return training


def figures(training: TracedTraining) -> tuple[Any, ...]:
    trace = training.trace
    assert trace.work is not None
    return trace.peaks_by_phase(), trace.peak(), [trace.work.operations[call] for call in trace.work.calls]


def methods(own: TracedTraining, *also: str, left_out: dict[str, str] | None = None) -> list[Choice]:
    choices = choices_for(own, MACHINE, {}, gpus=1, left_out={} if left_out is None else left_out, also=also)["method"]
    return [each for each in choices if each is not None]


def patch(diff: str) -> None:
    subprocess.run(["patch", "-p0", "--silent"], input=diff, text=True, check=True)


def traced_anew(worker: Worker, *arguments: str, overrides: Overrides | None = None) -> tuple[Any, ...]:
    """The figures of the current script, in a new process."""
    request = script_request(ScriptJob(UserScript.at("train.py", arguments), MACHINE))
    outcome = run_in_worker(worker, replace(request, for_plan=True, overrides=overrides))
    assert outcome.training is not None, outcome
    return figures(outcome.training)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "also"), [("plain", ("qlora",)), ("subclass", ("lora",))])
def test_the_changed_script_has_the_same_trace(
    script: str, also: tuple[str, ...], folder: Path, worker: Worker
) -> None:
    """Would notice: adapters in the trace but not in the diff, or the other way round; a model that is quantised or
    prepared differently; a subclass that prepared the model without adapters; a diff that does not apply."""
    (folder / "train.py").write_text(SCRIPTS[script])
    with waiting(*OWN) as forks:
        own = training(forks.trace(Overrides()))
        candidates = [Candidate(2, 2, (each,)) for each in methods(own, *also)]
        forked = [figures(training(forks.trace(each.overrides))) for each in candidates]
    assert len(forked) == len(also)
    for candidate, traced in zip(candidates, forked, strict=True):
        (folder / "train.py").write_text(SCRIPTS[script])
        assert traced != figures(own)
        if script == "subclass":  # here the fork waits where the subclass is made
            assert traced_anew(worker, *OWN, overrides=candidate.overrides) == traced
        paste = pasted(candidate, own)
        assert paste.diff and not paste.model
        patch(paste.diff)
        flags = [word for flag in paste.flags for word in flag.split(" ", 1)]
        assert traced_anew(worker, *OWN, *flags) == traced


def placed(source: str, **made: Any) -> TracedTraining:
    """Writes a script to `train.py`, and returns its training with the places of its calls."""
    Path("train.py").write_text(source)
    ends = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            ends[name] = CallPlace(str(Path("train.py").absolute()), node.end_lineno or 0, node.end_col_offset or 0)
    at = TrainerCall(ends["Trainer"], **made)
    return changed(KNOWN, plan__made_at=at, plan__model__loaded_at=ends.get("from_pretrained"))


LORA = Overrides(adapter={"r": 2})
QLORA = Overrides(adapter={"r": 2}, model={"quantization_config": {"load_in_4bit": True}})
CHUNKED = Overrides(loss={"chunked": True})
WRAPPED = "get_peft_model(model, LoraConfig(r=2))"
BITS = "BitsAndBytesConfig(load_in_4bit=True)"
TAKES = {"takes": ("peft_config",)}
CASES: list[tuple[str, str, Overrides, dict[str, Any]]] = [
    ("Trainer(model, 1)\n", "chunk_loss(model)\nTrainer(model, 1)\n", CHUNKED, {"model": 0}),
    ("t = Trainer(a, model=self.m)\n", "chunk_loss(self.m)\nt = Trainer(a, model=self.m)\n", CHUNKED, {}),
    ("for _ in a:\n    Trainer(model)\n", "", CHUNKED, {"model": 0}),
    ("Trainer(load())\n", "", CHUNKED, {"model": 0}),
    ("Trainer(model, 1)\n", f"model = {WRAPPED}\nTrainer(model, 1)\n", LORA, {"model": 0}),
    ("é = 'ü'; Trainer(model)\n", f"é = 'ü'; Trainer({WRAPPED})\n", LORA, {"model": 0}),
    ("Trainer((model), 1)\n", f"model = {WRAPPED}\nTrainer((model), 1)\n", LORA, {"model": 0}),
    ("Trainer(a, model=self.m)\n", "Trainer(a, model=get_peft_model(self.m, LoraConfig(r=2)))\n", LORA, {}),
    ("Trainer(**given, model=model)\n", f"model = {WRAPPED}\nTrainer(**given, model=model)\n", LORA, {}),
    ("Trainer(**given)\n", "", LORA, {}),
    ("Trainer(*given)\n", "", LORA, {"model": 0}),
    ("Trainer(model_init=model)\n", "", LORA, {"model": "model_init"}),
    ("Trainer(model)", "", LORA, {"model": 0}),  # no newline at the end
    ("def f():\n    Trainer(model)\n", f"def f():\n    Trainer({WRAPPED})\n", LORA, {"model": 0}),  # a global
    (
        "def f(model):\n    return Trainer(model)\n",
        f"def f(model):\n    model = {WRAPPED}\n    return Trainer(model)\n",
        LORA, {"model": 0},
    ),
    ("for _ in a:\n    Trainer(model)\n", f"for _ in a:\n    Trainer({WRAPPED})\n", LORA, {"model": 0}),
    ("Trainer(model, peft_config=None)\n", "Trainer(model, peft_config=LoraConfig(r=2))\n", LORA, TAKES),
    ("Trainer(model, **given)\n", "", LORA, TAKES),
    ("t = Trainer(x,)\n", "peft_config = LoraConfig(r=2)\nt = Trainer(x, peft_config=peft_config,)\n", LORA, TAKES),
    (
        "Trainer(\n    x,  # it\n    y\n)\n", "Trainer(\n    x,  # it\n    y,\n    peft_config=LoraConfig(r=2),\n)\n",
        LORA, TAKES,
    ),
    (
        "peft_config = None\nTrainer(x)\n", "peft_config = None\nTrainer(x, peft_config=LoraConfig(r=2))\n",
        LORA, TAKES,
    ),
    (
        "model = A.from_pretrained(\n    name,\n)\nTrainer(model)\n",
        f"model = A.from_pretrained(\n    name,\n    quantization_config={BITS},\n)\n"
        f"model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
        f"model = {WRAPPED}\nTrainer(model)\n",
        QLORA, {"model": 0},
    ),
    (
        "Trainer(model=A.from_pretrained())\n",
        f"Trainer(model=get_peft_model(prepare_model_for_kbit_training(A.from_pretrained(quantization_config={BITS}), "
        "use_gradient_checkpointing=False), LoraConfig(r=2)))\n",
        QLORA, {},
    ),
    ("model = A.from_pretrained(**given)\nTrainer(model)\n", "", QLORA, {"model": 0}),
    ("model = load()\nTrainer(model)\n", "", QLORA, {"model": 0}),
    (
        "Trainer('name')\n", f"peft_config = LoraConfig(r=2)\nquantization_config = {BITS}\n"
        "Trainer('name', peft_config=peft_config, quantization_config=quantization_config)\n",
        QLORA, {"takes": ("peft_config", "quantization_config"), "named": True, "model": 0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "overrides", "made"), CASES, ids=[each[0] for each in CASES])
def test_the_diff_is_right_in_every_form_of_script(
    before: str, after: str, overrides: Overrides, made: dict[str, Any], folder: Path
) -> None:
    """Would notice: a variable that becomes local to a function, adapters on adapters in a loop, a keyword given
    twice, bytes counted as characters, a guess where the arguments of the call are not known."""
    diff = other_code.diff(placed(before, **made).facts, overrides)
    if not after:
        assert diff == ""
        return
    patch(diff)
    lines = Path("train.py").read_text().splitlines(keepends=True)
    assert (
        "".join(line for line in lines if not line.startswith(("from peft", "from transformers", "from hf"))) == after
    )
    assert sum(line.startswith(("from peft import", "from hf_memkit")) for line in lines) == 1
    used = next(at for at, line in enumerate(lines) if "LoraConfig(" in line or "chunk_loss(" in line)
    assert any(line.startswith(("from peft", "from hf")) for line in lines[:used])


def test_imports_stand_behind_those_of_the_script(folder: Path) -> None:
    """Would notice: an import before `from __future__` or the shebang, a second import, an import below its use."""
    head = '#!/usr/bin/python\n"""Trains."""\n\nfrom __future__ import annotations\n'
    body = "import os\n\n\ndef f():\n    import sys\n    Trainer(model=1)\n\n\nimport late\nf()\n"
    patch(other_code.diff(placed(head + "from peft import LoraConfig\n" + body).facts, LORA))
    assert (
        Path("train.py")
        .read_text()
        .startswith(head + "from peft import LoraConfig\nimport os\nfrom peft import get_peft_model\n\n\ndef f")
    )
    patch(other_code.diff(placed("#!/usr/bin/python\nTrainer(model=1)\n").facts, LORA))
    assert Path("train.py").read_text().startswith("#!/usr/bin/python\nfrom peft import LoraConfig, get_peft_model\n")


def test_the_diff_on_the_page_is_memkit_s(folder: Path) -> None:
    """Would notice: a diff in docs/plan.md that differs from memkit's."""
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "plan.md").read_text(), re.DOTALL)
    before = "".join(line[1:] + "\n" for line in shown.splitlines()[3:] if not line.startswith("+"))
    own = placed(before)
    (lora,) = methods(own, "lora")
    assert pasted(Candidate(4, 1, (lora,)), own).diff == shown


KNOWN: TracedTraining = changed(MADE, arguments__optim=None, model__trained_dtypes=("bfloat16",))


@pytest.mark.parametrize(
    ("fields", "names", "why"),
    [
        ({"plan__model__adapters": True}, ["LoRA", "QLoRA"], "adapters already"),
        ({"plan__model__quantised": True}, ["LoRA", "QLoRA"], "quantised already"),
        ({"plan__model__of_transformers": False}, ["LoRA", "QLoRA"], "not a model class of transformers"),
        ({"model__kind": "DetrForObjectDetection"}, ["LoRA", "QLoRA"], "would leave a new head untrained"),
        ({"plan__own_optimizer": True}, ["LoRA", "QLoRA", "adafactor"], "own optimizer"),
        ({"plan__model__from_pretrained": False}, ["QLoRA"], "from_pretrained"),
        ({"arguments__deepspeed": {"zero_optimization": {"stage": 2}}}, ["QLoRA"], "DeepSpeed"),
    ],
)  # fmt: skip
def test_impossible_methods_are_left_out_with_the_reason(fields: Any, names: list[str], why: str) -> None:
    """Would notice: adapters on adapters, 4 bits for a model that is not loaded, an optimizer that the script
    ignores."""
    left_out: dict[str, str] = {}
    possible = methods(changed(KNOWN, **fields), "lora", "qlora", "adafactor", left_out=left_out)
    reasons = {name: left_out[name] for name in ("LoRA", "QLoRA", "adafactor") if name in left_out}
    assert list(reasons) == names and all(why in reason for reason in reasons.values())
    assert {each.name for each in possible} == {"LoRA", "QLoRA", "adafactor"} - set(names)


def test_a_reentrant_checkpoint_would_train_nothing() -> None:
    """Would notice: adapters below a reentrant checkpoint, whose inputs need no gradients; a head left untrained."""
    reentrant = TracedArguments(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True})
    (lora,) = methods(changed(KNOWN, arguments=reentrant, model__kind="BertForSequenceClassification"), "lora")
    assert lora.settings["arguments.activation_checkpointing_kwargs"] == {"use_reentrant": False}
    assert lora.settings["adapter.task_type"] == "SEQ_CLS" and lora.group == "another method"


@pytest.mark.slow
def test_the_changed_script_trains(folder: Path) -> None:
    """Would notice: code that only traces but does not train; a whole model saved instead of adapters."""
    source = PLAIN.replace('"llama")', '"llama", dtype=torch.float32)')
    own = placed(source)
    (lora,) = methods(own, "lora")
    patch(pasted(Candidate(4, 1, (lora,)), own).diff)
    command = [sys.executable, "train.py", *OWN, "--use_cpu", "--max_steps", "2", "--save_strategy", "no"]
    ran = subprocess.run(
        [*command, "--activation_checkpointing", "True"], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    saved = {path.name for path in (folder / "out").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
