"""Unchanged scripts that were not written for memkit: the prediction equals their allocations when they really
train.

`jobs/written` was written from the libraries' documentation, most of it by somebody who had not seen memkit, and not
`lora_merge.py` and `qlora.py`; the others come with TRL and FlagEmbedding. Each trains on the CPU with a tiny model,
real tensors and a recorder of allocations; then it is predicted on fake CPU tensors, where every phase must have the
same peak; then for a fake GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction import from_script
from hf_memkit.prediction.running_scripts import ScriptJob
from hf_memkit.prediction.split_states import bucket_bytes, one_rank
from hf_memkit.prediction.trace.request import Device, ScriptRequest
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.process_group import single_process_environment
from tests.fewer import some
from tests.predict_script.job_list import read_job, typed_jobs
from tests.prediction.fake_and_real import _changes, peaks
from tests.prediction.test_child_libraries import alive

pytestmark = pytest.mark.slow

ALL: Final = typed_jobs()
ENGINES: Final = [name for name in ALL if name.startswith("deepspeed")]
KEPT: Final = {
    "lora_merge", "own_module", "qlora", "qwen_vl_sft", "summarization", "trl_dpo_lora", "trl_grpo_lora",
    "trl_sft_packing_eval",
}  # fmt: skip
"""One of each kind of model, data, adapter and trainer; the others run with `--exhaustive`."""
PLAIN: Final = some([name for name in ALL if name not in ENGINES], *sorted(KEPT))
GENERATES: Final = {"summarization", "whisper_finetune"}
"""Their evaluations generate: a bound, of which a real answer may fall short."""
LEARNS_FROM_ITS_ANSWERS: Final = {"trl_grpo", "trl_grpo_lora", "trl_rloo"}
"""Their answers are counted as long as they may be: by chance a real one ends earlier."""
RECURRENT: Final = {"own_module", "own_module_optimizers"}
"""torch has no shapes for cuDNN's recurrent layers: refused on a GPU, with the script's line."""
QUANTISED: Final = {"qlora", "qlora_dora", "lora_int8", "lora_torchao", "lora_torchao_compiled", "trl_sft_qlora"}
LIVES: Final = {
    "lora_chat": {"save", "evaluate"},
    "lora_merge": {"resume", "save", "evaluate", "best_model"},
    "lora_merge_reloaded": {"save"},
    "sentiment": {"best_model"},
    "trl_dpo_lora": {"log_probabilities"},
    "trl_dpo_precomputed": {"log_probabilities"},
    "trl_grpo": {"generate", "log_probabilities"},
    "trl_grpo_lora": {"generate", "log_probabilities"},
    "trl_rloo": {"generate", "log_probabilities"},
}
"""Expected phases in addition to those of every training."""
LIBRARIES: Final = Path(__file__).parents[2] / ".compat" / "scripts"
"""What `scripts/setup --dev` installs there: FlagEmbedding."""

EXACT: Final = 0.005


def started(folder: Path, out: Path, name: str, *, on_cpu: bool) -> tuple[UserScript, dict[str, str]]:
    """The script of a job, and its environment."""
    script, environment = read_job(ALL[name], folder, out, on_cpu=on_cpu)
    caches = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(LIBRARIES), "HF_DATASETS_CACHE": str(out / "cache")}
    return script, {**os.environ, **caches, **environment}


def ran(worker: Worker, folder: Path, out: Path, name: str, device: Device, **more: str) -> Outcome:
    """The outcome of a job, with more variables; for a GPU without the arguments that keep it on the CPU."""
    script, environment = started(folder, out, name, on_cpu=device != "cuda")
    request = ScriptRequest(script, str(out), {**environment, **more}, device=device, worst_batch=device == "cuda")
    found = worker.run(request)
    assert found.training, f"{name} on {device}: {found}"
    return found


def by_phase(content: Outcome) -> dict[str, int]:
    return peaks(_changes(content.training.trace))[1]


def stored_bytes(content: Outcome) -> list[int]:
    """Sizes of the weights and their scales when the training starts."""
    trace = content.training.trace
    return sorted(alive(trace, "weights", next(end for end, phase in trace.marks if phase == "load")))


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_predicted_is_what_a_real_training_allocates(
    worker: Worker, folder: Path, tmp_path: Path, name: str
) -> None:
    check_job(worker, folder, tmp_path, name)


def check_job(worker: Worker, folder: Path, tmp_path: Path, name: str) -> None:
    trained, traced = (ran(worker, folder, tmp_path, name, device) for device in ("real cpu", "cpu"))
    real, predicted = by_phase(trained), by_phase(traced)
    if name in QUANTISED:
        assert stored_bytes(traced) == stored_bytes(trained)
    assert LIVES.get(name, set()) <= predicted.keys()
    if name.startswith("lora_merge"):
        assert any("merge_and_unload() (lora_merge.py, line 5" in note for note in traced.training.notes)
    for phase, measured in real.items():
        if phase == "load" or not measured:
            continue  # the real one is recorded from train() on
        if phase == "save" and name in QUANTISED:
            continue  # bitsandbytes packs a KiB for each layer, here of tables that are real in both
        error = predicted.get(phase, 0) / measured - 1
        bound = name in LEARNS_FROM_ITS_ANSWERS or (name in GENERATES and phase == "evaluate")
        lowest, highest = 0 if phase == "generate" else -EXACT, 0.10 if bound else EXACT
        assert lowest <= error <= highest, f"{phase}: {predicted.get(phase)} for {measured}"
    if name in RECURRENT:
        with pytest.raises(AssertionError, match=r"_thnn_fused_gru_cell.*own_module.py, line 45"):
            ran(worker, folder, tmp_path, name, "cuda")
        return
    content = ran(worker, folder, tmp_path, name, "cuda")
    assert by_phase(content)["backward"] > 0 and content.training.model.parameters > 0


@pytest.mark.parametrize("name", ENGINES)
def test_scripts_with_deepspeed_are_traced_without_it(worker: Worker, folder: Path, tmp_path: Path, name: str) -> None:
    """Would notice: a process group, an operator or `zero.Init` that a prediction asks for."""
    content = ran(worker, folder, tmp_path, name, "cuda")
    assert content.training.engine.config["train_micro_batch_size_per_gpu"] == 2


LIVE: Final = ["deepspeed_zero2_hf_optimizer", "deepspeed_zero3_hf_optimizer"]


@pytest.mark.operators
@pytest.mark.parametrize("name", LIVE)
def test_what_an_engine_holds_is_what_the_live_engine_holds(
    worker: Worker, folder: Path, tmp_path: Path, name: str
) -> None:
    """Would notice: "auto" in the JSON that is not resolved as Trainer resolves it, weights in another dtype."""
    alone = single_process_environment()
    real = by_phase(ran(worker, folder, tmp_path, name, "real cpu", **alone, DS_ACCELERATOR="cpu"))
    content = ran(worker, folder, tmp_path, name, "cpu")
    job = ScriptJob(UserScript("train.py"), described_machine("T4", None, None, None))
    training = from_script._setup(content.training, job)
    ledger = from_script._engine_ledger(content.training.engine, training.sized_job)
    joined = one_rank(content.training.trace, ledger, bucket_bytes(training))
    predicted = peaks(_changes(joined))[1]
    # The engine steps inside `backward`, so Trainer's events mark no separate phase for it.
    for phase in ("forward", "backward"):
        assert predicted[phase] == pytest.approx(real[phase], rel=0.01), phase
