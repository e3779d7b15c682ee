"""torch.compile in plans: which setups are traced with it, and how they are ranked and shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.units import GIB
from hf_memkit.plan import wording
from hf_memkit.plan.candidate import Candidate, Choice
from hf_memkit.plan.choices import choices_for
from hf_memkit.plan.compiled import with_compiled
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.pasted import pasted
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.search import Search
from hf_memkit.plan.time_limit import TimeLimit
from hf_memkit.prediction.traced_training import Engine, Fsdp
from tests.plan.made_plans import CHECKPOINTING, plan, setup
from tests.plan.made_trainings import MADE, changed

FUSED = Choice("loss", "fused loss", {"arguments.use_liger_kernel": True})
RUN = changed(MADE, plan__length__steps=1000)


def compile_change(own: Any = MADE, gpu: str = "RTX 3090", **environment: str) -> tuple[Choice | None, str | None]:
    """The choice that differs from the script, and the reason why there is none."""
    left_out: dict[str, str] = {}
    ways = choices_for(own, described_machine(gpu, None, None, None), environment, gpus=1, left_out=left_out)
    return next(filter(None, ways["compile"]), None), left_out.get("torch.compile")


def test_compiling_is_a_change_that_no_one_has_to_ask_for() -> None:
    pytest.importorskip("triton")
    choice, why = compile_change()
    assert choice is not None and why is None and choice.group == "nearly the same"
    assert pasted(Candidate(8, 1, (choice,))).flags[-1] == "--torch_compile True"
    random, _ = compile_change(changed(MADE, plan__batch__dropout=True))
    assert random is not None and "dropout" in random.result and "dropout" not in choice.result


def test_what_cannot_be_compiled_has_at_most_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: a compiled setup where the launcher compiles, or on a GPU without Triton."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert compile_change(ACCELERATE_DYNAMO_BACKEND="inductor") == (None, None)
    assert compile_change(changed(MADE, device="cpu")) == (None, None)
    assert "compute capability 7.0" in (compile_change(gpu="P100")[1] or "")
    at_stage_3 = Engine({"zero_optimization": {"stage": 3}}, {}, (), (), 0)
    assert "ZeRO-3" in (compile_change(changed(MADE, engine=at_stage_3))[1] or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name != "triton" else None)
    assert "pip install triton" in (compile_change()[1] or "")


def test_a_script_that_compiles_is_tried_without() -> None:
    """Would notice: a backend of the script that turns torch.compile on again."""
    own = changed(MADE, arguments__torch_compile=True)
    choice, _ = compile_change(own)
    assert choice is not None and choice.settings == {"arguments.torch_compile": False}
    choice, _ = compile_change(changed(own, arguments__torch_compile_backend="aot_eager"))
    assert choice is not None and choice.settings["arguments.torch_compile_backend"] is None
    assert pasted(Candidate(8, 1, (choice,))).no_flag == ("torch_compile_backend=None",)


COMPILED = Choice("compile", "torch.compile", {"arguments.torch_compile": True}, "nearly the same", "rounds otherwise")


def effect_of(base: Judgement, *, memory: float = 0.75, time: float = 0.8, compiling_s: float = 8.0) -> Judgement:
    """`base` compiled, with these shares of its memory and step time."""
    assert base.seconds is not None
    candidate, gib = base.candidate, base.needs_bytes / GIB
    return setup(
        candidate.micro_batch_size, candidate.accumulation, memory * gib, time * base.seconds, *candidate.choices,
        COMPILED, training=base.training, compiling_s=compiling_s,
    )  # fmt: skip


def finished(made: Plan, *, judge: Callable[[Judgement], Judgement] = effect_of, limit_s: float | None = None) -> Plan:
    """The plan with compiled setups; `judge` makes one from the same setup without torch.compile."""
    by_candidate = {each.candidate: each for each in made.traced}

    def judge_candidate(candidate: Candidate) -> Judgement:
        assert candidate.choices[-1] == COMPILED
        return judge(by_candidate[replace(candidate, choices=candidate.choices[:-1])])

    limit = TimeLimit(limit_s)
    limit.begin()
    choices = {"compile": [None, COMPILED]}
    search = Search(judge_candidate, made.own.candidate, choices, ("same result", ""), time_limit=limit)
    return with_compiled(made, search, lambda candidate, seconds: None)


def names(made: Plan) -> list[str]:
    return [each.candidate.name for each in made.traced if COMPILED in each.candidate.choices]


def made_plan(*others: Judgement, own_gib: float = 15.0, training: Any = RUN) -> Plan:
    own = setup(8, 1, own_gib, 1.0, training=training)
    return plan(own, *(replace(each, training=training) for each in others))


def test_the_best_setup_and_a_faster_one_that_lacks_little_are_compiled() -> None:
    """Would notice: more than two; one that is too large, or slower than what fits."""
    checkpointed = setup(8, 1, 15.0, 1.4, CHECKPOINTING)
    slow = setup(4, 2, 22.5, 1.9)
    assert names(finished(made_plan(checkpointed, slow, own_gib=24.0))) == [
        "8 × 1, checkpointing, torch.compile",
        "8 × 1, torch.compile",
    ]
    assert names(finished(made_plan(checkpointed, slow, own_gib=42.0))) == ["8 × 1, checkpointing, torch.compile"]
    assert names(finished(made_plan(own_gib=15.0))) == ["8 × 1, torch.compile"]
    assert finished(made_plan(own_gib=24.0)).proposed is not None, "it fits only if it is compiled"


def test_a_compiled_setup_is_shown_with_what_it_saves() -> None:
    made = finished(made_plan())
    faster = made.faster()
    assert faster is not None and faster.candidate.name == "8 × 1, torch.compile"
    assert wording.effect_of_compiling(made, faster) == (
        "without torch.compile: 3.75 GiB more; compiling takes about 8 s"
    )
    assert wording.effect_of_compiling(made, made.own) == ""


def test_a_compiled_setup_that_needs_more_is_shown_with_the_reason() -> None:
    """Would notice: a cost without a reason; a reason that compiling saves; one where compiling costs nothing."""

    def holding(judgement: Judgement, **gib: float) -> Judgement:
        assert judgement.prediction is not None
        step = Counter({kind: round(size * GIB) for kind, size in gib.items()})
        return replace(judgement, prediction=replace(judgement.prediction, activations=step))

    def effect(memory: float, **gib: float) -> str:
        uncompiled = holding(setup(8, 1, 15.0, 1.0, training=RUN), saved=5.0, recomputed=1.0)
        made = finished(plan(uncompiled), judge=lambda base: holding(effect_of(base, memory=memory), **gib))
        return wording.effect_of_compiling(made, made.traced[-1])

    assert "0.75 GiB less (compiling adds 1.50 GiB of recomputed)" in effect(1.05, saved=4.0, recomputed=2.5)
    both = "(compiling adds 1.50 GiB of recomputed, 0.75 GiB of zeros)"
    assert both in effect(1.05, saved=5.0, recomputed=2.5, zeros=0.75)
    assert "adds" not in effect(0.9, saved=4.0, recomputed=2.5)


def test_a_setup_is_not_compiled_without_time_for_it() -> None:
    """Would notice: a search beyond its limit; a reason without the option that changes it."""
    made = finished(made_plan(), limit_s=2.0)
    assert not names(made) and "--limit" in made.left_out["torch.compile"] and not made.stopped
    assert not names(finished(replace(made_plan(), stopped_by_hand=True)))


def test_a_run_that_is_shorter_than_compiling_is_not_compiled() -> None:
    """Would notice: a proposal that makes a short run slower."""
    own = setup(8, 1, 15.0, 1.0, training=changed(MADE, plan__length__steps=3, plan__weights__trained=(1,) * 300))
    short = finished(plan(replace(own, run_seconds=(2.0, 3.0, 4.0))))
    assert not names(short) and "compiling about 120 s" in short.left_out["torch.compile"]

    sharded = changed(
        own.training, fsdp=Fsdp(reshard_after_forward=True, cpu_offload=False, activation_checkpointing=False)
    )
    alike = finished(plan(replace(own, training=sharded, run_seconds=(2.0, 3.0, 4.0))))
    assert names(alike), "FSDP2 compiles layers that are alike once"

    steps = changed(MADE, plan__length__steps=100)
    slower = finished(made_plan(training=steps), judge=lambda base: effect_of(base, compiling_s=30.0))
    assert names(slower) and slower.faster() is None, "20 s saved of 100, and 30 s to compile"
    assert (
        finished(made_plan(training=steps), judge=lambda base: effect_of(base, compiling_s=1.0)).faster() is not None
    )


def test_a_refused_setup_is_one_line() -> None:
    """Would notice: rows for setups that torch cannot compile; no setup without the fused loss that it cannot
    compile."""

    def refuse(base: Judgement) -> Judgement:
        return Judgement(replace(base.candidate, choices=(*base.candidate.choices, COMPILED)), why="too old")

    made = finished(made_plan(), judge=refuse)
    assert not names(made) and made.left_out["torch.compile"] == "too old"

    def refuse_fused(base: Judgement) -> Judgement:
        return refuse(base) if FUSED in base.candidate.choices else effect_of(base)

    made = finished(made_plan(setup(8, 1, 10.0, 0.5, FUSED)), judge=refuse_fused)
    assert names(made) == ["8 × 1, torch.compile"] and "torch.compile" not in made.left_out

    larger = setup(16, 1, 25.0, 0.9)  # may fit if it is compiled
    made = finished(made_plan(setup(8, 1, 10.0, 0.5, FUSED), larger), judge=refuse_fused)
    assert names(made) == ["16 × 1, torch.compile", "8 × 1, torch.compile"]


SCRIPT = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=512, use_cache=False
)
rows = [{"input_ids": torch.arange(128), "labels": torch.arange(128)}] * 400
trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
trainer.train()
print("compiled graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_a_script_is_planned_with_torch_compile_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real search, with the trace of compiled code."""
    pytest.importorskip("triton")
    from hf_memkit.common.user_script import UserScript
    from hf_memkit.plan.make_plan import PlanRequest, plan_gpus

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    given = ("--output_dir", "out", "--per_device_train_batch_size", "4", "--num_train_epochs", "1000")
    machine = described_machine("RTX 4090", None, "64GB", None)

    def planned(*arguments: str) -> dict[str, Judgement]:
        request = PlanRequest(limit_s=120.0)
        (made,) = plan_gpus(UserScript.at("train.py", (*given, *arguments)), [machine], request)
        return {each.candidate.name: each for each in made.traced}

    eager = planned("--max_steps", "100000")
    (name,) = [name for name in eager if "torch.compile" in name]
    assert eager[name].fits and eager[name].compiling_s > 0
    compiled = planned("--max_steps", "100000", "--torch_compile", "True", "--optim", "sgd")
    assert any(name.endswith("no torch.compile") for name in compiled)


@pytest.mark.slow
def test_a_run_follows_a_plan_that_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real Trainer on the CPU; the backend eager needs no C++ compiler."""
    import subprocess
    import sys

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("plan.yaml").write_text("arguments:\n  torch_compile: true\n  torch_compile_backend: eager\n")
    command = [sys.executable, "-m", "hf_memkit", "run", "train.py", "--plan", "plan.yaml", "--"]
    arguments = ["--output_dir", "out", "--max_steps", "2", "--use_cpu", "True", "--report_to", "none"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch_compile: False → True" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("compiled graphs:")]
    assert int(line.split()[-1]) > 0
