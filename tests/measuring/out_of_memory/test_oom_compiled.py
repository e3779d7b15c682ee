"""What torch.compile needs in addition: from a real compiled backward pass, from records and from logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory import Explanation, explain_oom, explain_records, suggest
from hf_memkit.measuring.out_of_memory.run_view import RunView
from tests.measuring.out_of_memory.test_oom_advice import TOP, frame, gpu
from tests.measuring.out_of_memory.test_oom_changes import oom, run

TOKENS, VOCABULARY = 8 * 1024, 50257


class LanguageModel(nn.Module):
    """As transformers' models, it returns the logits beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 8)
        self.head = nn.Linear(8, 500)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(tokens))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("backend", "times"), [("aot_eager", 1), ("eager", 0)])
def test_compiled_code_makes_zeros_as_large_as_the_logits(backend: str, times: int) -> None:
    """Defect: torch no longer makes them (pytorch#131794), but the explanation still names them."""
    model = torch.compile(LanguageModel(), backend=backend)
    tokens = torch.arange(2 * 40).reshape(2, 40)
    model(tokens)["loss"].backward()
    outputs = model(tokens)  # kept: its logits are an output that nothing uses
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        outputs["loss"].backward()

    moment = {"tokens": tokens.numel()}
    job = RunView(run(vocabulary=500, arguments={"bf16": False}), moment)
    zeros = [event for event in recorded.events() if event.name == "aten::zeros"]
    assert sum(event.cpu_memory_usage == job.logits_bytes for event in zeros) == times


def of_run(compilation: dict[str, Any] | None = None, error: str = "", **arguments: Any) -> Explanation:
    """A compiled run that needs 448 MiB more than is free."""
    failed = oom(tokens=TOKENS, error=error or gpu(), compilation={"graphs": 2, **(compilation or {})})
    return explain_records(run(arguments={"torch_compile": True, **arguments}), failed)


def why(explanation: Explanation) -> str:
    assert explanation.verdict is not None
    return explanation.verdict.why


def test_zeros_for_the_gradient_of_logits_in_a_run() -> None:
    zeros = TOKENS * VOCABULARY * 4
    assert f"{zeros / GIB:.2f} GiB" in why(of_run()) and "pytorch#131794" in why(of_run())
    moment = oom(tokens=TOKENS, compilation={"graphs": 1}, categories={"other_gib": 30.0})
    (change,) = [change for change in suggest(run(), moment, limit=99) if "chunked" in change.key]
    assert change.saves_gib == pytest.approx(zeros / GIB, abs=0.01)
    of_llama = suggest(run(model_type="llama", model_class="LlamaForCausalLM"), moment, limit=99)
    keys = [change.key for change in of_llama]
    assert "arguments.use_liger_kernel" not in keys, "torch cannot compile Liger's loss"
    assert "model_parts.chunked_loss" in keys


@pytest.mark.parametrize(
    ("moment", "arguments", "model_class"),
    [
        ({"phase": "forward"}, {}, "GPT2LMHeadModel"),
        ({}, {"use_liger_kernel": True}, "GPT2LMHeadModel"),
        ({}, {"label_smoothing_factor": 0.1}, "GPT2LMHeadModel"),  # which uses the logits
        ({}, {"torch_compile_backend": "eager"}, "GPT2LMHeadModel"),
        ({}, {}, "GPT2ForSequenceClassification"),
    ],
)
def test_runs_that_make_no_zeros(moment: dict[str, Any], arguments: dict[str, Any], model_class: str) -> None:
    record = run(arguments={"torch_compile": True, **arguments}, model_class=model_class)
    failed = oom(**{"tokens": TOKENS, "error": gpu(), **moment})
    assert "zeros" not in why(explain_records(record, failed))
    assert not any("chunked" in change.key for change in suggest(record, failed, limit=99))


def test_a_run_that_is_not_compiled_is_explained_as_before() -> None:
    explanation = explain_records(run(), oom(tokens=TOKENS, error=gpu()))
    assert "zeros" not in why(explanation) and "compil" not in why(explanation)


def test_a_run_in_which_torch_gave_up() -> None:
    reason = "train.py:3: tensor 'x' size mismatch"
    gave_up = why(of_run({"recompilations": 9, "given_up": 1, "recompile_reasons": [reason]}))
    assert "gave up" in gave_up and reason in gave_up and "pad-to-multiple" in gave_up
    assert "pad-to-multiple" not in why(of_run({"recompilations": 9, "recompile_reasons": [reason]}))


def test_cuda_graphs() -> None:
    error = gpu().replace("PyTorch, and", "PyTorch, with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), and")
    of_mode = why(of_run(error=error, torch_compile_mode="reduce-overhead"))
    assert "torch_compile_mode: reduce-overhead" in of_mode and "3.00 GiB" in of_mode
    assert "CUDA graph" in why(of_run(torch_compile_backend="cudagraphs"))
    assert "CUDA graph" not in why(of_run(torch_compile_mode="max-autotune-no-cudagraphs"))


BACKWARD = TOP + frame(
    "torch/autograd/graph.py", "_engine_run_backward", "return Variable._execution_engine.run_backward("
)
COMPILED = frame("torch/_functorch/_aot_autograd/runtime_wrappers.py", "backward", "return impl_fn()")
ARGUMENTS = {"per_device_train_batch_size": 8, "max_length": 1024, "vocab_size": VOCABULARY}
LIMIT = "W1127 torch._dynamo hit config.recompile_limit (8)\n"


@pytest.mark.parametrize(
    ("log", "arguments", "expected"),
    [
        (BACKWARD + gpu("1.53 GiB"), {**ARGUMENTS, "torch_compile": True}, "zeros"),
        (BACKWARD + COMPILED + gpu("1.53 GiB"), ARGUMENTS, "zeros"),
        (f"python train.py --torch_compile True\n{LIMIT}" + BACKWARD + gpu(), None, "gave up"),
        (LIMIT + BACKWARD + gpu(), {}, "gave up"),
        (BACKWARD + gpu(), {"torch_compile_mode": "max-autotune"}, "CUDA graph"),
    ],
)
def test_logs_of_compiled_jobs(log: str, arguments: dict[str, Any] | None, expected: str) -> None:
    assert expected in why(explain_oom(log, arguments))


def test_a_log_without_torch_compile() -> None:
    """torch's own checkpointing passes through dynamo uncompiled."""
    checkpointing = frame("torch/_dynamo/eval_frame.py", "_fn", "return fn(*args, **kwargs)")
    explanation = explain_oom(BACKWARD + checkpointing + gpu("1.53 GiB"), ARGUMENTS)
    assert "zeros" not in why(explanation) and explanation.error is not None
    assert "torch.compile" not in explanation.error.trace.in_use
