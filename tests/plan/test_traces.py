"""Traces of one script with different settings: a fork is traced like the script with the same flags."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.errors import ScriptFailed
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan import kept_traces
from hf_memkit.plan.choices import choices_for
from hf_memkit.plan.judge_trace import lengths_of
from hf_memkit.plan.make_plan import plan_gpus
from hf_memkit.plan.traces import ScriptTraces
from hf_memkit.prediction import wire
from hf_memkit.prediction.running_scripts import ScriptJob
from hf_memkit.prediction.traced_training import Outcome, RunLength, TracedTraining
from hf_memkit.prediction.waiting_script import TraceFile, WaitingScript
from hf_memkit.setup.script_overrides import Overrides
from tests.fewer import first

SCRIPT = """
import pathlib, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
with pathlib.Path("prepared").open("a") as prepared:
    prepared.write("x")
config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=1000, n_positions=64, bos_token_id=0, eos_token_id=0)
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 30
if pathlib.Path("looks").exists() and args.per_device_train_batch_size == 5:
    raise RuntimeError("five is not liked")
Trainer(GPT2LMHeadModel(config), args, train_dataset=rows).train()
"""
OWN = ("--output_dir", "out", "--per_device_train_batch_size", "8", "--report_to", "none")
HALF = Overrides(
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def traces(
    *arguments: str,
    keeps: bool = False,
    on_restart: Callable[[str], None] = lambda _: None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[ScriptTraces]:
    machine = described_machine("T4", None, None, None)
    environment = {**os.environ, **(variables or {})}
    job = ScriptJob(UserScript.at("train.py", arguments), machine, environment=environment)
    with WaitingScript(job, on_restart) as script:
        yield ScriptTraces(script, keeps=keeps)


def training(traced: TraceFile) -> TracedTraining:
    training = traced.outcome().training
    assert training is not None, traced
    return training


def facts(training: TracedTraining) -> tuple[Any, ...]:
    trace = training.trace
    assert trace.work is not None
    flops = sum(trace.work.operations[call].flops for call in trace.work.calls)
    return trace.peaks_by_phase(), flops, training.arguments.per_device_train_batch_size, training.facts.length.steps


def test_a_fork_is_the_script_with_these_flags_and_prepares_no_data(folder: Path) -> None:
    """Would notice: a setting that does not reach a fork, a fork that changes the next one, data that are prepared
    again for each candidate."""
    with traces(*OWN) as traced, ThreadPoolExecutor(2) as pool:
        own, half, again = pool.map(traced.of, [Overrides(), HALF, HALF])  # two of them at once
        assert (folder / "prepared").read_text() == "x"
        forked = facts(training(own)), facts(training(half))
        assert half == again and forked[0][0] != forked[1][0]
    assert not (folder / "out").exists(), "no fork leaves a folder"
    flags = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--activation_checkpointing")
    with traces(*OWN, *flags) as typed:
        assert facts(training(typed.of(Overrides()))) == forked[1]


@pytest.mark.slow
def test_a_setting_that_the_script_has_read_is_set_from_its_first_line(folder: Path) -> None:
    """Would notice: a fork of a script that has used another value; a script that starts again without a line; the
    script's own error reported as memkit's."""
    (folder / "looks").touch()
    restarts: list[str] = []
    with traces(*OWN, on_restart=restarts.append) as traced:
        half = training(traced.of(Overrides({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})))
        assert half.arguments.per_device_train_batch_size == 4 and (folder / "prepared").read_text() == "xx"
        assert len(restarts) == 1 and "per_device_train_batch_size" in restarts[0]
        failed = traced.of(Overrides({"per_device_train_batch_size": 5})).outcome().failed
        assert failed is not None and "five is not liked" in failed.text


def test_a_script_that_computes_gradients_first_does_not_wait(folder: Path) -> None:
    """Would notice: torch's error about threads in forked processes."""
    source = SCRIPT.replace(
        "Trainer(GPT2LM", "torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()\nTrainer(GPT2LM"
    )
    (folder / "train.py").write_text(source)
    restarts: list[str] = []
    with traces(*OWN, on_restart=restarts.append) as traced:
        assert training(traced.of(Overrides())).arguments.per_device_train_batch_size == 8 and not restarts
        assert training(traced.of(HALF)).arguments.per_device_train_batch_size == 4
    assert len(restarts) == 1 and "gradients" in restarts[0] and (folder / "prepared").read_text() == "xx"


@pytest.mark.slow
def test_options_of_models_are_set_from_the_first_line(folder: Path) -> None:
    """Would notice: an option that is set after from_pretrained or from_config."""
    source = SCRIPT.replace("GPT2LMHeadModel(config)", "AutoModelForCausalLM.from_config(config)")
    (folder / "train.py").write_text(source.replace("import GPT2Config,", "import AutoModelForCausalLM, GPT2Config,"))
    with traces(*OWN) as traced:
        eager = training(traced.of(Overrides({}, {"attn_implementation": "eager"})))
        assert eager.facts.model.attention == "eager"
        assert training(traced.of(Overrides())).facts.model.attention == "sdpa"


@pytest.mark.slow
def test_no_zero_3_is_proposed_for_a_model_with_a_device_map(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Would notice: ZeRO-3 proposed although `from_pretrained` then fails under DeepSpeed."""
    model = tmp_path_factory.mktemp("model")
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=1000, n_positions=64).save_pretrained(model)
    for options in ("", ', device_map="auto"'):
        load = f'AutoModelForCausalLM.from_pretrained("{model}"{options})'
        source = SCRIPT.replace("GPT2LMHeadModel(config)", load)
        (folder / "train.py").write_text(
            source.replace("import GPT2Config,", "import AutoModelForCausalLM, GPT2Config,")
        )
        with traces(*OWN) as started:
            own = training(started.of(Overrides()))
        left_out: dict[str, str] = {}
        machine = described_machine("T4", None, None, None)
        bf16 = replace(own, model=replace(own.model, trained_dtypes=("bfloat16",)))
        engines = choices_for(bf16, machine, {}, gpus=1, left_out=left_out)["engine"]
        names = {each.name for each in engines if each is not None}
        assert own.facts.model.device_map is bool(options) is ("zero3-offload" in left_out)
        assert names == ({"zero2-offload"} if options else {"zero2-offload", "zero3-offload"})


TRLS_OWN = """
import datasets, json, sys
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
rows = datasets.Dataset.from_dict({"input_ids": [[2] * 32] * 16})
arguments = SFTConfig("out", report_to="none", bf16=True, per_device_train_batch_size=4, save_strategy="no")
SFTTrainer(sys.argv[1], args=arguments, train_dataset=rows, processing_class=tokenizer).train()
"""


@pytest.mark.slow
def test_engines_are_proposed_for_a_device_map_that_trl_sets(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Would notice: no ZeRO in any plan of TRL's scripts. TRL sets a device_map only without distributed training, and
    none under DeepSpeed."""
    pytest.importorskip("trl")
    model = tmp_path_factory.mktemp("model")
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 1000, "n_positions": 64}
    GPT2Config(**shape, architectures=["GPT2LMHeadModel"]).save_pretrained(model)
    (folder / "train.py").write_text(TRLS_OWN)
    with traces(str(model)) as started:
        own = training(started.of(Overrides()))
        left_out: dict[str, str] = {}
        machine = described_machine("L4", None, None, None)
        choices = choices_for(own, machine, {}, gpus=1, left_out=left_out)
        assert not own.facts.model.device_map and "DeepSpeed" not in left_out
        for engine in choices["engine"][1:]:
            assert engine is not None
            other = training(started.of(Overrides({"deepspeed": engine.settings["arguments.deepspeed"]})))
            assert other.engine and not other.facts.model.device_map, engine.name


PAIRS = """
import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()


class Model(nn.Module):  # each pair has a negative
    def __init__(self, compares):
        super().__init__()
        self.table, self.head, self.compares = nn.Embedding(1000, 64), nn.Linear(64, 16), compares

    def forward(self, input_ids, labels):
        rows = self.table(input_ids).mean(1)
        if self.compares:  # each row with its own pair and those of all other rows
            others = self.table(torch.cat([input_ids.flip(1), input_ids.roll(1)])).sum(1)
            scores, labels = rows @ others.T, torch.arange(len(rows), device=rows.device)
        else:
            scores = self.head(rows)
        return {"loss": nn.functional.cross_entropy(scores, labels)}


rows = [{"input_ids": torch.arange(16), "labels": 1}] * 60
Trainer(Model(COMPARES), args, train_dataset=rows).train()
"""
"""With 16 classes and micro-batches of 8, both variants have a product of 8 rows and 16 columns."""


def test_the_last_batch_of_an_epoch_counts_if_an_epoch_ends() -> None:
    """Would notice: "same result" for an epoch of other rows; "another training" although no epoch ends."""
    run = RunLength(steps=10, steps_an_epoch=5, rows_an_epoch=112)
    assert lengths_of(run) != lengths_of(replace(run, rows_an_epoch=128))
    short = replace(run, steps=4)
    assert lengths_of(short) == lengths_of(replace(short, rows_an_epoch=128))


@pytest.mark.slow
@pytest.mark.parametrize("compares", first([True, False]))
def test_a_loss_that_compares_rows_keeps_its_micro_batch(folder: Path, compares: bool) -> None:
    """Would notice: smaller micro-batches for a user's contrastive loss, which would be another loss; a fixed
    micro-batch for a classifier that happens to have as many classes as rows."""
    (folder / "train.py").write_text(PAIRS.replace("COMPARES", str(compares)))
    script = UserScript.at("train.py", ("--output_dir", "out", "--per_device_train_batch_size", "8"))
    (plan,) = plan_gpus(script, [described_machine("T4", None, None, None)])
    sizes = {each.candidate.micro_batch_size for each in plan.compared}
    if compares:
        assert sizes == {8} and len(plan.compared) > 1
        assert "rows" in plan.left_out["another micro-batch"]
    else:
        assert sizes > {8} and "another micro-batch" not in plan.left_out


def test_a_failing_script_ends_the_plan_at_once(folder: Path) -> None:
    """Would notice: a plan that waits forever for a Trainer that is never made."""
    (folder / "looks").touch()
    with pytest.raises(ScriptFailed, match="five is not"), traces("--output_dir", "out", *OWN[2:3], "5"):
        pass


@pytest.fixture(autouse=True)
def no_files_are_left(folder: Path) -> Iterator[None]:
    """Would notice: checkpoints of traced trainings, files of processes, sockets."""
    yield
    assert {each.name for each in folder.iterdir()} <= {"train.py", "prepared", "looks"}


def test_a_trace_is_reused_for_the_same_training_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Would notice: the trace of another training reused; a trace made again without need."""
    caches = tmp_path.parent / f"{tmp_path.name}-cache"
    monkeypatch.setattr("hf_memkit.plan.kept_traces.cache_folder", lambda: caches / "memkit")
    cache = caches / "memkit" / "traces"
    seen: list[tuple[str, ...]] = []
    notices: list[str] = []

    def notes() -> tuple[str, ...]:
        with traces(*OWN, keeps=True, variables={"XDG_CACHE_HOME": str(caches)}) as traced:
            notices.extend(training(traced.of(Overrides())).notices)
            return training(traced.of(HALF)).notes

    seen.append(notes())
    assert notices == []
    (file,) = cache.glob("*.json")
    marked = wire.loads(Outcome, file.read_text()).training
    assert marked is not None
    file.write_text(wire.dumps(Outcome(replace(marked, notes=("from before",)))))
    seen.append(notes())
    file.write_text('{"trace": {}, "about": {}}')  # another format
    assert "30 rows" in notes()[0]
    source = (folder / "train.py").read_text()
    (folder / "train.py").write_text(source.replace("] * 30", "] * 31"))  # the same largest batch, other rows
    seen.append(notes())
    assert seen[1] == ("from before",) and "30 rows" in seen[0][0] and "31 rows" in seen[2][0]
    assert len(list(cache.glob("*.json"))) == 2
    copies = sorted((cache.parent / "overwritten").rglob("prepared"))  # later plans append to it
    assert [copy.read_text() for copy in copies] == ["x" * number for number in (1, 2, 3)]
    assert [line.rpartition(" ")[2] for line in notices] == list(map(str, copies))


def test_the_cache_drops_its_oldest_files_and_those_of_killed_plans(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: files that a killed plan had not completed, which stay for ever."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(kept_traces, "_MAX_BYTES", 250)
    for age, name in enumerate(("new.json", "being-written.77", "old.json", "left-by-a-killed-plan.42")):
        (cache / name).write_text("x" * 100)
        os.utime(cache / name, (1000 - age, 1000 - age))
    kept = object.__new__(kept_traces.KeptTraces)
    kept._folder = cache
    kept._drop_oldest()
    assert {path.name for path in cache.iterdir()} == {"new.json", "being-written.77"}
