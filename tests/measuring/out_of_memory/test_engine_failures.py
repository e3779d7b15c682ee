"""Errors of FSDP and of several processes that are not about memory: each leads to the right advice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.checks import RULES
from hf_memkit.cli.main import main
from hf_memkit.measuring.out_of_memory import explain_oom, find_messages, parse_message
from hf_memkit.measuring.out_of_memory.engine_failures import FAILURES
from tests.conftest import ROOT
from tests.measuring.out_of_memory import fsdp_errors
from tests.measuring.out_of_memory.test_oom_advice import TOP, frame, gpu

MIXED = (
    "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor "
    "before calling distributed operators!"
)
NO_BACKEND = "RuntimeError: No backend type associated with device type cpu"
LIGER = TOP + frame("liger_kernel/ops/fused_linear_cross_entropy.py", "forward", "logits = _input @ weight.t()")
ADAFACTOR = TOP + frame(
    "transformers/optimization.py", "step", "exp_avg_sq_row.mul_(beta2t).add_(update.mean(dim=-1))"
)
RECOMPUTED = TOP + frame("torch/utils/checkpoint.py", "recompute_fn", "fn(*args, **kwargs)")
TIMEOUT = (
    "[rank1]:[E616 13:41:10.909476913 ProcessGroupNCCL.cpp:565] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=2109, OpType=_ALLGATHER_BASE, NumelIn=262711296, NumelOut=525422592, "
    "Timeout(ms)=1800000) ran for 1800007 milliseconds before timing out."
)

# The words of the libraries, and of the issues that the rows name.
ERRORS: tuple[tuple[str, str, str], ...] = (
    ("ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32", "fsdp-dtypes",
     "version: 2"),
    ("ValueError: `FlatParameter` requires uniform dtype but got torch.float16 and torch.float32", "fsdp-dtypes",
     "version: 2"),
    ("AssertionError: FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}",
     "fsdp-trained-dtypes", "dtype"),
    ("ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`", "fsdp-frozen",
     "version: 2"),
    ("ValueError: `FlatParameter` requires uniform `requires_grad`", "fsdp-frozen", "version: 2"),
    ("ValueError: Cannot flatten integer dtype tensors", "fsdp-integers", "bnb_4bit_quant_storage"),
    ("Exception: Could not find the transformer layer class to wrap in the model.", "fsdp-wrap-class",
     "transformer_layer_cls_to_wrap"),
    ("ValueError: Could not find the transformer layer class Llama4VisionEncoderLayer in the model.",
     "fsdp-wrap-class", "transformer_layer_cls_to_wrap"),
    ("ValueError: Parameter 'model.embed_tokens.weight' is shared with a parameter already managed by another FSDP "
     "group. For shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP group.",
     "fsdp-tied-groups", "accelerate>=1.15"),
    ("ValueError: FSDP2 mapping failed (missing: ['lm_head.weight']). This is likely due to tied embeddings",
     "fsdp-tied-mapping", "tie_word_embeddings"),
    ("RuntimeError: bitsandbytes.optimizer_update_8bit_blockwise.default: got mixed torch.Tensor and DTensor, need to",
     "fsdp-optimizer", "adamw_torch_8bit"),
    ("NotImplementedError: Operator bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy "
     "registered.", "fsdp-optimizer", "adamw_torch_8bit"),
    (MIXED, "fsdp-sharded-weight", "model(**inputs)"),
    (LIGER + MIXED, "fsdp-sharded-weight", "fused_linear_cross_entropy: false"),
    (ADAFACTOR + MIXED, "fsdp-sharded-weight", "adamw_torch_8bit"),
    (RECOMPUTED + MIXED, "fsdp-sharded-weight", "pip install -U torch"),
    ("RuntimeError: 'weight' must be 2-D", "fsdp-flat-weight", "model(**inputs)"),
    ("RuntimeError: size mismatch, got input (2), mat (2x4096), vec (65667072)", "fsdp-flat-weight",
     "model(**inputs)"),
    ("AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to "
     "`False`", "fsdp-part-first", "model(**inputs)"),
    ("RuntimeError: FSDP state has already been lazily initialized for model.layers.0", "fsdp-part-first",
     "model(**inputs)"),
    ("RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:1!",
     "fsdp-devices", "trl"),
    ("RuntimeError: FSDP parameters should be materialized from meta device before training, but the following were "
     "still on meta device: ['lm_head.weight']", "fsdp-meta", "cpu_ram_efficient_loading: false"),
    ("NotImplementedError: Cannot copy out of meta tensor; no data!", "fsdp-meta-copy",
     "cpu_ram_efficient_loading: false"),
    ("RuntimeError: FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a",
     "fsdp-offload-device", "device_map"),
    ("RuntimeError: _apply(): Couldn't swap Linear.weight", "fsdp-moved", "model.to"),
    (NO_BACKEND, "fsdp-cpu-collective", "cuda:nccl,cpu:gloo"),
    ("RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
     "fsdp-needs-gpu", "nvidia-smi"),
    ("ValueError: When using FSDP2, a model and optimizer must be passed together to `Accelerator.prepare()`",
     "fsdp-prepare", "prepare(model, optimizer)"),
    ("RuntimeError: Passing `optimizers` is not allowed if PyTorch FSDP is enabled. You should subclass `Trainer`",
     "fsdp-optimizers", "optimizer_cls_and_kwargs"),
    ("ValueError: Using fsdp only works in distributed training.", "fsdp-one-process", "torchrun"),
    ("ValueError: Using --fsdp xxx together with --deepspeed is not possible, deactivate one of those flags.",
     "fsdp-and-deepspeed", "delete"),
    ("ValueError: `fsdp_config['activation_checkpointing']` (FSDP's own activation checkpointing) and the "
     "`activation_checkpointing` training argument can't both be set to True. Use FSDP's activation checkpointing",
     "fsdp-checkpointing-twice", "activation_checkpointing: false"),
    ("torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors "
     "have different metadata than during the forward pass.", "fsdp-recomputed", "use_cache: false"),
    ("ValueError: Unknown `fsdp` option: full_shrad", "fsdp-refused-value", "memkit check"),
    ("ValueError: You can't train a model that has been loaded with `device_map='auto'` in any distributed mode.",
     "device-map", "delete device_map"),
    ("ValueError: save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'",
     "fsdp-sharded-save", "FULL_STATE_DICT"),
    ("RuntimeError: Attempted to access the data pointer on an invalid python storage.", "fsdp-saved-shards",
     "save_model"),
    ("\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in "
     "current model is torch.Size([128256, 4096]).", "shards-in-checkpoint", "merge-weights"),
    ("RuntimeError: Missing key in checkpoint state_dict: optimizer.state.0.step.", "fsdp-optimizer-checkpoint",
     "accelerate"),
    (TIMEOUT, "collective-timeout", "grep"),
)  # fmt: skip
FSDP = "Using auto half precision backend\ndistributed_type: FSDP\n"


@pytest.mark.parametrize(("text", "form", "fix"), ERRORS, ids=[f"{form} {n}" for n, (_, form, _) in enumerate(ERRORS)])
def test_an_error_leads_to_its_advice(text: str, form: str, fix: str) -> None:
    ranked = "\n".join(f"[rank3]: {line}" for line in text.splitlines())
    for log, rank in ((FSDP + text, None), (FSDP + ranked, 3)):
        explanation = explain_oom(f"{log}\n\nsrun: error: node1: task 0: Exited with exit code 1\n")
        assert explanation.error is not None and explanation.verdict is not None
        assert explanation.error.message.form == form
        if text is not TIMEOUT:
            assert explanation.error.rank == rank
        assert fix in explanation.verdict.settings[0].assignment
        assert not explanation.changes and not explanation.others
    assert parse_message(text) is None, "the callback records no out-of-memory error"


ATTENTION = frame("me/model.py", "forward", "scores = query @ self.scale") + frame(
    "torch/distributed/tensor/_dispatch.py", "dispatch", "op_info = self.unwrap_to_op_info(op_call, args, kwargs)"
)
LIGERS_FORWARD = frame("liger_kernel/transformers/model/llama.py", "lce_forward", "outputs = self.model(input_ids)")
CHECKPOINT = frame("torch/utils/checkpoint.py", "checkpoint", "return CheckpointFunction.apply(function, *args)")
TENSOR_PARALLEL = frame("transformers/integrations/tensor_parallel.py", "tp_forward") + ATTENTION


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        (LIGERS_FORWARD + ATTENTION, "An operation met a weight of which this GPU has a shard"),
        (CHECKPOINT + ATTENTION, "An operation met a weight of which this GPU has a shard"),
        (LIGERS_FORWARD + LIGER.removeprefix(TOP) + ATTENTION,
         "Liger's loss met a weight of which this GPU has a shard"),
        (LIGERS_FORWARD + CHECKPOINT + RECOMPUTED.removeprefix(TOP) + ATTENTION,
         "An operation in a recomputed layer met a weight of which this GPU has a shard"),
        (LIGERS_FORWARD + CHECKPOINT + TENSOR_PARALLEL, None),
        (RECOMPUTED.removeprefix(TOP) + TENSOR_PARALLEL, None),
    ],
)  # fmt: skip
def test_the_row_is_that_of_the_call_which_failed(frames: str, what: str | None) -> None:
    """Defect: a library that is in use, but did not call the failed operation, chose the row."""
    trainer = frame("transformers/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)")
    explanation = explain_oom(TOP + trainer + frames + MIXED)
    assert (explanation.failure and explanation.failure.what) == what


def test_the_library_is_fsdp_only_in_errors_of_fsdp() -> None:
    libraries: dict[str, set[str]] = {row.cause: set() for row in FAILURES}
    for text, form, _ in ERRORS:
        error = explain_oom(FSDP + text).error
        assert error is not None
        libraries[next(row.cause for row in FAILURES if row.form == form)].add(error.message.library)
    assert libraries == {cause: {cause} for cause in libraries}


def test_every_row_has_an_error_and_a_rule_that_exists() -> None:
    assert {form for _, form, _ in ERRORS} == {row.form for row in FAILURES}
    assert {row.rule for row in FAILURES} - {""} <= set(RULES)
    firsts = {(row.form, row.what) for row in FAILURES}
    assert len(firsts) == len(FAILURES)
    assert not [row for row in FAILURES if row.what.endswith(".") or not row.why.endswith(".")]


def test_what_other_jobs_raise_too_needs_a_sign_of_fsdp() -> None:
    alone = {form for text, form, _ in ERRORS if explain_oom(text).error is not None}
    of_any_job = {row.form for row in FAILURES if "FSDP" not in row.seen}
    offload = next(row.why for row in FAILURES if row.form == "fsdp-cpu-collective")
    assert offload.startswith("If cpu_offload is on"), "only FSDP is seen, not its offload"
    assert alone == of_any_job and of_any_job < {row.form for row in FAILURES}
    proposed = [explain_oom(text).verdict for text in (TIMEOUT, FSDP + TIMEOUT)]
    keys = [[fix.key for fix in verdict.settings] for verdict in proposed if verdict is not None]
    assert ["arguments.fsdp_config" in each for each in keys] == [False, True]


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("python train.py --fsdp '' --bf16", False),
        ('python train.py --fsdp "" --bf16', False),
        ("ACCELERATE_USE_FSDP=false\nFSDP_VERSION=2", False),
        ("use_fsdp: false", False),
        ("WARNING: FSDP is not enabled", False),
        ("ACCELERATE_USE_FSDP=true", True),
        ("Distributed environment: DistributedType.FSDP  Backend: nccl", True),
        ("FSDPQwen2ForCausalLM(", True),
        ("fsdp=[],\nfsdp_config={'min_num_params': 0, 'xla': False, 'xla_fsdp_v2': False},\n"
         "fsdp_min_num_params=0,\nfsdp_transformer_layer_cls_to_wrap=None,", False),
        ("step 1", False),
        ("fsdp=[<FSDPOption.FULL_SHARD: 'full_shard'>],", True),
        ("fsdp: true", True),
        ("fsdp: 'full_shard auto_wrap'", True),
        ("accelerate launch --use_fsdp train.py", True),
        ("python train.py --fsdp 'full_shard auto_wrap'", True),
        ('  File "/x/torch/distributed/fsdp/_runtime_utils.py", line 1, in f', True),
    ],
)  # fmt: skip
def test_whether_a_job_uses_fsdp(line: str, uses: bool) -> None:
    error = explain_oom(f"{line}\n{NO_BACKEND}").error
    assert (error is not None) is uses


def test_memory_and_errors_come_before_what_follows_from_them() -> None:
    error, kill = ERRORS[0][0], "container exited with code 137"
    bare = "RuntimeError: CUDA out of memory\n"
    for log, form in (
        (f"{error}\n{gpu()}", "torch-device"),
        (f"{FSDP}{NO_BACKEND}\n{bare}", "torch-device-bare"),
        (f"{kill}\n{error}", "fsdp-dtypes"),
        (f"{TIMEOUT}\n{kill}", "sigkill"),
        (f"{TIMEOUT}\n{error}", "fsdp-dtypes"),
    ):
        chosen = explain_oom(log).error
        assert chosen is not None and chosen.message.form == form


def test_a_recorded_error_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    command = "$ accelerate launch --config_file fsdp.yaml train.py --bf16 true"
    log.write_text(f"{command}\n{ERRORS[6][0]}\n")
    assert main(["explain", str(log)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FSDP did not find the layer class that it was given (line 2).\n")
    assert "fsdp-wrap-class" in shown and "memkit check fsdp.yaml --args ARGUMENTS.yaml" in shown
    assert main(["explain", str(log), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["found"]["message"]["memory"], answer["verdict"]["cause"]) == ("none", "FSDP")
    assert answer["failure"]["rule"] == "fsdp-wrap-class" and "accelerate 1.15.0" in answer["failure"]["source"]
    end: dict[str, Any] = {"kind": "end", "status": "failed", "error_type": "ValueError"}
    for error, engine, fix in (
        (ERRORS[0][0], "", "version: 2"),
        (NO_BACKEND, "FSDP2", "cpu:gloo"),
        (NO_BACKEND, "", ""),
    ):
        run = {"kind": "run", "rank": 0, "world_size": 1, "engine": engine}
        records = (run, {**end, "error": error})
        (tmp_path / "memory-rank0.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        assert main(["explain", str(tmp_path)]) == (0 if fix else 1)
        assert fix in capsys.readouterr().out


@pytest.mark.slow
def test_the_libraries_of_this_machine_raise_them() -> None:
    done = subprocess.run(
        [sys.executable, "-m", fsdp_errors.__name__], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    heads = re.compile("|".join(rf"^{re.escape(name)}:$" for name in fsdp_errors.MISTAKES), re.M)
    texts = heads.split(done.stdout)[1:]
    assert len(texts) == len(fsdp_errors.MISTAKES), done.stdout + done.stderr
    for (name, (form, _)), text in zip(fsdp_errors.MISTAKES.items(), texts, strict=True):
        assert form in {error.message.form for error in find_messages(text)}, (name, text)
        chosen = explain_oom(FSDP + text).error
        assert chosen is not None and chosen.message.form == form, (name, text)
