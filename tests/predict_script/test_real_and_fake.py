"""Which tensors of a script are real before it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.child.libraries import checkpoints
from hf_memkit.prediction.traced_training import Outcome, Untrained
from tests.fewer import some
from tests.predict_script.conftest import Predict


@pytest.fixture(autouse=True)
def starts(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text(STARTS)


DATA = """
import json, sys
from pathlib import Path
import torch
from datasets import load_dataset
from torch.utils.data import random_split
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16,
                                   bos_token_id=0, eos_token_id=0))
on_gpu = torch.zeros(3).to("cuda") if torch.cuda.is_available() else None

def featurised(row):
    import torch  # no global: datasets cannot hash a module outside of site-packages, as the oldest torch lies in CI
    ids = torch.arange(8) * row["start"] % 50
    return {"input_ids": ids, "labels": ids.clone(), "mean": ids.float().mean().item()}

rows = load_dataset("json", data_files="starts.jsonl", split="train").map(featurised)
first, _ = random_split(rows, [20, 4], generator=torch.Generator().manual_seed(3))
Path(sys.argv[1]).write_text(json.dumps([rows.to_list(), list(first.indices)]))
"""

STARTS = "".join(json.dumps({"start": number}) + "\n" for number in range(1, 25))

TRAINING = """
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=2, report_to="none", save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
print("after train()")
"""


@pytest.mark.slow
def test_data_that_a_prediction_prepares_are_those_of_the_real_run(predict: Predict, tmp_path: Path) -> None:
    """Nothing made up reaches a cache: a real run that reads the same cache sees the same rows, splits and numbers."""
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    found = predict(DATA + TRAINING, "predicted.json", environment=cache)
    assert found.training, found
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    environment = {**os.environ, **cache, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", "real.json"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "after train()" in ran.stdout, ran.stderr[-2000:]
    predicted, real = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("predicted", "real"))
    assert predicted == real and len({row["mean"] for row in real[0]}) > 5
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")} == files


@pytest.mark.slow
@pytest.mark.tracing
def test_a_model_that_is_saved_before_it_trains(predict: Predict, tmp_path: Path) -> None:
    """Would notice: weights of shapes in a file, a save that ends the script, a folder that cannot be loaded then."""
    head, _, data = DATA.partition("def featurised")
    saves = """
model.save_pretrained("init")
model = GPT2LMHeadModel.from_pretrained("init")
torch.save({"rows": torch.arange(3)}, "rows.pt")
torch.save(model.state_dict(), "weights.pt")
"""
    training = TRAINING.replace("trainer.train()", "trainer.save_model('first')\ntrainer.train()")
    found = predict(f"{head}{saves}\ndef featurised{data}{training}", "rows.json")
    assert found.training.model.parameters > 0, found
    assert {path.name for path in (tmp_path / "init").iterdir()} == {"config.json", "generation_config.json"}
    assert {path.suffix for path in (tmp_path / "first").iterdir()} == {".json", ".bin"}
    assert not list(tmp_path.rglob("*.safetensors")) and not (tmp_path / "weights.pt").exists()
    assert torch.load(tmp_path / "rows.pt")["rows"].tolist() == [0, 1, 2]


@pytest.mark.tracing
def test_checkpoints_are_read_though_none_is_there(predict: Predict) -> None:
    """Would notice: a checkpoint that is looked for, one that is read without a separate phase, weights on the GPU
    twice: transformers reads both to the host."""
    training = TRAINING.replace(
        'save_strategy="no"', 'eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True'
    )
    training = training.replace("train_dataset=rows", "train_dataset=rows, eval_dataset=rows")
    training = training.replace("trainer.train()", "trainer.train(resume_from_checkpoint='out/checkpoint-7')")
    found = predict(DATA + training, "rows.json")
    assert found.training.notes[0].startswith("resume_from_checkpoint: not read")
    peaks = found.training.trace.peaks_by_phase()
    assert list(peaks) == [
        "load", "resume", "data", "forward", "backward", "optimizer", "evaluate", "save", "best_model",
    ]  # fmt: skip
    most = found.training.trace.at(found.training.steps_end).categories
    for phase in ("resume", "best_model"):  # weights, states, and workspaces that exist from the first step on
        assert peaks[phase] <= 1.01 * (most["weights"] + most["optimizer"] + most["buffers"] + most["other"])


@pytest.mark.tracing
@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("print(model(torch.zeros(1, 4, dtype=torch.long)).logits.tolist())", "tolist"),
        pytest.param(
            "json.dumps(model.transformer.wte.weight.detach().numpy().mean())", "numpy", marks=pytest.mark.slow
        ),
        pytest.param("print(torch.rand(3, device='cuda').sum().item())", "item", marks=pytest.mark.slow),
    ],
)
def test_whoever_asks_a_shape_for_its_values_gets_the_line(predict: Predict, line: str, asked: str) -> None:
    """A made-up number would be printed, or decide something, as if it were one of the model's."""
    head = DATA.partition("def featurised")[0]
    error = predict(f"{head}\n{line}\n{TRAINING}").failed
    assert error.place == f"train.py, line {head.count(chr(10)) + 2}", error
    assert asked in error.message and "a trace has no values" in error.message


LOOKS = """
import numpy
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
ids = torch.arange(12_000).remainder(50)
rows = [{"input_ids": ids.clone(), "labels": ids.where(ids > 1, -100), "image": torch.full((3, 96, 96), 1.0 * number)}
        for number in range(4)]
arguments = TrainingArguments("out", per_device_train_batch_size=4, report_to="none", remove_unused_columns=False)
trainer = Trainer(model, arguments, train_dataset=rows)
batch = next(iter(trainer.get_train_dataloader()))
found, labels, images = batch["input_ids"], batch["labels"], batch["image"]
assert found.is_cuda and found[0].tolist() == ids.tolist() and found[1, 3].item() == 3 == found[1][3]
assert [len(row.cpu().numpy()) for row in found] == [12_000] * 4 and found.max() == 49 and (found < 50).all()
assert len(labels[labels != -100].tolist()) == (labels >= 0).sum() == 4 * 48 * 240
labels[labels == -100] = 0
assert labels.min().item() == 0 and torch.equal(found, found.clone()) and not torch.equal(found, found + 1)
assert images.mean().item() == 1.5 and (2 * images + 1).permute(0, 2, 3, 1).cpu().numpy().max() == 7
assert (labels > 1).float().mean().item() == numpy.float32(0.96)
assert repr(found[0, :2]) == "tensor([0, 1], device='cuda:0')" and f"{found.max()}" == "49"
try:
    numpy.asarray(found)
except TypeError as error:
    assert "Tensor.cpu()" in str(error)
else:
    raise AssertionError("on a GPU it raises")
"""


@pytest.mark.tracing
@pytest.mark.parametrize(
    "more",
    [
        pytest.param("raise SystemExit", marks=pytest.mark.slow),
        "print(model.cuda()(found[:, :16]).logits.tolist())",
    ],
)
def test_batches_of_data_keep_their_values_on_the_gpu(predict: Predict, more: str) -> None:
    """Scripts print their first batch, and decode it. Would notice: a made-up one, a refusal, values that follow from
    weights."""
    head = DATA.partition("model = ")[0]
    found = predict(f"{head}{LOOKS}{more}")
    assert found == Outcome(untrained=Untrained(None)) if found.untrained else "tolist" in found.failed.message
    assert bool(found.untrained) == (more == "raise SystemExit"), found


WRITES = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import sys, torch

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
rows = [{"input_ids": [1] * 8, "labels": [1] * 8}] * 8
trainer = Trainer(model, TrainingArguments("deep/out", report_to="none", save_steps=1), train_dataset=rows)
out = Path("deep/out")
(out / "one").mkdir()
(out / "one" / "two.txt").write_text("2")
(out / "new").write_text("renamed")
(out / "new").rename(out / "renamed")
torch.save({"rows": 8}, out / "rows.pt")
trainer.save_model()
trainer.create_model_card()
if sys.argv[1:] == ["ends"]:
    raise SystemExit
trainer.train()
assert (out / "one" / "two.txt").read_text() == "2" and torch.load(out / "rows.pt") == {"rows": 8}
"""


@pytest.mark.parametrize(
    ("argument", "was_there"), some([("ends", False), ("trains", False), ("trains", True)], ("trains", True))
)
def test_a_script_writes_into_the_folder_that_trainer_makes(
    predict: Predict, tmp_path: Path, argument: str, was_there: bool
) -> None:
    """Would notice: a folder that is not made, one that stays, what somebody else has there that goes."""
    if was_there:
        (tmp_path / "deep" / "out").mkdir(parents=True)
        (tmp_path / "deep" / "out" / "mine").touch()
    found = predict(WRITES, argument)
    assert bool(found.training) == (argument == "trains"), found
    if found.training:
        assert not any("code below" in note for note in found.training.notes), found.training.notes
    assert (tmp_path / "deep").exists() == was_there == (tmp_path / "deep" / "out" / "mine").exists()


@pytest.mark.tracing
def test_small_parameters_of_the_script_keep_their_values(predict: Predict) -> None:
    """Scripts print what they initialised; the optimizer that was made before the model moved still trains it."""
    found = predict(
        """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 4.0]))
        self.layer = nn.Linear(2, 3)
    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(x * self.scale), labels)}

model = Model()
assert model.scale.mean().item() == 3.0 and model.layer.weight.abs().max().item() < 1
optimizer = torch.optim.AdamW(model.parameters())
model.to("cuda")
assert model.scale is optimizer.param_groups[0]["params"][0] and model.scale.is_cuda
rows = [{"x": torch.randn(2), "labels": 1}] * 16
Trainer(model, TrainingArguments("out", report_to="none"), train_dataset=rows, optimizers=(optimizer, None)).train()
"""
    )
    assert found.training.model.parameters == 2 + 6 + 3, found


@pytest.mark.tracing
def test_one_rank_of_several_gets_consistent_answers(predict: Predict) -> None:
    """A script that reads LOCAL_RANK, or asks torch.distributed, shares data and batches by the answers."""
    code = DATA.replace(
        "torch.manual_seed(0)",
        """
import os, torch.distributed as dist
from accelerate import PartialState
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("4", "0", "2")
state = PartialState()
assert (state.num_processes, state.process_index, dist.get_world_size(), dist.get_rank()) == (4, 0, 4, 0)
assert torch.cuda.device_count() == 2
dist.barrier()
with state.main_process_first():
    pass
torch.manual_seed(0)
""",
    )
    training = TRAINING.replace('"none"', '"none", eval_strategy="steps"').replace(
        "train_dataset=rows", "train_dataset=rows, eval_dataset=rows, compute_metrics=lambda found: {}"
    )
    found = predict(code + training, "rows.json", processes=4, per_node=2)
    assert found.training, found
    assert "evaluate" in {phase for _, phase in found.training.trace.marks}


@pytest.mark.tracing
def test_a_value_that_decides_in_the_traced_steps_is_named(predict: Predict) -> None:
    """Otherwise the script would silently take another branch."""
    own = """
class Own(Trainer):
    def compute_loss(self, model, inputs, **options):
        loss = model(**inputs).loss
        return loss if loss.item() > 0 else 2 * loss

"""
    code = DATA + own + TRAINING.replace("Trainer(model", "Own(model")
    notes = predict(code, "rows.json").training.notes
    line = code[: code.index("loss.item()")].count("\n") + 1
    assert any(note.startswith(f"train.py, line {line} asks for") for note in notes), notes


@pytest.mark.slow
def test_a_model_that_learns_from_its_own_answers(predict: Predict) -> None:
    """Would notice: a reward function that is called, answers that end early, a generation without the optimizer's
    states because one lasts for several steps."""
    code = """
import sys
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = Tokenizer(WordLevel({"[PAD]": 0, "[EOS]": 1, "a": 2, "[UNK]": 3}, unk_token="[UNK]"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0))

def reward(completions, **options):
    raise SystemExit("the user's judge, and its bill")

arguments = GRPOConfig(
    "out", per_device_train_batch_size=4, steps_per_generation=8, gradient_accumulation_steps=1,
    max_completion_length=int(sys.argv[1]), num_generations=4, report_to="none", save_strategy="no")
GRPOTrainer(model, reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": ["a a a"] * 64}),
            processing_class=tokenizer).train()
"""
    found = [predict(code, length) for length in ("20", "220")]
    for content in found:
        assert any("reward functions are not called" in note for note in content.training.notes)
        trace = content.training.trace
        drawn = trace.operations.index("aten.multinomial.default")
        assert trace.operation_of.count(drawn) == 4, "the last two tokens, in both steps"
    generated = [replay(each.training.trace).allocated_by_phase["generate"] for each in found]
    # 32 answers at once: keys and values of 2 layers × 64 numbers × 4 bytes, at their last token
    cache = 32 * 2 * 2 * 64 * 4 * 200
    assert cache <= generated[1] - generated[0] < 2 * cache


OWN_LOOP = """
import sys
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

accelerator = Accelerator(mixed_precision="fp16" if "scaled" in sys.argv else "no", gradient_accumulation_steps=4)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
if "accelerate" in sys.argv or "scaled" in sys.argv:
    model, optimizer = accelerator.prepare(model, optimizer)
ids = torch.ones(2, 8, dtype=torch.long).to("cuda")
for step in range(10_000):
    try:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            if "accelerate" in sys.argv or "scaled" in sys.argv:
                accelerator.backward(loss)
            elif "by hand" in sys.argv:
                torch.autograd.backward([loss])
                for each in model.parameters():
                    each.data -= 1e-3 * each.grad
                continue
            else:
                loss.backward()
            if "reads" in sys.argv:
                print(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError:
        continue
    if step > 9:
        open("too late", "w").close()
"""


@pytest.mark.parametrize(
    "way", ["accelerate", *(pytest.param(way, marks=pytest.mark.slow) for way in ("scaled", "by hand", "reads"))]
)
def test_a_training_loop_of_the_script_stops_at_once(predict: Predict, tmp_path: Path, way: str) -> None:
    """Would notice: a training of a day on tensors that hold nothing; advice to remove a line of it."""
    found = predict(OWN_LOOP, way)
    assert found.failed.type == "OwnLoop" and not (tmp_path / "too late").exists()
    assert "backward(" in OWN_LOOP.splitlines()[int(found.failed.place.split("line ")[1]) - 1]


@pytest.mark.slow
@pytest.mark.tracing
def test_gradients_above_train_are_no_training_loop(predict: Predict) -> None:
    """As LoRA-GA and the like begin with; and a part of the script's own that is fitted with real numbers."""
    before = """
import torch
from torch import nn
from torch.nn import functional
ids = torch.ones(2, 8, dtype=torch.long)
for _ in range(8):
    model(input_ids=ids, labels=ids).loss.backward()
model.zero_grad()
probe = nn.Linear(4, 1)
optimizer = torch.optim.SGD(probe.parameters(), 0.1)
for _ in range(20):
    loss = functional.mse_loss(probe(torch.ones(2, 4)), torch.ones(2, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert loss.item() < 0.1
"""
    found = predict(DATA + before + TRAINING, "rows.json")
    assert found.training, found


RESUMES = """
import sys
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, Trainer
from transformers import TrainingArguments

ZERO = {"zero_optimization": {"stage": 2}}

def model(width=32, rank=0):
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2))
    options = LoraConfig(r=rank, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return get_peft_model(made, options) if rank else made

def train(model, folder="out", deepspeed=None, **options):
    arguments = TrainingArguments(
        folder, deepspeed=deepspeed, max_steps=2, save_steps=1, report_to="none", use_cpu="real" in sys.argv)
    Trainer(model, arguments, train_dataset=[{"input_ids": [1] * 8, "labels": [1] * 8}] * 16).train(**options)

def classifier(**options):
    return BertForSequenceClassification.from_pretrained("bert", **options)
"""

SAVES = """
train(model(), "full")
train(model(rank=4), "lora")
model().save_pretrained("whole")
model().save_pretrained("parts", max_shard_size="20KB")
config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
BertForSequenceClassification(config).save_pretrained("bert")
"""


@pytest.mark.slow
def test_a_checkpoint_that_stops_a_run_stops_the_prediction(predict: Predict, tmp_path: Path) -> None:
    """Would notice: "fits" for a run that raises in its first second, and a refusal of one that goes on."""
    (tmp_path / "save.py").write_text(RESUMES + SAVES)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "save.py", "real"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    next(iter(sorted((tmp_path / "parts").glob("*.safetensors")))).unlink()
    stops = {
        "train(model(), resume_from_checkpoint='whole')": "FileNotFoundError",
        "train(model(), resume_from_checkpoint='lora/checkpoint-1')": "ValueError",
        "train(model(64), resume_from_checkpoint='full/checkpoint-1')": "RuntimeError",
        "train(model(64, rank=4), resume_from_checkpoint='lora/checkpoint-1')": "RuntimeError",
        "train(LlamaForCausalLM.from_pretrained('parts'))": "FileNotFoundError",
        "classifier(num_labels=3)": "RuntimeError",
        "train(model(), deepspeed=ZERO, resume_from_checkpoint='full/checkpoint-1')": "ValueError",
    }
    (tmp_path / "zero" / "global_step1").mkdir(parents=True)
    (tmp_path / "zero" / "trainer_state.json").write_text("{}")
    goes_on = [
        "train(model(), deepspeed=ZERO, resume_from_checkpoint='zero')",
        "train(model(), resume_from_checkpoint='full/checkpoint-1')",
        "train(model(rank=4), resume_from_checkpoint='lora/checkpoint-1')",
        "train(LlamaForCausalLM.from_pretrained('whole'))",
        "classifier(); classifier(num_labels=3, ignore_mismatched_sizes=True); train(model())",
    ]
    line = RESUMES.count("\n") + 1
    for code, kind in stops.items():
        error = predict(f"{RESUMES}{code}\n").failed
        assert error.type == kind and error.place in (f"train.py, line {line}", *places(RESUMES)), (code, error)
    for code in goes_on:
        assert (found := predict(f"{RESUMES}{code}\n")).training, (code, found)


def test_states_that_other_processes_saved_are_refused(tmp_path: Path) -> None:
    """Would notice: "fits" on 2 GPUs for a resume of what 8 saved."""
    with pytest.raises(ValueError, match="valid checkpoint"):
        checkpoints._refuse_engine(tmp_path, 2)
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "latest").write_text("global_step7\n")
    checkpoints._refuse_engine(tmp_path, 2)  # saved without states
    for rank in range(8):
        (tmp_path / "global_step7" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    checkpoints._refuse_engine(tmp_path, 8)
    with pytest.raises(ValueError, match="8 processes and 2"):
        checkpoints._refuse_engine(tmp_path, 2)


def places(code: str) -> list[str]:
    lines = enumerate(code.splitlines(), 1)
    return [f"train.py, line {number}" for number, each in lines if "Trainer(" in each or "from_pretrained" in each]
