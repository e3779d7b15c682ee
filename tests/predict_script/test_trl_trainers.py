"""TRL's Trainers: computations before they train, and a vLLM in the training's process."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction import Prediction
from hf_memkit.prediction.confidence import Confidence
from hf_memkit.prediction.from_script import predict_in
from hf_memkit.prediction.running_scripts import ScriptJob
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.traced_training import Outcome, Vllm
from hf_memkit.prediction.vllm_share import with_vllm
from hf_memkit.prediction.worker import Worker
from tests.fewer import some
from tests.predict_script.job_list import read_job
from tests.predict_script.test_jobs import ALL, EXACT, by_phase

pytestmark = pytest.mark.slow

MACHINE = described_machine("RTX 4090", None, None, None)
SHARE = Vllm("colocate", share=0.5, sleeps=False, weights_bytes=2**30)


def job(folder: Path, out: Path, name: str, *more: str) -> UserScript:
    """A job of TRL's with more arguments, on the GPU."""
    script, _ = read_job(ALL[name], folder, out, on_cpu=False)
    return replace(script, arguments=(*script.arguments, *more))


def training(peak: int, phases: dict[Any, int]) -> Prediction:
    """Of a training alone on the GPU."""
    return Prediction(
        peak_allocated_bytes=peak, peak_reserved_bytes=(peak, peak), outside_allocator_bytes=2**29,
        smallest_cap_bytes=peak, phases={name: (size, peak) for name, size in phases.items()},
        categories={
            **dict.fromkeys(("gradients", "optimizer", "activations", "loss", "buffers", "other"), 0), "weights": peak,
        },
        peak_phase="backward", peak_operation="", peak_module="", confidence=Confidence("trace", "a test's"),
        source="a test's",
    ).with_verdict(MACHINE)  # fmt: skip


def test_a_share_that_does_not_sleep_adds_to_every_phase_and_one_that_sleeps_to_its_own() -> None:
    """Would notice: a sleeping vLLM that counts during the backward pass, or does not count while it generates."""
    assert MACHINE.gpu is not None
    gib, size = 2**30, MACHINE.gpu.capacity_bytes // 2
    alone = training(16 * gib, {"load": 3 * gib, "generate": 8 * gib, "backward": 16 * gib})
    assert alone.verdict == "fits"
    added = with_vllm(alone, SHARE, MACHINE)
    assert added.verdict == "does not fit" and added.total_bytes[1] == alone.total_bytes[1] + size
    sleeps = with_vllm(alone, replace(SHARE, sleeps=True), MACHINE)
    assert sleeps.total_bytes[1] == 8 * gib + size + alone.outside_allocator_bytes
    assert sleeps.verdict == "fits" and "vLLM: 0.5 × 23.49 GiB = " in sleeps.why
    small = with_vllm(alone, replace(SHARE, share=0.1, sleeps=True), MACHINE)
    assert small.total_bytes == alone.total_bytes
    assert with_vllm(alone, None, MACHINE) is alone
    nowhere = with_vllm(alone, SHARE, replace(MACHINE, gpu=None))
    assert nowhere.total_bytes == alone.total_bytes and "0.5 of the GPU" in nowhere.notes[-1]


def test_a_share_that_is_too_small_for_the_weights_is_named() -> None:
    """Would notice: an engine that cannot start and is predicted to fit."""
    alone = training(2**30, {"backward": 2**30})
    found = with_vllm(alone, replace(SHARE, share=0.3, weights_bytes=8 * 2**30), MACHINE)
    assert found.verdict == "does not fit" and found.why.startswith("vLLM cannot start: its own copy of the weights")
    assert "vllm_gpu_memory_utilization=0.3 is 7.05 GiB; give more than 0.35" in found.why


@pytest.mark.exhaustive
def test_a_script_with_vllm_is_predicted_where_vllm_is_not_installed(
    worker: Worker, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: answers of no length, adapters that are not merged to send the weights, the pass without gradients
    that corrects for vLLM's own log-probabilities missing, a share of the wrong GPU."""
    monkeypatch.chdir(tmp_path)
    assert MACHINE.gpu is not None

    def found(*more: str) -> Prediction:
        return predict_in(worker, ScriptJob(job(folder, tmp_path, "trl_grpo", *more), MACHINE)).prediction

    long = ("--beta", "0", "--max_completion_length", "400")  # more numbers than are followed
    alone, beside = found(*long), found(*long, "--use_vllm")
    assert beside.outside_allocator_bytes - alone.outside_allocator_bytes == int(0.3 * MACHINE.gpu.capacity_bytes)
    assert "vLLM: 0.3 × 23.49 GiB = 7.05 GiB, by formula" in beside.why
    assert "log_probabilities" in beside.phases and "log_probabilities" not in alone.phases
    assert beside.phases["backward"][0] == pytest.approx(alone.phases["backward"][0], rel=0.01)
    assert beside.phases["generate"][0] < alone.phases["generate"][0]  # keys and values are vLLM's
    other = found(*long, "--use_vllm", "--vllm_mode", "server")
    assert other.outside_allocator_bytes == alone.outside_allocator_bytes and other.phases == beside.phases
    assert any(note.startswith("vLLM runs on other GPUs") for note in other.notes)


def test_a_vllm_gets_adapters_as_weights(worker: Worker, folder: Path, tmp_path: Path) -> None:
    """Would notice: weights that are sent without merging the adapters, which makes a product of each layer."""
    content = worker.run(
        ScriptRequest(
            job(folder, tmp_path, "trl_grpo_lora", "--use_vllm", "--vllm_enable_sleep_mode"), str(tmp_path),
            {"HF_HUB_OFFLINE": "1"},
        )
    )  # fmt: skip
    assert content.training, content
    vllm = content.training.vllm
    parameters = content.training.model.parameters - content.training.model.trainable_parameters
    assert vllm == Vllm("colocate", share=0.3, sleeps=True, weights_bytes=2 * parameters)
    trace = content.training.trace
    made = {trace.operations[trace.operation_of[event - 1]] for b, e, phase in trace.spans() if phase == "generate"
            for event in trace.events[b:e] if event > 0}  # fmt: skip
    assert "aten.mm.default" in made


def test_reference_log_probabilities_are_computed_of_one_batch_and_cached_nowhere(
    worker: Worker, folder: Path, tmp_path: Path
) -> None:
    """Would notice: made-up log-probabilities in a cache that a real run reads, a pass over all rows."""
    script = job(folder, tmp_path, "trl_kto", "--precompute_ref_log_probs", "--precompute_ref_batch_size", "16")
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    content = worker.run(ScriptRequest(script, str(tmp_path), environment))
    assert content.training, content
    trace = content.training.trace
    (_, loaded, first), (begin, end, second), *_ = trace.spans()
    assert (first, second) == ("load", "log_probabilities") and loaded == begin < end < begin + 5_000
    written = [*folder.rglob("*.arrow"), *tmp_path.rglob("*.arrow")]
    assert written and not any(b"ref_" in path.read_bytes() for path in written)


HEAD = """
import sys
from datasets import Dataset

MODELS = sys.argv[1] + "/models/"
STUDENT, TEACHER = MODELS + "llama-tiny", MODELS + "llama-teacher"
QUESTION, ANSWER = ({"role": role, "content": "Anna saw a dog"} for role in ("user", "assistant"))
CHATS = Dataset.from_dict({"messages": [[QUESTION, ANSWER]] * 32})
PROMPTS = Dataset.from_dict({"prompt": [[QUESTION]] * 32, "privileged_context": ["the dog"] * 32})
GIVEN = dict(output_dir="out", report_to="none", max_steps=2, per_device_train_batch_size=2, save_strategy="no",
             bf16=False, use_cpu=len(sys.argv) > 2)
PAIRS = dict(prompt=["Anna saw"] * 32, chosen=[" a dog"] * 32, rejected=[" nothing at all"] * 32)

def reward(completions, **options):
    return [float(len(each)) for each in completions]
"""
ANSWERS: dict[str, str] = {
    "trl:DistillationTrainer": """(
        STUDENT, teacher_model=TEACHER, train_dataset=PROMPTS.select_columns("prompt"),
        args=DistillationConfig(**GIVEN, max_completion_length=16, gradient_accumulation_steps=2))""",
    "trl.experimental.sdft:SDFTTrainer": """(
        STUDENT, train_dataset=PROMPTS, args=SDFTConfig(**GIVEN, max_completion_length=16, num_generations=2))""",
    "trl.experimental.sdpo:SDPOTrainer": """(
        STUDENT, reward_funcs=reward, train_dataset=PROMPTS,
        args=SDPOConfig(**GIVEN, max_completion_length=16, num_generations=2))""",
    "trl.experimental.gold:GOLDTrainer": """(
        STUDENT, teacher_model=TEACHER, processing_class=AutoTokenizer.from_pretrained(STUDENT), train_dataset=CHATS,
        args=GOLDConfig(**GIVEN, max_completion_length=16, gradient_accumulation_steps=2))""",
    "trl.experimental.gkd:GKDTrainer": """(
        STUDENT, teacher_model=TEACHER, processing_class=AutoTokenizer.from_pretrained(STUDENT), train_dataset=CHATS,
        args=GKDConfig(**GIVEN, max_new_tokens=16))""",
    "trl.experimental.iw_opd:IWOPDTrainer": """(
        STUDENT, teacher_model=TEACHER, processing_class=AutoTokenizer.from_pretrained(STUDENT), train_dataset=CHATS,
        args=IWOPDConfig(**GIVEN, max_completion_length=16))""",
    "trl.experimental.online_dpo:OnlineDPOTrainer": """(
        STUDENT, reward_funcs=reward, processing_class=AutoTokenizer.from_pretrained(STUDENT),
        train_dataset=PROMPTS.select_columns("prompt"), args=OnlineDPOConfig(**GIVEN, max_new_tokens=16))""",
}
"""Trainers that generate answers, in addition to those of the jobs."""
OTHERS: dict[str, str] = {
    "trl.experimental.gmpo:GMPOTrainer": """(
        STUDENT, reward, train_dataset=PROMPTS,
        args=GMPOConfig(**GIVEN, max_completion_length=16, num_generations=2))""",
    "trl.experimental.cpo:CPOTrainer": """(
        AutoModelForCausalLM.from_pretrained(STUDENT), args=CPOConfig(**GIVEN),
        train_dataset=Dataset.from_dict(PAIRS), processing_class=AutoTokenizer.from_pretrained(STUDENT))""",
    "trl.experimental.orpo:ORPOTrainer": """(
        AutoModelForCausalLM.from_pretrained(STUDENT), args=ORPOConfig(**GIVEN),
        train_dataset=Dataset.from_dict(PAIRS), processing_class=AutoTokenizer.from_pretrained(STUDENT))""",
    "trl.experimental.tpo:TPOTrainer": """(
        STUDENT, train_dataset=Dataset.from_dict({**PAIRS, "reference": [" a big dog"] * 32}), args=TPOConfig(**GIVEN),
        processing_class=AutoTokenizer.from_pretrained(STUDENT))""",
    "trl.experimental.a2po:A2POTrainer": """(
        STUDENT, reward, processing_class=AutoTokenizer.from_pretrained(STUDENT),
        train_dataset=PROMPTS.select_columns("prompt"), args=A2POConfig(**GIVEN, max_completion_length=16))""",
}
REFUSED = {"trl.experimental.a2po:A2POTrainer"}
"""It asks for the values of answers before it trains."""
WITH_VLLM = {
    "trl.experimental.async_grpo",
    "trl.experimental.async_distillation",
    "trl.experimental.server_distillation",
}
"""Without the package vLLM none of their Trainers can be made."""


def made(name: str) -> str:
    module, kind = name.split(":")
    code = (ANSWERS | OTHERS)[name].strip()
    config = kind.replace("Trainer", "Config")
    imports = f"from transformers import AutoModelForCausalLM, AutoTokenizer\nfrom {module} import {config}, {kind}\n"
    return f"{HEAD}{imports}{kind}{code}.train()\n"


def test_all_of_trls_trainers_are_tried() -> None:
    """Would notice: an untested Trainer of a new version of TRL."""
    import trl

    folder = Path(str(trl.__file__)).parent
    defined = re.compile(r"^class (\w+Trainer)\(", re.MULTILINE)
    found = {
        f"{'.'.join(file.parent.relative_to(folder.parent).parts)}:{kind}"
        for file in [*folder.glob("experimental/*/*_trainer.py")]
        for kind in defined.findall(file.read_text())
    }
    found = {
        each for each in found if each.partition(":")[0] not in WITH_VLLM | {"trl.experimental.bema_for_ref_model"}
    }
    own = {f"trl:{kind}" for file in folder.glob("trainer/*_trainer.py") for kind in defined.findall(file.read_text())}
    jobs = {f"trl:{kind}Trainer" for kind in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")}
    assert found | own - jobs - {"trl:_BaseTrainer"} == ANSWERS.keys() | OTHERS.keys()


@pytest.mark.parametrize("name", some(list(ANSWERS), "trl:DistillationTrainer"))
def test_trainers_that_generate_answers_allocate_what_is_predicted(
    worker: Worker, folder: Path, tmp_path: Path, name: str
) -> None:
    """Would notice: rewards that are asked of a Trainer without any, answers that end early, a step on the data's own
    answers where chance would have taken the model's."""
    (tmp_path / "train.py").write_text(made(name))
    real, predicted = (
        by_phase(traced(worker, folder, tmp_path, "cpu", device=device, worst_batch=False))
        for device in ("real cpu", "cpu")
    )
    assert "generate" in real
    for phase, measured in real.items():
        above = 0.05 if phase == "log_probabilities" else EXACT  # answers that end by chance
        assert measured * (1 - EXACT) <= predicted[phase] <= measured * (1 + above), phase
    content = traced(worker, folder, tmp_path)
    assert any(note.startswith("every answer is counted") for note in content.training.notes)
    assert by_phase(content)["generate"] > 0


@pytest.mark.parametrize(
    "name", some(list(OTHERS), "trl.experimental.gmpo:GMPOTrainer", "trl.experimental.orpo:ORPOTrainer")
)
def test_every_other_trainer_is_predicted_or_refused(worker: Worker, folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(made(name))
    content = traced(worker, folder, tmp_path)
    assert bool(content.training) == (name not in REFUSED), content
    assert content.training or name.partition(":")[2] in content.failed.message


def traced(worker: Worker, folder: Path, here: Path, *more: str, **options: Any) -> Outcome:
    script = UserScript(str(here / "train.py"), False, (str(folder), *more))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return worker.run(ScriptRequest(script, str(here), environment, **options))
