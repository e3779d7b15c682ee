"""Memory of a script's evaluations, compared with real ones of all batches with the same arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from hf_memkit.prediction.traced_training import Outcome
from tests.conftest import ROOT
from tests.predict_script.conftest import Predict

JOB: Final = """
import sys
import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

ROWS = 44
LENGTHS = [12] * 5 + [16] + [9] * 38

def nothing(found, compute_result=True):
    return {}

def collated(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": (ids > 0).long()}

def made(name):
    torch.manual_seed(0)
    rows = [[1] * 16] * ROWS
    arguments = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 2}
    arguments |= {"report_to": "none"}
    arguments |= {"use_cpu": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=1000, n_positions=64)
    options = {"compute_metrics": nothing, "train_dataset": rows, "eval_dataset": rows, "data_collator": collated}
    kind, kind_of_arguments, model = Trainer, TrainingArguments, GPT2LMHeadModel
    if name == "argmax":
        options["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    if name == "a pair":
        options["preprocess_logits_for_metrics"] = lambda logits, labels: (logits[..., :9], {"first": logits[:, 0]})
    if name == "batch by batch, on the GPU":
        arguments["batch_eval_metrics"] = True
        probabilities = []
        def summed(found, compute_result):
            probabilities.append(found.predictions.softmax(-1))
            del probabilities[:-1]
            return {}
        options["compute_metrics"] = summed
    if name == "moved":
        arguments["eval_accumulation_steps"] = 1
    if name == "moved at last":
        arguments["eval_accumulation_steps"] = 15
    if name == "in lists":
        arguments["eval_do_concat_batches"] = False
    if name == "losses":
        arguments["prediction_loss_only"] = True
    if name == "inputs":
        arguments["include_for_metrics"] = ["inputs", "loss"]
        options["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    if name == "hidden states":
        config.output_hidden_states = True
    if name == "padded":
        options["eval_dataset"] = [[1] * each for each in LENGTHS]
    if name == "several":
        options["eval_dataset"] = {"one": rows[:4], "two": rows, "three": rows[:8]}
    if name == "cast":
        arguments["bf16_full_eval"] = True
    if name == "answers":
        kind, kind_of_arguments, model = Seq2SeqTrainer, Seq2SeqTrainingArguments, BartForConditionalGeneration
        config = BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=1000, max_position_embeddings=64)
        arguments |= {"predict_with_generate": True, "generation_max_length": 40}
    if name == "own evaluate()":
        class Own(Trainer):
            def evaluate(self, eval_dataset=None, examples=None, ignore_keys=None, metric_key_prefix="eval"):
                loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
                metrics, self.compute_metrics = self.compute_metrics, None
                output = self.evaluation_loop(loader, "Evaluation", prediction_loss_only=metrics is None)
                self.compute_metrics = metrics
                if len(output.predictions) != ROWS:
                    raise ValueError(f"Got {len(output.predictions)} predictions and {ROWS} features.")
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
                return {"eval_score": 1.0}
        kind = Own
    return kind(model(config), kind_of_arguments("out", **arguments), **options)
"""
NAMES: Final = (
    "argmax", "a pair", "batch by batch, on the GPU", "moved", "moved at last", "in lists", "losses", "inputs",
    "hidden states", "padded", "several", "cast", "answers", "own evaluate()",
)  # fmt: skip
ROWS: Final = 44
LOGITS: Final = 2 * 16 * 1000 * 4
"""Of one batch."""
ON_GPU: Final = JOB.replace('"use_cpu": True, ', "")
REAL: Final = f"""{JOB}
import json
from hf_memkit.prediction.child.training.phase_hooks import TrainingWatch
from hf_memkit.prediction.child.tracer.tracer import StorageTracer

found = {{}}
for name in {NAMES!r}:
    trainer, tracer = made(name), StorageTracer("cpu")
    watch = TrainingWatch(tracer, lambda: trainer.model_wrapped)
    trainer.add_callback(watch)
    with tracer:
        tracer.adopt([*trainer.model.parameters(), *trainer.model.buffers()])
        trainer.train()
        found[name] = tracer.finish(watch.phase).peaks_by_phase()
    watch.end()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Peaks of the trainings with all their batches, with real tensors."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, "-c", REAL], cwd=tmp_path_factory.mktemp("real"), env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def peaks(found: Outcome) -> dict[str, int]:
    assert found.training, found
    return dict(found.training.trace.peaks_by_phase())


def test_what_the_script_makes_of_logits_is_what_is_kept(predict: Predict) -> None:
    """Would notice: the logits of all batches, which no run ever keeps, and a job that "does not fit" for them."""
    evaluated = [
        peaks(predict(f"{ON_GPU}\nmade({name!r}).train()"))["evaluate"] for name in ("argmax", "losses", "logits")
    ]
    ids = 2 * ROWS * 16 * 2 * 8  # of tokens and of labels, and once more where they are joined
    assert 0 < evaluated[0] - evaluated[1] < 2 * ids + LOGITS
    assert evaluated[2] - evaluated[0] > ROWS * LOGITS * 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_holds_what_a_real_one_of_all_batches_holds(
    predict: Predict, real: dict[str, dict[str, int]], name: str
) -> None:
    """Would notice: logits that preprocess_logits_for_metrics has reduced, moves to RAM, lists that are not joined,
    labels, inputs and losses that are kept, and predictions that are still there when the training goes on."""
    predicted = peaks(predict(f"{JOB}\nmade({name!r}).train()", device="cpu", worst_batch=True))
    shared = LOGITS if name == "moved" else 0  # on a CPU the first array shares its tensor's memory
    assert predicted["evaluate"] == pytest.approx(real[name]["evaluate"] - shared, rel=0.01)
    if name != "answers":  # on a CPU the arrays, which live on, share the tensors' memory
        # The job's own compute_metrics keeps its last batch.
        kept = real[name if "on the GPU" in name else "losses"]["data"]
        assert predicted["data"] == pytest.approx(kept, rel=0.01)


@pytest.mark.slow
def test_predictions_that_are_moved_take_ram(predict: Predict) -> None:
    """Would notice: RAM for the batches that were traced alone, or predictions that are joined in real memory."""
    batches, found = ROWS // 2, {}
    for name in ("argmax", "logits", "moved"):
        training = predict(f"{ON_GPU}\nmade({name!r}).train()").training
        found[name] = training.host.tensor_bytes["evaluate"]
    assert found["logits"] - found["argmax"] == pytest.approx(batches * LOGITS, rel=0.05)
    # all so far, and all that are joined (numpy: one array at a time)
    assert found["moved"] - found["argmax"] == pytest.approx(2 * batches * LOGITS, rel=0.05)


@pytest.mark.slow
def test_several_gpus_keep_what_all_of_them_gather(predict: Predict) -> None:
    evaluated = [
        peaks(predict(f"{ON_GPU}\nmade({name!r}).train()", processes=4, per_node=4))["evaluate"]
        for name in ("logits", "losses")
    ]
    # Joined: as many again but those of the last batches, which all come from all GPUs.
    assert evaluated[0] - evaluated[1] == pytest.approx(2 * ROWS / 2 * LOGITS, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("own evaluate()", "evaluate()"),
        pytest.param("argmax", "predict([[1] * 16] * ROWS)", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_above_the_training_or_below_is_that_of_the_arguments(
    predict: Predict, name: str, call: str
) -> None:
    """Would notice: an evaluation that runs all its batches, predictions of the traced batches alone, an evaluation
    with the wrong name, a value that somebody has made up."""
    code = ON_GPU.replace('"eval_strategy": "steps", ', "") + f"\ntrainer = made({name!r})\n"
    used = "metrics = trainer.CALL\nmetrics = getattr(metrics, 'metrics', metrics)\n".replace("CALL", call)
    used += "assert isinstance(metrics, dict) and all(each != each for each in metrics.values())\n"
    above = predict(f"{code}{used}trainer.train()")
    below = predict(f"{code}trainer.train()\ntrainer.{call}")
    asked = predict(f"{ON_GPU}\nmade({name!r}).train()")
    expected = peaks(asked)["evaluate"]
    for found in (above, below):
        assert peaks(found)["evaluate"] == pytest.approx(expected, rel=0.002)
        assert any(note.startswith("for compute_metrics") for note in found.training.notes)


@pytest.mark.slow
def test_the_data_set_of_an_evaluation_above_the_training_is_the_one_that_it_was_given(predict: Predict) -> None:
    code = ON_GPU.replace('"eval_strategy": "steps", ', "") + "\ntrainer = made('logits')\n"
    evaluated = [
        peaks(predict(f"{code}trainer.evaluate([[1] * 16] * {rows})\ntrainer.train()"))["evaluate"]
        for rows in (ROWS, 2 * ROWS)
    ]
    assert evaluated[1] - evaluated[0] == pytest.approx(2 * ROWS / 2 * LOGITS, rel=0.01)


LIBRARY: Final = """
import numpy, torch

class Similarity:
    primary_metric = "score"

    def __init__(self, size, breaks=False, sparse=False):
        self.size, self.breaks, self.sparse = size, breaks, sparse

    def __call__(self, model, output_path=None):
        with torch.inference_mode():
            ids = torch.ones(self.size, 16, dtype=torch.long).to(model.device)
            logits = model(input_ids=ids).logits.float()
            found = numpy.asarray((logits.to_sparse() if self.sparse else logits).cpu().numpy())
        if self.breaks:
            raise ValueError("Input contains NaN")
        if output_path:
            with open(output_path, "w") as file:
                file.write(str(found.mean()))
        return {"score": found.mean(), "parts": [int(found.argmax()), {"first": found[0, 0, 0].item()}], "name": "a"}

    def fits(self, model):
        return model.lm_head.weight.tolist()

def evaluated(model):
    return float(model.lm_head.weight.sum().cpu().numpy())

def evaluated_often(model, once):
    for _ in range(10_000):
        once()
        model.lm_head.weight.sum()

def longest(rows):
    return max(map(len, rows))
"""
EVALUATOR: Final = f"""{ON_GPU.replace('"eval_strategy": "steps", ', "")}
from a_library.evaluation import Similarity, evaluated
trainer = made("logits")
"""


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    """Where pip has put a library that evaluates (`--target`), as a variable of the environment."""
    package = tmp_path / "libraries" / "a_library"
    package.mkdir(parents=True)
    record = package.parent / "a_library-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("a_library/__init__.py,,\n")
    (package / "__init__.py").touch()
    (package / "evaluation.py").write_text(LIBRARY)
    return {"PYTHONPATH": str(package.parent)}


def test_a_library_s_evaluation_above_the_training_gives_nan(
    predict: Predict, tmp_path: Path, library: dict[str, str]
) -> None:
    """As sentence-transformers' examples begin. Would notice: a script that is refused, forward passes that are not
    counted, a number that somebody has made up, a file with it."""
    code = f"""{EVALUATOR}
from a_library.evaluation import longest
found = Similarity(256)(trainer.model, "score.txt")
assert found["score"] != found["score"] and found["parts"][0] != found["parts"][0] and found["name"] == "a"
assert found["parts"][1]["first"] != found["parts"][1]["first"]
failed = Similarity(4, breaks=True)(trainer.model)
assert failed[Similarity.primary_metric] != failed[Similarity.primary_metric]
sparse = Similarity(4, sparse=True)(trainer.model)
assert sparse["score"] != sparse["score"]
assert evaluated(trainer.model) != evaluated(trainer.model)
trainer.train()
"""
    found = predict(code, environment=library)
    assert found.training, found
    logits = 256 * 16 * 1000 * 4
    weights = 4 * found.training.model.parameters
    # GPT-2's logits, and layers' parts beside them; the optimizer's states in the second.
    assert logits + weights < peaks(found)["evaluate"] < 1.5 * logits + 10 * weights + 2**24
    assert peaks(found)["load"] < logits
    notes = " ".join(found.training.notes)
    assert "Similarity" in notes and "evaluated" in notes and "longest" not in notes
    assert not (tmp_path / "score.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("within", [True, False])
def test_a_long_evaluation_ends(predict: Predict, library: dict[str, str], within: bool) -> None:
    """Would notice: an evaluator of thousands of texts that runs to its end, within a training or above it."""
    code = f"""{EVALUATOR}
from hf_memkit.prediction.child.training import library_evaluations
library_evaluations._LIMIT_S = 0.5
evaluator, calls = Similarity(4), []
class Long(type(trainer)):
    def evaluate(self, *args, **kwargs):
        super().evaluate(*args, **kwargs)
        return many(self.model)
def many(model):
    return evaluated_often(model, lambda: calls.append(evaluator(model)))
from a_library.evaluation import evaluated_often
if {within}:
    trainer.__class__ = Long
    trainer.args.eval_strategy = "steps"
else:
    many(trainer.model)
trainer.train()
"""
    found = predict(code, environment=library)
    assert found.training, found
    assert any("evaluated_often" in note and "first" in note for note in found.training.notes)


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ("Similarity(4).fits(trainer.model)", "remove that line"),
        (
            "def perplexity(model):\n    return model.lm_head.weight.sum().item()\nperplexity(trainer.model)",
            "perplexity()",
        ),
        ("trainer.predict([[1] * 16] * ROWS).predictions.argmax(-1)", "omit"),
    ],
)
def test_who_reads_values_is_stopped_all_the_same(
    predict: Predict, library: dict[str, str], lines: str, fix: str
) -> None:
    code = f"{EVALUATOR}{lines}\ntrainer.train()"
    found = predict(code, environment=library)
    assert fix in found.failed.message, found
    last = code.splitlines().index(lines.splitlines()[min(1, lines.count("\n"))])
    assert found.failed.place == f"train.py, line {last + 1}"


def test_a_library_s_mistake_is_shown(predict: Predict, library: dict[str, str]) -> None:
    found = predict(f"{EVALUATOR}Similarity()\ntrainer.train()", environment=library)
    assert found.failed.type == "TypeError"
