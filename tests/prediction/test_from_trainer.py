"""`predict_trainer`: a user's arguments for Trainer, with custom models and data, or an existing Trainer."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_memkit.common.errors import InputError, NoKernel, SettingError, Unmodelled
from hf_memkit.prediction import Prediction, predict_script, predict_trainer
from hf_memkit.prediction.live_objects import read_objects, write_objects
from hf_memkit.prediction.traced_training import COMPILED
from hf_memkit.setup.own_arguments import read_trainer
from tests.fewer import first
from tests.prediction.user_models import CLASSES, LARGE, WIDTH, Classifier, LossyTrainer, Recurrent

EXAMPLE: dict[str, Any] = {"x": ((3, 16, 16), "float32"), "labels": 0}
SGD = {"optim": "sgd", "per_device_train_batch_size": 16}
TRAINED = 8 * 256 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH * CLASSES + CLASSES + 2 * 8
FROZEN = 8 * 3 * 9 + 8


def predicted(model: Any, args: Any = None, **options: Any) -> Prediction:
    return predict_trainer(model, SGD if args is None else args, **{"gpu": "16GB", "example": EXAMPLE, **options})


@pytest.mark.slow
def test_an_own_model_is_traced_however_it_is_given() -> None:
    found = [predicted(each) for each in (Classifier(), "tests.prediction.user_models:build")]
    assert {each.confidence.level for each in found} == {"trace"} and {each.verdict for each in found} == {"fits"}
    weights, gradients = found[0].categories["weights"], found[0].categories["gradients"]
    assert 0 <= weights - 4 * (TRAINED + FROZEN) < 30 * 512, "the shared weight counts once"
    assert 0 <= gradients - 4 * TRAINED < 20 * 512, "what is frozen has none"
    assert all(each.categories == found[0].categories for each in found)
    assert len({each.peak_allocated_bytes for each in found}) == 1


@pytest.mark.slow
def test_a_model_in_memory_is_not_touched_and_not_copied() -> None:
    model = Classifier().bfloat16()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = predicted(model, example={**EXAMPLE, "x": ((3, 16, 16), "bfloat16")})
    whole = predicted(Classifier())
    assert found.categories["weights"] < 0.51 * whole.categories["weights"]
    assert all(torch.equal(before[name], each) for name, each in model.named_parameters())
    assert model.one.weight is model.two.weight
    with torch.device("meta"):
        empty = Classifier()
    assert predicted(empty).peak_allocated_bytes == whole.peak_allocated_bytes


@pytest.mark.slow
def test_lists_of_weights_and_values_of_small_tables_are_kept() -> None:
    rows = {"input_ids": ((12,), "int64"), "labels": ((12,), "int64")}
    found, made = (predicted(each, example=rows) for each in (Recurrent(), Recurrent))
    assert found.confidence.level == "trace", found.notes
    assert found.peak_allocated_bytes == made.peak_allocated_bytes


@pytest.mark.slow
def test_a_loss_and_an_optimizer_of_one_s_own() -> None:
    own = predicted(
        Classifier, trainer_class="tests.prediction.user_models:LossyTrainer",
        optimizer_cls_and_kwargs=(torch.optim.Adam, {"lr": 1e-3, "foreach": False}),
    )  # fmt: skip
    plain = predicted(Classifier)
    forward, stepping = (own.phases[name][0] - plain.phases[name][0] for name in ("forward", "optimizer"))
    moments, largest = 2 * 4 * TRAINED, 4 * 8 * 256 * WIDTH
    assert 2 * 4 * LARGE <= forward - moments < 4 * 4 * LARGE, "its large tensor, and what is made of it"
    assert moments <= stepping <= moments + 3 * largest, "two moments, and a few temporaries of a weight"


@pytest.mark.slow
def test_a_trainer_that_was_not_started(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **SGD)
    rows = [{"x": torch.zeros(3, 16, 16), "labels": 1, "name": "a picture"}] * 20
    trainer = LossyTrainer(Classifier(), args, train_dataset=rows)
    found = predict_trainer(trainer, gpu="T4")
    assert found.confidence.level == "trace" and any("20 rows" in note for note in found.notes)
    assert found.phases == predicted(Classifier, trainer_class=LossyTrainer, gpu="T4").phases
    with pytest.raises(InputError, match="omit args"):
        predict_trainer(trainer, args)
    with pytest.raises(InputError, match=r"omit train_dataset and sequence_length"):
        predict_trainer(trainer, train_dataset=rows, sequence_length=3)


@pytest.mark.slow
def test_the_longest_rows_make_the_batch() -> None:
    """Would notice: the first rows in their place, a collator that is not the user's, columns that Trainer drops."""
    rows = [{"input_ids": [1] * length, "labels": [1] * length, "text": "x"} for length in [3, 40, 7, 60, 5, 50]]

    def pad(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["labels"]) for row in some)
        assert all(set(row) == {"input_ids", "labels"} for row in some)
        return {name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in some]) for name in some[0]}

    config = GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=100, n_positions=64)
    args = {"per_device_train_batch_size": 2}
    short, long = (
        predict_trainer(config, args, train_dataset=some, data_collator=pad, gpu="T4") for some in (rows[:1], rows)
    )
    assert long.categories["loss"] > 5 * short.categories["loss"] > 0
    assert any("6 rows can give: 2 × 60 tokens" in note for note in long.notes)
    assert any("A typical batch, 2 × " in note and "the worst, 2 × 60 tokens" in note for note in long.notes)


@pytest.mark.slow
def test_a_transformers_model_knows_its_own_example() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    config = BertConfig(architectures=["BertForSequenceClassification"], **sizes)
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    built = predict_trainer(model, SGD, sequence_length=24, gpu="T4")
    named = predict_trainer(config, SGD, sequence_length=24, gpu="T4")
    assert built.confidence.level == named.confidence.level == "trace"
    assert built.phases["backward"] == named.phases["backward"]


@pytest.mark.slow
def test_flex_attention_is_predicted_with_its_compiled_kernels() -> None:
    """Would notice: another attention in its place, and a GPU that Triton does not support."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    config = LlamaConfig(**sizes, vocab_size=99, attn_implementation="flex_attention")
    flex = predict_trainer(config, {"bf16": True}, sequence_length=64, gpu="RTX 4090")
    assert flex.compilation is not None and any(note.startswith(COMPILED) for note in flex.notes)
    with pytest.raises(NoKernel, match=r"attn_implementation=flex_attention: .*Triton needs 7\.0 or later\. Use sdpa"):
        predict_trainer(config, {}, sequence_length=64, gpu="P100")


def test_arguments_are_those_that_were_set(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, gradient_checkpointing=True, optim="adafactor", hub_token="secret", seed=3,
        lr_scheduler_type="cosine", per_device_train_batch_size=4,
    )  # fmt: skip
    found, notes = read_trainer(args)
    assert found == {
        "activation_checkpointing": True, "optim": "adafactor", "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 4,
    } and not notes  # fmt: skip
    assert read_trainer({"bf16": True, "gradient_checkpointing": True})[0]["activation_checkpointing"] is True
    with pytest.raises(SettingError) as refused:
        read_trainer({"bf17": True, "max_steps": "many", "per_device_train_batch_size": 0})
    assert len(str(refused.value).splitlines()) == 3 and "did you mean 'bf16'" in str(refused.value)


class _Inner:
    class Model(Classifier):
        pass


class _Quantised(torch.Tensor):
    pass


def _with_quantised() -> nn.Module:
    model = Classifier()
    model.out.weight = nn.Parameter(model.out.weight.data.as_subclass(_Quantised))
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": _with_quantised()}, "_Quantised"),
        ({"model": "tests.prediction.user_models:nothing"}, "has no nothing"),
        ({"model": "tests.prediction.user_models:build_nothing"}, "must make an nn.Module; it made a str"),
        ({"model": "no_such_module:build"}, "importing no_such_module failed"),
        ({"model": "tests.prediction.user_models:"}, "write a module and a name"),
        ({"example": None}, "train_dataset or example: give one"),
        ({"example": {"x": "red"}}, "must be a tensor, numbers"),
        ({"example": {"x": ((3, -1), "float32")}}, "not a shape"),
        (
            {"example": {"x": ((3, 8, 8), "float32"), "labels": 0}},
            "user_models.py, line 31: RuntimeError: a and b",
        ),
        ({"train_dataset": [EXAMPLE]}, "omit one"),
        ({"train_dataset": [], "example": None}, "no rows"),
        ({"train_dataset": [{"x": object()}], "example": None}, "Could not infer dtype of object"),
        ({"sequence_length": 12}, "have their own"),
        ({"gpus": True}, "above 0"),
        ({"args": 5}, "expected TrainingArguments"),
        ({"args": {"fsdp": "full_shard"}}, "Write gpus=2"),
        ({"trainer_class": "tests.prediction.user_models:LARGE"}, "not a subclass of transformers.Trainer"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": object()})}, "'<' not supported"),
    ],
)
def test_wrong_options_give_one_line(options: dict[str, Any], message: str) -> None:
    given = {"model": Classifier, "args": SGD, "example": EXAMPLE, **options}
    with pytest.raises(InputError) as refused:
        predict_trainer(given.pop("model"), given.pop("args"), **given)
    assert message in str(refused.value) and "\n" not in str(refused.value), refused.value


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))


@pytest.mark.slow
def test_a_model_is_sharded() -> None:
    """Defect: FSDP that is refused, or that leaves the model whole; a model in memory that is sharded otherwise than
    one that a function makes."""
    example = {"input_ids": [1] * 8, "labels": [1] * 8}
    two, eight = (predicted(llama, {"fsdp": True}, example=example, gpus=gpus) for gpus in (2, 8))
    assert two.categories["optimizer"] == pytest.approx(4 * eight.categories["optimizer"], rel=0.1)
    in_memory = predicted(llama(), {"fsdp": True}, example=example, gpus=2)
    assert (in_memory.peak_allocated_bytes, in_memory.categories) == (two.peak_allocated_bytes, two.categories)


def test_a_nested_class_has_a_name() -> None:
    assert predicted(_Inner.Model).confidence.level == "trace"


LIVE = """
import sqlite3
import threading
import weakref

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


def make(folder, connection=False, **arguments):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(256, 1024)
            self.act = lambda x: torch.tanh(x) * x

        def forward(self, x):
            return self.act(self.inside(x)) * len(self.owner().table)

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.block.owner = weakref.ref(self)
            self.out, self.twin = nn.Linear(1024, 256, bias=False), nn.Linear(1024, 256, bias=False)
            self.twin.weight = self.out.weight
            self.frozen = nn.utils.parametrizations.weight_norm(nn.Linear(256, 256)).requires_grad_(False)
            self.register_buffer("table", torch.zeros(1500, 1024))

        def forward(self, x, labels=None):
            hidden = self.frozen(self.out(self.block(x)) + self.twin(self.block(x)) + self.table.mean())
            return {"loss": (hidden - labels[:, None]).square().mean(), "logits": hidden}

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.lock, self.make = threading.Lock(), lambda number: torch.full((1 + number % 7, 256), float(number))
            self.connection = sqlite3.connect(":memory:") if connection else None

        def __len__(self):
            return 40

        def __getitem__(self, number):
            with self.lock:
                if self.connection is not None:
                    self.connection.execute("select 1")
                return {"x": self.make(number), "labels": float(number)}

    class Quiet(TrainerCallback):
        lock = threading.Lock()

    class Own(Trainer):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.teacher = nn.Linear(256, 512).to(self.args.device)

        def compute_loss(self, model, inputs, return_outputs=False, **more):
            outputs = model(**inputs)
            noise = torch.ones(2**18, device=inputs["x"].device) * outputs["logits"].mean()
            loss = outputs["loss"] + self.teacher(inputs["x"]).mean() + noise.mean()
            return (loss, outputs) if return_outputs else loss

    def collate(rows):
        longest = max(len(row["x"]) for row in rows)
        padded = [nn.functional.pad(row["x"], (0, 0, 0, longest - len(row["x"]))) for row in rows]
        return {"x": torch.cat(padded), "labels": torch.tensor([row["labels"] for row in rows] * longest)}

    model, seen, guard = Mine(), [], threading.RLock()
    model.block.register_forward_hook(lambda module, given, made: seen.append(made.detach().clone()))
    model.out.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def metrics(found):
        with guard:
            return {}

    rows = Rows()
    return Own(
        model,
        TrainingArguments(
            folder, report_to="none", per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2,
            remove_unused_columns=False, max_steps=2, save_strategy="no", logging_strategy="no", disable_tqdm=True,
            **arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
        compute_metrics=metrics,
        callbacks=[Quiet()],
        optimizers=(optimizer, schedule),
    )
"""


@pytest.mark.slow
def test_a_live_trainer_is_predicted_as_its_script_is(tmp_path: Path) -> None:
    """Local classes, lambdas, hooks, ties, locks, an optimizer with its schedule, in a process that has trained on two
    threads. Would notice: a hook, a tie or the optimizer that is lost; values that come along; a fork."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(LIVE, namespace)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        namespace["make"](str(tmp_path / "first"), use_cpu=True).train()
        trainer = namespace["make"](str(tmp_path / "out"))
        before = {name: each.clone() for name, each in trainer.model.named_parameters()}
        found = predict_trainer(trainer, gpu="16GB")
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(before[name], each) for name, each in trainer.model.named_parameters())
    assert trainer.model.out.weight.device.type == "cpu" and trainer.args.device.type == "cpu"
    (tmp_path / "train.py").write_text(LIVE + f"\nmake({str(tmp_path / 'script')!r}).train()\n")
    script = predict_script(tmp_path / "train.py", gpu="16GB")
    assert found.phases == script.phases and found.categories == script.categories
    assert any("callback Quiet" in note or "28 × 256" in note for note in found.notes), found.notes


QUANTISED = """
import sys

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig, Trainer, TrainingArguments
from torchao.quantization import Int8WeightOnlyConfig

def make(model, kind, folder):
    config = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4",
                                  bnb_4bit_compute_dtype=torch.bfloat16),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
        "torchao": TorchAoConfig(Int8WeightOnlyConfig()),
    }[kind]
    model = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = [{"input_ids": [1] * 32, "labels": [1] * 32}] * 16
    arguments = TrainingArguments(folder, max_steps=2, report_to="none", save_strategy="no")
    return Trainer(model, arguments, train_dataset=rows)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(["nf4", "int8", "torchao"]))
def test_a_live_quantised_model_is_predicted_as_its_script_is(tmp_path: Path, kind: str) -> None:
    """Would notice: codes or scales that are counted twice, or not; values that come along."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(QUANTISED, namespace)
    trainer = namespace["make"](tmp_path / "m", kind, str(tmp_path / "out"))
    before = trainer.model.get_memory_footprint()
    live = predict_trainer(trainer, gpu="16GB")
    assert trainer.model.get_memory_footprint() == before and trainer.args.device.type == "cpu"
    asked = f"\nmake({str(tmp_path / 'm')!r}, {kind!r}, {str(tmp_path / 'out')!r}).train()\n"
    (tmp_path / "train.py").write_text(QUANTISED + asked)
    script = predict_script(tmp_path / "train.py", gpu="16GB")
    tables = 1024 if kind == "nf4" else 0  # bitsandbytes' module keeps one on the GPU on which it quantises
    assert script.peak_allocated_bytes - live.peak_allocated_bytes == tables
    for name, (used, _) in script.phases.items():
        assert name == "load" or used - live.phases[name][0] == tables, "loading has passed in a live process"


def test_what_only_this_process_can_use_is_named(tmp_path: Path) -> None:
    """Would notice: `NoneType has no attribute`, or a line of memkit instead of the user's."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(LIVE, namespace)
    with pytest.raises(InputError, match=r"sqlite3\.Connection \(\.execute\): only the process that made it"):
        predict_trainer(namespace["make"](str(tmp_path), connection=True), gpu="16GB")


def test_what_cannot_be_sent_is_told_from_what_is_not_needed(tmp_path: Path) -> None:
    """Would notice: a corpus that is open, read into RAM and sent; an object's own error instead of an answer; a
    weak reference to a dead object, which no process can make."""
    (tmp_path / "corpus").write_text("x" * 10**6)
    held = {"file": (tmp_path / "corpus").open(), "raises": Raises(), "gone": weakref.ref(Raises()), "lock": Lock()}
    write_objects(held, tmp_path / "objects")
    assert (tmp_path / "objects").stat().st_size < 10_000
    again = read_objects(tmp_path / "objects")
    assert again["gone"]() is None and again["lock"].acquire()
    for name, kind in {"file": "TextIOWrapper", "raises": "Raises"}.items():
        with pytest.raises(Unmodelled, match=kind):
            again[name].read()
    held["file"].close()
    with pytest.raises(InputError, match=r"torch\.compile\(.*omit it"):
        write_objects({"forward": torch.compile(lambda x: x)}, tmp_path / "objects")


class Raises:
    def __getstate__(self) -> Any:
        raise AttributeError("no state for you")


@pytest.mark.slow
def test_a_trainer_that_has_trained_is_predicted(tmp_path: Path) -> None:
    """As in a notebook whose cells are run again. Would notice: what accelerate has prepared, which knows its process;
    states of an optimizer that come along with their values."""
    model = nn.Linear(2048, 2048)
    model.forward = functools.partial(_loss, model)  # type: ignore[method-assign]
    arguments = TrainingArguments(str(tmp_path), report_to="none", max_steps=1, save_strategy="no", use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=[{"x": torch.ones(2048)}] * 8)
    trainer.train()
    write_objects(trainer, tmp_path / "objects")
    assert (tmp_path / "objects").stat().st_size < 200_000
    found = predict_trainer(trainer, gpu="16GB")
    assert found.categories["optimizer"] >= 2 * 4 * 2048 * 2048 and found.verdict == "fits"


def _loss(model: nn.Linear, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": nn.functional.linear(x, model.weight, model.bias).mean()}


def test_the_weights_of_a_live_model_are_not_written(tmp_path: Path) -> None:
    """Would notice: gigabytes in the temporary folder."""
    model = nn.Sequential(nn.Linear(2048, 4096), nn.BatchNorm1d(4096))
    model.register_buffer("table", torch.zeros(2048, 2048))
    write_objects(model, tmp_path / "objects")
    assert (tmp_path / "objects").stat().st_size < 100_000
    again = read_objects(tmp_path / "objects")
    assert again[0].weight.shape == (4096, 2048) and torch.equal(again[1].running_var, torch.ones(4096))


def test_what_lies_in_one_storage_does_so_again(tmp_path: Path) -> None:
    """Flat parameters, 8-bit codes that a second name refers to. Would notice: memory that is counted twice."""
    flat = torch.zeros(1000)
    model = nn.ParameterList([nn.Parameter(flat[:400]), nn.Parameter(flat[400:])])
    write_objects([model, flat], tmp_path / "objects")
    (one, other), whole = read_objects(tmp_path / "objects")
    assert (other.shape, other.storage_offset(), whole.shape) == ((600,), 400, (1000,))
    assert len({each.untyped_storage()._cdata for each in (one, other, whole)}) == 1
